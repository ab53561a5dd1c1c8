// What products by AMX tiles (linear_amx.cpp, linear_many_amx.cpp) know of a call: where its rows and weights are.
#pragma once

#include <algorithm>

#include "coded.hpp"
#include "epilogue.hpp"
#include "kernels.hpp"
#include "tiles.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kStepInputs = 32;
constexpr int64_t kTileWords = 256;  // of 32 bits
constexpr int64_t kLineBytes = 64;
constexpr int64_t kPairRows = 2 * kTileRows;

// Where one or two tiles of rows begin: `second` is used where there are two.
struct Rows {
  const bf16* first;
  const bf16* second;
  int64_t stride;  // bytes from row to row

  OCTAVO_INLINE Rows step(int64_t step) const {
    return {first + step * kStepInputs, second + step * kStepInputs, stride};
  }
};

struct Shape {
  explicit Shape(const Linear& linear)
      : call(linear),
        blocks(blocks_of(linear)),
        block_words((linear.in_size + 1) / 2 * kLanes),
        whole_steps(linear.in_size / kStepInputs),
        has_tail(linear.in_size % kStepInputs != 0),
        layout(layout_of(linear.format, linear.span)) {}

  const bf16* inputs(int64_t row) const { return static_cast<const bf16*>(call.x) + row * call.x_stride; }

  // Where a tile begins that is to have this row and those after it: the last one of several begins earlier.
  int64_t first_of(int64_t row) const { return std::max<int64_t>(0, std::min(row, call.rows - kTileRows)); }

  Rows rows_of(int64_t row, bool two) const {
    return {inputs(first_of(row)), inputs(first_of(two ? row + kTileRows : row)),
            call.x_stride * static_cast<int64_t>(sizeof(bf16))};
  }

  // The last inputs of those rows, and zero. to: [32][32].
  Rows copy_last_inputs(int64_t row, bool two, bf16* to) const {
    const int64_t from = whole_steps * kStepInputs;
    std::memset(to, 0, 2 * kTileBytes);
    for (int64_t tile = 0; tile < (two ? 2 : 1); ++tile)
      for (int64_t r = 0; r < std::min<int64_t>(kTileRows, call.rows); ++r)
        std::memcpy(to + (tile * kTileRows + r) * kStepInputs, inputs(first_of(row + tile * kTileRows) + r) + from,
                    static_cast<size_t>(call.in_size - from) * sizeof(bf16));
    return {to, to + kTileRows * kStepInputs, kLineBytes};
  }

  // The last inputs' lines of a block, and zero: what follows them in the weight is another block's.
  void copy_tail(const uint32_t* weight, uint32_t* tail) const {
    const int64_t from = whole_steps * kTileWords;
    std::memset(tail, 0, kTileBytes);
    std::memcpy(tail, weight + from, static_cast<size_t>(block_words - from) * 4);
  }

  // Weights that become lines while they are multiplied: blocks as they are kept, and where in one a step's tile begins.
  bool coded() const { return call.format == Format::coded; }
  bool quantized() const { return call.half_scale != 0.0f; }
  bool widened() const { return coded() || quantized(); }
  int64_t kept_block_bytes() const {
    return coded() ? coded_block_bytes(call.in_size) : layout.block_bytes(call.in_size);
  }
  const uint8_t* kept_block(int64_t block) const {
    return static_cast<const uint8_t*>(call.weight) + block * kept_block_bytes();
  }
  int64_t kept_from(int64_t step) const {
    if (coded()) return coded_table_at(step) / kLineBytes * kLineBytes;
    const int64_t group = step % layout.span;
    return step / layout.span * layout.span_bytes() + (group > 0 ? layout.span_header + group * layout.group_bytes() : 0);
  }
  int64_t kept_to(int64_t step) const {
    if (coded()) return coded_tile_at(step) + kCodedTileBytes;
    return step / layout.span * layout.span_bytes() + layout.span_header + (step % layout.span + 1) * layout.group_bytes();
  }

  const uint32_t* weight(int64_t block) const { return static_cast<const uint32_t*>(call.weight) + block * block_words; }

  const Linear& call;
  int64_t blocks, block_words, whole_steps;
  bool has_tail;
  Layout layout;
};

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL
