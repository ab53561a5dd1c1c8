// linear_integer.cpp's products, bit for bit, with AMX tiles, for several rows.
//
//   step     a group's inputs, or half a group's where halves have scales of their own
//   tile     16 rows (or 12) x a step's inputs, times a step's inputs x 16 outputs: int32 sums of 16 rows x 16 outputs
//   vectors  each row of those is added to the row's float32 sums (F::add), which stay in a register over many groups
//
// The vectors take longest: while tiles are multiplied, there is one vector instruction a cycle. A step's product takes long to
// come out, so tiles are some steps ahead:
//
//   multiply step i │ store what step i - 3 gave │ add step i - 4 to the sums
//
// Each tile is cleared as soon as it was read for the last time. That costs nothing, and in phases in which all that loads
// tiles is slow (as if the core's other thread held most of the tile registers) a product takes half the time.
//
// x, for all threads, a tile's inputs of a group in a row (32 bytes) for each of its rows:
//
//   rows of tile 0 │ group 0 │ group 1 │ … ║ rows of tile 1 │ …            and likewise scales, and what is beside them
//
// A thread's own: some groups of a block's weights, a byte each, minus the format's centre │ their scales │ a panel's sums

#include <algorithm>
#include <atomic>
#include <new>

#include "integer_rows.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "scratch.hpp"
#include "simd.hpp"
#include "thread_pool.hpp"
#include "tiles.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kGroupBytes = kGroup * kLanes;  // of weights
constexpr int kTileWords = kTileRows * kLanes;
constexpr int64_t kInputsInCache = 1 << 20;       // bytes of inputs that stay in the second-level cache
constexpr int64_t kGroupsAtOnce = 40;             // whose weights stay in the first-level cache
constexpr int64_t kManyRows = 64;
constexpr int64_t kFetched = 2048;                // bytes of weights ahead
constexpr int kAhead = 4;                         // steps, as many as there are tiles of sums

using u8x64 = uint8_t __attribute__((vector_size(64)));

// What is multiplied in one go: all tiles of rows by some groups of a block.
template <typename F>
struct Pass {
  const int8_t* x;            // of the first group
  int64_t x_tile;             // bytes from tile to tile
  const float* x_scales;      // likewise
  const float* beside;
  int64_t scales_tile;        // floats from tile to tile
  int64_t tiles;
  const uint8_t* weight;
  const typename F::Scales* scales;
  int64_t groups;
  const uint8_t* next;        // the packed weights that are unpacked after this
  int64_t next_bytes;         // of a group of them
  float* sums;                // [rows][kSumsStride]
  bool first;                 // sums begin at zero
};

// Where the tiles are.
template <typename F, int Rows>
class Multiplier {
 public:
  OCTAVO_INLINE explicit Multiplier(const Pass<F>& pass)
      : pass_(pass), x_(pass.x), weight_(pass.weight), next_(pass.next) {
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
    load_tile<5>(weight_ + kHalf * kGroupBytes / F::kHalves, 64);
    multiply_signed_tiles<Step, 4, 5, F::kCentre != 0>();
    clear_tile<4>();
    clear_tile<5>();
    if constexpr (kHalf + 1 == F::kHalves) next_group();
  }

 private:
  // After the last one, the first: its products are not wanted.
  OCTAVO_INLINE void next_group() {
    if (tile_ == 0) {  // memory is not to rest while tiles are multiplied
      for (int64_t line = 0; line < pass_.next_bytes; line += kLineBytes) __builtin_prefetch(next_ + line, 0, 2);
      next_ += pass_.next_bytes;
    }
    x_ += Rows * kGroup;
    weight_ += kGroupBytes;
    if (++group_ < pass_.groups) return;
    group_ = 0;
    if (++tile_ == pass_.tiles) tile_ = 0;
    x_ = pass_.x + tile_ * pass_.x_tile;
    weight_ = pass_.weight;
  }

  const Pass<F>& pass_;
  const int8_t* x_;
  const uint8_t *weight_, *next_;
  int64_t group_ = 0, tile_ = 0;
};

// Where the vectors are.
template <typename F, int Rows>
class Adder {
 public:
  OCTAVO_INLINE explicit Adder(const Pass<F>& pass)
      : pass_(pass), scales_(pass.x_scales), beside_(pass.beside), sums_(pass.sums) {}

  OCTAVO_INLINE void begin(f32x16 (&sum)[Rows]) const {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sum[r] = pass_.first ? f32x16{} : load(sums_ + r * kSumsStride);
  }

  // Adds a group's products to the sums. True: it was the last one.
  OCTAVO_INLINE bool add(f32x16 (&sum)[Rows], const int32_t* totals) {
    const typename F::Scales weights = pass_.scales[group_];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      f32x16 total[F::kHalves];
#pragma GCC unroll 2
      for (int half = 0; half < F::kHalves; ++half) {
        i32x16 whole;
        std::memcpy(&whole, totals + half * kTileWords + r * kLanes, sizeof whole);
        total[half] = __builtin_convertvector(whole, f32x16);
      }
      sum[r] = F::add(sum[r], total, weights, scales_[r], F::kBeside == Beside::start ? 0.0f : beside_[r]);
    }
    scales_ += Rows;
    beside_ += Rows;
    if (++group_ < pass_.groups) return false;
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) store(sums_ + r * kSumsStride, sum[r]);
    if (++tile_ == pass_.tiles) return true;
    group_ = 0;
    sums_ += Rows * kSumsStride;
    scales_ = pass_.x_scales + tile_ * pass_.scales_tile;
    beside_ = pass_.beside + tile_ * pass_.scales_tile;
    begin(sum);
    return false;
  }

 private:
  const Pass<F>& pass_;
  const float *scales_, *beside_;
  float* sums_;
  int64_t group_ = 0, tile_ = 0;
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
        parts_((groups_ + kGroupsAtOnce - 1) / kGroupsAtOnce) {
    const int64_t in_cache = std::max<int64_t>(1, kInputsInCache / (kTileRows * groups_ * kGroup));
    const int64_t all_tiles = (call.rows + kTileRows - 1) / kTileRows;
    row_blocks_ = (all_tiles + in_cache - 1) / in_cache;
    // Tiles are equally high, 12 or 16 rows: there are kFewestTileRows at least.
    tile_rows_ = ((call.rows + all_tiles - 1) / all_tiles + 3) / 4 * 4;
    all_tiles_ = (call.rows + tile_rows_ - 1) / tile_rows_;
    tiles_ = (all_tiles_ + row_blocks_ - 1) / row_blocks_;
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
      const int64_t all = x.tiles * groups_, pieces = std::min(all, x.rows < kManyRows ? threads : 8 * threads);
      pool().run(pieces, [&](int64_t piece) {
        const int64_t begin = all * piece / pieces, end = all * (piece + 1) / pieces;
        if (call_.type == Type::bf16) put_groups<bf16>(x, begin, end);
        else put_groups<float>(x, begin, end);
      });
      // Few rows: each thread streams one range of the weights. Many: smaller ranges, so that no thread waits long.
      const int64_t ranges = std::min(panels_, x.rows < kManyRows ? threads : 8 * threads);
      std::atomic<int64_t> next{0}, next_own{0};
      pool().run(std::min(threads, ranges), [&](int64_t) {
        char* mine = own + next_own++ * own_bytes();
        const Tiles shape(static_cast<int>(tile_rows_), kLines / F::kHalves);
        for (int64_t range = next++; range < ranges; range = next++)
          for (int64_t panel = panels_ * range / ranges; panel < panels_ * (range + 1) / ranges; ++panel)
            multiply(x, panel * kPanel, mine);
      });
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

  int64_t own_bytes() const {
    return kGroupsAtOnce * (kGroupBytes + static_cast<int64_t>(sizeof(Scales))) +
           tiles_ * tile_rows_ * kSumsStride * static_cast<int64_t>(sizeof(float));
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

  // Groups of one block from `begin` to `end`, as tiles and scales.
  void unpack(int64_t block, int64_t begin, int64_t end, uint8_t* numbers, Scales* scales) const {
    const Layout layout = F::layout(layout_);
    const uint8_t* from = static_cast<const uint8_t*>(call_.weight) + block * block_bytes_;
    for (int64_t group = begin; group < end; ++group, ++scales) {
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

  static OCTAVO_INLINE void put_line(u32x16 line, uint8_t* to) {
    const u8x64 found = (u8x64)line - static_cast<uint8_t>(F::kCentre);
    std::memcpy(to, &found, sizeof found);
  }

  void multiply(const Inputs& x, int64_t block, char* own) const {
    uint8_t* numbers = reinterpret_cast<uint8_t*>(own);
    Scales* scales = reinterpret_cast<Scales*>(own + kGroupsAtOnce * kGroupBytes);
    float* sums = reinterpret_cast<float*>(scales + kGroupsAtOnce);
    const int64_t blocks = std::min(kPanel, blocks_ - block);
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t part = 0; part < parts_; ++part) {
        const int64_t begin = groups_ * part / parts_, end = groups_ * (part + 1) / parts_;
        unpack(block + b, begin, end, numbers, scales);
        Pass<F> pass{};
        pass.x = x.numbers + begin * tile_rows_ * kGroup;
        pass.x_tile = groups_ * tile_rows_ * kGroup;
        pass.x_scales = x.scales + begin * tile_rows_;
        pass.beside = x.beside + begin * tile_rows_;
        pass.scales_tile = groups_ * tile_rows_;
        pass.tiles = x.tiles;
        pass.weight = numbers;
        pass.scales = scales;
        pass.groups = end - begin;
        pass.next_bytes = layout_.span_bytes() / layout_.span;
        pass.next = static_cast<const uint8_t*>(call_.weight) + (block + b) * block_bytes_ + end * pass.next_bytes;
        pass.sums = sums + b * kLanes;
        pass.first = part == 0;
        if (tile_rows_ == 12) add_up<F, 12>(pass);
        else add_up<F, 16>(pass);
      }
    // Tile by tile: a row's outputs of both blocks are written one after the other.
    for (int64_t row = 0; row < x.rows; row += tile_rows_)
      finish_rows(call_, x.row + row, std::min(tile_rows_, x.rows - row), block, blocks, sums + row * kSumsStride);
  }

  const Linear& call_;
  Layout layout_;
  int64_t blocks_, panels_, block_bytes_, groups_, parts_;
  int64_t row_blocks_, tile_rows_, all_tiles_, tiles_;
};

}  // namespace

void linear_integer_amx(const Linear& call) {
  by_format(call.format, [&](auto format) { TileIntegerProduct<decltype(format)>(call).run(); });
}

}  // namespace octavo::OCTAVO_LEVEL
