// out = x · weightᵀ and what follows it (epilogue.hpp) with AMX tiles, for bf16 and any number of rows.
//
// A step multiplies 16 rows x 32 inputs (a tile of x) by 32 inputs x 16 outputs (a tile of weights: 16 packed lines, one
// after the other in a block) and adds the products to a tile of sums. Each sum is made of the same steps in ascending
// order: a row has the same bits whatever rows share the tile.
//
//   up to 16 rows: tiles 0-3 sums of four blocks │ 4 x │ 5-7 weights in turn. Each thread streams a range of the weights
//   more:          tiles 0, 1 sums of rows 0-15, 16-31 and one block │ 4, 5 x │ 6 weights
//
// Of many rows, tiles come from the caches, and that is the limit: four loads of 1 KB from the second-level cache take
// longer than four products. So 32 rows of x stay in the first-level cache, and for them a group of weights, which stays in
// the second-level cache, goes by without a place in the first (stream_tile). Where rows are too long for the first-level
// cache, that is so for a part of the inputs at a time; sums are stored and go on with the next part. Meanwhile the
// weights of the next part or group are fetched.
//
//   group of weights ─┬─ part of the inputs ─┬─ 32 rows of x ─┬─ block of 16 outputs: two sums, a step after the other
//                     ├─ the next part       ├─ the next 32   ├─ the next block
//
// A processor has few tile registers beyond the eight that have names, and two threads of a core share them: there are
// two sums at a time, and a factor is cleared as soon as it was read for the last time, for a tile that is zero takes none.
// Beside a busy thread of the same core that is a fifth faster than four sums, and twice as fast as nothing cleared.
//
// Tiles of x are read where x is. Of more than 16 rows the last tile ends with the last row, and has some rows again that
// another tile has: the same sums, of which only the others are used. Where the last inputs do not fill a step, tiles of
// them are copied, with zeros.

#include <algorithm>

#include "ahead.hpp"
#include "epilogue.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "scratch.hpp"
#include "shares.hpp"
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
constexpr int64_t kTilesAhead = 8;              // that few rows fetch
constexpr int64_t kStepsInCache = 20;           // of 32 rows: they stay in the first-level cache
constexpr int64_t kWeightsInCache = 512 << 10;  // bytes that stay in the second-level cache
constexpr int64_t kWeightsOnce = 144 << 10;     // bytes of a group that is read once
constexpr int64_t kReadOnce = 384;              // rows up to which each weight is read by one thread only
constexpr int64_t kTasks = 4;                   // a thread, or more: none is to wait long
constexpr int64_t kSmallestChunk = 64;          // rows
constexpr int64_t kLargestChunk = 384;          // rows whose sums stay in the second-level cache

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

// ---- up to 16 rows

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

// What both kinds of product know of a call.
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

  const uint32_t* weight(int64_t block) const { return static_cast<const uint32_t*>(call.weight) + block * block_words; }

  const Linear& call;
  int64_t blocks, block_words, whole_steps;
  bool has_tail;
  Layout layout;
};

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

// ---- more rows

// What a pass over some of the inputs reads: rows, and a block of weights. `tail`: where it ends with the last inputs and
// those do not fill a step, the block's tile for that step, or null; `tail_x`: those of the rows. `second`: rows from the
// first tile to the second, less than 16 where they have rows in common.
struct Part {
  Rows x;
  int64_t second;
  const uint32_t* weight;
  Rows tail_x;
  const uint32_t* tail;
  int64_t steps;
  bool begins;  // else the sums go on
};

template <int RowTiles>
OCTAVO_INLINE void multiply_rows(const Rows& x, const uint32_t* weight) {
  stream_tile<6>(weight, kLineBytes);
  load_tile<4>(x.first, x.stride);
  multiply_tiles<0, 4, 6>();
  clear_tile<4>();
  if constexpr (RowTiles == 2) {
    load_tile<5>(x.second, x.stride);
    multiply_tiles<1, 5, 6>();
  }
  clear_tile<6>();
  if constexpr (RowTiles == 2) clear_tile<5>();
}

// Sums of rows and of a panel that wait for what follows the product.
template <typename Out>
struct Pending {
  int64_t row, rows, block, blocks;
  const float* sums;
  Out* out;  // of the first of the rows, where they are finished one by one
  int64_t stride;

  OCTAVO_INLINE void finish_one() {
    if (rows == 0) return;
    finish_silu(sums, out);
    ++row;
    --rows;
    sums += kPairRows;
    out += stride;
  }
};

// RowTiles tiles of rows and a block; Finish: with each step a row of what is pending, so that vectors work beside tiles.
// sums: [16 * RowTiles][32].
template <int RowTiles, bool Finish, typename Out>
void add_up_rows(const Part& part, float* sums, Ahead& ahead, Pending<Out>& pending) {
  constexpr int64_t kSumsBytes = kPairRows * 4;
  float* second = sums + part.second * kPairRows;
  if (part.begins) {
    clear_tile<0>();
    if constexpr (RowTiles == 2) clear_tile<1>();
  } else {
    load_tile<0>(sums, kSumsBytes);
    if constexpr (RowTiles == 2) load_tile<1>(second, kSumsBytes);
  }
  for (int64_t step = 0; step < part.steps; ++step) {
    ahead.fetch();
    multiply_rows<RowTiles>(part.x.step(step), part.weight + step * kTileWords);
    if constexpr (Finish) pending.finish_one();
  }
  if (part.tail != nullptr) multiply_rows<RowTiles>(part.tail_x, part.tail);
  store_tile<0>(sums, kSumsBytes);
  clear_tile<0>();
  if constexpr (RowTiles == 2) {
    store_tile<1>(second, kSumsBytes);
    clear_tile<1>();
  }
}

template <typename Out>
class ManyRows {
 public:
  explicit ManyRows(const Linear& call)
      : shape_(call),
        panels_((shape_.blocks + kPanel - 1) / kPanel),
        parts_(std::max<int64_t>(1, (shape_.whole_steps + kStepsInCache - 1) / kStepsInCache)),
        group_((call.rows <= kReadOnce ? kWeightsOnce : kWeightsInCache) / panel_bytes()) {
    const bool once = call.rows <= kReadOnce;
    const int64_t tasks = (once ? kTasks : 2 * kTasks) * pool().size();
    if (once) group_ = call.rows <= kPairRows ? 1 : std::min(group_, panels_ / tasks);
    group_ = std::max<int64_t>(1, std::min(group_, panels_));
    groups_ = (panels_ + group_ - 1) / group_;
    const int64_t wanted = once ? 1 : (tasks + groups_ - 1) / groups_;
    chunk_ = std::max(kSmallestChunk, ((call.rows + wanted - 1) / wanted + kPairRows - 1) / kPairRows * kPairRows);
    if (parts_ > 1) chunk_ = std::min(chunk_, kLargestChunk);
    chunks_ = (call.rows + chunk_ - 1) / chunk_;
  }

  void run() const {
    const int64_t threads = std::min<int64_t>(pool().size(), groups_ * chunks_);
    Shares shares(groups_ * chunks_, threads);
    pool().run(threads, [&](int64_t thread) { work_off(thread, shares); });
  }

 private:
  static constexpr int64_t kPanel = 2;

  // What a thread has.
  struct Work {
    float* sums;
    uint32_t* widened;
    int64_t group;  // that is widened
    int64_t turn;
    Pending<Out> pending;
    Ahead ahead;
  };

  void finish_all(Pending<Out>& pending) const {
    finish<bf16, Out>(call(), pending.row, pending.rows, pending.block, pending.blocks, pending.sums, kPairRows);
    pending.rows = 0;
  }

  // A task is a group of panels for a chunk of rows, the next one the same group for the next rows.
  void work_off(int64_t thread, Shares& shares) const {
    const int64_t pairs = parts_ == 1 ? 2 : group_ * (chunk_ / kPairRows);
    const int64_t sums_bytes = pairs * kPairRows * kPairRows * 4;
    const int64_t widened_bytes = plain() ? 0 : group_ * kPanel * shape_.block_words * 4;
    char* memory = static_cast<char*>(scratch(sums_bytes + widened_bytes));
    const Tiles tiles(kTileRows);
    Work work{reinterpret_cast<float*>(memory), reinterpret_cast<uint32_t*>(memory + sums_bytes), -1, 0, {}, {}};
    for (int64_t task = shares.take(thread); task >= 0; task = shares.take(thread))
      multiply_group(task, shares.next(thread), work);
    finish_all(work.pending);
  }

  const Linear& call() const { return shape_.call; }
  bool plain() const { return call().format == Format::plain; }

  int64_t first_panel(int64_t group) const { return panels_ * group / groups_; }
  int64_t first_step(int64_t part) const { return shape_.whole_steps * part / parts_; }

  // Of what stays in the second-level cache: a part of the inputs, or all of them where they are widened.
  int64_t panel_bytes() const {
    return kPanel * (plain() && parts_ > 1 ? (shape_.whole_steps + parts_ - 1) / parts_ * kTileBytes
                                           : shape_.block_words * 4);
  }

  // The weights of a part of task `after`, where they are others than those of `task`: fetched with the steps of a part.
  Ahead ahead(int64_t task, int64_t after, int64_t part) const {
    const int64_t group = task / chunks_, next = after / chunks_;
    if (!plain() || (next == group && parts_ == 1)) return {};
    const int64_t begin = first_panel(next) * kPanel, end = std::min(first_panel(next + 1) * kPanel, shape_.blocks);
    const int64_t rows = std::min(chunk_, call().rows - task % chunks_ * chunk_);
    const int64_t passes = (rows + kPairRows - 1) / kPairRows * (first_panel(group + 1) - first_panel(group)) * kPanel;
    const int64_t steps = passes * (shape_.whole_steps / parts_), block_bytes = shape_.block_words * 4;
    if (parts_ == 1) return Ahead::of(shape_.weight(begin), (end - begin) * block_bytes, steps);
    return Ahead::of(shape_.weight(begin) + first_step(part) * kTileWords,
                     (first_step(part + 1) - first_step(part)) * kTileBytes, end - begin, block_bytes, steps);
  }

  // after: the next task, or -1.
  void multiply_group(int64_t task, int64_t after, Work& work) const {
    const int64_t group = task / chunks_, begin = task % chunks_ * chunk_, end = std::min(call().rows, begin + chunk_);
    const int64_t panel = first_panel(group), last = first_panel(group + 1);
    const uint32_t* weight = plain() ? shape_.weight(panel * kPanel) : work.widened;
    if (!plain() && work.group != group)
      widen_blocks(call(), shape_.layout, panel * kPanel, std::min(shape_.blocks, last * kPanel) - panel * kPanel,
                   work.widened);
    work.group = group;
    for (int64_t part = 0; part < parts_; ++part) {
      const int64_t then = part + 1 < parts_ ? task : after;
      work.ahead = then >= 0 ? ahead(task, then, (part + 1) % parts_) : Ahead{};
      if (part == 0 && parts_ > 1) finish_all(work.pending);
      for (int64_t row = begin; row < end; row += kPairRows) {
        float* sums = work.sums + (parts_ == 1 ? 0 : (row - begin) / kPairRows * group_) * kPairRows * kPairRows;
        multiply_part(row, std::min(kPairRows, end - row), panel, last, part, weight, sums, work);
      }
    }
  }

  // The panels' products of a part of up to 32 rows.
  __attribute__((noinline)) void multiply_part(int64_t row, int64_t rows, int64_t panel, int64_t last, int64_t part,
                                               const uint32_t* weight, float* all_sums, Work& work) const {
    alignas(64) bf16 tail_x[kPairRows * kStepInputs];
    alignas(64) uint32_t tail[kTileWords];
    const bool two = rows > kTileRows, ends = part == parts_ - 1, has_tail = ends && shape_.has_tail;
    const int64_t from = first_step(part), to = first_step(part + 1);
    const int64_t begin = shape_.first_of(row);
    Part pass{};
    pass.x = shape_.rows_of(row, two).step(from);
    pass.second = shape_.first_of(row + kTileRows) - begin;
    pass.steps = to - from;
    pass.begins = part == 0;
    if (has_tail) {
      pass.tail_x = shape_.copy_last_inputs(row, two, tail_x);
      pass.tail = tail;
    }
    const bool by_rows = ends && silu_;
    const auto add_up = two ? by_rows ? add_up_rows<2, true, Out> : add_up_rows<2, false, Out>
                            : by_rows ? add_up_rows<1, true, Out> : add_up_rows<1, false, Out>;
    for (int64_t p = panel; p < last; ++p) {
      const int64_t block = p * kPanel, blocks = std::min(kPanel, shape_.blocks - block);
      float* sums = all_sums + (parts_ == 1 ? work.turn++ % 2 : p - panel) * kPairRows * kPairRows;
      for (int64_t b = 0; b < blocks; ++b) {
        const uint32_t* lines = weight + ((p - panel) * kPanel + b) * shape_.block_words;
        pass.weight = lines + from * kTileWords;
        if (has_tail) shape_.copy_tail(lines, tail);
        add_up(pass, sums + b * kLanes, work.ahead, work.pending);
      }
      if (!ends) continue;
      finish_all(work.pending);
      Out* out = silu_ ? static_cast<Out*>(call().out) + row * call().out_stride + block / 2 * kLanes : nullptr;
      work.pending = {row, rows, block, blocks, sums + (row - begin) * kPairRows, out, call().out_stride};
    }
  }

  Shape shape_;
  // Gates of silu take many instructions, and are finished row by row where all blocks are whole.
  bool silu_ = call().gated && call().function == Function::silu && call().bias == nullptr &&
               row_size(call()) % kLanes == 0;
  int64_t panels_, parts_, group_;
  int64_t groups_, chunk_, chunks_;
};

}  // namespace

void linear_amx(const Linear& call) {
  const bool bf16_out = call.out_type == Type::bf16;
  if (call.rows <= kTileRows) bf16_out ? FewRows<bf16>(call).run() : FewRows<float>(call).run();
  else bf16_out ? ManyRows<bf16>(call).run() : ManyRows<float>(call).run();
}

}  // namespace octavo::OCTAVO_LEVEL
