// Weights of bf16 in 12 bits, exactly: signs and mantissas as they are, exponents as numbers of a table of 16 for each
// tile. Weights of a trained model lie within few powers of two of each other: a tile of 512 has about ten exponents (an
// idea of DFloat11, arXiv 2504.11651, whose codes vary in length; these are read at the speed of memory).
//
// A tile is 16 outputs x 32 inputs, 16 lines of bf16 as Linear has them. A block is its tiles in the order of the inputs,
// four tables before each four tiles:
//
//   block │ tables of tiles 0-3 (64 bytes) │ tile 0 (768) │ tile 1 │ tile 2 │ tile 3 │ tables of tiles 4-7 │ …
//   tile  │ lines 0, 1 │ lines 2, 3 │ … │ lines 14, 15 │    a byte for each weight: its mantissa x 2 + its sign
//         │ lines 0-3 │ lines 4-7 │ lines 8-11 │ 12-15 │   four bits for each: lines 0, 1 in the low halves of bytes
//
// The bytes of two lines lie so that a vector of them and one of exponents, interleaved within 16 bytes, are the lines:
// of each 16 bytes the first eight belong to the first line.
#pragma once

#include <cstdint>

#include "formats.hpp"

namespace octavo {

constexpr int64_t kCodedTileBytes = 768;
constexpr int64_t kCodedTableBytes = 16;
constexpr int64_t kCodedTogether = 4;  // tiles
constexpr int64_t kCodedHeader = kCodedTogether * kCodedTableBytes;

// Only whole tiles are coded.
constexpr bool can_be_coded(int64_t in_size) { return in_size > 0 && in_size % kGroup == 0; }

// From the beginning of a block.
constexpr int64_t coded_tile_at(int64_t tile) {
  return tile * kCodedTileBytes + (tile / kCodedTogether + 1) * kCodedHeader;
}
constexpr int64_t coded_table_at(int64_t tile) {
  return tile / kCodedTogether * (kCodedTogether * kCodedTileBytes + kCodedHeader) +
         tile % kCodedTogether * kCodedTableBytes;
}
constexpr int64_t coded_block_bytes(int64_t in_size) {
  const int64_t tiles = in_size / kGroup;
  return tiles * kCodedTileBytes + (tiles + kCodedTogether - 1) / kCodedTogether * kCodedHeader;
}

// The bits of one weight: of an output (lane) of a block, and an input.
inline uint16_t coded_weight(const uint8_t* block, int64_t lane, int64_t input) {
  const int64_t tile = input / kGroup, line = input % kGroup / 2, word = lane * 2 + input % 2;
  const int64_t byte = word / 8 * 16 + line % 2 * 8 + word % 8;
  const uint8_t* at = block + coded_tile_at(tile);
  const uint32_t rest = at[line / 2 * 64 + byte], codes = at[512 + line / 4 * 64 + byte];
  const uint32_t exponent = block[coded_table_at(tile) + (line % 4 < 2 ? codes & 15u : codes >> 4)];
  return static_cast<uint16_t>((rest & 1u) << 15 | exponent << 7 | rest >> 1);
}

}  // namespace octavo
