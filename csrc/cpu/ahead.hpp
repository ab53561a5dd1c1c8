// Memory that a thread reads next: with each step of what it does now, some lines of it are fetched.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

struct Ahead {
  const char* at;
  const char* end;
  const char* run_end;  // where what is read goes on `skip` bytes later
  int64_t run, skip;
  int64_t lines;  // with each step

  // `runs` times `bytes` bytes, `stride` bytes apart, in so many steps.
  static Ahead of(const void* from, int64_t bytes, int64_t runs, int64_t stride, int64_t steps) {
    const char* at = static_cast<const char*>(from);
    const int64_t lines = (bytes + kLine - 1) / kLine, run = lines * kLine;
    return {at, at + (runs - 1) * stride + run, at + run, run, stride - run,
            (lines * runs + steps - 1) / std::max<int64_t>(1, steps)};
  }

  static Ahead of(const void* from, int64_t bytes, int64_t steps) { return of(from, bytes, 1, bytes, steps); }

  // Into the second-level cache.
  OCTAVO_INLINE void fetch() {
    for (int64_t line = 0; line < lines && at < end; ++line) {
      __builtin_prefetch(at, 0, 2);
      at += kLine;
      if (at == run_end) {
        at += skip;
        run_end = at + run;
      }
    }
  }

 private:
  static constexpr int64_t kLine = 64;
};

}  // namespace octavo::OCTAVO_LEVEL
