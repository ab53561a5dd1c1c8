// What a tile of query vectors looks at, how its partitions are put together, and where the cache has what it reads:
// the parts of attention (attention.cpp) that do not depend on how products are made.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>

#include "eight_bits.hpp"
#include "kernels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kPartition = 256;
// Scores and weights of a vector, apart by an odd number of cache lines: rows in the same place fall into different sets.
constexpr int64_t kWeightsStride = kPartition + kLanes;

// What a line of packed keys adds to the sums of 16 positions: one channel, or a pair of bf16.
template <typename K>
constexpr int kTogether = sizeof(K) == 2 ? 2 : 1;

// Calls visit with a value of the type.
template <typename Visit>
OCTAVO_INLINE void with_type(Type type, const Visit& visit) {
  if (type == Type::bf16) visit(bf16());
  else visit(float());
}

constexpr int64_t padded(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

struct Tile {
  int64_t request, head;  // KV head
  int64_t first, count;   // query vectors: row * shared + head of the group
};

// What one partition gives for each vector of a tile, and what they are merged into.
template <int Vectors>
struct State {
  float most[Vectors];
  float total[Vectors];
  float* sums;  // [vectors, head_size padded to 16]
};

// What a thread reduces after a partition, or null.
template <typename Work>
struct Next {
  const Work* tile = nullptr;
  int64_t partition = 0;
};

// K: what the cache keeps. Of 8 bits a key's factor multiplies its score, and a value's factor its weight: no product is
// spent on single channels. Vectors: how many a tile may have.
template <typename K, int Vectors>
class TileView {
 public:
  static constexpr int kTile = Vectors;
  using State = OCTAVO_LEVEL::State<(Vectors + kLanes - 1) / kLanes * kLanes>;

  TileView(const Attention& call, const Tile& tile)
      : call_(call),
        tile_(tile),
        size_(call.cache.head_size),
        padded_(padded(size_, kLanes)),
        shared_(call.query_heads / call.cache.heads),
        row_(size_ + (kScaled<K> ? kFactor : 0)),
        half_(call.cache.heads * call.cache.block_size * row_),
        width_(call.cache.tile()) {
    const int64_t start = call.query_start[tile.request];
    const int64_t rows = call.query_start[tile.request + 1] - start;
    const int64_t past = call.seq_lens[tile.request] - rows;
    low_ = first_end_ = INT64_MAX;
    high_ = last_begin_ = 0;
    for (int64_t v = 0; v < tile.count; ++v) {
      const int64_t row = (tile.first + v) / shared_, head = tile.head * shared_ + (tile.first + v) % shared_;
      query_[v] = (start + row) * call.query_stride + head * size_;
      out_[v] = ((start + row) * call.query_heads + head) * size_;
      sink_[v] = call.sinks == nullptr ? -__builtin_inff() : call.sinks[head];
      end_[v] = past + row + 1;
      begin_[v] = call.window > 0 ? std::max<int64_t>(0, end_[v] - call.window) : 0;
      low_ = std::min(low_, begin_[v]);
      high_ = std::max(high_, end_[v]);
      last_begin_ = std::max(last_begin_, begin_[v]);
      first_end_ = std::min(first_end_, end_[v]);
    }
  }

  // Room for what `State::sums` points to, of tiles of up to so many vectors.
  static int64_t sums_size(const Attention& call, int64_t vectors) {
    return (vectors > kLanes ? kTile : std::min(kTile, kLanes)) * padded(call.cache.head_size, kLanes);
  }

  int64_t first_partition() const { return low_ / kPartition; }
  int64_t partitions() const { return (high_ + kPartition - 1) / kPartition - first_partition(); }

  void begin(State& whole) const {
    clear(whole);
    std::fill_n(whole.sums, tile_.count * padded_, 0.0f);
  }

  // `part.sums` may be null: nothing to add. Never inlined: which product is fused with the sum may differ from copy to
  // copy, and the bits are to be the same wherever partitions are merged.
  __attribute__((noinline)) void merge(const State& part, State& whole) const {
    for (int64_t v = 0; v < tile_.count; v += kLanes) merge_vectors(v, std::min(v + kLanes, tile_.count), part, whole);
  }

  // Of a tile with a single partition, that one's state will do: merged, it is multiplied by e^0 and added to 0, and the sum
  // of that and 0 here is the same, a negative zero included.
  void finish(State& whole) const {
    State sinks{};
    clear(sinks);
    for (int64_t v = 0; v < tile_.count; ++v) {
      sinks.most[v] = sink_[v];
      sinks.total[v] = 1.0f;
    }
    if (call_.sinks != nullptr) merge(sinks, whole);  // they take their share of the weight and add no value
    for (int64_t v = 0; v < tile_.count; v += kLanes) store(whole.total + v, 1.0f / load(whole.total + v));
    with_type(call_.cache.type, [&](auto type) {
      for (int64_t v = 0; v < tile_.count; ++v) {
        auto* to = static_cast<decltype(type)*>(call_.out) + out_[v];
        by_vectors(size_, [&](int64_t i, auto lanes) {
          put(to + i, load(whole.sums + v * padded_ + i, lanes) * whole.total[v] + 0.0f, lanes);
        });
      }
    });
  }

 protected:
  void clear(State& state) const {
    std::fill(std::begin(state.most), std::end(state.most), -__builtin_inff());
    std::fill(std::begin(state.total), std::end(state.total), 0.0f);
  }

  void merge_vectors(int64_t first, int64_t end, const State& part, State& whole) const {
    const f32x16 old_most = load(whole.most + first), most = load(part.most + first);
    const f32x16 peak = select(less(old_most, most) | is_nan(most), most, old_most);
    const i32x16 nothing = equal(most, splat(-__builtin_inff()));
    const f32x16 old_share = select(nothing, splat(1.0f), exp(old_most - peak));
    const f32x16 share = select(nothing, f32x16{}, exp(most - peak));
    store(whole.most + first, peak);
    store(whole.total + first, load(whole.total + first) * old_share + load(part.total + first) * share);
    for (int64_t v = first; v < end; ++v) {
      if (nothing[v - first]) continue;
      const float kept = old_share[v - first], added = share[v - first];
      float* to = whole.sums + v * padded_;
      if (part.sums == nullptr) {
        by_vectors(size_, [&](int64_t i, auto lanes) { store(to + i, load(to + i, lanes) * kept, lanes); });
        continue;
      }
      const float* from = part.sums + v * padded_;
      by_vectors(size_, [&](int64_t i, auto lanes) {
        store(to + i, load(to + i, lanes) * kept + load(from + i, lanes) * added, lanes);
      });
    }
  }

  const K* keys(int64_t position) const {  // of the tile that begins with this position
    const int64_t block = call_.block_table[tile_.request * call_.table_stride + position / call_.cache.block_size];
    return static_cast<const K*>(call_.cache.data) + block * 2 * half_ +
           (tile_.head * call_.cache.block_size + position % call_.cache.block_size) * row_;
  }

  const K* value(int64_t position) const {
    const int64_t lane = kScaled<K> ? position % width_ : 0;  // where there are no factors, all of a block's are one row
    return keys(position - lane) + half_ + lane * size_;
  }

  // Positions before the first that anybody looks at may have no block: the first tile that has one.
  int64_t first_tile(int64_t position) const { return std::max(position, low_ / width_ * width_); }

  // The keys of 16 positions put together from narrower tiles. Positions that nobody looks at may have no block: their
  // lanes are zero.
  void gather(int64_t position, K* room) const {
    constexpr int64_t Together = kTogether<K>;
    for (int64_t step = 0; step < size_ / Together; ++step) {
      K line[kLanes * Together] = {};
      for (int64_t at = first_tile(position); at < std::min(position + kLanes, high_); at += width_)
        std::memcpy(line + (at - position) * Together, keys(at) + step * width_ * Together,
                    width_ * Together * sizeof(K));
      std::memcpy(room + step * kLanes * Together, line, sizeof line);
    }
  }

  // Of the keys of positions from `low` to `high`, and of their values; those of position p are at p - base. There is room
  // for a partition.
  void gather_factors(int64_t base, int64_t low, int64_t high, float (*factors)[kPartition]) const {
    for (int64_t position = first_tile(low); position < high; position += width_)
      for (int which = 0; which < 2; ++which)
        std::memcpy(factors[which] + position - base, keys(position) + which * half_ + width_ * size_,
                    width_ * sizeof(float));
    for (int which = 0; kUnit<K> != 1.0f && which < 2; ++which)
      for (int64_t i = 0; i < kPartition; i += kLanes) store(factors[which] + i, load(factors[which] + i) * kUnit<K>);
  }

  const Attention& call_;
  const Tile& tile_;
  const int64_t size_, padded_, shared_;
  const int64_t row_, half_, width_;  // what a token's key takes, and all keys of a block, of K; tokens of a tile
  int64_t low_, high_;              // positions that any vector of the tile looks at
  int64_t last_begin_, first_end_;  // positions that all of them look at
  int64_t query_[kTile], out_[kTile];  // where they begin
  float sink_[kTile];
  int64_t begin_[kTile], end_[kTile];
};

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL
