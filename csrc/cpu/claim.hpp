// Lines of memory that what follows a product (epilogue.hpp) writes, and those of the residual that it reads, fetched into
// the second-level cache while products are made: they were written and read by other threads, or lie in memory.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

class Claim {
 public:
  Claim() = default;

  // Of up to 32 outputs of `rows` rows, from `row` and `output` on (of the rows of out), so many rows with each step.
  static Claim of(const Linear& call, int64_t row, int64_t rows, int64_t output, int64_t with_step) {
    const int64_t size = call.out_type == Type::bf16 ? 2 : 4, at = row * call.out_stride + output;
    Claim found;
    found.out_ = static_cast<const char*>(call.out) + at * size;
    found.out_stride_ = call.out_stride * size;
    const bool apart = call.residual != nullptr && call.residual != call.out;
    found.residual_ = reinterpret_cast<const char*>(apart ? call.residual + at : nullptr);
    found.residual_stride_ = call.out_stride * 4;
    found.two_ = size == 4;
    found.rows_ = rows;
    found.with_step_ = with_step;
    return found;
  }

  OCTAVO_INLINE void step() {
    for (int64_t row = 0; row < with_step_ && rows_ > 0; ++row, --rows_) {
      asm volatile("prefetcht1 (%0)" : : "r"(out_));
      if (two_) asm volatile("prefetcht1 64(%0)" : : "r"(out_));
      out_ += out_stride_;
      if (residual_ == nullptr) continue;
      asm volatile("prefetcht1 (%0)\n\tprefetcht1 64(%0)" : : "r"(residual_));
      residual_ += residual_stride_;
    }
  }

 private:
  const char* out_ = nullptr;
  const char* residual_ = nullptr;
  int64_t out_stride_ = 0, residual_stride_ = 0, rows_ = 0, with_step_ = 0;
  bool two_ = false;  // lines of each row
};

}  // namespace octavo::OCTAVO_LEVEL
