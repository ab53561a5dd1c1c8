// The same as linear_amx.cpp, for more than 16 rows, and for coded (coded.hpp) and quantized weights (formats.hpp).
//
//   tiles 0, 1 sums of rows 0-15, 16-31 and one block │ 4, 5 x │ 6 weights
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
// Coded and quantized weights become lines while the first 32 rows of a task are multiplied. Of few rows, a part's lines
// are kept at a time, of more rows all parts', where they fit: the tasks that follow, with other rows, find them.
//
// The last tile ends with the last row, and has some rows again that another tile has: the same sums, of which only the
// others are used.

#include <algorithm>

#include "ahead.hpp"
#include "claim.hpp"
#include "coded_lines.hpp"
#include "epilogue.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "linear_amx.hpp"
#include "scratch.hpp"
#include "shares.hpp"
#include "simd.hpp"
#include "thread_pool.hpp"
#include "tiles.hpp"
#include "widen.hpp"
#include "widened_tile.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kStepsInCache = 20;           // of 32 rows: they stay in the first-level cache
constexpr int64_t kWeightsInCache = 512 << 10;  // bytes that stay in the second-level cache
constexpr int64_t kWeightsOnce = 144 << 10;     // bytes of a group that is read once
constexpr int64_t kReadOnce = 384;              // rows up to which each weight is read by one thread only
constexpr int64_t kTasks = 4;                   // a thread, or more: none is to wait long
constexpr int64_t kSmallestChunk = 64;          // rows
constexpr int64_t kLargestChunk = 384;          // rows whose sums stay in the second-level cache, or more:
constexpr int64_t kSumsInCache = 512 << 10;     // bytes
constexpr int64_t kClaimedRows = 2;             // with each step
constexpr int64_t kCodedAhead = 6;              // steps
constexpr int64_t kQuantizedAhead = 12;

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

// What a pass reads: lines; or weights as they are kept: coded, far away or fetched beforehand, or quantized.
enum class Kind { lines, coded, coded_near, quantized };

// The same block's part as it is kept: the first rows' pass makes lines of it, a step ahead of the products. `after`: the
// block of which the same part comes next.
struct Fresh {
  const Linear* call;
  WidenTile widen_tile;  // of quantized weights
  const uint8_t* block;
  const uint8_t* after;
  int64_t from, steps;
  uint8_t* to;  // of step `from`

  template <Kind K>
  OCTAVO_INLINE void widen(int64_t step) const {
    if (step >= steps) return;
    const int64_t ahead = step + (K == Kind::quantized ? kQuantizedAhead : kCodedAhead);
    const uint8_t* later = ahead < steps ? block : after;
    const int64_t later_step = from + (ahead < steps ? ahead : std::min(ahead - steps, steps - 1));
    uint8_t* lines = to + step * kTileBytes;
    if constexpr (K == Kind::quantized)
      widen_tile(*call, {block, from + step, later, later_step, lines});
    else
      octavo::OCTAVO_LEVEL::widen_tile<K == Kind::coded>(CodedLines(*call), CodedLines::tile(block, from + step), lines,
                                                         later + coded_tile_at(later_step));
  }
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
  float scale;
  Claim claim;

  OCTAVO_INLINE void finish_one() {
    if (rows == 0) return;
    finish_silu(sums, out, scale);
    ++row;
    --rows;
    sums += kPairRows;
    out += stride;
  }
};

// RowTiles tiles of rows and a block; Finish: with each step a row of what is pending, so that vectors work beside tiles.
// sums: [16 * RowTiles][32].
template <int RowTiles, bool Finish, Kind K, typename Out>
void add_up_rows(const Part& part, const Fresh& fresh, float* sums, Ahead& ahead, Pending<Out>& pending) {
  constexpr int64_t kSumsBytes = kPairRows * 4;
  float* second = sums + part.second * kPairRows;
  if (part.begins) {
    clear_tile<0>();
    if constexpr (RowTiles == 2) clear_tile<1>();
  } else {
    load_tile<0>(sums, kSumsBytes);
    if constexpr (RowTiles == 2) load_tile<1>(second, kSumsBytes);
  }
  if constexpr (K != Kind::lines) fresh.widen<K>(0);
  for (int64_t step = 0; step < part.steps; ++step) {
    if constexpr (K != Kind::lines) fresh.widen<K>(step + 1);
    else ahead.fetch();
    multiply_rows<RowTiles>(part.x.step(step), part.weight + step * kTileWords);
    pending.claim.step();
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
        whole_(call.format == Format::f8 || parts_ == 1 ||
               (shape_.widened() && call.rows > kReadOnce && kPanel * shape_.block_words * 4 <= kWeightsInCache / 4)),
        group_((call.rows <= kReadOnce ? kWeightsOnce : kWeightsInCache) / panel_bytes()) {
    // Lines of a part are made anew by each task: there are few, of many rows.
    const bool once = call.rows <= kReadOnce || (shape_.widened() && !whole_);
    const int64_t tasks = (once ? kTasks : 2 * kTasks) * pool().size();
    if (once) group_ = call.rows <= kPairRows ? 1 : std::min(group_, panels_ / tasks);
    group_ = std::max<int64_t>(1, std::min(group_, panels_));
    groups_ = (panels_ + group_ - 1) / group_;
    const int64_t wanted = once ? 1 : (tasks + groups_ - 1) / groups_;
    chunk_ = std::max(kSmallestChunk, ((call.rows + wanted - 1) / wanted + kPairRows - 1) / kPairRows * kPairRows);
    if (parts_ > 1) {
      const int64_t in_cache = kSumsInCache / (group_ * kPairRows * 4) / kPairRows * kPairRows;
      chunk_ = std::min(chunk_, std::max(kLargestChunk, in_cache));
    }
    chunks_ = (call.rows + chunk_ - 1) / chunk_;
    chunk_ = ((call.rows + chunks_ - 1) / chunks_ + kPairRows - 1) / kPairRows * kPairRows;
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
    uint32_t* lines;  // of a group, or a part of it
    int64_t group;    // whose lines these are
    int64_t fetched;  // the group of which coded weights were fetched, or -1
    int64_t turn;
    Pending<Out> pending;
    Ahead ahead;
  };

  void finish_all(Pending<Out>& pending) const {
    const auto all = [&](auto scaled) {
      finish<bf16, Out, decltype(scaled)::value>(call(), pending.row, pending.rows, pending.block, pending.blocks,
                                                 pending.sums, kPairRows);
    };
    if (shape_.quantized()) all(std::true_type());
    else all(std::false_type());
    pending.rows = 0;
  }

  // A task is a group of panels for a chunk of rows, the next one the same group for the next rows.
  void work_off(int64_t thread, Shares& shares) const {
    const int64_t pairs = parts_ == 1 ? 2 : group_ * (chunk_ / kPairRows);
    const int64_t sums_bytes = pairs * kPairRows * kPairRows * 4;
    const int64_t lines_bytes = plain() ? 0 : group_ * kPanel * lines_words() * 4;
    char* memory = static_cast<char*>(scratch(sums_bytes + lines_bytes));
    const Tiles tiles(kTileRows);
    Work work{reinterpret_cast<float*>(memory), reinterpret_cast<uint32_t*>(memory + sums_bytes), -1, -1, 0, {}, {}};
    for (int64_t task = shares.take(thread); task >= 0; task = shares.take(thread))
      multiply_group(task, shares.next(thread), work);
    finish_all(work.pending);
  }

  const Linear& call() const { return shape_.call; }
  bool plain() const { return call().format == Format::plain; }

  int64_t first_panel(int64_t group) const { return panels_ * group / groups_; }
  int64_t first_step(int64_t part) const { return shape_.whole_steps * part / parts_; }

  // Of what stays in the second-level cache: of each block a part of the inputs, or all of them where they are widened.
  int64_t panel_bytes() const { return kPanel * lines_words() * 4; }
  int64_t lines_words() const {
    return whole_ ? shape_.block_words : (shape_.whole_steps + parts_ - 1) / parts_ * kTileWords;
  }

  int64_t first_block(int64_t group) const { return first_panel(group) * kPanel; }
  int64_t last_block(int64_t group) const { return std::min(shape_.blocks, first_panel(group + 1) * kPanel); }

  // Pairs of tiles of rows that a task has.
  int64_t passes(int64_t task) const {
    return (std::min(chunk_, call().rows - task % chunks_ * chunk_) + kPairRows - 1) / kPairRows;
  }

  // The weights of a part of task `after`, where they are others than those of `task`: fetched with the steps of a part, if
  // they are coded with those of all passes but the one that makes lines of them.
  Ahead ahead(int64_t task, int64_t after, int64_t part, bool fresh) const {
    const int64_t group = task / chunks_, next = after / chunks_, rounds = passes(task) - (fresh ? 1 : 0);
    if (after < 0 || call().format == Format::f8 || rounds == 0) return {};
    if (next == group && (parts_ == 1 || (shape_.widened() && whole_ && !(fresh && after == task)))) return {};  // it is there
    const int64_t steps = rounds * (last_block(group) - first_block(group)) * (shape_.whole_steps / parts_);
    const int64_t begin = first_block(next), blocks = last_block(next) - begin;
    const int64_t from = first_step(part), to = first_step(part + 1);
    if (shape_.widened()) {
      const int64_t at = shape_.kept_from(from), stride = shape_.kept_block_bytes();
      return Ahead::of(shape_.kept_block(begin) + at, shape_.kept_to(to - 1) - at, blocks, stride, steps);
    }
    if (parts_ == 1) return Ahead::of(shape_.weight(begin), blocks * shape_.block_words * 4, steps);
    return Ahead::of(shape_.weight(begin) + from * kTileWords, (to - from) * kTileBytes, blocks, shape_.block_words * 4, steps);
  }

  // after: the next task, or -1.
  void multiply_group(int64_t task, int64_t after, Work& work) const {
    const int64_t group = task / chunks_, begin = task % chunks_ * chunk_, end = std::min(call().rows, begin + chunk_);
    const int64_t panel = first_panel(group), last = first_panel(group + 1);
    const bool is_new = work.group != group, fresh = shape_.widened() && (is_new || !whole_);
    if (call().format == Format::f8 && is_new)
      widen_blocks(call(), shape_.layout, first_block(group), last_block(group) - first_block(group), work.lines);
    bool fetched = work.fetched == group;
    work.group = group;
    for (int64_t part = 0; part < parts_; ++part) {
      work.ahead = ahead(task, part + 1 < parts_ ? task : after, (part + 1) % parts_, fresh);
      if (part == 0 && parts_ > 1) finish_all(work.pending);
      for (int64_t row = begin; row < end; row += kPairRows) {
        float* sums = work.sums + (parts_ == 1 ? 0 : (row - begin) / kPairRows * group_) * kPairRows * kPairRows;
        const Kind kind = !fresh || row > begin ? Kind::lines
                          : shape_.quantized()  ? Kind::quantized
                          : fetched             ? Kind::coded_near
                                                : Kind::coded;
        multiply_part(row, std::min(kPairRows, end - row), panel, last, part, sums, kind, work);
      }
      fetched = work.ahead.lines > 0;
    }
    work.fetched = fetched && after >= 0 ? after / chunks_ : -1;
  }

  using AddUpRows = void (*)(const Part&, const Fresh&, float*, Ahead&, Pending<Out>&);
  template <Kind K>
  static AddUpRows add_up_of(bool two, bool by_rows) {
    return two ? by_rows ? add_up_rows<2, true, K, Out> : add_up_rows<2, false, K, Out>
               : by_rows ? add_up_rows<1, true, K, Out> : add_up_rows<1, false, K, Out>;
  }
  static AddUpRows add_up_of(Kind kind, bool two, bool by_rows) {
    switch (kind) {
      case Kind::coded: return add_up_of<Kind::coded>(two, by_rows);
      case Kind::coded_near: return add_up_of<Kind::coded_near>(two, by_rows);
      case Kind::quantized: return add_up_of<Kind::quantized>(two, by_rows);
      case Kind::lines: break;
    }
    return add_up_of<Kind::lines>(two, by_rows);
  }

  // The panels' products of a part of up to 32 rows.
  __attribute__((noinline)) void multiply_part(int64_t row, int64_t rows, int64_t panel, int64_t last, int64_t part,
                                               float* all_sums, Kind kind, Work& work) const {
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
    const auto add_up = add_up_of(kind, two, by_rows);
    Fresh fresh{};
    for (int64_t p = panel; p < last; ++p) {
      const int64_t block = p * kPanel, blocks = std::min(kPanel, shape_.blocks - block);
      float* sums = all_sums + (parts_ == 1 ? work.turn++ % 2 : p - panel) * kPairRows * kPairRows;
      for (int64_t b = 0; b < blocks; ++b) {
        uint32_t* own = work.lines + ((p - panel) * kPanel + b) * lines_words();
        const uint32_t* lines = plain() ? shape_.weight(block + b) : own;
        pass.weight = lines + (plain() || whole_ ? from : 0) * kTileWords;
        if (has_tail) shape_.copy_tail(lines, tail);
        if (kind != Kind::lines)
          fresh = {&call(), widen_tile_, shape_.kept_block(block + b),
                   shape_.kept_block(std::min(block + b + 1, shape_.blocks - 1)), from, pass.steps,
                   reinterpret_cast<uint8_t*>(const_cast<uint32_t*>(pass.weight))};
        add_up(pass, fresh, sums + b * kLanes, work.ahead, work.pending);
      }
      if (!ends) continue;
      finish_all(work.pending);
      Out* out = silu_ ? static_cast<Out*>(call().out) + row * call().out_stride + block / 2 * kLanes : nullptr;
      work.pending = {row, rows, block, blocks, sums + (row - begin) * kPairRows, out, call().out_stride, sum_scale(call()),
                      Claim::of(call(), row, rows, (call().gated ? block / 2 : block) * kLanes, kClaimedRows)};
    }
  }

  Shape shape_;
  // Gates of silu take many instructions, and are finished row by row where all blocks are whole.
  bool silu_ = call().gated && call().function == Function::silu && call().bias == nullptr &&
               row_size(call()) % kLanes == 0;
  WidenTile widen_tile_ = shape_.quantized() ? widen_tile_of(call().format) : nullptr;
  int64_t panels_, parts_;
  bool whole_;  // lines of all parts are kept, where weights are not plain
  int64_t group_;
  int64_t groups_, chunk_, chunks_;
};

}  // namespace

void linear_many_amx(const Linear& call) {
  call.out_type == Type::bf16 ? ManyRows<bf16>(call).run() : ManyRows<float>(call).run();
}

}  // namespace octavo::OCTAVO_LEVEL
