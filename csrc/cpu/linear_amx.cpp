// out = x · weightᵀ and what follows it (epilogue.hpp) with AMX tiles, for bf16 and up to 16 rows. (More rows are
// linear_many_amx.cpp's, coded weights and up to 64 rows linear_coded_amx.cpp's.)
//
// A step multiplies 16 rows x 32 inputs (a tile of x) by 32 inputs x 16 outputs (a tile of weights: 16 packed lines, one
// after the other in a block) and adds the products to a tile of sums. Each sum is made of the same steps in ascending
// order: a row has the same bits whatever rows share the tile.
//
//   tiles 0-3 sums of four blocks │ 4 x │ 5-7 weights in turn. Each thread streams a range of the weights
//
// Tiles of x are read where x is. Where the last inputs do not fill a step, tiles of them are copied, with zeros.

#include <algorithm>

#include "epilogue.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "linear_amx.hpp"
#include "scratch.hpp"
#include "simd.hpp"
#include "thread_pool.hpp"
#include "tiles.hpp"
#include "widen.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kTilesAhead = 8;  // that are fetched

OCTAVO_INLINE void prefetch_tile(const void* at) {
  for (int64_t line = 0; line < kTileRows; ++line)
    __builtin_prefetch(static_cast<const char*>(at) + line * kLineBytes, 0, 2);  // into the second-level cache
}

// What a pass over all inputs reads: rows, and blocks of weights, which are `block_words` apart. `tail`: where the last
// inputs do not fill a step, the blocks' tiles for that step, or null; `tail_x`: that of the rows.
struct Pass {
  Rows x;
  const uint32_t* weight;
  int64_t block_words;
  Rows tail_x;
  const uint32_t* tail;
  int64_t whole_steps;
};

template <int Blocks, int Block>
OCTAVO_INLINE void multiply_block(const uint32_t* weight, int64_t block_words) {
  constexpr int kWeight = 5 + Block % 3;
  load_tile<kWeight>(weight + Block * block_words, kLineBytes);
  multiply_tiles<Block, 4, kWeight>();
  clear_tile<kWeight>();
  if constexpr (Block + 1 < Blocks) multiply_block<Blocks, Block + 1>(weight, block_words);
}

template <int Blocks>
OCTAVO_INLINE void multiply_step(const Rows& x, const uint32_t* weight, int64_t block_words) {
  load_tile<4>(x.first, x.stride);
  multiply_block<Blocks, 0>(weight, block_words);
  clear_tile<4>();
}

// Calls work<block> for each tile of sums.
template <int Blocks, int Block = 0, typename Work>
OCTAVO_INLINE void each_sum(const Work& work) {
  work(std::integral_constant<int, Block>());
  if constexpr (Block + 1 < Blocks) each_sum<Blocks, Block + 1>(work);
}

// A tile of rows and Blocks blocks. sums: [16][sums_words].
template <int Blocks>
void add_up(const Pass& pass, float* sums, int64_t sums_words) {
  each_sum<Blocks>([&](auto tile) { clear_tile<decltype(tile)::value>(); });
  const int64_t whole = pass.whole_steps, steps = pass.block_words / kTileWords;
  for (int64_t step = 0; step < whole; ++step) {
    // At the end of these blocks, the beginning of those that come next.
    const int64_t ahead = step + kTilesAhead;
    const uint32_t* next = pass.weight + (ahead < steps ? ahead * kTileWords
                                                        : Blocks * pass.block_words + (ahead - steps) * kTileWords);
    for (int block = 0; block < Blocks; ++block) prefetch_tile(next + block * pass.block_words);
    multiply_step<Blocks>(pass.x.step(step), pass.weight + step * kTileWords, pass.block_words);
  }
  if (pass.tail != nullptr) multiply_step<Blocks>(pass.tail_x, pass.tail, kTileWords);
  each_sum<Blocks>([&](auto tile) {
    store_tile<decltype(tile)::value>(sums + decltype(tile)::value * kLanes, sums_words * 4);
  });
}

using AddUp = void (*)(const Pass&, float*, int64_t);

AddUp add_up_of(int64_t blocks) {
  switch (blocks) {
    case 1: return add_up<1>;
    case 2: return add_up<2>;
    case 3: return add_up<3>;
    default: return add_up<4>;
  }
}

template <typename Out>
class FewRows {
 public:
  explicit FewRows(const Linear& call)
      : shape_(call), panels_((shape_.blocks + kPanel - 1) / kPanel), ranges_(std::min<int64_t>(panels_, pool().size())) {}

  void run() const {
    pool().run(ranges_, [&](int64_t range) { stream(panels_ * range / ranges_, panels_ * (range + 1) / ranges_); });
  }

 private:
  static constexpr int64_t kPanel = 4;

  void stream(int64_t panel, int64_t end) const {
    constexpr int64_t kSumsBytes = kTileRows * kPanel * kLanes * 4;
    const bool widens = shape_.call.format != Format::plain;
    const int64_t panel_bytes = widens ? kPanel * shape_.block_words * 4 + kTilesAhead * kTileBytes : 0;
    char* memory = static_cast<char*>(scratch(kSumsBytes + panel_bytes));
    float* sums = reinterpret_cast<float*>(memory);
    uint32_t* widened = reinterpret_cast<uint32_t*>(memory + kSumsBytes);
    alignas(64) bf16 tail_x[kPairRows * kStepInputs];
    const Rows x = shape_.rows_of(0, false), last = shape_.has_tail ? shape_.copy_last_inputs(0, false, tail_x) : x;
    const Tiles tiles(static_cast<int>(shape_.call.rows));
    for (; panel < end; ++panel) multiply(panel * kPanel, x, last, sums, widened);
  }

  __attribute__((noinline)) void multiply(int64_t block, const Rows& x, const Rows& last, float* sums,
                                          uint32_t* widened) const {
    alignas(64) uint32_t tail[kPanel * kTileWords];
    const int64_t blocks = std::min(kPanel, shape_.blocks - block);
    const uint32_t* weight = shape_.weight(block);
    if (shape_.call.format != Format::plain) {
      widen_blocks(shape_.call, shape_.layout, block, blocks, widened);
      weight = widened;
    }
    if (shape_.has_tail)
      for (int64_t b = 0; b < blocks; ++b) shape_.copy_tail(weight + b * shape_.block_words, tail + b * kTileWords);
    const Pass pass{x, weight, shape_.block_words, last, shape_.has_tail ? tail : nullptr, shape_.whole_steps};
    add_up_of(blocks)(pass, sums, kPanel * kLanes);
    finish<bf16, Out>(shape_.call, 0, shape_.call.rows, block, blocks, sums, kPanel * kLanes);
  }

  Shape shape_;
  int64_t panels_, ranges_;
};

}  // namespace

void linear_amx(const Linear& call) {
  if (call.format == Format::coded && call.rows <= kWidenedRows) return linear_coded_amx(call);
  if (call.rows > kTileRows) return linear_many_amx(call);
  call.out_type == Type::bf16 ? FewRows<bf16>(call).run() : FewRows<float>(call).run();
}

}  // namespace octavo::OCTAVO_LEVEL
