// out = x · weightᵀ and what follows it (epilogue.hpp), for any number of rows. The packed layout is drawn at Linear.
//
// Each output is one sum over the inputs in ascending order, in one accumulator, whatever the rows around it: a row's
// result has the same bits alone and among a thousand. Threads share out panels: pairs of blocks of 16 outputs.

#include <algorithm>
#include <atomic>

#include "epilogue.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "scratch.hpp"
#include "simd.hpp"
#include "step.hpp"
#include "thread_pool.hpp"
#include "widen.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// Rows of a tile, and blocks: 24 accumulators of 32 registers, or 6 (of two registers each) of 16.
#if defined(__AVX512F__)
constexpr int kRows = 12, kBlocks = 2;
#else
constexpr int kRows = 6, kBlocks = 1;
#endif
constexpr int64_t kPanel = 2;                // blocks that an epilogue needs at once: gates and what they belong to
constexpr int64_t kInputsInCache = 1 << 20;  // bytes of inputs that stay in the second-level cache
constexpr int64_t kManyRows = 256;
constexpr int64_t kAhead = 16 * kLine;       // words that the first-level cache is filled ahead
constexpr int64_t kSumsStride = kPanel * kLanes;

// One step along the inner dimension: `Line` is a packed line as the sums take it, Input what rows are copied into.
struct FloatStep {
  using Element = float;
  using Input = float;
  using Line = f32x16;
  static constexpr int kTogether = 1;
  static OCTAVO_INLINE Line open(const uint32_t* at) { return load(reinterpret_cast<const float*>(at)); }
  static OCTAVO_INLINE f32x16 add(f32x16 sum, const float* x, Line line) { return sum + splat(*x) * line; }
};

#if defined(__AVX512BF16__)
struct BfloatStep {
  using Element = bf16;
  using Input = bf16;
  using Line = u32x16;
  static constexpr int kTogether = 2;
  static OCTAVO_INLINE Line open(const uint32_t* at) {
    Line line;
    std::memcpy(&line, at, sizeof line);
    return line;
  }
  static OCTAVO_INLINE f32x16 add(f32x16 sum, const bf16* x, Line line) { return PairStep::add(sum, word(x), line); }
};
#else
// The numbers are widened to float32 beforehand, those of the weights once for all rows of a tile.
struct BfloatStep {
  using Element = bf16;
  using Input = float;
  struct Line {
    f32x16 even, odd;
  };
  static constexpr int kTogether = 2;
  static OCTAVO_INLINE Line open(const uint32_t* at) {
    u32x16 line;
    std::memcpy(&line, at, sizeof line);
    return {(f32x16)(line << 16), (f32x16)(line & 0xffff0000u)};
  }
  static OCTAVO_INLINE f32x16 add(f32x16 sum, const float* x, const Line& line) {
    return sum + splat(x[0]) * line.even + splat(x[1]) * line.odd;
  }
};
#endif

// What is fetched into the second-level cache meanwhile: for each line that is read, `stride` bytes.
struct Fetch {
  const char* at;
  int64_t stride;
};

// Sums of Rows rows and Blocks blocks of 16 outputs.
template <typename Step, int Rows, int Blocks>
OCTAVO_INLINE void add_up(const typename Step::Input* x, int64_t x_stride, const uint32_t* weight, int64_t block_words,
                          Fetch fetch, float* sums) {
  f32x16 sum[Rows][Blocks];
  for (int row = 0; row < Rows; ++row)
    for (int block = 0; block < Blocks; ++block) sum[row][block] = f32x16{};
  for (int64_t at = 0; at < block_words; at += kLine, x += Step::kTogether, fetch.at += fetch.stride) {
    typename Step::Line line[Blocks];
    for (int block = 0; block < Blocks; ++block) {
      const uint32_t* from = weight + block * block_words + at;
      line[block] = Step::open(from);
      __builtin_prefetch(from + kAhead);
      __builtin_prefetch(fetch.at + block * 64, 0, 2);
    }
    for (int row = 0; row < Rows; ++row)
      for (int block = 0; block < Blocks; ++block)
        sum[row][block] = Step::add(sum[row][block], x + row * x_stride, line[block]);
  }
  for (int row = 0; row < Rows; ++row)
    for (int block = 0; block < Blocks; ++block) store(sums + row * kSumsStride + block * kLanes, sum[row][block]);
}

template <typename Step, int Rows>
OCTAVO_INLINE void add_up_panel(const typename Step::Input* x, int64_t x_stride, const uint32_t* weight,
                                int64_t block_words, int64_t blocks, Fetch fetch, float* sums) {
  if (blocks == kBlocks) return add_up<Step, Rows, kBlocks>(x, x_stride, weight, block_words, fetch, sums);
  fetch.stride /= blocks;
  for (int64_t block = 0; block < blocks; ++block, fetch.at += block_words / kLine * fetch.stride)
    add_up<Step, Rows, 1>(x, x_stride, weight + block * block_words, block_words, fetch, sums + block * kLanes);
}

// Calls add_up_panel for a number of rows that is known when it runs.
template <typename Step, int Rows = kRows>
void add_up_rows(int64_t rows, const typename Step::Input* x, int64_t x_stride, const uint32_t* weight,
                 int64_t block_words, int64_t blocks, Fetch fetch, float* sums) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return add_up_rows<Step, Rows - 1>(rows, x, x_stride, weight, block_words, blocks, fetch, sums);
  }
  add_up_panel<Step, Rows>(x, x_stride, weight, block_words, blocks, fetch, sums);
}

template <typename Step, typename Out>
class Product {
 public:
  explicit Product(const Linear& call)
      : call_(call),
        blocks_(blocks_of(call)),
        panels_((blocks_ + kPanel - 1) / kPanel),
        steps_((call.in_size + Step::kTogether - 1) / Step::kTogether),
        layout_(layout_of(call.format, call.span)),
        // An odd number of cache lines, so that rows do not fall into the same sets of a cache.
        stride_(((steps_ * Step::kTogether * kInput + 63) / 64 | 1) * 64 / kInput) {
    const int64_t in_cache = std::max<int64_t>(kRows, kInputsInCache / (stride_ * kInput));
    row_blocks_ = (call.rows + in_cache - 1) / in_cache;
    // Few rows: each thread streams one range of the weights. Many: smaller ranges, so that no thread waits long.
    const int64_t threads = pool().size();
    ranges_ = std::min(panels_, call.rows < kManyRows ? threads : 8 * threads);
  }

  void run() const {
    std::atomic<int64_t> next{0};
    pool().run(std::min<int64_t>(pool().size(), ranges_ * row_blocks_), [&](int64_t) { work_off(next); });
  }

 private:
  using Input = typename Step::Input;
  static constexpr int64_t kInput = sizeof(Input);

  int64_t row_of(int64_t row_block) const { return call_.rows * row_block / row_blocks_; }

  // Ranges of panels of the first rows, then of the next.
  void work_off(std::atomic<int64_t>& next) const {
    Input* x = nullptr;
    int64_t at_hand = -1;
    for (int64_t task = next++; task < ranges_ * row_blocks_; task = next++) {
      const int64_t row_block = task / ranges_, range = task % ranges_;
      const int64_t row = row_of(row_block), rows = row_of(row_block + 1) - row;
      if (row_block != at_hand) x = inputs(row, rows);  // and behind them, room for a panel
      at_hand = row_block;
      const int64_t end = panels_ * (range + 1) / ranges_;
      for (int64_t panel = panels_ * range / ranges_; panel < end; ++panel)
        multiply(x, row, rows, panel * kPanel, std::min(panel + 1, end - 1) * kPanel);
    }
  }

  // The inputs of these rows as the steps read them, in this thread's own memory.
  Input* inputs(int64_t row, int64_t rows) const {
    const int64_t panel_bytes = call_.format == Format::plain ? 0 : kPanel * steps_ * kLine * 4;
    Input* x = static_cast<Input*>(scratch(rows * stride_ * kInput + panel_bytes));
    for (int64_t r = 0; r < rows; ++r) {
      const auto* from = static_cast<const typename Step::Element*>(call_.x) + (row + r) * call_.x_stride;
      Input* to = x + r * stride_;
      by_vectors(call_.in_size, [&](int64_t i, auto lanes) { store(to + i, load(from + i, lanes), lanes); });
      if (steps_ * Step::kTogether != call_.in_size) to[call_.in_size] = Input{};  // the last one has no partner
    }
    return x;
  }

  // The panel from `block` on. Meanwhile the one from `next` on is fetched, by each tile a part: without that the first
  // tile would wait for memory, and the others leave memory idle.
  __attribute__((noinline)) void multiply(Input* x, int64_t row, int64_t rows, int64_t block, int64_t next) const {
    alignas(64) float sums[kRows * kSumsStride];
    const int64_t words = steps_ * kLine, blocks = std::min(kPanel, blocks_ - block);
    const uint32_t* weights = static_cast<const uint32_t*>(call_.weight);
    const uint32_t* weight = weights + block * words;
    const int64_t tiles = (rows + kRows - 1) / kRows;
    Fetch fetch{reinterpret_cast<const char*>(weights + next * words), kPanel * 64 / tiles};
    if (call_.format != Format::plain) {
      uint32_t* widened = reinterpret_cast<uint32_t*>(x + rows * stride_);
      widen_blocks(call_, layout_, block, blocks, widened);
      weight = widened;
      fetch = {reinterpret_cast<const char*>(call_.weight), 0};
    }
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
      add_up_rows<Step>(count, x + first * stride_, stride_, weight, words, blocks, fetch, sums);
      fetch.at += steps_ * fetch.stride;
      finish<typename Step::Element, Out>(call_, row + first, count, block, blocks, sums, kSumsStride);
    }
  }

  const Linear& call_;
  int64_t blocks_, panels_, steps_;
  Layout layout_;
  int64_t stride_, row_blocks_, ranges_;
};

}  // namespace

void linear(const Linear& call) {
  if (call.rows == 0) return;
  if (call.type == Type::bf16) {
#if defined(__AMX_BF16__)
    linear_amx(call);
#else
    if (call.out_type == Type::bf16) Product<BfloatStep, bf16>(call).run();
    else Product<BfloatStep, float>(call).run();
#endif
  } else {
    Product<FloatStep, float>(call).run();
  }
}

}  // namespace octavo::OCTAVO_LEVEL
