// Coded weights (drawn in coded.hpp) as lines of bf16.
#pragma once

#include <immintrin.h>

#include "coded.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// Where a tile is, and its table.
struct CodedTile {
  const uint8_t* at;
  const uint8_t* table;

  static OCTAVO_INLINE CodedTile of(const uint8_t* block, int64_t tile) {
    return {block + coded_tile_at(tile), block + coded_table_at(tile)};
  }
};

OCTAVO_INLINE __m512i exponents_of(CodedTile tile) {
  // Four times the same 16: what is beside a code in its byte does not matter.
  return _mm512_maskz_broadcast_i32x4(kAll, _mm_load_si128(reinterpret_cast<const __m128i*>(tile.table)));
}

// A quarter of a tile, four lines, while 192 bytes are fetched into the second-level cache: evenly among the other work,
// for a processor has few places for lines that are on their way, and what finds none stops all that follows it.
template <bool Fetch>
OCTAVO_INLINE void widen_quarter(CodedTile tile, __m512i exponents, int64_t quarter, uint8_t* to, const uint8_t* next) {
  const auto fetch = [&](int64_t line) {
    if constexpr (Fetch) asm volatile("prefetcht1 (%0)" : : "r"(next + quarter * 192 + line * 64));
  };
  const auto store = [&](int64_t line, __m512i bits) {  // mantissa and sign below the exponent; the sign goes to the top
    _mm512_store_si512(to + (quarter * 4 + line) * 64, _mm512_shrdi_epi16(bits, bits, 1));
  };
  const __m512i codes = _mm512_load_si512(tile.at + 512 + quarter * 64);
  const __m512i rest0 = _mm512_load_si512(tile.at + quarter * 128), rest1 = _mm512_load_si512(tile.at + quarter * 128 + 64);
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

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL
