// Attention over the paged KV cache, for any mix of prompt chunks and single rows. The cache's layout is drawn at KVCache.
//
// A query vector (one row, one head) looks at positions of its own. They are cut into partitions of 256 positions, at
// multiples of 256; each is reduced from a fresh state, and the results are merged in ascending order. So the bits do not
// depend on chunks, on what was cached, on the rows beside it or on threads: a long context can be shared out among them.
//
//   vectors of one KV head ─┬─ tile of up to 12 ─┬─ partition 0 ─ scores → softmax → weighted values ┐
//                           │                    ├─ partition 1 ─ …                                  ├─ merge
//                           └─ …                 └─ …                                                ┘

#include <algorithm>
#include <cstring>

#include "eight_bits.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "simd.hpp"
#include "thread_pool.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kPartition = 256;
constexpr int64_t kProducts = 1 << 16;  // what is less is not worth a second thread
constexpr int64_t kChunk = 256;           // channels of a query that are widened at a time

// Sums are in registers: of 32, or of 16 that hold half as much. Query vectors of a tile share what is read of the cache.
#if defined(__AVX512F__)
constexpr int kTile = 12;
constexpr int keys_together(int count) { return count <= 4 ? 4 : 2; }      // groups of 16 positions
constexpr int channels_together(int count) { return count <= 6 ? 4 : 2; }  // vectors of 16 channels
#else
constexpr int kTile = 6;
constexpr int keys_together(int) { return 1; }
constexpr int channels_together(int) { return 1; }
#endif

// Calls visit with a number of vectors, known at compile time, that is at least `count`.
template <typename Visit>
OCTAVO_INLINE void with_count(int64_t count, const Visit& visit) {
  if (count <= 1) return visit(std::integral_constant<int, 1>());
  if (count <= 2) return visit(std::integral_constant<int, 2>());
  if (count <= 3) return visit(std::integral_constant<int, 3>());
  if (count <= 4) return visit(std::integral_constant<int, 4>());
  if constexpr (kTile == 6) return visit(std::integral_constant<int, 6>());
  if (count <= 6) return visit(std::integral_constant<int, 6>());
  if (count <= 8) return visit(std::integral_constant<int, 8>());
  visit(std::integral_constant<int, kTile>());
}

// What a line of packed keys adds to the sums of 16 positions: one channel, or a pair of bf16. Products are float32 on
// every level: where there is a bf16 dot product, it is slower.
template <typename K>
constexpr int kTogether = sizeof(K) == 2 ? 2 : 1;

// Calls visit with a value of the type.
template <typename Visit>
OCTAVO_INLINE void with_type(Type type, const Visit& visit) {
  if (type == Type::bf16) visit(bf16());
  else visit(float());
}

struct Tile {
  int64_t request, head;  // KV head
  int64_t first, count;   // query vectors: row * shared + head of the group
};

// What one partition gives for each vector of a tile, and what they are merged into.
struct State {
  float most[kLanes];
  float total[kLanes];
  float* sums;  // [kTile, head_size]
};

// K: what the cache keeps. Of 8 bits a key's factor multiplies its score, and a value's factor its weight: no product is
// spent on single channels.
template <typename K>
class TileAttention {
 public:
  TileAttention(const Attention& call, const Tile& tile)
      : call_(call),
        tile_(tile),
        size_(call.cache.head_size),
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

  int64_t first_partition() const { return low_ / kPartition; }
  int64_t partitions() const { return (high_ + kPartition - 1) / kPartition - first_partition(); }

  void clear(State& state) const {
    std::fill_n(state.most, kLanes, -__builtin_inff());
    std::fill_n(state.total, kLanes, 0.0f);
  }

  // `keys`: room for the keys of 16 positions, where tiles are narrower.
  void reduce(int64_t partition, State& state, K* room) const {
    clear(state);
    const int64_t low = std::max(low_, partition * kPartition) / kLanes * kLanes;
    const int64_t high = std::min(high_, (partition + 1) * kPartition);
    alignas(64) float weights[kTile][kPartition];
    with_count(tile_.count, [&](auto count) {
      for (int64_t channel = 0; channel < size_; channel += kChunk) score<count>(low, high, channel, weights, room);
    });
    alignas(64) float factors[2][kScaled<K> ? kPartition : 1] = {};
    if constexpr (kScaled<K>) gather_factors(low, high, factors);
    for (int64_t v = 0; v < tile_.count; ++v) soften(v, low, high, factors, weights[v], state);
    with_count(tile_.count, [&](auto count) { add_values<count>(low, high, weights, state); });
  }

  void begin(State& whole) const {
    clear(whole);
    std::fill_n(whole.sums, kTile * size_, 0.0f);
  }

  // `part.sums` may be null: nothing to add. Never inlined: which product is fused with the sum may differ from copy to
  // copy, and the bits are to be the same wherever partitions are merged.
  __attribute__((noinline)) void merge(const State& part, State& whole) const {
    const f32x16 old_most = load(whole.most), most = load(part.most);
    const f32x16 peak = select(less(old_most, most) | is_nan(most), most, old_most);
    const i32x16 nothing = equal(most, splat(-__builtin_inff()));
    const f32x16 old_share = select(nothing, splat(1.0f), exp(old_most - peak));
    const f32x16 share = select(nothing, f32x16{}, exp(most - peak));
    store(whole.most, peak);
    store(whole.total, load(whole.total) * old_share + load(part.total) * share);
    for (int64_t v = 0; v < tile_.count; ++v) {
      if (nothing[v]) continue;
      const float kept = old_share[v], added = share[v];
      float* to = whole.sums + v * size_;
      if (part.sums == nullptr) {
        by_vectors(size_, [&](int64_t i, auto lanes) { store(to + i, load(to + i, lanes) * kept, lanes); });
        continue;
      }
      const float* from = part.sums + v * size_;
      by_vectors(size_, [&](int64_t i, auto lanes) {
        store(to + i, load(to + i, lanes) * kept + load(from + i, lanes) * added, lanes);
      });
    }
  }

  void finish(State& whole) const {
    State sinks{{}, {}, nullptr};
    clear(sinks);
    for (int64_t v = 0; v < tile_.count; ++v) {
      sinks.most[v] = sink_[v];
      sinks.total[v] = 1.0f;
    }
    if (call_.sinks != nullptr) merge(sinks, whole);  // they take their share of the weight and add no value
    with_type(call_.cache.type, [&](auto type) {
      for (int64_t v = 0; v < tile_.count; ++v) {
        auto* to = static_cast<decltype(type)*>(call_.out) + out_[v];
        by_vectors(size_, [&](int64_t i, auto lanes) {
          store(to + i, load(whole.sums + v * size_ + i, lanes) / whole.total[v], lanes);
        });
      }
    });
  }

 private:
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

  // Of the positions' keys, and of their values.
  void gather_factors(int64_t low, int64_t high, float (*factors)[kPartition]) const {
    for (int64_t position = first_tile(low); position < high; position += width_)
      for (int which = 0; which < 2; ++which)
        std::memcpy(factors[which] + position - low, keys(position) + which * half_ + width_ * size_,
                    width_ * sizeof(float));
    for (int which = 0; kUnit<K> != 1.0f && which < 2; ++which)
      for (int64_t i = 0; i < kPartition; i += kLanes) store(factors[which] + i, load(factors[which] + i) * kUnit<K>);
  }

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

  // weights[v][position - low]: the products of query and keys, for whole groups of 16 positions; added to what is there
  // where `first`, the channel from which they are taken, is not 0.
  template <int Count>
  void score(int64_t low, int64_t high, int64_t first, float (*weights)[kPartition], K* room) const {
    const int64_t channels = std::min(kChunk, size_ - first);
    alignas(64) float query[Count][kChunk];
    with_type(call_.cache.type, [&](auto type) {
      for (int64_t v = 0; v < Count; ++v) {  // what is beyond the tile's vectors is computed and not used
        const auto* from = static_cast<const decltype(type)*>(call_.query) + query_[std::min(v, tile_.count - 1)] + first;
        by_vectors(channels, [&](int64_t i, auto lanes) { store(query[v] + i, load(from + i, lanes), lanes); });
      }
    });
    constexpr int Groups = keys_together(Count);
    const bool whole = width_ == kLanes;
    int64_t position = low;
    for (; whole && position + (Groups - 1) * kLanes < high; position += Groups * kLanes) {
      const K *tiles[Groups], *next[Groups];
      for (int64_t group = 0; group < Groups; ++group) {
        tiles[group] = keys(position + group * kLanes) + first * kLanes;
        const int64_t ahead = position + (Groups + group) * kLanes;
        next[group] = keys(ahead < high ? ahead : position) + first * kLanes;
      }
      score_groups<Count, Groups>(tiles, next, query, channels, first > 0, weights, position - low);
    }
    for (; position < high; position += kLanes) {
      if (!whole) gather(position, room);
      const K* tiles[1] = {(whole ? keys(position) : room) + first * kLanes};
      score_groups<Count, 1>(tiles, tiles, query, channels, first > 0, weights, position - low);
    }
  }

  template <int Count, int Groups>
  OCTAVO_INLINE void score_groups(const K* const (&tiles)[Groups], const K* const (&next)[Groups],
                                  const float (*query)[kChunk], int64_t channels, bool more,
                                  float (*weights)[kPartition], int64_t offset) const {
    f32x16 sum[Count][Groups] = {};
    if (more)
      for (int v = 0; v < Count; ++v)
        for (int group = 0; group < Groups; ++group) sum[v][group] = load(weights[v] + offset + group * kLanes);
    for (int64_t channel = 0; channel < channels; channel += kTogether<K>) {
      if (Groups > 1 && (!kScaled<K> || channel % 4 == 0))  // a line of the cache's 64 bytes has 4 channels of 8 bits
        for (int group = 0; group < Groups; ++group) {  // the values of these positions are read soon, then other keys
          __builtin_prefetch(tiles[group] + half_ + channel * kLanes);
          __builtin_prefetch(next[group] + channel * kLanes);
        }
      if constexpr (kTogether<K> == 1) {
        f32x16 key[Groups];
        for (int group = 0; group < Groups; ++group) key[group] = load(tiles[group] + channel * kLanes);
        for (int v = 0; v < Count; ++v)
          for (int group = 0; group < Groups; ++group)
            sum[v][group] = sum[v][group] + splat(query[v][channel]) * key[group];
      } else {
        u32x16 line[Groups];
        for (int group = 0; group < Groups; ++group)
          std::memcpy(&line[group], tiles[group] + channel * kLanes, sizeof line[group]);
        for (int v = 0; v < Count; ++v)
          for (int group = 0; group < Groups; ++group)
            sum[v][group] = sum[v][group] + splat(query[v][channel]) * (f32x16)(line[group] << 16);
        for (int v = 0; v < Count; ++v)
          for (int group = 0; group < Groups; ++group)
            sum[v][group] = sum[v][group] + splat(query[v][channel + 1]) * (f32x16)(line[group] & 0xffff0000u);
      }
    }
    for (int v = 0; v < Count; ++v)
      for (int group = 0; group < Groups; ++group) store(weights[v] + offset + group * kLanes, sum[v][group]);
  }

  // Scores to weights e^(score - most), 0 where the vector may not look; their sum and the largest score.
  // The values' factors go into the weights, and not into their sum.
  template <int64_t Size>
  void soften(int64_t v, int64_t low, int64_t high, const float (&factors)[2][Size], float* weights,
              State& state) const {
    const f32x16 nothing = splat(-__builtin_inff());
    f32x16 most = nothing;
    for (int64_t position = low; position < high; position += kLanes) {
      f32x16 score = load(weights + (position - low));
      if constexpr (kScaled<K>) score = score * load(factors[0] + (position - low));
      score = score * call_.scale;
      if (call_.softcap > 0.0f) score = tanh(score / call_.softcap) * call_.softcap;
      // Chosen, not multiplied: a lane that is hidden may hold anything.
      const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      const int32_t begin = static_cast<int32_t>(std::max<int64_t>(begin_[v] - position, 0));
      const int32_t end = static_cast<int32_t>(std::min<int64_t>(end_[v] - position, kLanes));
      const i32x16 seen = reaches(lane, begin - i32x16{}) & less(lane, end - i32x16{});
      score = select(seen, score, nothing);
      store(weights + (position - low), score);
      most = select(is_nan(score), score, max(score, most));
    }
    const float peak = max_lane(most);
    state.most[v] = peak;
    if (peak == -__builtin_inff()) {
      std::fill_n(weights, (high - low + kLanes - 1) / kLanes * kLanes, 0.0f);
      return;
    }
    f32x16 total = {};
    for (int64_t position = low; position < high; position += kLanes) {
      const f32x16 weight = exp(load(weights + (position - low)) - peak);
      if constexpr (kScaled<K>) store(weights + (position - low), weight * load(factors[1] + (position - low)));
      else store(weights + (position - low), weight);
      total = total + weight;
    }
    state.total[v] = sum(total);
  }

  // state.sums: the weighted values.
  template <int Count>
  void add_values(int64_t low, int64_t high, const float (*weights)[kPartition], State& state) const {
    constexpr int Vectors = channels_together(Count);
    int64_t channel = 0;
    for (; channel + Vectors * kLanes <= size_; channel += Vectors * kLanes)
      add_some<Count, Vectors>(low, high, weights, channel, state);
    for (; channel + kLanes <= size_; channel += kLanes) add_some<Count, 1>(low, high, weights, channel, state);
    if (channel < size_) add_last(low, high, weights, channel, static_cast<int>(size_ - channel), state);
  }

  // Calls all(position, its value) where all vectors look, and some(…) where some do. What a vector does not see it must
  // not add, not even times zero: infinity and NaN would come through.
  template <typename All, typename Some>
  OCTAVO_INLINE void by_positions(int64_t low, int64_t high, const All& all, const Some& some) const {
    int64_t position = std::max(low, low_);
    const int64_t together = kScaled<K> ? width_ : call_.cache.block_size;  // whose values follow each other
    const auto run = [&](int64_t end, const auto& visit) {
      while (position < end) {
        const K* at = value(position);
        const int64_t left = together - position % together;
        for (const int64_t stop = std::min(end, position + left); position < stop; ++position, at += size_)
          visit(position, at);
      }
    };
    run(std::min(last_begin_, high), some);
    run(std::min(first_end_, high), all);
    run(high, some);
  }

  bool sees(int64_t v, int64_t position) const {
    return v < tile_.count && position >= begin_[v] && position < end_[v];
  }

  template <int Count, int Vectors>
  void add_some(int64_t low, int64_t high, const float (*weights)[kPartition], int64_t channel, State& state) const {
    f32x16 sum[Count][Vectors] = {};
    by_positions(
        low, high,
        [&](int64_t position, const K* at) {
          f32x16 part[Vectors];
          for (int i = 0; i < Vectors; ++i) part[i] = load(at + channel + i * kLanes);
          for (int v = 0; v < Count; ++v)
            for (int i = 0; i < Vectors; ++i) sum[v][i] = sum[v][i] + splat(weights[v][position - low]) * part[i];
        },
        [&](int64_t position, const K* at) {
          for (int v = 0; v < Count; ++v)
            if (sees(v, position))
              for (int i = 0; i < Vectors; ++i)
                sum[v][i] = sum[v][i] + splat(weights[v][position - low]) * load(at + channel + i * kLanes);
        });
    for (int v = 0; v < Count; ++v)
      for (int i = 0; i < Vectors; ++i) store(state.sums + v * size_ + channel + i * kLanes, sum[v][i]);
  }

  // The last channels of heads that are not whole vectors.
  void add_last(int64_t low, int64_t high, const float (*weights)[kPartition], int64_t channel, int count,
                State& state) const {
    f32x16 sum[kTile] = {};
    const auto add = [&](int64_t position, const K* at) {
      const f32x16 part = load_part(at + channel, count);
      for (int64_t v = 0; v < tile_.count; ++v)
        if (sees(v, position)) sum[v] = sum[v] + splat(weights[v][position - low]) * part;
    };
    by_positions(low, high, add, add);
    for (int64_t v = 0; v < tile_.count; ++v) store_part(state.sums + v * size_ + channel, sum[v], count);
  }

  const Attention& call_;
  const Tile& tile_;
  const int64_t size_, shared_;
  const int64_t row_, half_, width_;  // what a token's key takes, and all keys of a block, of K; tokens of a tile
  int64_t low_, high_;              // positions that any vector of the tile looks at
  int64_t last_begin_, first_end_;  // positions that all of them look at
  int64_t query_[kTile], out_[kTile];  // where they begin
  float sink_[kTile];
  int64_t begin_[kTile], end_[kTile];
};

int64_t tiles_of_head(const Attention& call, int64_t request) {
  const int64_t rows = call.query_start[request + 1] - call.query_start[request];
  return (rows * (call.query_heads / call.cache.heads) + kTile - 1) / kTile;
}

void list_tiles(const Attention& call, Tile* tiles) {
  const int64_t shared = call.query_heads / call.cache.heads;
  for (int64_t request = 0; request < call.requests; ++request) {
    const int64_t vectors = (call.query_start[request + 1] - call.query_start[request]) * shared;
    for (int64_t head = 0; head < call.cache.heads; ++head)
      for (int64_t first = 0; first < vectors; first += kTile)
        *tiles++ = {request, head, first, std::min<int64_t>(kTile, vectors - first)};
  }
}

// What a thread needs for its tiles.
template <typename K>
class Room {
 public:
  explicit Room(int64_t size) : sums_(2 * kTile * size), keys_(kLanes * size), part{{}, {}, sums_.data()},
                                whole{{}, {}, sums_.data() + kTile * size} {}
  K* keys() const { return keys_.data(); }

 private:
  const Buffer<float> sums_;
  const Buffer<K> keys_;

 public:
  State part, whole;
};

// Many tiles: each goes through its partitions by itself.
template <typename K>
void whole_tiles(const Attention& call, const Buffer<Tile>& tiles, int64_t count, int64_t pieces) {
  pool().run(pieces, [&](int64_t piece) {
    Room<K> room(call.cache.head_size);
    for (int64_t index = count * piece / pieces; index < count * (piece + 1) / pieces; ++index) {
      const TileAttention<K> work(call, tiles[index]);
      work.begin(room.whole);
      for (int64_t p = 0; p < work.partitions(); ++p) {
        work.reduce(work.first_partition() + p, room.part, room.keys());
        work.merge(room.part, room.whole);
      }
      work.finish(room.whole);
    }
  });
}

struct Piece {
  int64_t tile, partition;
};

// Few tiles with long contexts: partitions are shared out, and merged when all are there.
template <typename K>
void shared_tiles(const Attention& call, const Buffer<Tile>& tiles, int64_t count, int64_t num_pieces) {
  const int64_t size = kTile * call.cache.head_size;
  const Buffer<Piece> pieces(num_pieces);
  const Buffer<State> parts(num_pieces);
  const Buffer<float> sums((num_pieces + 1) * size);
  for (int64_t index = 0, next = 0; index < count; ++index) {
    const TileAttention<K> work(call, tiles[index]);
    for (int64_t p = 0; p < work.partitions(); ++p, ++next) {
      pieces[next] = {index, work.first_partition() + p};
      parts[next].sums = sums.data() + next * size;
    }
  }
  pool().run(num_pieces, [&](int64_t piece) {
    const Buffer<K> keys(call.cache.tile() == kLanes ? 0 : kLanes * call.cache.head_size);
    TileAttention<K>(call, tiles[pieces[piece].tile]).reduce(pieces[piece].partition, parts[piece], keys.data());
  });
  State whole{{}, {}, sums.data() + num_pieces * size};
  for (int64_t index = 0, next = 0; index < count; ++index) {
    const TileAttention<K> work(call, tiles[index]);
    work.begin(whole);
    for (; next < num_pieces && pieces[next].tile == index; ++next) work.merge(parts[next], whole);
    work.finish(whole);
  }
}

template <typename K>
void attend(const Attention& call) {
  const int64_t rows = call.query_start[call.requests], row_size = call.query_heads * call.cache.head_size;
  // Rows of no request.
  with_type(call.cache.type, [&](auto type) {
    std::fill_n(static_cast<decltype(type)*>(call.out) + rows * row_size, (call.rows - rows) * row_size, type);
  });
  int64_t count = 0, products = 0;  // tiles, and what their vectors look at
  for (int64_t request = 0; request < call.requests; ++request) {
    count += call.cache.heads * tiles_of_head(call, request);
    const int64_t own = call.query_start[request + 1] - call.query_start[request];
    products += own * call.query_heads * call.seq_lens[request] * call.cache.head_size;
  }
  const Buffer<Tile> tiles(count);
  list_tiles(call, tiles.data());
  const int64_t threads = pool().size();
  if (threads > 1 && count < 4 * threads && products > kProducts) {
    int64_t num_pieces = 0;
    for (int64_t index = 0; index < count; ++index) num_pieces += TileAttention<K>(call, tiles[index]).partitions();
    if (num_pieces > count) return shared_tiles<K>(call, tiles, count, num_pieces);
  }
  whole_tiles<K>(call, tiles, count, products > kProducts ? std::min(count, 32 * threads) : std::min<int64_t>(count, 1));
}

}  // namespace

void attention(const Attention& call) {
  if (call.cache.kept == Kept::int8) attend<Int8>(call);
  else if (call.cache.kept == Kept::fp8) attend<E4M3>(call);
  else if (call.cache.type == Type::bf16) attend<bf16>(call);
  else attend<float>(call);
}

}  // namespace octavo::OCTAVO_LEVEL
