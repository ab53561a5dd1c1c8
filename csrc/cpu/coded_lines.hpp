// Coded weights (drawn in coded.hpp) as lines of bf16.
#pragma once

#include <immintrin.h>

#include "coded.hpp"
#include "kernels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// A Code (widened_tile.hpp).
class CodedLines {
 public:
  static constexpr int64_t kAhead = 5;
  static constexpr bool kScaled = false;

  // `shared`: its table of exponents.
  struct Tile {
    const uint8_t* at;
    const uint8_t* shared;

    OCTAVO_INLINE Tile apart(int64_t bytes) const { return {at + bytes, shared + bytes}; }
  };
  using Opened = __m512i;

  explicit CodedLines(const Linear& call) : block_bytes_(coded_block_bytes(call.in_size)) {}

  int64_t block_bytes() const { return block_bytes_; }
  static OCTAVO_INLINE Tile tile(const uint8_t* block, int64_t step) {
    return {block + coded_tile_at(step), block + coded_table_at(step)};
  }
  static OCTAVO_INLINE const uint8_t* fetched(Tile tile) { return tile.at; }
  static OCTAVO_INLINE bool shared_from(int64_t step) { return (step & (kCodedTogether - 1)) == 0; }

  static OCTAVO_INLINE void open(Tile tile, bool, Opened& opened) {  // each has its own
    // Four times the same 16: what is beside a code in its byte does not matter.
    opened = _mm512_maskz_broadcast_i32x4(kAll, _mm_load_si128(reinterpret_cast<const __m128i*>(tile.shared)));
  }

  // A quarter of a tile, four lines, while 192 bytes are fetched into the second-level cache: evenly among the other work,
  // for a processor has few places for lines that are on their way, and what finds none stops all that follows it.
  template <bool Fetch, int Quarter>
  static OCTAVO_INLINE void quarter(Tile tile, const Opened& exponents, uint8_t* to, const uint8_t* later) {
    const auto fetch = [&](int64_t line) {
      if constexpr (Fetch) asm volatile("prefetcht1 (%0)" : : "r"(later + Quarter * 192 + line * 64));
    };
    const auto store = [&](int64_t line, __m512i bits) {  // mantissa and sign below the exponent; the sign goes to the top
      _mm512_store_si512(to + (Quarter * 4 + line) * 64, _mm512_shrdi_epi16(bits, bits, 1));
    };
    const __m512i codes = _mm512_load_si512(tile.at + 512 + Quarter * 64);
    const __m512i rest0 = _mm512_load_si512(tile.at + Quarter * 128);
    const __m512i rest1 = _mm512_load_si512(tile.at + Quarter * 128 + 64);
    const __m512i high0 = _mm512_maskz_permutexvar_epi8(~0ull, codes, exponents);
    const __m512i high1 = _mm512_maskz_permutexvar_epi8(~0ull, _mm512_maskz_srli_epi16(~0u, codes, 4), exponents);
    fetch(0);
    store(0, _mm512_unpacklo_epi8(rest0, high0));
    store(1, _mm512_unpackhi_epi8(rest0, high0));
    fetch(1);
    store(2, _mm512_unpacklo_epi8(rest1, high1));
    store(3, _mm512_unpackhi_epi8(rest1, high1));
    fetch(2);
  }

 private:
  int64_t block_bytes_;
};

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL
