// linear_integer.cpp's products, bit for bit, with AMX tiles, for several rows.
//
//   step     a group's inputs, or half a group's where halves have scales of their own
//   tile     16 rows (or 12) x a step's inputs, times a step's inputs x 16 outputs: int32 sums of 16 rows x 16 outputs
//   vectors  each row of those is added to the row's float32 sums (F::add), which stay in a register over many groups
//
// The vectors take longest: while tiles are at work, one of the two ports does not multiply, add or convert floats, and a
// group needs 48 such instructions or more. A step's product takes long to come out, so tiles are some steps ahead:
//
//   multiply step i │ store what step i - 3 gave │ add step i - 4 to the sums
//
// Each tile is cleared as soon as it was read for the last time. That costs nothing, and in phases in which all that loads
// tiles is slow (as if the core's other thread held most of the tile registers) a product takes half the time.
//
// A tile of rows stays in the first-level cache, a range of weights, unpacked, in the second-level one: it comes by the
// rows, block by block, and each two blocks are finished at once, so that a row's outputs are written one after the other.
//
// x, for all threads, a tile's inputs of a group in a row (32 bytes) for each of its rows:
//
//   rows of tile 0 │ group 0 │ group 1 │ … ║ rows of tile 1 │ …            and likewise scales, and what is beside them
//
// A thread's own: a range's weights, a byte each, minus the format's centre │ their scales │ sums

#include <algorithm>
#include <new>

#include "ahead.hpp"
#include "integer_rows.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "scratch.hpp"
#include "shares.hpp"
#include "simd.hpp"
#include "thread_pool.hpp"
#include "tiles.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kGroupBytes = kGroup * kLanes;  // of weights
constexpr int kTileWords = kTileRows * kLanes;
constexpr int64_t kInputsAtOnce = 4 << 20;        // bytes
constexpr int64_t kGroupsInCache = 48;            // of a tile that stay in the first-level cache
constexpr int64_t kWeightsInCache = 512 << 10;    // bytes of unpacked weights that stay in the second-level cache
constexpr int64_t kTasks = 4;                     // at least, a thread
constexpr int64_t kChunkTiles = 8;                // at least
constexpr int64_t kFetched = 2048;                // bytes of weights ahead
constexpr int kAhead = 4;                         // steps, as many as there are tiles of sums

using u8x64 = uint8_t __attribute__((vector_size(64)));

// What is multiplied in one go: some groups of tiles of rows and blocks, all blocks by a tile, then by the next one.
template <typename F>
struct Pass {
  const Linear* call;
  Ahead* ahead;
  int64_t row, rows, tiles;
  const int8_t* x;            // from the first row and group on
  const float *x_scales, *beside;
  int64_t block, blocks;      // the first one's number is even
  const uint8_t* weight;      // from the first block and group on
  const typename F::Scales* scales;
  int64_t groups, all_groups;  // that are multiplied, and that a tile or block has
  float* sums;                // [panels][rows][kSumsStride], or of one panel
  int64_t panel_words;        // from panel to panel, or 0
  bool begins, ends;          // sums begin at zero; they are finished
};

// Where the tiles are.
template <typename F, int Rows>
class Multiplier {
 public:
  OCTAVO_INLINE explicit Multiplier(const Pass<F>& pass) : pass_(pass), x_(pass.x), weight_(pass.weight) {
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
  }

  // Multiplies the next step into tile Step, and stores what the step three before gave to its place in `given`, [4][256].
  template <int Step>
  OCTAVO_INLINE void step(int32_t* given) {
    constexpr int kDone = (Step + 1) % kAhead, kHalf = Step % F::kHalves;
    store_tile<kDone>(given + kDone * kTileWords, kLanes * 4);
    clear_tile<kDone>();
    load_tile<4>(x_ + kHalf * kGroup / F::kHalves, kGroup);
    stream_tile<5>(weight_ + kHalf * kGroupBytes / F::kHalves, 64);
    multiply_signed_tiles<Step, 4, 5, F::kCentre != 0>();
    clear_tile<4>();
    clear_tile<5>();
    if constexpr (kHalf + 1 == F::kHalves) next_group();
  }

 private:
  // After the last one, the first: its products are not wanted.
  OCTAVO_INLINE void next_group() {
    pass_.ahead->fetch();
    x_ += Rows * kGroup;
    weight_ += kGroupBytes;
    if (++group_ < pass_.groups) return;
    group_ = 0;
    weight_ += (pass_.all_groups - pass_.groups) * kGroupBytes;
    if (++block_ == pass_.blocks) {
      block_ = 0;
      weight_ = pass_.weight;
      if (++tile_ == pass_.tiles) tile_ = 0;
    }
    x_ = pass_.x + tile_ * pass_.all_groups * Rows * kGroup;
  }

  const Pass<F>& pass_;
  const int8_t* x_;
  const uint8_t* weight_;
  int64_t group_ = 0, block_ = 0, tile_ = 0;
};

// Where the vectors are.
template <typename F, int Rows>
class Adder {
 public:
  OCTAVO_INLINE explicit Adder(const Pass<F>& pass)
      : pass_(pass), x_scales_(pass.x_scales), beside_(pass.beside), scales_(pass.scales) {}

  OCTAVO_INLINE void begin(f32x16 (&sum)[Rows]) const {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sum[r] = pass_.begins ? f32x16{} : load(sums() + r * kSumsStride);
  }

  // Adds a group's products to the sums. True: it was the last one.
  OCTAVO_INLINE bool add(f32x16 (&sum)[Rows], const int32_t* totals) {
    const typename F::Scales weights = *scales_++;
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      f32x16 total[F::kHalves];
#pragma GCC unroll 2
      for (int half = 0; half < F::kHalves; ++half) {
        i32x16 whole;
        std::memcpy(&whole, totals + half * kTileWords + r * kLanes, sizeof whole);
        total[half] = __builtin_convertvector(whole, f32x16);
      }
      sum[r] = F::add(sum[r], total, weights, x_scales_[r], F::kBeside == Beside::start ? 0.0f : beside_[r]);
    }
    x_scales_ += Rows;
    beside_ += Rows;
    if (++group_ < pass_.groups) return false;
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) store(sums() + r * kSumsStride, sum[r]);
    if (next_block()) return true;
    begin(sum);
    return false;
  }

 private:
  OCTAVO_INLINE float* sums() const {
    return pass_.sums + block_ / kPanel * pass_.panel_words + block_ % kPanel * kLanes;
  }

  // True: there is none.
  OCTAVO_INLINE bool next_block() {
    group_ = 0;
    scales_ += pass_.all_groups - pass_.groups;
    const int64_t first = block_ / kPanel * kPanel, row = tile_ * Rows;
    if ((++block_ == pass_.blocks || block_ % kPanel == 0) && pass_.ends)
      finish_rows(*pass_.call, pass_.row + row, std::min<int64_t>(Rows, pass_.rows - row), pass_.block + first,
                  block_ - first, pass_.sums + first / kPanel * pass_.panel_words);
    if (block_ == pass_.blocks) {
      block_ = 0;
      scales_ = pass_.scales;
      if (++tile_ == pass_.tiles) return true;
    }
    x_scales_ = pass_.x_scales + tile_ * pass_.all_groups * Rows;
    beside_ = pass_.beside + tile_ * pass_.all_groups * Rows;
    return false;
  }

  const Pass<F>& pass_;
  const float *x_scales_, *beside_;
  const typename F::Scales* scales_;
  int64_t group_ = 0, block_ = 0, tile_ = 0;
};

template <typename F, int Rows>
__attribute__((noinline)) void add_up(const Pass<F>& pass) {
  alignas(64) int32_t given[kAhead * kTileWords];
  Multiplier<F, Rows> multiplier(pass);
  multiplier.template step<0>(given);
  multiplier.template step<1>(given);
  multiplier.template step<2>(given);
  multiplier.template step<3>(given);
  Adder<F, Rows> adder(pass);
  f32x16 sum[Rows];
  adder.begin(sum);
  for (;;) {
    multiplier.template step<0>(given);
    if constexpr (F::kHalves == 1)
      if (adder.add(sum, given)) return;
    multiplier.template step<1>(given);
    if (adder.add(sum, given + (2 - F::kHalves) * kTileWords)) return;
    multiplier.template step<2>(given);
    if constexpr (F::kHalves == 1)
      if (adder.add(sum, given + 2 * kTileWords)) return;
    multiplier.template step<3>(given);
    if (adder.add(sum, given + (4 - F::kHalves) * kTileWords)) return;
  }
}

template <typename F>
class TileIntegerProduct {
 public:
  explicit TileIntegerProduct(const Linear& call)
      : call_(call),
        layout_(layout_of(call.format, call.span)),
        blocks_(blocks_of(call)),
        panels_((blocks_ + kPanel - 1) / kPanel),
        block_bytes_(layout_.block_bytes(call.in_size)),
        groups_(layout_.spans(call.in_size) * layout_.span),
        parts_((groups_ + kGroupsInCache - 1) / kGroupsInCache) {
    const int64_t at_once = std::max<int64_t>(1, kInputsAtOnce / (kTileRows * groups_ * kGroup));
    const int64_t all_tiles = (call.rows + kTileRows - 1) / kTileRows;
    const int64_t row_blocks = (all_tiles + at_once - 1) / at_once;
    // Tiles are equally high, 12 or 16 rows: there are kFewestTileRows at least.
    tile_rows_ = ((call.rows + all_tiles - 1) / all_tiles + 3) / 4 * 4;
    all_tiles_ = (call.rows + tile_rows_ - 1) / tile_rows_;
    tiles_ = (all_tiles_ + row_blocks - 1) / row_blocks;
    // Ranges of weights stay in the cache, each for chunks of the rows.
    const int64_t in_cache = std::max<int64_t>(1, kWeightsInCache / (kPanel * unpacked_bytes()));
    const int64_t tasks = kTasks * pool().size();
    ranges_ = (panels_ + in_cache - 1) / in_cache;
    chunks_ = std::clamp<int64_t>((tasks + ranges_ - 1) / ranges_, 1, std::max<int64_t>(1, tiles_ / kChunkTiles));
    ranges_ = std::min(panels_, std::max(ranges_, (tasks + chunks_ - 1) / chunks_));
    range_ = (panels_ + ranges_ - 1) / ranges_;
  }

  void run() const {
    const int64_t threads = pool().size();
    const int64_t x_bytes = tiles_ * tile_rows_ * groups_ * kGroup;
    const int64_t scales_bytes = tiles_ * groups_ * kTileRows * static_cast<int64_t>(sizeof(float));
    char* memory = static_cast<char*>(scratch(x_bytes + 2 * scales_bytes + threads * own_bytes()));
    Inputs x{};
    x.numbers = reinterpret_cast<int8_t*>(memory);
    x.scales = reinterpret_cast<float*>(memory + x_bytes);
    x.beside = reinterpret_cast<float*>(memory + x_bytes + scales_bytes);
    char* own = memory + x_bytes + 2 * scales_bytes;
    for (int64_t tile = 0; tile < all_tiles_; tile += tiles_) {
      x.row = tile * tile_rows_;
      x.tiles = std::min(tiles_, all_tiles_ - tile);
      x.rows = std::min(x.tiles * tile_rows_, call_.rows - x.row);
      const int64_t all = x.tiles * groups_, pieces = std::min(all, kTasks * threads);
      pool().run(pieces, [&](int64_t piece) {
        const int64_t begin = all * piece / pieces, end = all * (piece + 1) / pieces;
        if (call_.type == Type::bf16) put_groups<bf16>(x, begin, end);
        else put_groups<float>(x, begin, end);
      });
      Shares shares(ranges_ * chunks_, threads);
      pool().run(threads, [&](int64_t thread) { work_off(x, thread, shares, own + thread * own_bytes()); });
    }
  }

 private:
  using Scales = typename F::Scales;

  // Quantized rows, in tiles.
  struct Inputs {
    int8_t* numbers;
    float *scales, *beside;
    int64_t row, rows, tiles;
  };

  // A thread's range of weights, unpacked.
  struct Work {
    uint8_t* numbers;
    Scales* scales;
    float* sums;
    int64_t block, blocks;
    Ahead ahead;
  };

  // Of a block.
  int64_t unpacked_bytes() const { return groups_ * (kGroupBytes + static_cast<int64_t>(sizeof(Scales))); }

  int64_t own_bytes() const {
    return range_ * (kPanel * unpacked_bytes() + kTileRows * kSumsStride * static_cast<int64_t>(sizeof(float)));
  }

  // Groups from `begin` to `end`, counted through all tiles.
  template <typename T>
  void put_groups(const Inputs& x, int64_t begin, int64_t end) const {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t tile = index / groups_, group = index % groups_;
      for (int64_t r = 0; r < tile_rows_; ++r) {
        const int64_t row = tile * tile_rows_ + r, at = index * tile_rows_ + r;
        Group found{};
        if (row < x.rows) found = quantize_group<T>(call_, x.row + row, group);
        for (int half = 0; half < 2; ++half) store_bytes(x.numbers + at * kGroup + half * kLanes, found.numbers[half]);
        x.scales[at] = found.scale;
        if constexpr (F::kBeside != Beside::start) put_beside<F>(found, x.beside + at);
      }
    }
  }

  // A block's groups, as tiles and scales.
  void unpack(int64_t block, uint8_t* numbers, Scales* scales) const {
    const Layout layout = F::layout(layout_);
    const uint8_t* from = packed(block);
    for (int64_t group = 0; group < groups_; ++group, ++scales) {
      const uint8_t* span = from + group / layout.span * layout.span_bytes();
      const uint8_t* at = span + layout.span_header + group % layout.span * layout.group_bytes();
      for (int64_t line = 0; line < layout.group_bytes(); line += kLineBytes) __builtin_prefetch(at + kFetched + line);
      const typename F::Lines lines(at + layout.group_header);
#pragma GCC unroll 4
      for (int pair = 0; pair < kLines / 2; ++pair, numbers += 2 * kLineBytes) {
        u32x16 even, odd;
        lines.open(pair, even, odd);
        put_line(even, numbers);
        put_line(odd, numbers + kLineBytes);
      }
      new (scales) Scales(typename F::Head(span), at);
    }
  }

  const uint8_t* packed(int64_t block) const { return static_cast<const uint8_t*>(call_.weight) + block * block_bytes_; }

  static OCTAVO_INLINE void put_line(u32x16 line, uint8_t* to) {
    const u8x64 found = (u8x64)line - static_cast<uint8_t>(F::kCentre);
    std::memcpy(to, &found, sizeof found);
  }

  int64_t first_block(int64_t range) const { return std::min(blocks_, panels_ * range / ranges_ * kPanel); }

  // The weights of task `after`, where they are others than those of `task`.
  Ahead ahead(int64_t task, int64_t after) const {
    const int64_t range = after / chunks_;
    if (range == task / chunks_) return {};
    const uint8_t *begin = packed(first_block(range)), *end = packed(first_block(range + 1));
    const int64_t groups = (end - begin) / block_bytes_ * groups_ * (tiles_ / chunks_);
    return Ahead::of(begin, end - begin, groups);
  }

  // Ranges of weights, each for some rows, then for the next ones.
  void work_off(const Inputs& x, int64_t thread, Shares& shares, char* own) const {
    Work work{};
    work.numbers = reinterpret_cast<uint8_t*>(own);
    work.scales = reinterpret_cast<Scales*>(own + range_ * kPanel * groups_ * kGroupBytes);
    work.sums = reinterpret_cast<float*>(work.scales + range_ * kPanel * groups_);
    const Tiles shape(static_cast<int>(tile_rows_), kLines / F::kHalves);
    int64_t unpacked = -1;
    for (int64_t task = shares.take(thread); task >= 0; task = shares.take(thread)) {
      const int64_t range = task / chunks_, chunk = task % chunks_;
      work.block = first_block(range);
      work.blocks = first_block(range + 1) - work.block;
      if (range != unpacked)
        for (int64_t b = 0; b < work.blocks; ++b)
          unpack(work.block + b, work.numbers + b * groups_ * kGroupBytes, work.scales + b * groups_);
      unpacked = range;
      const int64_t after = shares.next(thread);
      work.ahead = after >= 0 ? ahead(task, after) : Ahead{};
      multiply(x, x.tiles * chunk / chunks_, x.tiles * (chunk + 1) / chunks_, work);
    }
  }

  // Of many inputs a part at a time: of a tile, so many stay in the first-level cache while blocks come by.
  void multiply(const Inputs& x, int64_t tile, int64_t last, Work& work) const {
    Pass<F> pass{};
    pass.call = &call_;
    pass.ahead = &work.ahead;
    pass.block = work.block;
    pass.blocks = work.blocks;
    pass.all_groups = groups_;
    pass.sums = work.sums;
    pass.panel_words = parts_ == 1 ? 0 : kTileRows * kSumsStride;
    for (pass.tiles = parts_ == 1 ? last - tile : 1; tile < last; tile += pass.tiles)
      for (int64_t part = 0; part < parts_; ++part) {
        const int64_t from = groups_ * part / parts_, at = (tile * groups_ + from) * tile_rows_;
        pass.row = x.row + tile * tile_rows_;
        pass.rows = x.row + x.rows - pass.row;
        pass.x = x.numbers + at * kGroup;
        pass.x_scales = x.scales + at;
        pass.beside = x.beside + at;
        pass.weight = work.numbers + from * kGroupBytes;
        pass.scales = work.scales + from;
        pass.groups = groups_ * (part + 1) / parts_ - from;
        pass.begins = part == 0;
        pass.ends = part == parts_ - 1;
        if (tile_rows_ == 12) add_up<F, 12>(pass);
        else add_up<F, 16>(pass);
      }
  }

  const Linear& call_;
  Layout layout_;
  int64_t blocks_, panels_, block_bytes_, groups_, parts_;
  int64_t tile_rows_, all_tiles_, tiles_;  // tiles_: at once
  int64_t ranges_, range_, chunks_;        // range_: panels, at most
};

}  // namespace

void linear_integer_amx(const Linear& call) {
  by_format(call.format, [&](auto format) { TileIntegerProduct<decltype(format)>(call).run(); });
}

}  // namespace octavo::OCTAVO_LEVEL
