// Weights of 8-bit floats (f8 in formats.hpp) as the lines of bf16 that products read (drawn at Linear), block by block,
// while they are multiplied: a product of them has the bits of one with the widened weight.
#pragma once

#include "dots.hpp"
#include "formats.hpp"
#include "kernels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

// A line: from 16 pairs of e4m3 and a scale for each, the upper halves of numbers times scale, to nearest, ties to even.
#if defined(__AVX512BW__)

// 32 numbers of e4m3 as bf16, exactly. A number of bf16 has the exponent's lowest bit at 7, and a bias of 127 instead of 7.
OCTAVO_INLINE __m512i from_e4m3(__m256i bytes) {
  // Without an exponent: 0 to 7 times 2^-9. (No arithmetic on numbers below the normal range, which takes 100 cycles.)
  const __m512i small = _mm512_setr_epi32(0x3b000000, 0x3bc03b80, 0x3c203c00, 0x3c603c40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512i words = _mm512_maskz_cvtepu8_epi16(~0u, bytes), rest = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
  __m512i found = _mm512_add_epi16(_mm512_maskz_slli_epi16(~0u, rest, 4), _mm512_set1_epi16(120 << 7));
  found = _mm512_mask_permutexvar_epi16(found, _mm512_cmplt_epu16_mask(rest, _mm512_set1_epi16(8)), rest, small);
  found = _mm512_mask_mov_epi16(found, _mm512_cmpeq_epi16_mask(rest, _mm512_set1_epi16(0x7f)), _mm512_set1_epi16(0x7fc0));
  return _mm512_or_si512(found, _mm512_and_si512(_mm512_maskz_slli_epi16(~0u, words, 8), _mm512_set1_epi16(-0x8000)));
}

// Exact: no product is below the normal range.
template <bool Exact>
OCTAVO_INLINE __m512i widened_line(const uint8_t* at, f32x16 scale) {
  const u32x16 both = (u32x16)from_e4m3(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  const f32x16 even = (f32x16)(both << 16) * scale, odd = (f32x16)(both & 0xffff0000u) * scale;
#if defined(__AVX512BF16__)
  if constexpr (Exact) {
    alignas(64) static constexpr uint16_t kPairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    return _mm512_maskz_permutexvar_epi16(~0u, _mm512_load_si512(kPairs), halves);
  }
#endif
  const __m512i low = _mm512_maskz_srli_epi32(kAll, rounded_to_bf16(even), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, low, rounded_to_bf16(odd));
}

// The smallest number is 2^-9.
OCTAVO_INLINE bool is_exact(f32x16 scale) {
  const __m512 size = _mm512_abs_ps((__m512)scale);
  return (_mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p-117f), _CMP_LT_OQ) &
          _mm512_cmp_ps_mask(size, _mm512_setzero_ps(), _CMP_NEQ_OQ)) == 0;
}

#else

using Words = RegisterOf<uint32_t>::Type;
using Integers = RegisterOf<int32_t>::Type;
using Floats = RegisterOf<float>::Type;

// Numbers of e4m3, in the low eight bits of each word. The exponent's bias is 7 instead of 127; a number without one is
// read as if its exponent were 1 and it had a leading bit, which is taken off again: no arithmetic on what is below the
// normal range, which takes 100 cycles.
OCTAVO_INLINE Floats from_e4m3(Words bytes) {
  const Words rest = bytes & 0x7fu, sign = (bytes & 0x80u) << 24;
  const Words small = (Words)((Integers)rest < 8), is_nan = (Words)((Integers)rest == 0x7f);
  const Floats value = (Floats)((rest << 20) + (120u << 23) + (small & 1u << 23)) - (Floats)(small & 0x3c800000u);  // 2^-6
  return (Floats)((Words)value | sign | (is_nan & 0x7fc00000u));
}

OCTAVO_INLINE Words upper_half(Floats value) {
  const Words bits = (Words)value, rounded = bits + 0x7fffu + (bits >> 16 & 1u), is_nan = (Words)(value != value);
  return ((is_nan & (bits | 0x400000u)) | (~is_nan & rounded)) & 0xffff0000u;
}

template <bool>
OCTAVO_INLINE u32x16 widened_line(const uint8_t* at, f32x16 scale) {
  return by_registers(
      [](Words pairs, Floats scales) {
        const Floats even = from_e4m3(pairs & 0xffu) * scales, odd = from_e4m3(pairs >> 8) * scales;
        return upper_half(even) >> 16 | upper_half(odd);
      },
      load_pairs(at), scale);
}

OCTAVO_INLINE bool is_exact(f32x16) { return false; }

#endif

template <bool Exact>
OCTAVO_INLINE void widen_span(const uint8_t* at, f32x16 scale, int64_t pairs, uint32_t* to) {
  for (int64_t pair = 0; pair < pairs; ++pair, at += 2 * kLanes, to += kLanes) {
    const auto line = widened_line<Exact>(at, scale);
    std::memcpy(to, &line, sizeof line);
    __builtin_prefetch(at + 2048);
  }
}

// `blocks` blocks from `block` on; to: a line of 16 words for each pair of inputs.
inline __attribute__((always_inline)) void widen_blocks(const Linear& call, const Layout& layout, int64_t block,
                                                        int64_t blocks, uint32_t* to) {
  const int64_t spans = layout.spans(call.in_size), pairs = layout.span * kGroup / 2;
  const uint8_t* at = static_cast<const uint8_t*>(call.weight) + block * layout.block_bytes(call.in_size);
  for (int64_t span = 0; span < blocks * spans; ++span, to += pairs * kLanes) {
    const f32x16 scale = load(reinterpret_cast<const float*>(at));
    at += layout.span_header;
    if (is_exact(scale)) widen_span<true>(at, scale, pairs, to);
    else widen_span<false>(at, scale, pairs, to);
    at += pairs * 2 * kLanes;
  }
}

}  // namespace octavo::OCTAVO_LEVEL
