// Quantized weights (drawn in formats.hpp) as lines of bf16, by arithmetic of half precision (AVX-512 FP16, which each
// processor with AMX has): 32 weights in an instruction, where float32 would take two and put them together again.
//
//   number ── table or conversion ──► half ── times scale, plus offset ──► half ── rounded to 8 bits ──► bf16
//
// A number of four bits becomes q - 8, a half whose low byte is 0; so offsets become m + 8 d, rounded to half precision.
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

// Of the two ports for vectors one shuffles, the other shifts. Both multiply and convert, but while tiles are multiplied
// the second alone does, and is what a tile waits for: nothing else is to go there. (vpermw would take both.)
//
// Bits of 64, moved byte by byte: as a shift, but by the port that shuffles.
struct Moves {
  alignas(64) uint8_t down[16][64];     // each byte, by -8 to 7 bits
  alignas(64) uint8_t doubled[16][64];  // the eight bits of a word that begin there, twice
  constexpr Moves() : down(), doubled() {
    for (int byte = 0; byte < 64; ++byte) {
      for (int bits = 0; bits < 16; ++bits) {
        down[bits][byte] = static_cast<uint8_t>((byte % 8 * 8 + bits + 56) % 64);
        doubled[bits][byte] = static_cast<uint8_t>(byte % 8 / 2 * 16 + bits);
      }
    }
  }
};
constexpr Moves kMoves;

// What was above comes round from below.
template <int Down>
OCTAVO_INLINE __m512i bytes_down(__m512i bytes) {
  if constexpr (Down == 0) return bytes;
  return _mm512_maskz_multishift_epi64_epi8(~0ull, _mm512_load_si512(kMoves.down[Down + 8]), bytes);
}

// `Keep`: of the bytes; the others are 0.
template <int Bit, __mmask64 Keep = ~0ull>
OCTAVO_INLINE __m512i doubled(__m512i words) {
  return _mm512_maskz_multishift_epi64_epi8(Keep, _mm512_load_si512(kMoves.doubled[Bit]), words);
}

constexpr __mmask64 kLow = 0x5555555555555555ull, kHigh = ~kLow;  // bytes of words

// Whether two lines of a quarter, the third and the fourth, keep their numbers in the high bytes of words.
constexpr bool high_lines(int bits) { return bits == 5 || bits == 6; }

// The 32 numbers of each line of a quarter, in the high bytes of words if there are four bits or high_lines(), else in the
// low ones. Of fewer than eight bits there are others beside them.
template <int Bits, int Quarter>
OCTAVO_INLINE void read_numbers(const uint8_t* at, __m512i (&lines)[4]) {
  const auto vector = [at](int index) { return _mm512_loadu_si512(at + index * 64); };
  if constexpr (Bits == 4) {
    const __m512i own = vector(Quarter);
    lines[0] = _mm512_loadu_si512(at + Quarter * 64 - 1);  // there is a header before the first
    lines[1] = doubled<4>(own);
    lines[2] = own;
    lines[3] = doubled<12>(own);
    return;
  }
  // Lines of bytes: low bytes of words are a line, high bytes the next but one.
  const auto read = [&](auto odd) {
    constexpr int kOdd = decltype(odd)::value, kOwn = 2 * Quarter + kOdd;
    constexpr int kSelect = 0xca;  // first ? second : third
    if constexpr (Bits == 8) {
      const __m512i bytes = vector(kOwn);
      lines[kOdd] = _mm512_and_si512(bytes, _mm512_set1_epi16(255));
      lines[2 + kOdd] = doubled<8, kLow>(bytes);
    } else {
      __m512i low = vector(Quarter), bytes;
      if constexpr (kOdd) low = bytes_down<4>(low);
      if constexpr (Bits == 5) {
        const __m512i high = bytes_down<kOwn - 4>(vector(4));
        bytes = _mm512_ternarylogic_epi32(_mm512_set1_epi8(16), high, low, kSelect);
      } else {
        const __m512i high = bytes_down<2 * (kOwn % 4) - 4>(vector(4 + Quarter / 2));
        bytes = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low, high, kSelect);
      }
      lines[kOdd] = lines[2 + kOdd] = bytes;
    }
  };
  read(std::integral_constant<int, 0>());
  read(std::integral_constant<int, 1>());
}

// What there is for each of 16 outputs, for both words of it: halves, bytes as words, bytes with a sign, floats.
struct Twice {
  alignas(64) uint16_t words[32];
  alignas(64) uint8_t halves[64];
  alignas(64) uint8_t bytes[64];
  constexpr Twice() : words(), halves(), bytes() {
    for (int i = 0; i < 32; ++i) words[i] = static_cast<uint16_t>(i / 2);
    for (int i = 0; i < 64; ++i) halves[i] = static_cast<uint8_t>(i / 4 * 2 + i % 2);
    for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(i / 4);
  }
};
constexpr Twice kTwice;

OCTAVO_INLINE __m512h halves_at(const uint8_t* at) {
  const __m512i halves = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  return (__m512h)_mm512_maskz_permutexvar_epi8(~0ull, _mm512_load_si512(kTwice.halves), halves);
}

template <__mmask64 Keep>
OCTAVO_INLINE __m512i bytes_at(const uint8_t* at) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return _mm512_maskz_permutexvar_epi8(Keep, _mm512_load_si512(kTwice.bytes), _mm512_castsi128_si512(bytes));
}
OCTAVO_INLINE __m512h unsigned_at(const uint8_t* at) { return _mm512_maskz_cvtepu16_ph(~0u, bytes_at<kLow>(at)); }
OCTAVO_INLINE __m512h signed_at(const uint8_t* at) {
  return _mm512_maskz_cvtepi16_ph(~0u, _mm512_maskz_srai_epi16(~0u, bytes_at<kHigh>(at), 8));
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

// The high bytes of -8 to 7 in half precision, whose low bytes are 0, by a byte's low bits.
struct Eights {
  alignas(64) uint8_t high[64];
  constexpr Eights() : high() {
    constexpr uint8_t kOf[16] = {0xc8, 0xc7, 0xc6, 0xc5, 0xc4, 0xc2, 0xc0, 0xbc,
                                 0x00, 0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47};
    for (int i = 0; i < 64; ++i) high[i] = kOf[i % 16];
  }
};
constexpr Eights kEights;

// Numbers, as read_numbers() leaves them, in half precision: of four bits less 8, of High lines times 256.
template <int Bits, bool High>
OCTAVO_INLINE __m512h integers(__m512i numbers) {
  if constexpr (Bits == 4)
    return (__m512h)_mm512_maskz_permutexvar_epi8(kHigh, numbers, _mm512_load_si512(kEights.high));
  constexpr int kMask = ((1 << Bits) - 1) << (High ? 8 : 0);
  return _mm512_maskz_cvtepu16_ph(~0u, Bits == 8 ? numbers : _mm512_and_si512(numbers, _mm512_set1_epi16(kMask)));
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
  // Scales, scales / 256, and offsets that are added or zeros, of each half of the inputs; and those of the span.
  struct Opened {
    __m512h d[2], high_d[2], m[2], span_d, span_m;
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

  OCTAVO_INLINE void open(Tile tile, bool fresh, Opened& opened) const {
    if (kSpan == 1 || fresh) open_span(tile.shared, opened);
    if constexpr (F == Format::q6_k) {
      for (int half = 0; half < 2; ++half)
        set(opened, half, _mm512_mul_ph(opened.span_d, signed_at(tile.at + 16 * half)), opened.span_m);
    } else if constexpr (kNested) {
      set_both(opened, _mm512_mul_ph(opened.span_d, unsigned_at(tile.at)),
               _mm512_mul_ph(opened.span_m, unsigned_at(tile.at + 16)));
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

  OCTAVO_INLINE void open_span(const uint8_t* shared, Opened& opened) const {
    if constexpr (kZeroed) {
      __m512h zero = unsigned_at(shared + 64);
      if constexpr (kBits == 4) zero = _mm512_sub_ph(zero, constant(8));
      for (int half = 0; half < 2; ++half) opened.d[half] = floats_at(shared, half_scale_), opened.m[half] = zero;
      return;
    }
    const __m512h d = scaled(halves_at(shared));
    __m512h m = constant(0);
    if constexpr (kOffset) m = scaled(halves_at(shared + 32));
    if constexpr (kNested) m = (__m512h)_mm512_xor_si512((__m512i)m, _mm512_set1_epi16(static_cast<short>(0x8000)));
    if constexpr (kSpan == 1) set_both(opened, d, m);
    else opened.span_d = d, opened.span_m = m;
  }

  static OCTAVO_INLINE __m512h constant(int value) { return _mm512_set1_ph(static_cast<_Float16>(value)); }

  // Of a number, beyond what integers() does. A power of two: nothing is rounded twice where there is no offset.
  static constexpr int kSubtracted = kCentre - (kBits == 4 ? 8 : 0);
  static OCTAVO_INLINE void set(Opened& opened, int half, __m512h d, __m512h m) {
    opened.d[half] = d;
    if constexpr (high_lines(kBits)) opened.high_d[half] = _mm512_mul_ph(d, _mm512_set1_ph(1.0f / 256));
    if constexpr (kSubtracted != 0) opened.m[half] = _mm512_fmadd_ph(d, constant(-kSubtracted), m);
    else opened.m[half] = m;
  }
  static OCTAVO_INLINE void set_both(Opened& opened, __m512h d, __m512h m) {
    set(opened, 0, d, m);
    set(opened, 1, d, m);
  }

  template <bool Fetch, int Line>
  static OCTAVO_INLINE void line(__m512i numbers, const Opened& opened, uint8_t* to, const uint8_t* later) {
    constexpr bool kHighLine = high_lines(kBits) && Line % 4 >= 2;
    const __m512h d = kHighLine ? opened.high_d[Line / 8] : opened.d[Line / 8];
    _mm512_store_si512(to + Line * 64, to_bf16(weights(integers<kBits, kHighLine>(numbers), d, opened.m[Line / 8])));
    constexpr int64_t kLines = kFetched / 64;
    if constexpr (Fetch)
      for (int64_t fetch = kLines * Line / 16; fetch < kLines * (Line + 1) / 16; ++fetch)
        asm volatile("prefetcht1 (%0)" : : "r"(later + fetch * 64));
  }

  static OCTAVO_INLINE __m512h weights(__m512h numbers, __m512h d, __m512h m) {
    if constexpr (kZeroed) return _mm512_mul_ph(_mm512_sub_ph(numbers, m), d);
    else if constexpr (F == Format::q4_0) return _mm512_mul_ph(numbers, d);
    else return _mm512_fmadd_ph(numbers, d, m);
  }

  Layout layout_;
  int64_t block_bytes_;
  float half_scale_;
  _Float16 exponent_;
};

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL
