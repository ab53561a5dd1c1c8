// Packed weights of bf16 → coded ones (drawn in coded.hpp).

#include "coded_lines.hpp"
#include "kernels.hpp"
#include "levels.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kTileLines = 16;
constexpr int64_t kPairs = kTileLines / 2;

// The numbers by which a tile's exponents go: exponent → code, and the table, code → exponent.
struct Codes {
  alignas(64) uint8_t of[256];
  alignas(16) uint8_t table[kCodedTableBytes];
};

// Two lines' exponents, and beside them mantissas and signs, in the order in which they are kept.
struct Bytes {
  __m512i exponents, rest;

  static OCTAVO_INLINE Bytes of(const uint8_t* lines) {
    const __m512i first = _mm512_loadu_si512(lines), second = _mm512_loadu_si512(lines + 64);
    const __m512i a = _mm512_shldi_epi16(first, first, 1), b = _mm512_shldi_epi16(second, second, 1);
    const __m512i low = _mm512_set1_epi16(0xff);
    return {_mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)),
            _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low))};
  }
};

OCTAVO_INLINE int least_of(__m512i bytes) {
  alignas(64) __m128i quarters[4];
  _mm512_store_si512(quarters, bytes);
  const __m128i quarter = _mm_min_epu8(_mm_min_epu8(quarters[0], quarters[1]), _mm_min_epu8(quarters[2], quarters[3]));
  return _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_min_epu8(quarter, _mm_srli_epi16(quarter, 8)))) & 0xff;
}

// False: the tile has more than 16 exponents.
bool find_codes(const uint8_t* lines, Codes& codes) {
  __m512i least = _mm512_set1_epi8(-1), most = _mm512_setzero_si512();
  for (int64_t pair = 0; pair < kPairs; ++pair) {
    const __m512i exponents = Bytes::of(lines + pair * 128).exponents;
    least = _mm512_min_epu8(least, exponents);
    most = _mm512_max_epu8(most, exponents);
  }
  const int low = least_of(least), high = 255 - least_of(_mm512_xor_si512(most, _mm512_set1_epi8(-1)));
  std::memset(codes.table, 0, sizeof codes.table);
  if (high - low < kCodedTableBytes) {
    for (int code = 0; code < kCodedTableBytes && low + code <= 255; ++code) {
      codes.table[code] = static_cast<uint8_t>(low + code);
      codes.of[low + code] = static_cast<uint8_t>(code);
    }
    return true;
  }
  bool seen[256] = {};
  for (int64_t i = 0; i < kTileLines * 32; ++i) {
    uint16_t bits;
    std::memcpy(&bits, lines + i * 2, sizeof bits);
    seen[bits >> 7 & 0xff] = true;
  }
  int64_t count = 0;
  for (int exponent = low; exponent <= high; ++exponent) {
    if (!seen[exponent]) continue;
    if (count == kCodedTableBytes) return false;
    codes.table[count] = static_cast<uint8_t>(exponent);
    codes.of[exponent] = static_cast<uint8_t>(count++);
  }
  return true;
}

OCTAVO_INLINE __m512i codes_of(const Codes& codes, __m512i exponents) {
  const auto half = [&](int64_t from) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(codes.of + from), exponents,
                                    _mm512_load_si512(codes.of + from + 64));
  };
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(exponents), half(0), half(128));
}

void encode_tile(const uint8_t* lines, const Codes& codes, uint8_t* table, uint8_t* to) {
  std::memcpy(table, codes.table, sizeof codes.table);
  for (int64_t quarter = 0; quarter < 4; ++quarter, lines += 256) {
    const Bytes first = Bytes::of(lines), second = Bytes::of(lines + 128);
    _mm512_store_si512(to + quarter * 128, first.rest);
    _mm512_store_si512(to + quarter * 128 + 64, second.rest);
    const __m512i high = _mm512_slli_epi16(codes_of(codes, second.exponents), 4);
    _mm512_store_si512(to + 512 + quarter * 64, _mm512_or_si512(codes_of(codes, first.exponents), high));
  }
}

bool encode_block(const uint8_t* lines, int64_t tiles, uint8_t* block) {
  Codes codes{};
  for (int64_t tile = 0; tile < tiles; ++tile, lines += 1024) {
    if (!find_codes(lines, codes)) return false;
    encode_tile(lines, codes, block + coded_table_at(tile), block + coded_tile_at(tile));
  }
  return true;
}

}  // namespace

bool encode(const Encode& call) {
  const int64_t tiles = call.in_size / kGroup, bytes = coded_block_bytes(call.in_size);
  const uint8_t* from = static_cast<const uint8_t*>(call.packed);
  for (int64_t block = 0; block < call.blocks; ++block)
    if (!encode_block(from + block * tiles * 1024, tiles, call.coded + block * bytes)) return false;
  return true;
}

}  // namespace octavo::OCTAVO_LEVEL
