// Attention of one tile by vectors: a vector of 16 positions' scores, and of 16 channels' sums, for each query vector.
#pragma once

#include "attention_tile.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kChunk = 256;           // channels of a query that are widened at a time

// Sums are in registers: of 32, or of 16 that hold half as much. Query vectors of a tile share what is read of the cache.
#if defined(__AVX512F__)
constexpr int kVectors = 12;
constexpr int keys_together(int count) { return count <= 4 ? 4 : 2; }      // groups of 16 positions
constexpr int channels_together(int count) { return count <= 6 ? 4 : 2; }  // vectors of 16 channels
#else
constexpr int kVectors = 6;
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
  if constexpr (kVectors == 6) return visit(std::integral_constant<int, 6>());
  if (count <= 6) return visit(std::integral_constant<int, 6>());
  if (count <= 8) return visit(std::integral_constant<int, 8>());
  visit(std::integral_constant<int, kVectors>());
}

// Products are float32: where there is a bf16 dot product, it is slower.
template <typename K>
class VectorTile : public TileView<K, kVectors> {
  using View = TileView<K, kVectors>;
  using View::call_, View::tile_, View::size_, View::padded_, View::half_, View::width_, View::low_, View::high_;
  using View::last_begin_, View::first_end_, View::query_, View::begin_, View::end_;
  using View::keys, View::value, View::first_tile, View::gather;

 public:
  using View::kTile;
  using typename View::State;
  using View::View;

  // A thread's, while it reduces tiles: for the keys of 16 positions, where the cache's tiles are narrower.
  class Room {
   public:
    static int64_t bytes(const KVCache& cache) { return kLanes * cache.head_size * static_cast<int64_t>(sizeof(K)); }
    Room(const KVCache&, void* memory) : keys_(static_cast<K*>(memory)) {}
    K* keys() const { return keys_; }

   private:
    K* keys_;
  };

  void reduce(int64_t partition, State& state, Room& own, const Next<VectorTile>&) const {
    K* room = own.keys();
    this->clear(state);
    const int64_t low = std::max(low_, partition * kPartition) / kLanes * kLanes;
    const int64_t high = std::min(high_, (partition + 1) * kPartition);
    alignas(64) float weights[kTile][kWeightsStride];
    with_count(tile_.count, [&](auto count) {
      for (int64_t channel = 0; channel < size_; channel += kChunk) score<count>(low, high, channel, weights, room);
    });
    alignas(64) float factors[2][kScaled<K> ? kPartition : 1] = {};
    if constexpr (kScaled<K>) this->gather_factors(low, low, high, factors);
    for (int64_t v = 0; v < tile_.count; ++v) soften(v, low, high, factors, weights[v], state);
    with_count(tile_.count, [&](auto count) { add_values<count>(low, high, weights, state); });
  }

 private:
  // weights[v][position - low]: the products of query and keys, for whole groups of 16 positions; added to what is there
  // where `first`, the channel from which they are taken, is not 0.
  template <int Count>
  void score(int64_t low, int64_t high, int64_t first, float (*weights)[kWeightsStride], K* room) const {
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
                                  float (*weights)[kWeightsStride], int64_t offset) const {
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
  void add_values(int64_t low, int64_t high, const float (*weights)[kWeightsStride], State& state) const {
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
  void add_some(int64_t low, int64_t high, const float (*weights)[kWeightsStride], int64_t channel, State& state) const {
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
      for (int i = 0; i < Vectors; ++i) store(state.sums + v * padded_ + channel + i * kLanes, sum[v][i]);
  }

  // The last channels of heads that are not whole vectors.
  void add_last(int64_t low, int64_t high, const float (*weights)[kWeightsStride], int64_t channel, int count,
                State& state) const {
    f32x16 sum[kTile] = {};
    const auto add = [&](int64_t position, const K* at) {
      const f32x16 part = load_part(at + channel, count);
      for (int64_t v = 0; v < tile_.count; ++v)
        if (sees(v, position)) sum[v] = sum[v] + splat(weights[v][position - low]) * part;
    };
    by_positions(low, high, add, add);
    for (int64_t v = 0; v < tile_.count; ++v) store_part(state.sums + v * padded_ + channel, sum[v], count);
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL
