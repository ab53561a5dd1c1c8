// Tiles of bf16, 16 lines of 16 outputs x 2 inputs, from weights that are kept in another form. A Code is such a form
// (coded_lines.hpp, quantized_lines.hpp):
//
//   Code(call), block_bytes()
//   Tile, tile(block, step)   where 16 outputs x 32 inputs of a block are, and what they share; apart(bytes): as far on
//   Opened, open(tile, fresh, opened)   what they share, as quarters need it; fresh: `opened` is not of a tile that shares it
//   quarter<Fetch, Quarter>(tile, opened, to, later)   widens four of 16 lines; fetches a quarter of what `later` begins
//   fetched(tile)             where that is
//   shared_from(step)         whether what is shared begins with this step, and is to be fetched, too
//   kAhead                    steps that memory is fetched ahead
//   kScaled                   whether sums are multiplied by sum_scale(call) when they are finished (epilogue.hpp)
#pragma once

#include <cstdint>

#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// A whole tile.
template <bool Fetch, typename Code>
OCTAVO_INLINE void widen_tile(const Code& code, typename Code::Tile tile, uint8_t* to, const uint8_t* later) {
  typename Code::Opened opened;
  code.open(tile, true, opened);
  Code::template quarter<Fetch, 0>(tile, opened, to, later);
  Code::template quarter<Fetch, 1>(tile, opened, to, later);
  Code::template quarter<Fetch, 2>(tile, opened, to, later);
  Code::template quarter<Fetch, 3>(tile, opened, to, later);
}

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL
