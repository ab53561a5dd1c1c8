// Memory that a thread reads next: with each step of what it does now, some lines of it are fetched.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

struct Ahead {
  const char* at;
  const char* end;
  int64_t lines;  // with each step

  // `bytes` bytes in so many steps.
  static Ahead of(const void* from, int64_t bytes, int64_t steps) {
    const char* at = static_cast<const char*>(from);
    const int64_t lines = (bytes + kLine - 1) / kLine;
    return {at, at + lines * kLine, (lines + steps - 1) / std::max<int64_t>(1, steps)};
  }

  // Into the second-level cache.
  OCTAVO_INLINE void fetch() {
    for (int64_t line = 0; line < lines && at < end; ++line, at += kLine) __builtin_prefetch(at, 0, 2);
  }

 private:
  static constexpr int64_t kLine = 64;
};

}  // namespace octavo::OCTAVO_LEVEL
