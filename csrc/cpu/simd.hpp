// Sixteen lanes at a time, in the compiler's own vector types: one source for every instruction set.
//
// A file that includes this is compiled once for each level (see CMakeLists.txt) with OCTAVO_LEVEL naming the namespace
// of the level; the compiler lowers a 64-byte vector to one AVX-512 register, two AVX2 registers or four SSE ones. What a
// level does better than that (a bf16 dot product) is in the kernel that uses it, behind the compiler's feature macro.
// What gcc 12 does not lower but takes lane by lane, comparisons above all, goes by registers (by_registers, less, …).
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define OCTAVO_INLINE __attribute__((always_inline)) inline

namespace octavo::OCTAVO_LEVEL {

constexpr int kLanes = 16;

using bf16 = uint16_t;  // the upper half of a float
using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));

// The bytes of a register, and what one holds of a vector of 64 bytes, by the type of its lanes.
#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
template <typename Lane>
struct RegisterOf;
template <>
struct RegisterOf<float> {
  using Type = float __attribute__((vector_size(kRegisterBytes)));
  using Whole = float __attribute__((vector_size(64)));
};
template <>
struct RegisterOf<int32_t> {
  using Type = int32_t __attribute__((vector_size(kRegisterBytes)));
  using Whole = int32_t __attribute__((vector_size(64)));
};
template <>
struct RegisterOf<uint32_t> {
  using Type = uint32_t __attribute__((vector_size(kRegisterBytes)));
  using Whole = uint32_t __attribute__((vector_size(64)));
};
template <>
struct RegisterOf<double> {
  using Type = double __attribute__((vector_size(kRegisterBytes)));
  using Whole = double __attribute__((vector_size(64)));
};
template <>
struct RegisterOf<int64_t> {
  using Type = int64_t __attribute__((vector_size(kRegisterBytes)));
  using Whole = int64_t __attribute__((vector_size(64)));
};
template <typename Vector>
using LaneOf = std::remove_reference_t<decltype(std::declval<Vector&>()[0])>;

// An operation on the lanes of vectors of 64 bytes, done with one register of each after the other.
template <typename Operation, typename... Vectors>
OCTAVO_INLINE auto by_registers(const Operation& operation, const Vectors&... vectors) {
  if constexpr (kRegisterBytes == 64) {
    return operation(vectors...);
  } else {
    constexpr int kCount = 64 / kRegisterBytes;
    const auto part = [](const auto& vector, int index) {
      typename RegisterOf<LaneOf<std::decay_t<decltype(vector)>>>::Type found;
      std::memcpy(&found, reinterpret_cast<const char*>(&vector) + index * kRegisterBytes, sizeof found);
      return found;
    };
    using Part = decltype(operation(part(vectors, 0)...));
    Part parts[kCount];
    for (int index = 0; index < kCount; ++index) parts[index] = operation(part(vectors, index)...);
    typename RegisterOf<LaneOf<Part>>::Whole found;
    std::memcpy(&found, parts, sizeof found);
    return found;
  }
}

// All bits of the lanes for which it holds.
template <typename Vector>
OCTAVO_INLINE auto less(Vector a, Vector b) {
  return by_registers([](auto x, auto y) { return x < y; }, a, b);
}
template <typename Vector>
OCTAVO_INLINE auto reaches(Vector a, Vector b) {
  return by_registers([](auto x, auto y) { return x >= y; }, a, b);
}
template <typename Vector>
OCTAVO_INLINE auto equal(Vector a, Vector b) {
  return by_registers([](auto x, auto y) { return x == y; }, a, b);
}
template <typename Vector>
OCTAVO_INLINE auto is_nan(Vector a) {
  return by_registers([](auto x) { return x != x; }, a);
}

OCTAVO_INLINE f32x16 splat(float value) { return value - f32x16{}; }

OCTAVO_INLINE f32x16 load(const float* at) {
  f32x16 found;
  std::memcpy(&found, at, sizeof found);
  return found;
}

OCTAVO_INLINE void store(float* at, f32x16 value) { std::memcpy(at, &value, sizeof value); }

#if defined(__AVX512F__)
// Functions with a mask, of which all lanes are wanted: gcc 12 takes the undefined register of those without for a fault
// of ours.
constexpr __mmask16 kAll = 0xffff;
#endif

OCTAVO_INLINE f32x16 load(const bf16* at) {
#if defined(__AVX512F__)  // gcc 12 takes __builtin_convertvector in two halves
  const __m256i found = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  return (f32x16)((u32x16)_mm512_maskz_cvtepu16_epi32(kAll, found) << 16);
#else
  u16x16 found;
  std::memcpy(&found, at, sizeof found);
  return (f32x16)(__builtin_convertvector(found, u32x16) << 16);
#endif
}

// Rounds to nearest, ties to even; a NaN stays one.
#if defined(__AVX512F__)
// The upper halves of the lanes are what is rounded.
OCTAVO_INLINE __m512i rounded_to_bf16(f32x16 value) {
  const __m512i bits = (__m512i)value;
  const __m512i odd = _mm512_maskz_and_epi32(kAll, _mm512_maskz_srli_epi32(kAll, bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = (__m512i)((u32x16)bits + (u32x16)odd + 0x7fffu);
  const __mmask16 nan = _mm512_cmp_ps_mask((__m512)value, (__m512)value, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
}
OCTAVO_INLINE void store(bf16* at, f32x16 value) {
  const __m512i upper = _mm512_maskz_srli_epi32(kAll, rounded_to_bf16(value), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_maskz_cvtepi32_epi16(kAll, upper));
}
#else
OCTAVO_INLINE void store(bf16* at, f32x16 value) {
  const u32x16 upper = by_registers(
      [](auto part) {
        using Bits = RegisterOf<uint32_t>::Type;
        const Bits bits = (Bits)part;
        const Bits rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
        const Bits nan = (Bits)(part != part);
        return ((nan & (bits | 0x400000u)) | (~nan & rounded)) >> 16;
      },
      value);
  const u16x16 halves = __builtin_convertvector(upper, u16x16);
  std::memcpy(at, &halves, sizeof halves);
}
#endif

// Two vectors, one after the other.
OCTAVO_INLINE void store(float* at, f32x16 first, f32x16 second) {
  store(at, first);
  store(at + 16, second);
}
OCTAVO_INLINE void store(bf16* at, f32x16 first, f32x16 second) {
#if defined(__AVX512BW__)
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i both =
      _mm512_permutex2var_epi16(rounded_to_bf16(first), _mm512_load_si512(kUpper), rounded_to_bf16(second));
  _mm512_storeu_si512(at, both);
#else
  store(at, first);
  store(at + 16, second);
#endif
}

OCTAVO_INLINE float widen(bf16 value) {
  const uint32_t bits = uint32_t{value} << 16;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}
OCTAVO_INLINE float widen(float value) { return value; }

OCTAVO_INLINE void narrow(float value, float* at) { *at = value; }
OCTAVO_INLINE void narrow(float value, bf16* at) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  *at = value != value ? static_cast<bf16>((bits >> 16) | 0x40u)
                       : static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The first `count` lanes from memory, the others zero; nothing beyond them is read.
template <typename T>
OCTAVO_INLINE f32x16 load_part(const T* at, int count) {
  f32x16 found = {};
  for (int lane = 0; lane < count; ++lane) found[lane] = widen(at[lane]);
  return found;
}

template <typename T>
OCTAVO_INLINE void store_part(T* at, f32x16 value, int count) {
  for (int lane = 0; lane < count; ++lane) narrow(value[lane], at + lane);
}

// Lanes of a vector that may be a part of one: the type Whole says at compile time that it is not.
using Whole = std::integral_constant<int, kLanes>;

template <typename T>
OCTAVO_INLINE f32x16 load(const T* at, Whole) { return load(at); }
template <typename T>
OCTAVO_INLINE f32x16 load(const T* at, int count) { return load_part(at, count); }
template <typename T>
OCTAVO_INLINE void store(T* at, f32x16 value, Whole) { store(at, value); }
template <typename T>
OCTAVO_INLINE void store(T* at, f32x16 value, int count) { store_part(at, value, count); }

// How layers write what they compute: as store does, but for what is below bfloat16's normal range. Instructions for bfloat16 take what is below its normal range for zero, and so do AMX's products
// with their inputs.
#if defined(__AMX_BF16__)
OCTAVO_INLINE void put(bf16* at, f32x16 value, Whole) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), (__m256i)_mm512_cvtneps_pbh((__m512)value));
}
OCTAVO_INLINE void put(bf16* at, f32x16 first, f32x16 second) {
  _mm512_storeu_si512(at, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}
OCTAVO_INLINE void put(bf16* at, f32x16 value, int lanes) {
  _mm256_mask_storeu_epi16(at, static_cast<__mmask16>((1u << lanes) - 1), (__m256i)_mm512_cvtneps_pbh((__m512)value));
}
#else
template <typename Lanes>
OCTAVO_INLINE void put(bf16* at, f32x16 value, Lanes lanes) { store(at, value, lanes); }
OCTAVO_INLINE void put(bf16* at, f32x16 first, f32x16 second) { store(at, first, second); }
#endif
template <typename Lanes>
OCTAVO_INLINE void put(float* at, f32x16 value, Lanes lanes) { store(at, value, lanes); }
OCTAVO_INLINE void put(float* at, f32x16 first, f32x16 second) { store(at, first, second); }

// Calls visit(first, lanes) for each vector of a row of `size` elements.
template <typename Visit>
OCTAVO_INLINE void by_vectors(int64_t size, const Visit& visit) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) visit(i, Whole());
  if (i < size) visit(i, static_cast<int>(size - i));
}

template <typename Mask, typename Vector>
OCTAVO_INLINE Vector select(Mask mask, Vector yes, Vector no) {
  return (Vector)(((Mask)yes & mask) | ((Mask)no & ~mask));
}

// The second where one is NaN.
template <typename Vector>
OCTAVO_INLINE Vector max(Vector a, Vector b) {
  return by_registers([](auto x, auto y) { return select(x > y, x, y); }, a, b);
}

// Halves are added to halves: the same order wherever the lanes come from.
OCTAVO_INLINE float sum(f32x16 value) {
  float lane[16];
  store(lane, value);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

// NaN where there is one.
OCTAVO_INLINE float max_lane(f32x16 value) {
  float lane[16];
  store(lane, value);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i)
      lane[i] = lane[i + half] > lane[i] || lane[i + half] != lane[i + half] ? lane[i + half] : lane[i];
  return lane[0];
}

// e^x within 2 units in the last place; 0 from about -87.3 down, infinity from about 88.7 up, NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by the Taylor polynomial of degree 7 (its error there is 5e-9).
template <typename Floats>
OCTAVO_INLINE Floats exp_register(Floats x) {
  using Integers = decltype(x < x);
  const auto same = [](float value) { return value - Floats{}; };
  const Floats low = same(-87.33654f), high = same(88.72283f);
  const Floats bounded = select(x < low, low, select(x > high, high, x));
  const Floats magic = same(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats shifted = bounded * 1.44269504088896341f + magic;
  const Floats n = shifted - magic;
  Floats r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Floats p = same(1.0f / 5040.0f);
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // 2^n in two factors, for n = 128 has no float of its own.
  const Integers whole = __builtin_convertvector(n, Integers);
  const Integers half = whole >> 1;
  const Floats first = (Floats)((half + 127) << 23), second = (Floats)((whole - half + 127) << 23);
  Floats found = p * first * second;
  found = select(x < low, Floats{}, found);
  found = select(x > high, same(__builtin_inff()), found);
  return select(x != x, x, found);
}
#if defined(__AVX512F__)
// The same steps by instructions that only these levels have, and the same bits.
OCTAVO_INLINE __m512 exp_register(__m512 x) {
  const __m512 magic = _mm512_set1_ps(12582912.0f);
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.33654f), _CMP_NLT_UQ);
  // (Of a NaN and a number these functions return the second.)
  const __m512 bounded = _mm512_maskz_min_ps(kAll, _mm512_set1_ps(89.0f), x);
  const __m512 n = _mm512_fmadd_ps(bounded, _mm512_set1_ps(1.44269504088896341f), magic) - magic;
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), bounded);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040.0f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(counts, p, n);
}
#endif
OCTAVO_INLINE f32x16 exp(f32x16 x) {
#if defined(__AVX512F__)
  return (f32x16)exp_register((__m512)x);
#else
  return by_registers([](auto part) { return exp_register(part); }, x);
#endif
}

template <typename Floats>
OCTAVO_INLINE Floats tanh_register(Floats x) {
  using Integers = decltype(x < x);
  // With e = exp(-2|x|): tanh|x| = (1 - e) / (1 + e).
  const Floats size = (Floats)((Integers)x & INT32_MAX);
  const Floats e = exp_register(size * -2.0f);
  const Floats found = (1.0f - e) / (1.0f + e);
  return (Floats)((Integers)found | ((Integers)x & INT32_MIN));
}
OCTAVO_INLINE f32x16 tanh(f32x16 x) {
  return by_registers([](auto part) { return tanh_register(part); }, x);
}

// Within 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
template <typename Floats>
OCTAVO_INLINE Floats erf_register(Floats x) {
  using Integers = decltype(x < x);
  const Floats size = (Floats)((Integers)x & INT32_MAX);
  const Floats t = 1.0f / (1.0f + 0.3275911f * size);
  Floats p = 1.061405429f - Floats{};
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Floats found = 1.0f - p * t * exp_register(-size * size);
  return (Floats)((Integers)found | ((Integers)x & INT32_MIN));
}
OCTAVO_INLINE f32x16 erf(f32x16 x) {
  return by_registers([](auto part) { return erf_register(part); }, x);
}

// An array of its own, cleared, or of anything. Levels use no std::vector: of a template that several files instantiate
// the linker keeps one copy for all, and if that one was compiled for AVX-512 it would run on machines without it.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : Buffer(new T[size]()) {}
  static Buffer of_anything(int64_t size) { return Buffer(new T[size]); }
  ~Buffer() { delete[] data_; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() const { return data_; }
  T& operator[](int64_t index) const { return data_[index]; }

 private:
  explicit Buffer(T* data) : data_(data) {}

  T* data_;
};

}  // namespace octavo::OCTAVO_LEVEL
