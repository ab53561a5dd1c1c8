// Exact products of bytes: what one row's next four inputs add to 16 outputs.
//
// A line is 16 outputs x 4 numbers (64 bytes, unsigned); the inputs are four int8 in a 32-bit word, the same for every
// output. Bits: how large the numbers may be. Sums are int32, the same on every level.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "formats.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

OCTAVO_INLINE u32x16 load_line(const uint8_t* at) {
  u32x16 found;
  std::memcpy(&found, at, sizeof found);
  return found;
}

OCTAVO_INLINE i32x16 splat_words(int32_t value) { return value - i32x16{}; }

#if defined(__AVX512VNNI__)

template <int Bits>
OCTAVO_INLINE i32x16 dot(i32x16 sum, u32x16 line, int32_t x) {
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)line, _mm512_set1_epi32(x));
}

#elif defined(__AVX512BW__) || defined(__AVX2__)

#if defined(__AVX512BW__)
using Register = __m512i;
OCTAVO_INLINE Register same(int32_t x) { return _mm512_set1_epi32(x); }
OCTAVO_INLINE Register pairs(Register numbers, Register x) { return _mm512_maddubs_epi16(numbers, x); }
OCTAVO_INLINE Register halves(Register a, Register b) { return _mm512_madd_epi16(a, b); }
OCTAVO_INLINE Register add(Register a, Register b) { return _mm512_add_epi32(a, b); }
OCTAVO_INLINE Register ones() { return _mm512_set1_epi16(1); }
OCTAVO_INLINE Register low_bytes(Register a) { return _mm512_and_si512(a, _mm512_set1_epi16(255)); }
OCTAVO_INLINE Register high_bytes(Register a) { return _mm512_srli_epi16(a, 8); }
OCTAVO_INLINE Register low_signed(Register a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
OCTAVO_INLINE Register high_signed(Register a) { return _mm512_srai_epi16(a, 8); }
#else
using Register = __m256i;
OCTAVO_INLINE Register same(int32_t x) { return _mm256_set1_epi32(x); }
OCTAVO_INLINE Register pairs(Register numbers, Register x) { return _mm256_maddubs_epi16(numbers, x); }
OCTAVO_INLINE Register halves(Register a, Register b) { return _mm256_madd_epi16(a, b); }
OCTAVO_INLINE Register add(Register a, Register b) { return _mm256_add_epi32(a, b); }
OCTAVO_INLINE Register ones() { return _mm256_set1_epi16(1); }
OCTAVO_INLINE Register low_bytes(Register a) { return _mm256_and_si256(a, _mm256_set1_epi16(255)); }
OCTAVO_INLINE Register high_bytes(Register a) { return _mm256_srli_epi16(a, 8); }
OCTAVO_INLINE Register low_signed(Register a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
OCTAVO_INLINE Register high_signed(Register a) { return _mm256_srai_epi16(a, 8); }
#endif

// Products of pairs saturate at 16 bits, which two times 127 x 63 do not reach, but two times 127 x 255 do: numbers of a
// byte are taken apart into halves first.
template <int Bits>
OCTAVO_INLINE Register dot_register(Register sum, Register line, int32_t x) {
  const Register inputs = same(x);
  if constexpr (Bits < 7) return add(sum, halves(pairs(line, inputs), ones()));
  return add(sum, add(halves(low_bytes(line), low_signed(inputs)), halves(high_bytes(line), high_signed(inputs))));
}

template <int Bits>
OCTAVO_INLINE i32x16 dot(i32x16 sum, u32x16 line, int32_t x) {
  constexpr int kRegisters = 64 / sizeof(Register);
  Register sums[kRegisters], lines[kRegisters];
  std::memcpy(sums, &sum, sizeof sum);
  std::memcpy(lines, &line, sizeof line);
  for (int i = 0; i < kRegisters; ++i) sums[i] = dot_register<Bits>(sums[i], lines[i], x);
  std::memcpy(&sum, sums, sizeof sum);
  return sum;
}

#else

template <int Bits>
OCTAVO_INLINE i32x16 dot(i32x16 sum, u32x16 line, int32_t x) {
  for (int byte = 0; byte < 4; ++byte) {
    const int32_t input = static_cast<int8_t>(static_cast<uint32_t>(x) >> (8 * byte));
    sum = sum + (i32x16)(line >> (8 * byte) & 255u) * input;
  }
  return sum;
}

#endif

// Sixteen half-precision numbers.
OCTAVO_INLINE f32x16 load_halves(const uint8_t* at) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#else
  u16x16 found;
  std::memcpy(&found, at, sizeof found);
  const u32x16 bits = __builtin_convertvector(found, u32x16);
  const u32x16 sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  // Without a leading one: a multiple of 2^-24. Infinities and NaN keep their exponent full.
  const u32x16 normal = (rest << 13) + (112u << 23);
  const u32x16 full = (rest << 13) | 0x7f800000u;
  const u32x16 small = (u32x16)(__builtin_convertvector((i32x16)rest, f32x16) * 0x1p-24f);
  const u32x16 is_small = (u32x16)less((i32x16)rest, 0x400 - i32x16{});
  const u32x16 is_full = (u32x16)reaches((i32x16)rest, 0x7c00 - i32x16{});
  return (f32x16)(sign | (is_small & small) | (is_full & full) | (~(is_small | is_full) & normal));
#endif
}

// Sixteen pairs of bytes.
OCTAVO_INLINE u32x16 load_pairs(const uint8_t* at) {
#if defined(__AVX512F__)
  return (u32x16)_mm512_maskz_cvtepu16_epi32(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#else
  u16x16 found;
  std::memcpy(&found, at, sizeof found);
  return __builtin_convertvector(found, u32x16);
#endif
}

using u8x16 = uint8_t __attribute__((vector_size(16)));
using i8x16 = int8_t __attribute__((vector_size(16)));

// Sixteen bytes, Bytes says whether they have a sign, as numbers. (gcc 12 takes __builtin_convertvector byte by byte.)
template <typename Bytes>
OCTAVO_INLINE f32x16 load_bytes(const uint8_t* at) {
  [[maybe_unused]] constexpr bool kSigned = std::is_same_v<Bytes, i8x16>;
#if defined(__AVX512F__)
  const __m128i found = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  const i32x16 wide = (i32x16)(kSigned ? _mm512_maskz_cvtepi8_epi32(kAll, found)
                                        : _mm512_maskz_cvtepu8_epi32(kAll, found));
#elif defined(__AVX2__)
  __m256i halves[2];
  for (int half = 0; half < 2; ++half) {
    const __m128i found = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + 8 * half));
    halves[half] = kSigned ? _mm256_cvtepi8_epi32(found) : _mm256_cvtepu8_epi32(found);
  }
  i32x16 wide;
  std::memcpy(&wide, halves, sizeof wide);
#else
  Bytes found;
  std::memcpy(&found, at, sizeof found);
  const i32x16 wide = __builtin_convertvector(found, i32x16);
#endif
  return __builtin_convertvector(wide, f32x16);
}

// The nearest integers, ties to even, of numbers that are small enough to have one.
OCTAVO_INLINE i32x16 nearest(f32x16 value) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_maskz_cvtps_epi32(kAll, (__m512)value);
#elif defined(__AVX2__)
  __m256 halves[2];
  std::memcpy(halves, &value, sizeof value);
  const __m256i rounded[2] = {_mm256_cvtps_epi32(halves[0]), _mm256_cvtps_epi32(halves[1])};
  i32x16 found;
  std::memcpy(&found, rounded, sizeof found);
  return found;
#else
  // Adding 1.5 * 2^23 rounds, and leaves the integer in the low bits. Not fused with the product that made the value.
  asm("" : "+m"(value));
  return (i32x16)((u32x16)(value + 12582912.0f) - 0x4b400000u);
#endif
}

using i32x4 = int32_t __attribute__((vector_size(16)));

// All lanes put together by an operation whose order does not matter.
template <typename Join>
OCTAVO_INLINE int32_t joined(i32x16 value, const Join& join) {
#if defined(__AVX512F__)
  const auto eight = join(__builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7),
                          __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15));
  const auto four = join(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                         __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
#else
  i32x4 fours[4];
  std::memcpy(fours, &value, sizeof fours);
  const i32x4 four = join(join(fours[0], fours[2]), join(fours[1], fours[3]));
#endif
  const auto two = join(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
  return join(two, __builtin_shufflevector(two, two, 1, 0, 3, 2))[0];
}

OCTAVO_INLINE int32_t total_of(i32x16 value) {
  return joined(value, [](auto a, auto b) { return a + b; });
}

OCTAVO_INLINE int32_t largest_of(i32x16 value) {
  return joined(value, [](auto a, auto b) { return a > b ? a : b; });
}

// The larger of each two lanes.
OCTAVO_INLINE i32x16 larger(i32x16 a, i32x16 b) {
#if defined(__AVX512F__)  // gcc 12 makes four instructions of max
  return (i32x16)_mm512_maskz_max_epi32(kAll, (__m512i)a, (__m512i)b);
#else
  return max(a, b);
#endif
}

// Numbers from -128 to 127 as bytes, in the order in which a quantized weight has its inputs (formats.hpp).
OCTAVO_INLINE void store_inputs(int8_t* at, i32x16 value) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_maskz_cvtepi32_epi8(kAll, (__m512i)value);
#else
  __m256i halves[2];
  std::memcpy(halves, &value, sizeof value);
  // Packing takes turns between the 128-bit lanes of both: 0-3 8-11 4-7 12-15.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(halves[0], halves[1]), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#endif
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm_shuffle_epi8(bytes, order));
#else
  const i8x16 bytes = __builtin_convertvector(value, i8x16);
  for (int64_t i = 0; i < kLanes; ++i) at[i] = bytes[i / 8 * 8 + kInputOrder[i % 8]];
#endif
}

}  // namespace octavo::OCTAVO_LEVEL
