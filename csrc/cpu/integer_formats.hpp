// How the product reads each format (drawn in formats.hpp): its lines, its scales, and what a group adds to a sum.
#pragma once

#include "dots.hpp"
#include "formats.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

constexpr int kLines = 8;  // of a group
constexpr int64_t kLineBytes = 64;

template <int Bits>
struct Lines;

template <>
struct Lines<4> {
  static constexpr int kBits = 4;
  OCTAVO_INLINE explicit Lines(const uint8_t* numbers) : at(numbers) {}
  // Lines 2 * pair and 2 * pair + 1.
  OCTAVO_INLINE void open(int pair, u32x16& even, u32x16& odd) const {
    const u32x16 both = load_line(at + pair * kLineBytes);
    even = both & 0x0f0f0f0fu;
    odd = both >> 4 & 0x0f0f0f0fu;
  }
  const uint8_t* at;
};

template <>
struct Lines<5> {
  static constexpr int kBits = 5;
  OCTAVO_INLINE explicit Lines(const uint8_t* numbers) : low(numbers), high(load_line(numbers + 4 * kLineBytes)) {}
  OCTAVO_INLINE void open(int pair, u32x16& even, u32x16& odd) const {
    low.open(pair, even, odd);
    // Bit j to bit 4: the shift is a constant once loops are unrolled.
    const int j = 2 * pair;
    even |= (j <= 4 ? high << (4 - j) : high >> (j - 4)) & 0x10101010u;
    odd |= (j < 4 ? high << (3 - j) : high >> (j - 3)) & 0x10101010u;
  }
  Lines<4> low;
  u32x16 high;
};

template <>
struct Lines<6> {
  static constexpr int kBits = 6;
  OCTAVO_INLINE explicit Lines(const uint8_t* numbers) : low(numbers) {}
  OCTAVO_INLINE void open(int pair, u32x16& even, u32x16& odd) const {
    low.open(pair, even, odd);
    const u32x16 high = load_line(low.at + (4 + pair / 2) * kLineBytes);
    if (pair % 2 == 0) {
      even |= high << 4 & 0x30303030u;
      odd |= high << 2 & 0x30303030u;
    } else {
      even |= high & 0x30303030u;
      odd |= high >> 2 & 0x30303030u;
    }
  }
  Lines<4> low;
};

template <>
struct Lines<8> {
  static constexpr int kBits = 8;
  OCTAVO_INLINE explicit Lines(const uint8_t* numbers) : at(numbers) {}
  OCTAVO_INLINE void open(int pair, u32x16& even, u32x16& odd) const {
    even = load_line(at + 2 * pair * kLineBytes);
    odd = load_line(at + (2 * pair + 1) * kLineBytes);
  }
  const uint8_t* at;
};

// What rows have for each group beside their int8 inputs and the inputs' scale: a format needs one of these.
enum class Beside {
  start,   // int32: -centre * sum of the inputs, where the integer sum begins (for each half, where there are two)
  offset,  // float: the inputs' scale * sum of the inputs
  total,   // float: sum of the inputs
};

// A kind of format is: Lines, layout (constant where `given` is not needed), kBeside, kHalves (sums of a group), kCentre,
// Head (what a span shares) and
//   Scales(head, group header): the scales of 16 outputs;
//   add(sum, totals, scales, x_scale, beside): the sum with this group's integer sums, one for each half, added.

// w = d (q - Centre)
template <Format Kind, int Bits, int Centre>
struct Centred {
  static constexpr Layout layout(const Layout&) { return layout_of(Kind, 0); }
  using Lines = OCTAVO_LEVEL::Lines<Bits>;
  static constexpr Beside kBeside = Beside::start;
  static constexpr int kHalves = 1, kCentre = Centre;
  struct Head {
    OCTAVO_INLINE explicit Head(const uint8_t* at) : d(load_halves(at)) {}
    f32x16 d;
  };
  struct Scales {
    OCTAVO_INLINE Scales(const Head& head, const uint8_t*) : d(head.d) {}
    f32x16 d;
  };
  static OCTAVO_INLINE f32x16 add(f32x16 sum, const f32x16* totals, const Scales& scales, float x_scale, float) {
    return sum + (scales.d * x_scale) * totals[0];
  }
};

// w = d q + m
template <Format Kind, int Bits>
struct Offset {
  static constexpr Layout layout(const Layout&) { return layout_of(Kind, 0); }
  using Lines = OCTAVO_LEVEL::Lines<Bits>;
  static constexpr Beside kBeside = Beside::offset;
  static constexpr int kHalves = 1, kCentre = 0;
  struct Head {
    OCTAVO_INLINE explicit Head(const uint8_t* at) : d(load_halves(at)), m(load_halves(at + 32)) {}
    f32x16 d, m;
  };
  struct Scales {
    OCTAVO_INLINE Scales(const Head& head, const uint8_t*) : d(head.d), m(head.m) {}
    f32x16 d, m;
  };
  static OCTAVO_INLINE f32x16 add(f32x16 sum, const f32x16* totals, const Scales& scales, float x_scale, float beside) {
    sum = sum + (scales.d * x_scale) * totals[0];
    return sum + scales.m * beside;
  }
};

// w = d s q - m o
template <Format Kind, int Bits>
struct Nested {
  static constexpr Layout layout(const Layout&) { return layout_of(Kind, 0); }
  using Lines = OCTAVO_LEVEL::Lines<Bits>;
  static constexpr Beside kBeside = Beside::offset;
  static constexpr int kHalves = 1, kCentre = 0;
  using Head = typename Offset<Kind, Bits>::Head;
  struct Scales {
    OCTAVO_INLINE Scales(const Head& head, const uint8_t* at)
        : d(head.d * load_bytes<u8x16>(at)), m(head.m * load_bytes<u8x16>(at + 16)) {}
    f32x16 d, m;
  };
  static OCTAVO_INLINE f32x16 add(f32x16 sum, const f32x16* totals, const Scales& scales, float x_scale, float beside) {
    sum = sum + (scales.d * x_scale) * totals[0];
    return sum - scales.m * beside;
  }
};

// w = d s (q - 32), an s for each half
struct NestedHalves {
  static constexpr Layout layout(const Layout&) { return layout_of(Format::q6_k, 0); }
  using Lines = OCTAVO_LEVEL::Lines<6>;
  static constexpr Beside kBeside = Beside::start;
  static constexpr int kHalves = 2, kCentre = 32;
  using Head = Centred<Format::q6_k, 6, 32>::Head;
  struct Scales {
    OCTAVO_INLINE Scales(const Head& head, const uint8_t* at)
        : d{head.d * load_bytes<i8x16>(at), head.d * load_bytes<i8x16>(at + 16)} {}
    f32x16 d[2];
  };
  static OCTAVO_INLINE f32x16 add(f32x16 sum, const f32x16* totals, const Scales& scales, float x_scale, float) {
    sum = sum + (scales.d[0] * x_scale) * totals[0];
    return sum + (scales.d[1] * x_scale) * totals[1];
  }
};

// w = d (q - z), z an integer
template <int Bits>
struct Zeroed {
  static constexpr Layout layout(const Layout& given) { return {Bits, given.span, 80, 0}; }
  using Lines = OCTAVO_LEVEL::Lines<Bits>;
  static constexpr Beside kBeside = Beside::total;
  static constexpr int kHalves = 1, kCentre = 0;
  struct Head {
    OCTAVO_INLINE explicit Head(const uint8_t* at)
        : d(load(reinterpret_cast<const float*>(at))), z(load_bytes<u8x16>(at + 64)) {}
    f32x16 d, z;
  };
  struct Scales {
    OCTAVO_INLINE Scales(const Head& head, const uint8_t*) : d(head.d), z(head.z) {}
    f32x16 d, z;
  };
  // Both integers are below 2^24, and so is their difference: exact in float32.
  static OCTAVO_INLINE f32x16 add(f32x16 sum, const f32x16* totals, const Scales& scales, float x_scale, float beside) {
    return sum + (scales.d * x_scale) * (totals[0] - scales.z * beside);
  }
};

// Calls use(F()) with the kind of a format that is multiplied as integers.
template <typename Use>
OCTAVO_INLINE void by_format(Format format, const Use& use) {
  switch (format) {
    case Format::q4_0: return use(Centred<Format::q4_0, 4, 8>());
    case Format::q4_1: return use(Offset<Format::q4_1, 4>());
    case Format::q5_0: return use(Centred<Format::q5_0, 5, 16>());
    case Format::q5_1: return use(Offset<Format::q5_1, 5>());
    case Format::q8_0: return use(Centred<Format::q8_0, 8, 128>());
    case Format::q4_k: return use(Nested<Format::q4_k, 4>());
    case Format::q5_k: return use(Nested<Format::q5_k, 5>());
    case Format::q6_k: return use(NestedHalves());
    case Format::u4: return use(Zeroed<4>());
    case Format::u8: return use(Zeroed<8>());
    case Format::f8:
    case Format::coded:
    case Format::plain: break;
  }
}

}  // namespace octavo::OCTAVO_LEVEL
