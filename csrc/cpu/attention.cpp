// Attention over the paged KV cache, for any mix of prompt chunks and single rows. The cache's layout is drawn at KVCache.
//
// A query vector (one row, one head) looks at positions of its own. They are cut into partitions of 256 positions, at
// multiples of 256; each is reduced from a fresh state, and the results are merged in ascending order. So the bits do not
// depend on chunks, on what was cached, on the rows beside it or on threads: a long context can be shared out among them.
//
//   vectors of one KV head ─┬─ tile of up to 6 ──┬─ partition 0 ─ scores → softmax → weighted values ┐
//                           │                    ├─ partition 1 ─ …                                  ├─ merge
//                           └─ …                 └─ …                                                ┘

#include <algorithm>
#include <cstring>

#include "kernels.hpp"
#include "levels.hpp"
#include "simd.hpp"
#include "step.hpp"
#include "thread_pool.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kPartition = 256;
constexpr int kTile = 6;      // query vectors that share what is read of the cache
constexpr int kChannels = 4;  // vectors of 16 channels that are summed at a time

struct Tile {
  int64_t request, head;  // KV head
  int64_t first, count;   // query vectors: row * shared + head of the group
};

// What one partition gives for each vector of a tile, and what they are merged into.
struct State {
  float most[kTile];
  float total[kTile];
  float* sums;  // [kTile, head_size]
};

template <typename Step>
class TileAttention {
  using T = typename Step::Element;

 public:
  TileAttention(const Attention& call, const Tile& tile)
      : call_(call), tile_(tile), size_(call.cache.head_size), shared_(call.query_heads / call.cache.heads) {
    const int64_t start = call.query_start[tile.request];
    const int64_t rows = call.query_start[tile.request + 1] - start;
    const int64_t past = call.seq_lens[tile.request] - rows;
    low_ = first_end_ = INT64_MAX;
    high_ = last_begin_ = 0;
    for (int64_t v = 0; v < tile.count; ++v) {
      const int64_t row = (tile.first + v) / shared_, head = tile.head * shared_ + (tile.first + v) % shared_;
      query_[v] = static_cast<const T*>(call.query) + (start + row) * call.query_stride + head * size_;
      out_[v] = static_cast<T*>(call.out) + ((start + row) * call.query_heads + head) * size_;
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
    std::fill_n(state.most, kTile, -__builtin_inff());
    std::fill_n(state.total, kTile, 0.0f);
    std::fill_n(state.sums, kTile * size_, 0.0f);
  }

  void reduce(int64_t partition, State& state) const {
    clear(state);
    const int64_t low = std::max(low_, partition * kPartition) / kLanes * kLanes;
    const int64_t high = std::min(high_, (partition + 1) * kPartition);
    alignas(64) float weights[kTile][kPartition];
    score(low, high, weights);
    for (int64_t v = 0; v < tile_.count; ++v) soften(v, low, high, weights[v], state);
    for (int64_t channel = 0; channel < size_;) channel += add_values(low, high, weights, channel, state);
  }

  void merge(const State& part, State& whole) const {
    for (int64_t v = 0; v < tile_.count; ++v) {
      if (part.most[v] == -__builtin_inff()) continue;
      merge_one(v, part.most[v], part.total[v], part.sums + v * size_, whole);
    }
  }

  void finish(State& whole) const {
    for (int64_t v = 0; v < tile_.count; ++v) {
      // A sink takes its share of the weight and adds no value.
      if (sink_[v] != -__builtin_inff()) merge_one(v, sink_[v], 1.0f, nullptr, whole);
      for (int64_t i = 0; i < size_; ++i) narrow(whole.sums[v * size_ + i] / whole.total[v], out_[v] + i);
    }
  }

 private:
  const T* block_of(int64_t position) const {
    const int64_t block = call_.block_table[tile_.request * call_.table_stride + position / call_.cache.block_size];
    return static_cast<const T*>(call_.cache.data) + block * 2 * call_.cache.heads * call_.cache.block_size * size_;
  }

  const T* keys(int64_t position) const {  // of the tile that begins with this position
    return block_of(position) + (tile_.head * call_.cache.block_size + position % call_.cache.block_size) * size_;
  }

  const T* value(int64_t position) const { return keys(position) + call_.cache.heads * call_.cache.block_size * size_; }

  // The keys of 16 positions for one step along the channels, where tiles are narrower: put together from several.
  // Positions that nobody looks at may have no block: their lanes stay zero.
  u32x16 gathered(int64_t position, int64_t step) const {
    u32x16 line = {};
    const int64_t width = call_.cache.tile();
    for (int64_t lane = 0; lane < kLanes && position + lane < high_; lane += width)
      std::memcpy(reinterpret_cast<uint32_t*>(&line) + lane, keys(position + lane) + step * width * Step::kTogether,
                  width * sizeof(uint32_t));
    return line;
  }

  // weights[v][position - low]: the products of query and keys, for whole groups of 16 positions.
  void score(int64_t low, int64_t high, float (*weights)[kPartition]) const {
    const bool whole = call_.cache.tile() == kLanes;
    for (int64_t position = low; position < high; position += kLanes) {
      const T* tile = whole ? keys(position) : nullptr;
      f32x16 sum[kTile] = {};
      for (int64_t step = 0; step < size_ / Step::kTogether; ++step) {
        u32x16 line;
        if (whole) std::memcpy(&line, tile + step * kLanes * Step::kTogether, sizeof line);
        else line = gathered(position, step);
        for (int64_t v = 0; v < tile_.count; ++v) {
          uint32_t x;
          std::memcpy(&x, query_[v] + step * Step::kTogether, sizeof x);
          sum[v] = Step::add(sum[v], x, line);
        }
      }
      for (int64_t v = 0; v < tile_.count; ++v) store(weights[v] + (position - low), sum[v]);
    }
  }

  // Scores to weights e^(score - most), 0 where the vector may not look; their sum and the largest score.
  void soften(int64_t v, int64_t low, int64_t high, float* weights, State& state) const {
    const f32x16 nothing = splat(-__builtin_inff());
    f32x16 most = nothing;
    for (int64_t position = low; position < high; position += kLanes) {
      f32x16 score = load(weights + (position - low)) * call_.scale;
      if (call_.softcap > 0.0f) score = tanh(score / call_.softcap) * call_.softcap;
      // Chosen, not multiplied: a lane that is hidden may hold anything.
      const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      const i32x16 seen = (lane >= static_cast<int32_t>(std::max<int64_t>(begin_[v] - position, 0))) &
                          (lane < static_cast<int32_t>(std::min<int64_t>(end_[v] - position, kLanes)));
      score = select(seen, score, nothing);
      store(weights + (position - low), score);
      most = select(score != score, score, max(score, most));
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
      store(weights + (position - low), weight);
      total = total + weight;
    }
    state.total[v] = sum(total);
  }

  // Adds the weighted values of some channels; returns how many.
  int64_t add_values(int64_t low, int64_t high, const float (*weights)[kPartition], int64_t channel, State& state) const {
    const int64_t rest = size_ - channel;
    if (rest < kLanes) {
      add_last(low, high, weights, channel, static_cast<int>(rest), state);
      return rest;
    }
    if (rest < kChannels * kLanes) {
      add_some<1>(low, high, weights, channel, state);
      return kLanes;
    }
    add_some<kChannels>(low, high, weights, channel, state);
    return kChannels * kLanes;
  }

  // Calls visit(position, seen) for each position that any vector looks at; seen(v): whether this one does. What it does
  // not see it must not add, not even times zero: infinity and NaN would come through.
  template <typename Visit>
  OCTAVO_INLINE void by_positions(int64_t low, int64_t high, const Visit& visit) const {
    int64_t position = std::max(low, low_);
    const auto some = [&](int64_t end) {
      for (; position < end; ++position)
        visit(position, [&](int64_t v) { return position >= begin_[v] && position < end_[v]; });
    };
    some(std::min(last_begin_, high));
    for (const int64_t end = std::min(first_end_, high); position < end; ++position)
      visit(position, [](int64_t) { return true; });
    some(high);
  }

  template <int Vectors>
  void add_some(int64_t low, int64_t high, const float (*weights)[kPartition], int64_t channel, State& state) const {
    f32x16 sum[kTile][Vectors] = {};
    by_positions(low, high, [&](int64_t position, auto seen) {
      const T* from = value(position) + channel;
      f32x16 part[Vectors];
      for (int i = 0; i < Vectors; ++i) part[i] = load(from + i * kLanes);
      for (int64_t v = 0; v < tile_.count; ++v)
        if (seen(v))
          for (int i = 0; i < Vectors; ++i) sum[v][i] = sum[v][i] + weights[v][position - low] * part[i];
    });
    for (int64_t v = 0; v < tile_.count; ++v)
      for (int i = 0; i < Vectors; ++i) store(state.sums + v * size_ + channel + i * kLanes, sum[v][i]);
  }

  void add_last(int64_t low, int64_t high, const float (*weights)[kPartition], int64_t channel, int count,
                State& state) const {
    f32x16 sum[kTile] = {};
    by_positions(low, high, [&](int64_t position, auto seen) {
      const f32x16 part = load_part(value(position) + channel, count);
      for (int64_t v = 0; v < tile_.count; ++v)
        if (seen(v)) sum[v] = sum[v] + weights[v][position - low] * part;
    });
    for (int64_t v = 0; v < tile_.count; ++v) store_part(state.sums + v * size_ + channel, sum[v], count);
  }

  void merge_one(int64_t v, float most, float total, const float* sums, State& whole) const {
    const float peak = most > whole.most[v] || most != most ? most : whole.most[v];
    const float old_share = exp(splat(whole.most[v] - peak))[0], new_share = exp(splat(most - peak))[0];
    whole.most[v] = peak;
    whole.total[v] = whole.total[v] * old_share + total * new_share;
    float* to = whole.sums + v * size_;
    for (int64_t i = 0; i < size_; ++i) to[i] = to[i] * old_share + (sums == nullptr ? 0.0f : sums[i] * new_share);
  }

  const Attention& call_;
  const Tile& tile_;
  const int64_t size_, shared_;
  int64_t low_, high_;              // positions that any vector of the tile looks at
  int64_t last_begin_, first_end_;  // positions that all of them look at
  const T* query_[kTile];
  T* out_[kTile];
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

// Many tiles: each goes through its partitions by itself.
template <typename Step>
void whole_tiles(const Attention& call, const Buffer<Tile>& tiles, int64_t count) {
  const int64_t size = kTile * call.cache.head_size;
  pool().run(count, [&](int64_t index) {
    const TileAttention<Step> work(call, tiles[index]);
    const Buffer<float> sums(2 * size);
    State part{{}, {}, sums.data()}, whole{{}, {}, sums.data() + size};
    work.clear(whole);
    for (int64_t p = 0; p < work.partitions(); ++p) {
      work.reduce(work.first_partition() + p, part);
      work.merge(part, whole);
    }
    work.finish(whole);
  });
}

struct Piece {
  int64_t tile, partition;
};

// Few tiles with long contexts: partitions are shared out, and merged when all are there.
template <typename Step>
void shared_tiles(const Attention& call, const Buffer<Tile>& tiles, int64_t count, int64_t num_pieces) {
  const int64_t size = kTile * call.cache.head_size;
  const Buffer<Piece> pieces(num_pieces);
  const Buffer<State> parts(num_pieces);
  const Buffer<float> sums((num_pieces + 1) * size);
  for (int64_t index = 0, next = 0; index < count; ++index) {
    const TileAttention<Step> work(call, tiles[index]);
    for (int64_t p = 0; p < work.partitions(); ++p, ++next) {
      pieces[next] = {index, work.first_partition() + p};
      parts[next].sums = sums.data() + next * size;
    }
  }
  pool().run(num_pieces, [&](int64_t piece) {
    TileAttention<Step>(call, tiles[pieces[piece].tile]).reduce(pieces[piece].partition, parts[piece]);
  });
  State whole{{}, {}, sums.data() + num_pieces * size};
  for (int64_t index = 0, next = 0; index < count; ++index) {
    const TileAttention<Step> work(call, tiles[index]);
    work.clear(whole);
    for (; next < num_pieces && pieces[next].tile == index; ++next) work.merge(parts[next], whole);
    work.finish(whole);
  }
}

template <typename Step>
void attend(const Attention& call) {
  using T = typename Step::Element;
  const int64_t rows = call.query_start[call.requests], row_size = call.query_heads * call.cache.head_size;
  // Rows of no request.
  std::memset(static_cast<T*>(call.out) + rows * row_size, 0, (call.rows - rows) * row_size * sizeof(T));
  int64_t count = 0;
  for (int64_t request = 0; request < call.requests; ++request) count += call.cache.heads * tiles_of_head(call, request);
  const Buffer<Tile> tiles(count);
  list_tiles(call, tiles.data());
  const int64_t threads = pool().size();
  if (threads > 1 && count < 4 * threads) {
    int64_t num_pieces = 0;
    for (int64_t index = 0; index < count; ++index) num_pieces += TileAttention<Step>(call, tiles[index]).partitions();
    if (num_pieces > count) return shared_tiles<Step>(call, tiles, count, num_pieces);
  }
  whole_tiles<Step>(call, tiles, count);
}

}  // namespace

void attention(const Attention& call) {
  if (call.cache.type == Type::bf16) attend<PairStep>(call);
  else attend<SingleStep>(call);
}

}  // namespace octavo::OCTAVO_LEVEL
