// Packing of weights (the layout is drawn at Linear).

#include <algorithm>
#include <cstring>

#include "coded.hpp"
#include "kernels.hpp"

namespace octavo {
namespace {

constexpr int64_t kOutputs = 16;  // of a block
constexpr int64_t kUnits = 16;    // of a row, moved together: one line of 64 bytes

// Elements of a block: inputs are padded to whole pairs where they come in pairs.
int64_t block_size(int64_t in_size, int64_t together) {
  return (in_size + together - 1) / together * together * kOutputs;
}

// A unit is what one output has in a line: a pair of bf16 inputs, or one float. A block is its rows, transposed by units.
//
// Lanes `first` to `last` - 1 of a block, from rows of `row_bytes` bytes that need not be aligned.
void pack_lanes(const char* rows, int64_t row_bytes, int64_t first, int64_t last, uint32_t* block) {
  uint32_t tile[kOutputs][kUnits] = {};
  const int64_t units = (row_bytes + 3) / 4;
  for (int64_t unit = 0; unit < units; unit += kUnits) {
    const int64_t bytes = std::min<int64_t>(4 * kUnits, row_bytes - 4 * unit);
    const int64_t count = (bytes + 3) / 4;
    for (int64_t lane = first; lane < last; ++lane) {
      tile[lane][count - 1] = 0;  // an odd last input has a zero beside it
      std::memcpy(tile[lane], rows + (lane - first) * row_bytes + 4 * unit, bytes);
    }
    uint32_t* to = block + unit * kOutputs;
    if (first == 0 && last == kOutputs && count == kUnits) {
      for (int64_t k = 0; k < kUnits; ++k)
        for (int64_t lane = 0; lane < kOutputs; ++lane) to[k * kOutputs + lane] = tile[lane][k];
    } else {
      for (int64_t k = 0; k < count; ++k)
        for (int64_t lane = first; lane < last; ++lane) to[k * kOutputs + lane] = tile[lane][k];
    }
  }
}

}  // namespace

int64_t packed_blocks(int64_t out_size, bool gated) {
  const int64_t size = gated ? out_size / 2 : out_size;
  return (size + kOutputs - 1) / kOutputs * (gated ? 2 : 1);
}

int64_t packed_bytes(Type type, int64_t out_size, int64_t in_size, bool gated) {
  return type == Type::bf16 ? packed_blocks(out_size, gated) * block_size(in_size, 2) * 2
                            : packed_blocks(out_size, gated) * block_size(in_size, 1) * 4;
}

int64_t coded_bytes(int64_t out_size, int64_t in_size, bool gated) {
  return can_be_coded(in_size) ? packed_blocks(out_size, gated) * coded_block_bytes(in_size) : 0;
}

void pack(Type type, const void* weight, int64_t first_row, int64_t rows, int64_t out_size, int64_t in_size, bool gated,
          void* packed) {
  const int64_t together = type == Type::bf16 ? 2 : 1;
  const int64_t row_bytes = in_size * 4 / together, block_units = block_size(in_size, together) / together;
  const int64_t half = gated ? out_size / 2 : out_size;
  const char* from = static_cast<const char*>(weight);
  for (int64_t row = first_row; row < first_row + rows;) {
    const bool up = row >= half;
    const int64_t place = up ? row - half : row, lane = place % kOutputs;
    const int64_t lanes = std::min({kOutputs - lane, first_row + rows - row, (up ? out_size : half) - row});
    const int64_t block = gated ? place / kOutputs * 2 + up : place / kOutputs;
    pack_lanes(from, row_bytes, lane, lane + lanes, static_cast<uint32_t*>(packed) + block * block_units);
    row += lanes;
    from += lanes * row_bytes;
  }
}

}  // namespace octavo
