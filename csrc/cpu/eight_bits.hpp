// Numbers of a KV cache that keeps them in 8 bits: how they are made, and how they are read (KVCache in kernels.hpp).
//
// What is kept of a row of channels, on every level bit for bit what octavo/kernels/kv_rows.py says:
//
//   factor = max|x| / most        most: 127 of int8, 448 of e4m3fn
//   code   = x * (most / max|x|), rounded to the nearest whole number or e4m3fn, ties to even
//
// The factor of a row with a NaN is NaN; that of one with an infinity is infinite, and its codes are 0. Both read as NaN.
#pragma once

#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

struct Int8 {
  int8_t bits;
};
struct E4M3 {  // sign, 4 bits of exponent, 3 of mantissa
  uint8_t bits;
};

template <typename K>
constexpr bool kScaled = sizeof(K) == 1;  // there are factors
constexpr int64_t kFactor = sizeof(float);  // codes that take as much room

template <typename K>
constexpr float kMost = 127.0f;
template <>
constexpr float kMost<E4M3> = 448.0f;
template <typename K>
constexpr float kUnit = 1.0f;  // what load() gives is to be multiplied by
template <>
constexpr float kUnit<E4M3> = 256.0f;

using i8x16 = int8_t __attribute__((vector_size(16)));
using u8x16 = uint8_t __attribute__((vector_size(16)));
using i16x16 = int16_t __attribute__((vector_size(32)));

// All bits of lanes where a < b; both below 2^31. gcc 12 compares vectors of 64 bytes lane by lane without AVX-512, and so
// it converts 8 bits to 32 and back, unless by way of 16.
OCTAVO_INLINE i32x16 less(u32x16 a, u32x16 b) { return (i32x16)(a - b) >> 31; }

OCTAVO_INLINE f32x16 load(const Int8* at) {
#if defined(__AVX512F__)
  const __m128i found = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return (f32x16)_mm512_maskz_cvtepi32_ps(kAll, _mm512_maskz_cvtepi8_epi32(kAll, found));
#else
  i8x16 found;
  std::memcpy(&found, at, sizeof found);
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(found, i16x16), i32x16), f32x16);
#endif
}

// Times 2^-8: with its bits moved to their places in a float16, an e4m3fn is that, and whole numbers of 2^-9 are right
// without a leading one, too.
OCTAVO_INLINE f32x16 load(const E4M3* at) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(-0x4080));
  return (f32x16)_mm512_maskz_cvtph_ps(kAll, half);
#else
  u8x16 found;
  std::memcpy(&found, at, sizeof found);
  const u32x16 bits = __builtin_convertvector(__builtin_convertvector(found, u16x16), u32x16);
  const u32x16 size = (bits & 0x7fu) << 20;
  const f32x16 small = (f32x16)(size + (113u << 23)) - 0x1p-14f;  // no leading one
  const f32x16 chosen = select(less(size, u32x16{} + (1u << 23)), small, (f32x16)(size + (112u << 23)));
  return (f32x16)((u32x16)chosen | (bits & 0x80u) << 24);
#endif
}

OCTAVO_INLINE f32x16 load_part(const Int8* at, int count) {
  Int8 room[kLanes] = {};
  std::memcpy(room, at, static_cast<size_t>(count));
  return load(room);
}
OCTAVO_INLINE f32x16 load_part(const E4M3* at, int count) {
  E4M3 room[kLanes] = {};
  std::memcpy(room, at, static_cast<size_t>(count));
  return load(room);
}

// Of |x| up to kMost and a little more: the code in the low 8 bits.
template <typename K>
OCTAVO_INLINE u32x16 encode(f32x16 x) {
  if constexpr (std::is_same_v<K, Int8>) return (u32x16)(x + 12582912.0f);  // 1.5 * 2^23: the sum is a whole number
  const u32x16 bits = (u32x16)x, size = bits & 0x7fffffffu;
  // Below 2^-6 in steps of 2^-9, which are those of floats from 2^14 up; above, three bits of mantissa are kept.
  const u32x16 small = (u32x16)((f32x16)size + 16384.0f) - 0x46800000u;
  const u32x16 large = ((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - (120u << 3);
  const i32x16 is_small = less(size, u32x16{} + 0x3c800000u);
  return ((u32x16)is_small & small) | (~(u32x16)is_small & large) | (bits >> 24 & 0x80u);
}

// Rounded to float32 here: not fused with a sum on levels that could.
OCTAVO_INLINE f32x16 rounded(f32x16 product) {
  asm volatile("" : "+m"(product));
  return product;
}

// Codes of a row of `size` channels; returns the factor. Rows with nothing above 1e-30 are zeros: `most / max|x|` is no
// float of the smallest ones.
template <typename K, typename T>
static float keep(const T* row, int64_t size, K* codes) {
  u32x16 most = {};  // bits of |x|, in the order of their values, NaN above all
  by_vectors(size, [&](int64_t i, auto lanes) {
    const u32x16 x = (u32x16)load(row + i, lanes) & 0x7fffffffu;
    const u32x16 more = (u32x16)less(most, x);
    most = (more & x) | (~more & most);
  });
  const float largest = max_lane((f32x16)most), share = largest > 1e-30f ? kMost<K> / largest : 0.0f;
  by_vectors(size, [&](int64_t i, auto lanes) {
    const f32x16 x = rounded(load(row + i, lanes) * share);
    const i32x16 is_nan = less(u32x16{} + 0x7f800000u, (u32x16)x & 0x7fffffffu);
    const u32x16 wide = encode<K>(select(is_nan, f32x16{}, x));
    const u8x16 found = __builtin_convertvector(__builtin_convertvector(wide, u16x16), u8x16);
    std::memcpy(codes + i, &found, static_cast<size_t>(static_cast<int>(lanes)));
  });
  return largest / kMost<K>;
}

}  // namespace octavo::OCTAVO_LEVEL
