// out = x · weightᵀ and what follows it (epilogue.hpp) with AMX tiles, for up to 64 rows and weights that are not kept as
// tiles read them: coded (coded.hpp) or quantized (formats.hpp). The sums are those of linear_amx.cpp, step by step.
//
// Weights come from memory once, and that is what such a product waits for. A thread widens the tiles of the next step into
// a buffer in the first-level cache, a quarter after each product of this step, and with it fetches what comes later: so
// fetching, widening and multiplying take their time together and not one after the other.
//
//   rows     sums (tiles 0-3)
//   1-16     1 of rows x 4 blocks
//   17-32    2 x 2
//   33-64    3 or 4 x 1
//
// Tiles of x come from the first-level cache: where more rows than one tile are longer than that, a part of the inputs at a
// time, for all blocks of a group; sums are stored and go on with the next part.
//
// A Code says how weights are kept (widened_tile.hpp).
#pragma once

#include <algorithm>

#include "claim.hpp"
#include "epilogue.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "scratch.hpp"
#include "shares.hpp"
#include "simd.hpp"
#include "thread_pool.hpp"
#include "tiles.hpp"
#include "widened_tile.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kStepInputs = 32;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kStepsInCache = 28;        // of a tile of rows: they stay in the first-level cache
constexpr int64_t kSumsInCache = 128 << 10;  // bytes of a group's sums, where there are several parts
constexpr int64_t kTasks = 4;                // a thread

// Tiles of rows: where they begin, and bytes from row to row.
struct Rows {
  const bf16* tile[4];
  int64_t stride;
};

// Blocks' tiles of a part of the inputs.
struct Run {
  const uint8_t* block;
  int64_t from, steps;

  template <typename Code>
  OCTAVO_INLINE typename Code::Tile tile(const Code& code, int64_t step) const {
    return code.tile(block, from + step);
  }
};

// A thread's tiles of two steps: those that are multiplied, and those that are widened.
template <int Blocks>
struct Widened {
  alignas(64) uint8_t tiles[2][Blocks][kTileBytes];
  int turn = 0;
  const uint8_t* ready = nullptr;  // what is in the first of tiles[turn]
};

template <typename Code, int RowTiles, int Blocks>
class Step {
 public:
  using Tile = typename Code::Tile;

  // `after`: what is widened meanwhile, `fresh` and `opened` as a Code has them; `later`: what is fetched, of each block,
  // which are `block_bytes` apart.
  static OCTAVO_INLINE void multiply(const Code& code, const Rows& x, int64_t step, Widened<Blocks>& widened, Tile after,
                                     bool fresh, typename Code::Opened (&opened)[Blocks], const uint8_t* later,
                                     int64_t block_bytes) {
    for (int b = 0; b < Blocks; ++b) code.open(after.apart(b * block_bytes), fresh, opened[b]);
    product<0>(x, step, widened, after, opened, later, block_bytes);
    widened.turn ^= 1;
    widened.ready = after.at;
  }

 private:
  static constexpr int kProducts = RowTiles * Blocks;
  static constexpr int kQuarters = 4 * Blocks;

  // The blocks for each tile of rows, which is loaded once; those of weights are, where there are no more than two.
  template <int Product>
  static OCTAVO_INLINE void product(const Rows& x, int64_t step, Widened<Blocks>& widened, Tile after,
                                    const typename Code::Opened* opened, const uint8_t* later, int64_t block_bytes) {
    constexpr int kRow = Product / Blocks, kBlock = Product % Blocks, kX = 4 + (RowTiles > 1 ? kRow % 2 : 0);
    constexpr int kWeight = RowTiles > 1 ? 6 + kBlock : 5 + kBlock % 3;
    if constexpr (kRow == 0) load_tile<kWeight>(widened.tiles[widened.turn][kBlock], kLineBytes);
    if constexpr (kBlock == 0) load_tile<kX>(x.tile[kRow] + step * kStepInputs, x.stride);
    multiply_tiles<kBlock * RowTiles + kRow, kX, kWeight>();
    if constexpr (kRow == RowTiles - 1) clear_tile<kWeight>();
    if constexpr (kBlock == Blocks - 1) clear_tile<kX>();
    widen<kQuarters * Product / kProducts, kQuarters * (Product + 1) / kProducts>(
        after, opened, later, block_bytes, widened.tiles[widened.turn ^ 1]);
    if constexpr (Product + 1 < kProducts)
      product<Product + 1>(x, step, widened, after, opened, later, block_bytes);
  }

  // Quarters of the blocks' tiles, from the First to that before the Last.
  template <int First, int Last>
  static OCTAVO_INLINE void widen(Tile after, const typename Code::Opened* opened, const uint8_t* later,
                                  int64_t block_bytes, uint8_t (*to)[kTileBytes]) {
    if constexpr (First < Last) {
      const int64_t apart = First / 4 * block_bytes;
      Code::template quarter<true, First % 4>(after.apart(apart), opened[First / 4], to[First / 4], later + apart);
      widen<First + 1, Last>(after, opened, later, block_bytes, to);
    }
  }
};

// Sums [rows][stride] of some blocks, in tiles 0 to 3.
template <int RowTiles, int Blocks>
struct Sums {
  float* at[RowTiles];
  int64_t stride;  // bytes

  template <int Tile = 0, typename Work>
  OCTAVO_INLINE void each(const Work& work) const {
    work(std::integral_constant<int, Tile>(), at[Tile % RowTiles] + Tile / RowTiles * kLanes);
    if constexpr (Tile + 1 < RowTiles * Blocks) each<Tile + 1>(work);
  }
  OCTAVO_INLINE void begin(bool first) const {
    if (first) each([](auto tile, float*) { clear_tile<decltype(tile)::value>(); });
    else each([&](auto tile, float* from) { load_tile<decltype(tile)::value>(from, stride); });
  }
  OCTAVO_INLINE void end() const {
    each([&](auto tile, float* to) {
      store_tile<decltype(tile)::value>(to, stride);
      clear_tile<decltype(tile)::value>();
    });
  }
};

// A panel whose sums are whole: with each step of the next one some rows of it are finished, so that vectors work beside
// tiles.
struct Pending {
  using Finish = void (*)(const Linear& call, int64_t row, int64_t rows, int64_t block, int64_t blocks, const float* sums,
                          int64_t stride);
  Finish finish;
  const Linear* call;
  int64_t row, rows, block, blocks;
  const float* sums;
  int64_t stride;
  int64_t with_step;

  OCTAVO_INLINE void finish_some() {
    if (rows > 0) finish_rows(std::min(rows, with_step));
  }
  __attribute__((noinline)) void finish_rows(int64_t count) {
    if (count == 0) return;
    finish(*call, row, count, block, blocks, sums, stride);
    row += count;
    rows -= count;
    sums += count * stride;
  }
};

template <typename Code, int RowTiles, int Blocks>
__attribute__((noinline)) void add_up(const Code& code, const Rows& x, const Run& run, const Run& next,
                                      const Sums<RowTiles, Blocks>& sums, Widened<Blocks>& widened,
                                      Pending& pending, Claim& claim) {
  using Tile = typename Code::Tile;
  const int64_t block_bytes = code.block_bytes();
  const Tile first = run.tile(code, 0);
  if (widened.ready != first.at)
    for (int64_t b = 0; b < Blocks; ++b) {
      const Tile tile = first.apart(b * block_bytes);
      widen_tile<false>(code, tile, widened.tiles[widened.turn][b], nullptr);
    }
  sums.begin(run.from == 0);
  typename Code::Opened opened[Blocks] = {};
  for (int64_t step = 0; step < run.steps; ++step) {
    const Tile after = step + 1 < run.steps ? run.tile(code, step + 1) : next.tile(code, 0);
    const bool fresh = step == 0 || step + 1 == run.steps || Code::shared_from(run.from + step + 1);
    const int64_t ahead = step + Code::kAhead, over = std::min(ahead - run.steps, next.steps - 1);
    const Tile later = ahead < run.steps ? run.tile(code, ahead) : next.tile(code, over);
    if (code.shared_from(ahead < run.steps ? run.from + ahead : next.from + over))
      for (int64_t b = 0; b < Blocks; ++b) __builtin_prefetch(later.shared + b * block_bytes, 0, 2);
    claim.step();
    Step<Code, RowTiles, Blocks>::multiply(code, x, run.from + step, widened, after, fresh, opened, Code::fetched(later),
                                           block_bytes);
    pending.finish_some();
  }
  sums.end();
}

// What follows a product, for outputs of a type.
template <typename Code, typename Out>
void finish_rows_of(const Linear& call, int64_t row, int64_t rows, int64_t block, int64_t blocks, const float* sums,
                    int64_t stride) {
  finish<bf16, Out, Code::kScaled>(call, row, rows, block, blocks, sums, stride);
}

template <typename Code, int RowTiles>
class Product {
 public:
  explicit Product(const Linear& call)
      : call_(call),
        code_(call),
        blocks_(blocks_of(call)),
        steps_(call.in_size / kStepInputs),
        parts_(RowTiles == 1 ? 1 : (steps_ * RowTiles + kStepsInCache - 1) / kStepsInCache),
        panels_((blocks_ + kPanel - 1) / kPanel),
        block_bytes_(code_.block_bytes()) {
    const int64_t tasks = kTasks * pool().size();
    group_ = std::max<int64_t>(1, panels_ / tasks);
    if (parts_ > 1) group_ = std::max<int64_t>(1, std::min(group_, kSumsInCache / kSumsBytes));
    groups_ = (panels_ + group_ - 1) / group_;
  }

  void run() const {
    const int64_t threads = std::min<int64_t>(pool().size(), groups_);
    Shares shares(groups_, threads);
    pool().run(threads, [&](int64_t thread) { work_off(thread, shares); });
  }

 private:
  static constexpr int kBlocks = RowTiles == 1 ? 4 : RowTiles == 2 ? 2 : 1;  // of a run
  static constexpr int64_t kPanel = std::max(2, kBlocks);                    // of what is finished together
  static constexpr int64_t kSumsStride = kPanel * kLanes;
  static constexpr int64_t kSumsBytes = RowTiles * kTileRows * kSumsStride * 4;

  // What a thread has.
  struct Work {
    Rows x;
    float* sums[2];  // of a group, or a panel, in turn
    int turn;
    Pending pending;
    Widened<kBlocks> widened;
  };

  void work_off(int64_t thread, Shares& shares) const {
    const int64_t sums = (parts_ > 1 ? group_ : 1) * kSumsBytes / 4;
    float* memory = static_cast<float*>(scratch(2 * sums * 4));
    const Tiles tiles(static_cast<int>(std::min<int64_t>(kTileRows, call_.rows)));
    Work work{rows(), {memory, memory + sums}, 0, {}, {}};
    for (int64_t task = shares.take(thread); task >= 0; task = shares.take(thread)) {
      const int64_t after = shares.next(thread);
      multiply_group(task, after >= 0 ? after : task, work);
    }
    work.pending.finish_rows(work.pending.rows);
  }

  int64_t first_panel(int64_t group) const { return panels_ * group / groups_; }
  int64_t first_step(int64_t part) const { return steps_ * part / parts_; }

  // A tile of rows that is not the first ends with the last row, and has some rows again that another tile has.
  int64_t first_row(int64_t tile) const {
    return std::max<int64_t>(0, std::min(tile * kTileRows, call_.rows - kTileRows));
  }

  Rows rows() const {
    Rows found;
    found.stride = call_.x_stride * static_cast<int64_t>(sizeof(bf16));
    for (int64_t tile = 0; tile < RowTiles; ++tile)
      found.tile[tile] = static_cast<const bf16*>(call_.x) + first_row(tile) * call_.x_stride;
    return found;
  }

  Run run_of(int64_t block, int64_t part) const {
    return {static_cast<const uint8_t*>(call_.weight) + block * block_bytes_, first_step(part),
            first_step(part + 1) - first_step(part)};
  }

  // What follows a run that ends before `block`: the next blocks, the next part, or the next group. The blocks at the end
  // that fill no run are not begun beforehand.
  Run run_after(const Run& run, int64_t block, int64_t part, int64_t last, int64_t begin, int64_t after) const {
    if (block >= last) {
      block = part + 1 < parts_ ? begin : first_panel(after) * kPanel;
      part = part + 1 < parts_ ? part + 1 : 0;
    }
    return block + kBlocks <= blocks_ ? run_of(block, part) : run;
  }

  void multiply_group(int64_t group, int64_t after, Work& work) const {
    const int64_t begin = first_panel(group) * kPanel, last = std::min(blocks_, first_panel(group + 1) * kPanel);
    for (int64_t part = 0; part < parts_; ++part)
      for (int64_t panel = begin; panel < last; panel += kPanel) {
        const int64_t blocks = std::min(kPanel, last - panel), runs = blocks / kBlocks;
        float* sums = work.sums[work.turn] + (parts_ > 1 ? (panel - begin) / kPanel : 0) * (kSumsBytes / 4);
        const int64_t steps = std::max<int64_t>(1, runs * run_of(panel, part).steps);
        work.pending.with_step = (work.pending.rows + steps - 1) / steps;
        Claim claim = part == parts_ - 1 ? claim_of(panel, steps) : Claim();
        for (int64_t b = 0; b < runs * kBlocks; b += kBlocks) {
          const Run run = run_of(panel + b, part);
          add_up<Code>(code_, work.x, run, run_after(run, panel + b + kBlocks, part, last, begin, after),
                       sums_of<kBlocks>(sums + b * kLanes), work.widened, work.pending, claim);
        }
        work.pending.finish_rows(work.pending.rows);
        if (runs * kBlocks < blocks) add_rest(panel, runs * kBlocks, blocks, part, sums, work);
        if (part < parts_ - 1) continue;
        work.pending = {finish_, &call_, 0, call_.rows, panel, blocks, sums, kSumsStride, 0};
        if (parts_ == 1 || panel + kPanel >= last) work.turn ^= 1;
      }
  }

  Claim claim_of(int64_t panel, int64_t steps) const {
    return Claim::of(call_, 0, call_.rows, (call_.gated ? panel / 2 : panel) * kLanes, (call_.rows + steps - 1) / steps);
  }

  template <int Blocks>
  Sums<RowTiles, Blocks> sums_of(float* at) const {
    Sums<RowTiles, Blocks> sums;
    sums.stride = kSumsStride * 4;
    for (int64_t tile = 0; tile < RowTiles; ++tile) sums.at[tile] = at + first_row(tile) * kSumsStride;
    return sums;
  }

  // Blocks that fill no run, one by one.
  __attribute__((noinline)) void add_rest(int64_t panel, int64_t b, int64_t blocks, int64_t part, float* sums,
                                          Work& work) const {
    Widened<1> widened;
    Claim claim;
    for (; b < blocks; ++b) {
      const Run run = run_of(panel + b, part);
      add_up<Code>(code_, work.x, run, run, sums_of<1>(sums + b * kLanes), widened, work.pending, claim);
    }
  }

  const Linear& call_;
  Code code_;
  Pending::Finish finish_ = call_.out_type == Type::bf16 ? finish_rows_of<Code, bf16> : finish_rows_of<Code, float>;
  int64_t blocks_, steps_, parts_, panels_, block_bytes_;
  int64_t group_, groups_;
};

template <typename Code>
void multiply(const Linear& call) {
  switch ((call.rows + kTileRows - 1) / kTileRows) {
    case 1: return Product<Code, 1>(call).run();
    case 2: return Product<Code, 2>(call).run();
    case 3: return Product<Code, 3>(call).run();
    default: return Product<Code, 4>(call).run();
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL
