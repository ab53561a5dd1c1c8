// Quantized weights (drawn in formats.hpp) as lines of bf16, by arithmetic of half precision (AVX-512 FP16, which each
// processor with AMX has): 32 weights in an instruction, where float32 would take two and put them together again.
//
//   number ── table or conversion ──► half ── times scale, plus offset ──► half ── rounded to 8 bits ──► bf16
//
// Half precision has few powers of two: scales are multiplied by call.half_scale first, one for the whole matrix, so that
// its largest weight is 2^14 at most. A half h has its exponent in bits 10-14, bf16 in bits 7-14:
//
//   half  s eeeee mmmmmmmmmm      h + 4, shifted by 3 with its sign:  ssss eeeee mmmmmmm
//   bf16  s 011 eeeee mmmmmmm     = h / 2^16, to 8 bits, halves away from zero
//
// so sums are of weights * half_scale / 2^16, and multiplied by sum_scale() when they are finished. What is below 2^-14 as
// a half, which is 2^-28 of the largest weight, becomes about as much (and zero 2^-15): the products' own rounding is coarser.
//
// A word of numbers is two inputs of one output, which is how formats.hpp puts them: four of the 16 lines are in one vector
// of words, and a shift apart.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dots.hpp"
#include "formats.hpp"
#include "kernels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// The half bytes `Line` of words, low in each, with what is above them, up to eight bits. A shift would take the port that
// multiplies, where this takes the other.
struct FromBits {
  alignas(64) uint8_t first[4][64];
  constexpr FromBits() : first() {
    for (int line = 0; line < 4; ++line)
      for (int byte = 0; byte < 64; ++byte) first[line][byte] = static_cast<uint8_t>(byte % 8 / 2 * 16 + 4 * line);
  }
};
constexpr FromBits kFromBits;

template <int Line>
OCTAVO_INLINE __m512i halves_of_bytes(__m512i words) {
  if constexpr (Line == 0) return words;
  return _mm512_maskz_multishift_epi64_epi8(~0ull, _mm512_load_si512(kFromBits.first[Line]), words);
}

// The 32 numbers of each line of a quarter, each in the low bits of a word. Of fewer than six bits others are above them.
template <int Bits, int Quarter>
OCTAVO_INLINE void read_numbers(const uint8_t* at, __m512i (&lines)[4]) {
  const auto vector = [at](int index) { return _mm512_loadu_si512(at + index * 64); };
  const auto moved = [](__m512i words, auto down) {
    constexpr int kDown = decltype(down)::value;
    if constexpr (kDown > 0) return _mm512_maskz_srli_epi16(~0u, words, kDown);
    else if constexpr (kDown < 0) return _mm512_maskz_slli_epi16(~0u, words, -kDown);
    else return words;
  };
  if constexpr (Bits == 4) {
    const __m512i own = vector(Quarter);
    lines[0] = own;
    lines[1] = halves_of_bytes<1>(own);
    lines[2] = halves_of_bytes<2>(own);
    lines[3] = halves_of_bytes<3>(own);
    return;
  }
  // Lines of bytes: low bytes of words are a line, high bytes the next but one.
  const auto read = [&](auto odd) {
    constexpr int kOdd = decltype(odd)::value, kOwn = 2 * Quarter + kOdd;
    constexpr int kSelect = 0xca;  // first ? second : third
    if constexpr (Bits == 8) {
      const __m512i bytes = vector(kOwn);
      lines[kOdd] = _mm512_and_si512(bytes, _mm512_set1_epi16(255));
      lines[2 + kOdd] = moved(bytes, std::integral_constant<int, 8>());
    } else {
      const __m512i low = moved(vector(Quarter), std::integral_constant<int, 4 * kOdd>());
      if constexpr (Bits == 5) {
        const __m512i high = moved(vector(4), std::integral_constant<int, kOwn - 4>());
        lines[kOdd] = _mm512_ternarylogic_epi32(_mm512_set1_epi8(16), high, low, kSelect);
        lines[2 + kOdd] = halves_of_bytes<2>(lines[kOdd]);
      } else {
        const __m512i high = moved(vector(4 + Quarter / 2), std::integral_constant<int, 2 * (kOwn % 4) - 4>());
        const __m512i bytes = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low, high, kSelect);
        lines[kOdd] = _mm512_and_si512(bytes, _mm512_set1_epi16(63));
        lines[2 + kOdd] = _mm512_and_si512(halves_of_bytes<2>(bytes), _mm512_set1_epi16(63));
      }
    }
  };
  read(std::integral_constant<int, 0>());
  read(std::integral_constant<int, 1>());
}

// What there is for each of 16 outputs, for both words of it: halves, bytes as words, bytes with a sign, floats.
struct Twice {
  alignas(64) uint16_t words[32];
  alignas(64) uint8_t bytes[64];
  constexpr Twice() : words(), bytes() {
    for (int i = 0; i < 32; ++i) words[i] = static_cast<uint16_t>(i / 2);
    for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(i / 4);
  }
};
constexpr Twice kTwice;

OCTAVO_INLINE __m512h halves_at(const uint8_t* at) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  return (__m512h)_mm512_maskz_permutexvar_epi16(~0u, _mm512_load_si512(kTwice.words), _mm512_castsi256_si512(halves));
}

template <bool High>
OCTAVO_INLINE __m512i bytes_at(const uint8_t* at) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  constexpr __mmask64 kHalf = High ? 0xaaaaaaaaaaaaaaaaull : 0x5555555555555555ull;
  return _mm512_maskz_permutexvar_epi8(kHalf, _mm512_load_si512(kTwice.bytes), _mm512_castsi128_si512(bytes));
}
OCTAVO_INLINE __m512h unsigned_at(const uint8_t* at) { return _mm512_maskz_cvtepu16_ph(~0u, bytes_at<false>(at)); }
OCTAVO_INLINE __m512h signed_at(const uint8_t* at) {
  return _mm512_maskz_cvtepi16_ph(~0u, _mm512_maskz_srai_epi16(~0u, bytes_at<true>(at), 8));
}

OCTAVO_INLINE __m512h floats_at(const uint8_t* at, float scale) {
  const f32x16 values = load(reinterpret_cast<const float*>(at)) * scale;
  const __m256i narrow = _mm512_maskz_cvtps_ph(kAll, (__m512)values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (__m512h)_mm512_maskz_permutexvar_epi16(~0u, _mm512_load_si512(kTwice.words), _mm512_castsi256_si512(narrow));
}

OCTAVO_INLINE __m512i to_bf16(__m512h value) {
  const __m512i moved = _mm512_maskz_mulhrs_epi16(~0u, (__m512i)value, _mm512_set1_epi16(1 << 12));  // (value + 4) >> 3
  constexpr int kAndOr = 0xea;  // first and second, or third
  return _mm512_ternarylogic_epi32(moved, _mm512_set1_epi16(static_cast<short>(0x8fff)), _mm512_set1_epi16(0x3000),
                                   kAndOr);
}

// Integers from -Centre on, by a number's low bits.
template <int Bits, int Centre>
struct Table {
  alignas(64) _Float16 values[32];
  constexpr Table() : values() {
    for (int i = 0; i < 32; ++i) values[i] = static_cast<_Float16>(i % (1 << Bits) - Centre);
  }
};

template <int Bits, int Centre>
OCTAVO_INLINE __m512h integers(__m512i numbers) {
  if constexpr (Bits <= 5) {
    static constexpr Table<Bits, Centre> table;
    return (__m512h)_mm512_maskz_permutexvar_epi16(~0u, numbers, _mm512_load_si512(table.values));
  } else {
    return _mm512_maskz_cvtepu16_ph(~0u, numbers);
  }
}

// Of a power of two. (Asked for each tile of many rows.)
OCTAVO_INLINE int exponent_of(float power) {
  uint32_t bits;
  std::memcpy(&bits, &power, sizeof bits);
  return static_cast<int>(bits >> 23) - 127;
}

// A Code (widened_tile.hpp).
template <Format F>
class QuantizedLines {
  static constexpr bool kZeroed = F == Format::u4 || F == Format::u8;
  static constexpr bool kNested = F == Format::q4_k || F == Format::q5_k;
  static constexpr bool kOffset = F == Format::q4_1 || F == Format::q5_1 || kNested;
  static constexpr int kCentre = F == Format::q4_0   ? 8
                                 : F == Format::q5_0 ? 16
                                 : F == Format::q6_k ? 32
                                 : F == Format::q8_0 ? 128
                                                     : 0;
  static constexpr Layout kLayout = layout_of(F, kGroup);
  static constexpr int64_t kSpan = kZeroed ? 0 : kLayout.span;  // groups; 0: known when it runs
  static constexpr int kBits = static_cast<int>(kLayout.bits);
  static constexpr int64_t kFetched = (kSpan == 1 ? kLayout.span_bytes() : kLayout.group_bytes()) + 63;  // bytes

 public:
  static constexpr int64_t kAhead = kBits < 8 ? 12 : 8;
  static constexpr bool kScaled = true;

  // `at`: its group; `shared`: its span's header.
  struct Tile {
    const uint8_t* at;
    const uint8_t* shared;

    OCTAVO_INLINE Tile apart(int64_t bytes) const { return {at + bytes, shared + bytes}; }
  };
  // Scales, and offsets or zeros, of each half of the inputs.
  struct Opened {
    __m512h d[2], m[2];
  };

  explicit QuantizedLines(const Linear& call)
      : layout_(layout_of(call.format, call.span)),
        block_bytes_(layout_.block_bytes(call.in_size)),
        half_scale_(call.half_scale),
        exponent_(static_cast<_Float16>(exponent_of(call.half_scale))) {}

  int64_t block_bytes() const { return block_bytes_; }

  OCTAVO_INLINE Tile tile(const uint8_t* block, int64_t step) const {
    if constexpr (kSpan == 1) {
      const uint8_t* span = block + step * kLayout.span_bytes();
      return {span + kLayout.span_header, span};
    } else {
      const auto group = static_cast<uint32_t>(step), groups = static_cast<uint32_t>(kSpan > 0 ? kSpan : layout_.span);
      const uint32_t index = group / groups;
      const uint8_t* span = block + index * (kLayout.span_header + groups * kLayout.group_bytes());
      return {span + kLayout.span_header + (group - index * groups) * kLayout.group_bytes(), span};
    }
  }
  static OCTAVO_INLINE const uint8_t* fetched(Tile tile) { return kSpan == 1 ? tile.shared : tile.at; }
  static OCTAVO_INLINE bool shared_from(int64_t step) { return kSpan != 1 && (kSpan == 0 || step % kSpan == 0); }

  OCTAVO_INLINE Opened open(Tile tile) const {
    if constexpr (kZeroed) {
      const __m512h d = floats_at(tile.shared, half_scale_), zero = unsigned_at(tile.shared + 64);
      return {{d, d}, {zero, zero}};
    } else {
      __m512h d = scaled(halves_at(tile.shared));
      if constexpr (F == Format::q6_k)
        return centred(_mm512_mul_ph(d, signed_at(tile.at)), _mm512_mul_ph(d, signed_at(tile.at + 16)));
      if constexpr (!kOffset) return centred(d, d);
      __m512h m = scaled(halves_at(tile.shared + 32));
      if constexpr (kNested) {
        d = _mm512_mul_ph(d, unsigned_at(tile.at));
        m = _mm512_mul_ph(m, unsigned_at(tile.at + 16));
      }
      return {{d, d}, {m, m}};
    }
  }

  // A quarter of a tile, four lines, while a quarter of the bytes of another is fetched into the second-level cache.
  template <bool Fetch, int Quarter>
  static OCTAVO_INLINE void quarter(Tile tile, const Opened& opened, uint8_t* to, const uint8_t* later) {
    __m512i numbers[4];
    read_numbers<kBits, Quarter>(tile.at + kLayout.group_header, numbers);
    line<Fetch, Quarter * 4>(numbers[0], opened, to, later);
    line<Fetch, Quarter * 4 + 1>(numbers[1], opened, to, later);
    line<Fetch, Quarter * 4 + 2>(numbers[2], opened, to, later);
    line<Fetch, Quarter * 4 + 3>(numbers[3], opened, to, later);
  }

 private:
  OCTAVO_INLINE __m512h scaled(__m512h value) const { return _mm512_scalef_ph(value, _mm512_set1_ph(exponent_)); }

  static OCTAVO_INLINE Opened centred(__m512h first, __m512h second) {
    const __m512h centre = _mm512_set1_ph(static_cast<_Float16>(-kCentre));
    return {{first, second}, {_mm512_mul_ph(first, centre), _mm512_mul_ph(second, centre)}};
  }

  template <bool Fetch, int Line>
  static OCTAVO_INLINE void line(__m512i numbers, const Opened& opened, uint8_t* to, const uint8_t* later) {
    _mm512_store_si512(to + Line * 64, to_bf16(weights(numbers, opened.d[Line / 8], opened.m[Line / 8])));
    constexpr int64_t kLines = kFetched / 64;
    if constexpr (Fetch)
      for (int64_t fetch = kLines * Line / 16; fetch < kLines * (Line + 1) / 16; ++fetch)
        asm volatile("prefetcht1 (%0)" : : "r"(later + fetch * 64));
  }

  static OCTAVO_INLINE __m512h weights(__m512i numbers, __m512h d, __m512h m) {
    if constexpr (kZeroed) return _mm512_mul_ph(_mm512_sub_ph(integers<kBits, 0>(numbers), m), d);
    else if constexpr (kCentre > 0 && kBits <= 5) return _mm512_mul_ph(integers<kBits, kCentre>(numbers), d);
    else if constexpr (kNested) return _mm512_fmsub_ph(integers<kBits, 0>(numbers), d, m);
    // Also d (q - centre): a power of two, so that nothing is rounded twice.
    else return _mm512_fmadd_ph(integers<kBits, 0>(numbers), d, m);
  }

  Layout layout_;
  int64_t block_bytes_;
  float half_scale_;
  _Float16 exponent_;
};

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL
