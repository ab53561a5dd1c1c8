// out = x · weightᵀ and what follows it (epilogue.hpp) with AMX tiles, for bf16 and any number of rows.
//
// A step multiplies 16 rows x 32 inputs (a tile of x) by 32 inputs x 16 outputs (a tile of weights: 16 packed lines, one
// after the other in a block) and adds the products to a tile of sums. Each sum is made in one tile, its steps in
// ascending order: a row has the same bits whatever rows share the tile. What follows the product (epilogue.hpp) is done
// to a tile of sums between the steps of the next one: vectors and memory work while tiles are multiplied.
//
//   up to 16 rows: tiles 0-3 sums of four blocks │ 4 x │ 5-7 weights in turn
//   more:          tiles 0, 1 sums of rows 0-15 and two blocks │ 2, 3 of rows 16-31 │ 4, 5 x │ 6, 7 weights
//
// A factor is cleared as soon as it was read for the last time. A processor has few tile registers beyond the eight that
// have names, two threads of a core share them, and one that is zero takes none: a fifth to a half more products a second.
//
// Tiles of x are read where x is. Of more than 16 rows the last tile ends with the last row, and has some rows again that
// another tile has: the same sums, of which only the others are used. Where the last inputs do not fill a step, tiles of
// them are copied, with zeros.

#include <algorithm>
#include <atomic>

#include "epilogue.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "scratch.hpp"
#include "simd.hpp"
#include "thread_pool.hpp"
#include "tiles.hpp"
#include "widen.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kStepInputs = 32;
constexpr int64_t kTileWords = 256;              // of 32 bits
constexpr int64_t kLineBytes = 64;
constexpr int64_t kPairRows = 2 * kTileRows;
constexpr int64_t kInputsInCache = 1 << 20;      // bytes of inputs that stay in the second-level cache
constexpr int64_t kFewestRows = 128;             // for which the weights are read again
constexpr int64_t kTilesAhead = 8;               // of weights from memory
constexpr int64_t kStepsBetween = 4;             // before some more of a pending tile is finished
constexpr int64_t kFewRows = 4;                  // are finished at once

enum class From { memory, cache };

OCTAVO_INLINE void prefetch_tile(const void* at) {
  for (int64_t line = 0; line < kTileRows; ++line)
    __builtin_prefetch(static_cast<const char*>(at) + line * kLineBytes, 0, 2);  // into the second-level cache
}

// Where one or two tiles of rows begin: `second` is used where there are two.
struct Rows {
  const bf16* first;
  const bf16* second;
  int64_t stride;  // bytes from row to row

  OCTAVO_INLINE Rows step(int64_t step) const {
    return {first + step * kStepInputs, second + step * kStepInputs, stride};
  }
};

// What a pass over the inputs reads: rows, and blocks of weights, which are `block_words` apart. `tail`: where the last
// inputs do not fill a step, the blocks' tiles for that step, or null; `tail_x`: those of the rows. `second`: rows from
// the first tile to the second, less than 16 where they have rows in common.
struct Pass {
  Rows x;
  int64_t second;
  const uint32_t* weight;
  int64_t block_words;
  Rows tail_x;
  const uint32_t* tail;
  int64_t whole_steps;
};

template <int RowTiles, int Blocks, int Block>
OCTAVO_INLINE void multiply_block(const Rows& x, const uint32_t* weight, int64_t block_words) {
  constexpr int kWeight = RowTiles == 2 ? 6 + Block : 5 + Block % 3;
  load_tile<kWeight>(weight + Block * block_words, kLineBytes);
  multiply_tiles<Block, 4, kWeight>();
  if constexpr (RowTiles == 2) {
    if constexpr (Block == 0) load_tile<5>(x.second, x.stride);
    multiply_tiles<2 + Block, 5, kWeight>();
  }
  clear_tile<kWeight>();
  if constexpr (Block + 1 < Blocks) multiply_block<RowTiles, Blocks, Block + 1>(x, weight, block_words);
}

template <int RowTiles, int Blocks>
OCTAVO_INLINE void multiply_step(const Rows& x, const uint32_t* weight, int64_t block_words) {
  load_tile<4>(x.first, x.stride);
  multiply_block<RowTiles, Blocks, 0>(x, weight, block_words);
  clear_tile<4>();
  if constexpr (RowTiles == 2) clear_tile<5>();
}

// Calls work<row, block> for each tile of sums.
template <int RowTiles, int Blocks, int Tile = 0, typename Work>
OCTAVO_INLINE void each_sum(const Work& work) {
  constexpr int kRow = Tile / Blocks, kBlock = Tile % Blocks;
  work(std::integral_constant<int, 2 * kRow + kBlock>(), kRow, kBlock);
  if constexpr (Tile + 1 < RowTiles * Blocks) each_sum<RowTiles, Blocks, Tile + 1>(work);
}

// Sums, of rows `stride` apart, that wait for what follows the product.
struct Pending {
  void (*finish)(const Linear&, int64_t row, int64_t rows, int64_t block, int64_t blocks, const float*, int64_t stride);
  int64_t row, rows, block, blocks;
  const float* sums;
  int64_t stride;
  int64_t done;  // rows

  OCTAVO_INLINE void some(const Linear& call, int64_t count) {
    if (done == rows) return;
    count = std::min(count, rows - done);
    finish(call, row + done, count, block, blocks, sums + done * stride, stride);
    done += count;
  }
};

// (`finish` itself may have no address: it is the same name on every level.)
template <typename Out>
void finish_rows(const Linear& call, int64_t row, int64_t rows, int64_t block, int64_t blocks, const float* sums,
                 int64_t stride) {
  finish<bf16, Out>(call, row, rows, block, blocks, sums, stride);
}

// RowTiles tiles of rows and Blocks blocks, and meanwhile what is `pending`. sums: [16 * RowTiles][sums_words].
template <int RowTiles, int Blocks, From Weights>
void add_up(const Linear& call, const Pass& pass, float* sums, int64_t sums_words, Pending& pending) {
  each_sum<RowTiles, Blocks>([&](auto tile, int, int) { clear_tile<decltype(tile)::value>(); });
  const int64_t whole = pass.whole_steps, steps = pass.block_words / kTileWords;
  const int64_t turns = whole / kStepsBetween, share = turns == 0 ? 0 : (pending.rows + turns - 1) / turns;
  for (int64_t step = 0; step < whole; ++step) {
    const uint32_t* weight = pass.weight + step * kTileWords;
    if constexpr (Weights == From::memory) {
      // At the end of these blocks, the beginning of those that come next.
      const int64_t ahead = step + kTilesAhead;
      const uint32_t* next = pass.weight + (ahead < steps ? ahead * kTileWords
                                                          : Blocks * pass.block_words + (ahead - steps) * kTileWords);
      for (int block = 0; block < Blocks; ++block) prefetch_tile(next + block * pass.block_words);
    }
    multiply_step<RowTiles, Blocks>(pass.x.step(step), weight, pass.block_words);
    if (step % kStepsBetween == kStepsBetween - 1) pending.some(call, share);
  }
  if (pass.tail != nullptr) multiply_step<RowTiles, Blocks>(pass.tail_x, pass.tail, kTileWords);
  pending.some(call, pending.rows);
  each_sum<RowTiles, Blocks>([&](auto tile, int row, int block) {
    store_tile<decltype(tile)::value>(sums + row * pass.second * sums_words + block * kLanes, sums_words * 4);
  });
}

using AddUp = void (*)(const Linear&, const Pass&, float*, int64_t, Pending&);

template <From Weights>
AddUp add_up_of(bool two_rows, int64_t blocks) {
  if (two_rows) return blocks == 1 ? add_up<2, 1, Weights> : add_up<2, 2, Weights>;
  switch (blocks) {
    case 1: return add_up<1, 1, Weights>;
    case 2: return add_up<1, 2, Weights>;
    case 3: return add_up<1, 3, Weights>;
    default: return add_up<1, 4, Weights>;
  }
}

template <typename Out>
class TileProduct {
 public:
  explicit TileProduct(const Linear& call)
      : call_(call),
        blocks_(blocks_of(call)),
        block_words_((call.in_size + 1) / 2 * kLanes),
        steps_((call.in_size + kStepInputs - 1) / kStepInputs),
        panel_(call.rows <= kTileRows ? 4 : 2),
        panels_((blocks_ + panel_ - 1) / panel_),
        layout_(layout_of(call.format, call.span)) {
    const int64_t in_cache = std::max(kFewestRows, kInputsInCache / (steps_ * kLineBytes));
    const int64_t wanted = (call.rows + in_cache - 1) / in_cache;
    rows_at_once_ = ((call.rows + wanted - 1) / wanted + kPairRows - 1) / kPairRows * kPairRows;
    row_blocks_ = (call.rows + rows_at_once_ - 1) / rows_at_once_;
    // Few rows: each thread streams one range of the weights. Many: smaller ranges, so that no thread waits long.
    const int64_t threads = pool().size();
    ranges_ = std::min(panels_, call.rows <= kPairRows ? threads : 8 * threads);
  }

  void run() const {
    std::atomic<int64_t> next{0};
    pool().run(std::min<int64_t>(pool().size(), ranges_ * row_blocks_), [&](int64_t) { work_off(next); });
  }

 private:
  // Ranges of panels of the first rows, then of the next.
  void work_off(std::atomic<int64_t>& next) const {
    const int64_t sums_bytes = 2 * kPairRows * panel_ * kLanes * 4;
    const int64_t panel_bytes = call_.format == Format::plain ? 0 : panel_ * block_words_ * 4 + kTilesAhead * kTileBytes;
    char* memory = static_cast<char*>(scratch(sums_bytes + panel_bytes));
    float* sums[2] = {reinterpret_cast<float*>(memory), reinterpret_cast<float*>(memory + sums_bytes / 2)};
    uint32_t* widened = reinterpret_cast<uint32_t*>(memory + sums_bytes);
    const Tiles tiles(static_cast<int>(std::min<int64_t>(kTileRows, call_.rows)));
    Pending pending{finish_rows<Out>, 0, 0, 0, 0, nullptr, panel_ * kLanes, 0};
    for (int64_t task = next++; task < ranges_ * row_blocks_; task = next++) {
      const int64_t row_block = task / ranges_, range = task % ranges_;
      const int64_t row = row_block * rows_at_once_, rows = std::min(rows_at_once_, call_.rows - row);
      for (int64_t panel = panels_ * range / ranges_; panel < panels_ * (range + 1) / ranges_; ++panel)
        multiply(row, rows, panel * panel_, sums, widened, pending);
    }
    pending.some(call_, pending.rows);
  }

  const bf16* inputs(int64_t row) const { return static_cast<const bf16*>(call_.x) + row * call_.x_stride; }

  // Where a tile begins that is to have this row and those after it: the last one of several begins earlier.
  int64_t first_of(int64_t row) const { return std::max<int64_t>(0, std::min(row, call_.rows - kTileRows)); }

  Rows rows_of(int64_t row, bool two) const {
    return {inputs(first_of(row)), inputs(first_of(two ? row + kTileRows : row)),
            call_.x_stride * static_cast<int64_t>(sizeof(bf16))};
  }

  // The last inputs of those rows, and zero.
  Rows copy_last_inputs(int64_t row, bool two, bf16* to) const {
    const int64_t from = call_.in_size / kStepInputs * kStepInputs;
    std::memset(to, 0, 2 * kTileBytes);
    for (int64_t tile = 0; tile < (two ? 2 : 1); ++tile)
      for (int64_t r = 0; r < std::min<int64_t>(kTileRows, call_.rows); ++r)
        std::memcpy(to + (tile * kTileRows + r) * kStepInputs, inputs(first_of(row + tile * kTileRows) + r) + from,
                    static_cast<size_t>(call_.in_size - from) * sizeof(bf16));
    return {to, to + kTileRows * kStepInputs, kLineBytes};
  }

  // The last inputs' lines of each block, and zero: what follows them in the weight is another block's.
  void copy_tail(const uint32_t* weight, int64_t blocks, uint32_t* tail) const {
    const int64_t from = call_.in_size / kStepInputs * kTileWords;
    for (int64_t block = 0; block < blocks; ++block) {
      std::memset(tail + block * kTileWords, 0, kTileBytes);
      std::memcpy(tail + block * kTileWords, weight + block * block_words_ + from,
                  static_cast<size_t>(block_words_ - from) * 4);
    }
  }

  // sums: for two times 32 rows; the first ones may be pending.
  __attribute__((noinline)) void multiply(int64_t row, int64_t rows, int64_t block, float* (&sums)[2], uint32_t* widened,
                                          Pending& pending) const {
    alignas(64) uint32_t tail[4 * kTileWords];
    alignas(64) bf16 tail_x[kPairRows * kStepInputs];
    const int64_t blocks = std::min(panel_, blocks_ - block), stride = panel_ * kLanes;
    const uint32_t* weight = static_cast<const uint32_t*>(call_.weight) + block * block_words_;
    if (call_.format != Format::plain) {
      widen_blocks(call_, layout_, block, blocks, widened);
      weight = widened;
    }
    const bool has_tail = call_.in_size % kStepInputs != 0;
    if (has_tail) copy_tail(weight, blocks, tail);
    for (int64_t first = row; first < row + rows; first += kPairRows) {
      const int64_t count = std::min(kPairRows, row + rows - first);
      const bool two = count > kTileRows;
      const int64_t begin = first_of(first);
      const Rows x = rows_of(first, two);
      const Pass pass{x, first_of(first + kTileRows) - begin, weight, block_words_,
                      has_tail ? copy_last_inputs(first, two, tail_x) : x, has_tail ? tail : nullptr,
                      call_.in_size / kStepInputs};
      std::swap(sums[0], sums[1]);
      (call_.rows <= kPairRows ? add_up_of<From::memory>(two, blocks) : add_up_of<From::cache>(two, blocks))(
          call_, pass, sums[0], stride, pending);
      pending = {finish_rows<Out>, first, count, block, blocks, sums[0] + (first - begin) * stride, stride, 0};
      if (call_.rows <= kFewRows) pending.some(call_, count);
    }
  }

  const Linear& call_;
  int64_t blocks_, block_words_, steps_, panel_, panels_;
  Layout layout_;
  int64_t rows_at_once_, row_blocks_, ranges_;
};

}  // namespace

void linear_amx(const Linear& call) {
  if (call.out_type == Type::bf16) TileProduct<bf16>(call).run();
  else TileProduct<float>(call).run();
}

}  // namespace octavo::OCTAVO_LEVEL
