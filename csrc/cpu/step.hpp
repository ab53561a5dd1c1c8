// One step of a product along its inner dimension: what one row's next inputs add to 16 outputs.
//
// Weights and keys are packed in lines of 64 bytes: 16 outputs x a pair of bf16 inputs, or 16 outputs x one float.
#pragma once

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

constexpr int64_t kLine = 16;  // 32-bit words

struct PairStep {
  using Element = bf16;
  static constexpr int kTogether = 2;
  static OCTAVO_INLINE f32x16 add(f32x16 sum, uint32_t x, u32x16 line) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)), (__m512bh)line);
#else
    const uint32_t even_bits = x << 16, odd_bits = x & 0xffff0000u;
    float even, odd;
    std::memcpy(&even, &even_bits, sizeof even);
    std::memcpy(&odd, &odd_bits, sizeof odd);
    sum = sum + splat(even) * (f32x16)(line << 16);
    return sum + splat(odd) * (f32x16)(line & 0xffff0000u);
#endif
  }
};

struct SingleStep {
  using Element = float;
  static constexpr int kTogether = 1;
  static OCTAVO_INLINE f32x16 add(f32x16 sum, uint32_t x, u32x16 line) {
    float value;
    std::memcpy(&value, &x, sizeof value);
    return sum + splat(value) * (f32x16)line;
  }
};

OCTAVO_INLINE uint32_t word(const void* at) {
  uint32_t found;
  std::memcpy(&found, at, sizeof found);
  return found;
}

}  // namespace octavo::OCTAVO_LEVEL
