// Attention of one tile by AMX, for queries of bf16, over caches of bf16 and of 8 bits.
//
// Scores are 16 query vectors x 32 channels (a tile of queries) times 32 channels x 16 positions: 16 lines of keys. Weights
// are rounded to bf16, and 16 vectors x 32 positions of them are multiplied by tiles of values: 16 lines, 16 channels. What
// the lines are, and what they are made of, is drawn in attention_amx_lines.hpp. They are made once for all vectors of a
// tile.
//
// Of 8 bits, a score is the product of the numbers times the key's factor, and a weight is multiplied by the value's factor
// before it is rounded; the sum of the weights is without.
//
// Steps of 32 positions begin at multiples of 32, and what a vector does not see has a weight of zero: each sum is made of
// the same steps whatever the other vectors see.
#pragma once

#if defined(__AMX_BF16__)

#include "attention_amx_lines.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// 2^x for x <= 0: 0 below `least`, NaN for NaN. With x = n + f, n whole and 0 <= f < 1, 2^f by a polynomial whose relative
// error is below 8e-5 (a fit of degree 3): weights are rounded to bf16, by up to 4e-3, when they are multiplied. A result
// below the normal range would take 200 cycles.
OCTAVO_INLINE __m512 power_of_two(__m512 x, float least) {
  const __m512 f = _mm512_maskz_reduce_ps(kAll, x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(7.802452147e-2f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.260671556e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.958335638e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.999251962e-1f));
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(counts, p, x);  // times 2^n: it rounds x down
}

// Sums of a tile of 16 vectors and Blocks tiles of 16 columns in tiles 0 to 3; tile 4 is the vectors', 5 to 7 are the
// columns' in turn. What was read for the last time is cleared: see linear_many_amx.cpp.
template <int Blocks>
struct OneRow {
  // Calls work with each block, as a constant.
  template <int Block = 0, typename Work>
  static OCTAVO_INLINE void each(const Work& work) {
    work(std::integral_constant<int, Block>());
    if constexpr (Block + 1 < Blocks) each<Block + 1>(work);
  }

  static OCTAVO_INLINE void begin() {
    each([](auto block) { clear_tile<block>(); });
  }

  // rows: a tile, of rows `stride` bytes apart. columns(block): a tile of packed lines.
  template <typename Columns>
  static OCTAVO_INLINE void add(const bf16* rows, int64_t, int64_t stride, const Columns& columns) {
    load_tile<4>(rows, stride);
    each([&](auto block) {
      load_tile<5 + block % 3>(columns(block), 64);
      multiply_tiles<block, 4, 5 + block % 3>();
      clear_tile<5 + block % 3>();
    });
    clear_tile<4>();
  }

  static OCTAVO_INLINE void end(float* sums, int64_t stride) {
    each([&](auto block) {
      store_tile<block>(sums + block * kLanes, stride * 4);
      clear_tile<block>();
    });
  }
};

// The same for two tiles of vectors and one of columns: two sums at a time are faster than four.
struct TwoRows {
  static OCTAVO_INLINE void begin() {
    clear_tile<0>();
    clear_tile<1>();
  }

  // rows: tiles that are `apart`.
  template <typename Columns>
  static OCTAVO_INLINE void add(const bf16* rows, int64_t apart, int64_t stride, const Columns& columns) {
    stream_tile<6>(columns(0), 64);
    load_tile<4>(rows, stride);
    multiply_tiles<0, 4, 6>();
    clear_tile<4>();
    load_tile<5>(rows + apart, stride);
    multiply_tiles<1, 5, 6>();
    clear_tile<6>();
    clear_tile<5>();
  }

  static OCTAVO_INLINE void end(float* sums, int64_t stride) {
    store_tile<0>(sums, stride * 4);
    clear_tile<0>();
    store_tile<1>(sums + kTileRows * stride, stride * 4);
    clear_tile<1>();
  }
};

template <int Rows, int Blocks>
using Products = std::conditional_t<Rows == 1, OneRow<Blocks>, TwoRows>;

// All lanes put together, halves with halves.
template <typename Join>
OCTAVO_INLINE float joined(__m512 value, const Join& join) {
  const f32x16 all = (f32x16)value;
  const auto eight = join(__builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7),
                          __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15));
  const auto four = join(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                         __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
  const auto two = join(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
  return join(two, __builtin_shufflevector(two, two, 1, 0, 3, 2))[0];
}

template <typename K>
class AmxTile : public AmxView<K> {
  using View = AmxView<K>;
  using View::call_, View::tile_, View::size_, View::padded_, View::steps_, View::width_, View::low_, View::high_;
  using View::begin_, View::end_;
  using View::kStepPositions, View::kStepChannels, View::kTileHalves, View::kWeightsLine;
  using View::list_groups, View::group_bytes, View::copy_queries, View::copy_factors, View::key_lines, View::pair_values;
  static constexpr int64_t kPartitionSteps = kPartition / kStepPositions;
  static constexpr int64_t kSums = 4;   // tiles of them
  static constexpr int64_t kLine = 64;  // bytes

 public:
  using typename View::Room, typename View::State;

  AmxTile(const Attention& call, const Tile& tile) : View(call, tile) {}

  void reduce(int64_t partition, State& state, Room& room, const Next<AmxTile>& next) const {
    this->clear(state);
    if (this->hides_what_is_not_finite(partition)) return reduce_each(partition, state, room);
    const int64_t base = partition * kPartition;  // positions in what follows are counted from here
    const int64_t low = std::max(low_ - base, int64_t{0}), high = std::min(high_ - base, kPartition);
    const int64_t low_step = low / kStepPositions * kStepPositions, high_step = padded(high, kStepPositions);
    room.configure(std::min<int64_t>(tile_.count, kTileRows));
    copy_queries(room.queries);
    copy_factors(base, low / kLanes * kLanes, high, room.factors);
    const auto reduce_rows = [&](auto rows, auto fresh, int64_t first) {
      score<rows, fresh>(base, low / kLanes * kLanes, high, room.queries + first * steps_ * kStepChannels, room);
      for (int64_t v = first; v < std::min(first + rows * kTileRows, tile_.count); ++v)
        soften(v, base, low_step, high_step, room.scores + (v - first) * kWeightsStride, room, state);
      add_values<rows, fresh>(base, low_step, high, room.weights + first * kWeightsLine, room,
                              state.sums + first * padded_);
    };
    using One = std::integral_constant<int, 1>;
    using Two = std::integral_constant<int, 2>;
    if (tile_.count <= kTileRows) {
      room.ahead.begin(group_bytes());
      if (next.tile != nullptr) next.tile->list_groups(next.partition, room.ahead);
      room.ahead.spread(turns(low, high));
      return reduce_rows(One(), std::true_type(), 0);
    }
    for (int64_t group = low / kLanes; kScaled<K> && group * kLanes < high; ++group)
      key_lines(base + group * kLanes, room, room.keys + group * steps_ * kTileHalves, [] {});
    for (int64_t step = low_step; step < high; step += kStepPositions)
      pair_values(base + step, 0, size_, kPartitionSteps * kTileHalves, room.pairs + step * kLanes, [] {});
    for (int64_t first = 0; first < tile_.count; first += 2 * kTileRows) reduce_rows(Two(), std::false_type(), first);
  }

 private:
  // How often a tile that is read once calls room.ahead.
  int64_t turns(int64_t low, int64_t high) const {
    const int64_t pairs = (padded(high, kStepPositions) - low / kStepPositions * kStepPositions) / 2;
    if constexpr (!kScaled<K>) return pairs * steps_;
    return (pairs * 2 * (padded_ / kLanes) + (padded(high, kLanes) / kLanes - low / kLanes) * size_) / View::kTurn;
  }

  void reduce_each(int64_t partition, State& state, Room& room) const {
    const Buffer<float> sums(kTileRows * padded_);
    State own{{}, {}, sums.data()};
    for (int64_t v = 0; v < tile_.count; ++v) {
      float* to = state.sums + v * padded_;
      const Tile tile{tile_.request, tile_.head, tile_.first + v, 1};
      const AmxTile alone(call_, tile);
      if (partition < alone.first_partition() || partition >= alone.first_partition() + alone.partitions()) {
        std::fill_n(to, padded_, 0.0f);
        continue;
      }
      alone.reduce(partition, own, room, {});
      state.most[v] = own.most[0];
      state.total[v] = own.total[0];
      std::copy_n(own.sums, padded_, to);
    }
  }

  // Scores of Rows times 16 vectors and whole groups of 16 positions, whose keys are lines already, or (Fresh) are made to
  // be now.
  template <int Rows, bool Fresh>
  void score(int64_t base, int64_t low, int64_t high, const bf16* queries, Room& room) const {
    constexpr int kBlocks = Rows == 1 ? 4 : 1;
    const auto score_some = [&](auto blocks, int64_t group) {
      const bf16* keys_of[blocks];
      for (int64_t i = 0; i < blocks; ++i, group += kLanes) {
        if constexpr (kScaled<K> && !Fresh) keys_of[i] = room.keys + group * steps_ * kStepChannels;
        else keys_of[i] = key_lines(base + group, room, room.keys + i * steps_ * kTileHalves, [&] { room.ahead.fetch(); });
      }
      score_groups<Rows, blocks>(keys_of, queries, room.scores + group - blocks * kLanes);
    };
    int64_t group = low;
    for (; group + (kBlocks - 1) * kLanes < high; group += kBlocks * kLanes)
      score_some(std::integral_constant<int, kBlocks>(), group);
    for (; group < high; group += kLanes) score_some(std::integral_constant<int, 1>(), group);
  }

  template <int Rows, int Blocks>
  OCTAVO_INLINE void score_groups(const bf16* const (&keys_of)[Blocks], const bf16* queries, float* scores) const {
    Products<Rows, Blocks>::begin();
    for (int64_t step = 0; step < steps_; ++step)
      Products<Rows, Blocks>::add(queries + step * kTileHalves, steps_ * kTileHalves, kLine,
                                  [&](int block) { return keys_of[block] + step * kTileHalves; });
    Products<Rows, Blocks>::end(scores, kWeightsStride);
  }

  // Goes through groups of 16 positions in ascending order: two(group) for that one and the next, where the vector sees all
  // of both, some(group, lanes) for others.
  template <typename Some, typename Two>
  OCTAVO_INLINE void each_group(int64_t begin, int64_t end, const Some& some, const Two& two) const {
    int64_t group = begin / kLanes * kLanes;
    const auto one = [&] {
      const int64_t first = std::max<int64_t>(begin - group, 0), last = std::min(end - group, int64_t{kLanes});
      some(group, static_cast<__mmask16>((1u << last) - (1u << first)));
      group += kLanes;
    };
    if (group < begin && group < end) one();
    for (; group + 2 * kLanes <= end; group += 2 * kLanes) two(group);
    while (group < end) one();
  }

  // Scores to weights e^(score - most), 0 where the vector may not look; their sum and the largest score. low and high are
  // multiples of 32.
  void soften(int64_t v, int64_t base, int64_t low, int64_t high, float* scores, const Room& room, State& state) const {
    bf16* weights = room.weights + v * kWeightsLine;
    const float *key_factors = room.factors[0], *value_factors = room.factors[1];
    constexpr float kLog2E = 1.44269504088896341f;
    constexpr float kLeast = kScaled<K> ? -100.0f : -126.0f;  // times a value's factor it is still in the normal range
    const int64_t begin = std::max(low, begin_[v] - base), end = std::min(high, end_[v] - base);
    const auto clear_weights = [&](int64_t from, int64_t to) {
      const __m256i nothing = _mm256_setzero_si256();
      for (; from < to; from += kLanes) _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + from), nothing);
    };
    if (begin >= end) return clear_weights(low, high);
    clear_weights(low, begin / kLanes * kLanes);
    clear_weights(padded(end, kLanes), high);
    float scale = call_.scale;
    if (kScaled<K> || call_.softcap > 0.0f) {
      for (int64_t i = begin / kLanes * kLanes; i < end; i += kLanes) {
        f32x16 score = load(scores + i);
        if constexpr (kScaled<K>) score = score * load(key_factors + i);
        else score = score * scale;
        if (call_.softcap > 0.0f) score = tanh(score / call_.softcap) * call_.softcap;
        store(scores + i, score);
      }
      scale = 1.0f;
    }
    __m512 most = _mm512_set1_ps(-__builtin_inff()), other = most;
    // A NaN takes the place of what was there, and is found in the weights.
    each_group(
        begin, end,
        [&](int64_t i, __mmask16 seen) { most = _mm512_mask_max_ps(most, seen, most, _mm512_load_ps(scores + i)); },
        [&](int64_t i) {
          most = _mm512_maskz_max_ps(kAll, most, _mm512_load_ps(scores + i));
          other = _mm512_maskz_max_ps(kAll, other, _mm512_load_ps(scores + i + kLanes));
        });
    most = _mm512_maskz_max_ps(kAll, most, other);
    const float peak = joined(most, [](auto a, auto b) { return a > b ? a : b; }) * scale;
    state.most[v] = peak;
    const __m512 factor = _mm512_set1_ps(scale * kLog2E), offset = _mm512_set1_ps(peak * kLog2E);
    __m512 total = _mm512_setzero_ps();
    const auto weigh = [&](int64_t i) {
      return power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + i), factor, offset), kLeast);
    };
    const auto scaled = [&](__m512 weight, int64_t i, __mmask16 seen) {  // for the sum of values
      if constexpr (!kScaled<K>) return weight;
      return _mm512_maskz_mul_ps(seen, weight, _mm512_loadu_ps(value_factors + i));
    };
    each_group(
        begin, end,
        [&](int64_t i, __mmask16 seen) {
          const __m512 weight = _mm512_maskz_mov_ps(seen, weigh(i));
          total = _mm512_add_ps(total, weight);
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i), (__m256i)_mm512_cvtneps_pbh(scaled(weight, i, seen)));
        },
        [&](int64_t i) {
          const __m512 first = weigh(i), second = weigh(i + kLanes);
          total = _mm512_add_ps(_mm512_add_ps(total, first), second);
          _mm512_storeu_si512(weights + i,
                              (__m512i)_mm512_cvtne2ps_pbh(scaled(second, i + kLanes, kAll), scaled(first, i, kAll)));
        });
    state.total[v] = joined(total, [](auto a, auto b) { return a + b; });
  }

  // sums[Rows times 16 vectors, padded_]: the weighted values, which are in pairs already, or (Fresh) are to be paired now.
  template <int Rows, bool Fresh>
  void add_values(int64_t base, int64_t low, int64_t high, const bf16* weights, Room& room, float* sums) const {
    constexpr int kBlocks = Rows == 1 ? 4 : 1;
    int64_t channel = 0;
    for (; channel + kBlocks * kLanes <= padded_; channel += kBlocks * kLanes)
      add_channels<Rows, kBlocks, Fresh>(base, low, high, channel, weights, room, sums + channel);
    for (; channel < padded_; channel += kLanes)
      add_channels<Rows, 1, Fresh>(base, low, high, channel, weights, room, sums + channel);
  }

  template <int Rows, int Blocks, bool Fresh>
  OCTAVO_INLINE void add_channels(int64_t base, int64_t low, int64_t high, int64_t channel, const bf16* weights,
                                  Room& room, float* sums) const {
    Products<Rows, Blocks>::begin();
    for (int64_t step = low; step < high; step += kStepPositions) {
      const bf16* tiles = room.pairs + (channel / kLanes * kPartitionSteps + step / kStepPositions) * kTileHalves;
      int64_t apart = kPartitionSteps * kTileHalves;
      if constexpr (Fresh) {
        bf16* own = room.pairs + step / kStepPositions % 2 * kSums * kTileHalves;
        pair_values(base + step, channel, std::min(size_, channel + Blocks * kLanes), kTileHalves, own,
                    [&] { room.ahead.fetch(); });
        tiles = own;
        apart = kTileHalves;
      }
      Products<Rows, Blocks>::add(weights + step, kTileRows * kWeightsLine, kWeightsLine * 2,
                                  [&](int block) { return tiles + block * apart; });
    }
    Products<Rows, Blocks>::end(sums, padded_);
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL

#endif
