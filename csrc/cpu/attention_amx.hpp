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
  static constexpr int64_t kMeanwhile = 2 * Blocks;

  // Calls work with each block, as a constant.
  template <int Block = 0, typename Work>
  static OCTAVO_INLINE void each(const Work& work) {
    work(std::integral_constant<int, Block>());
    if constexpr (Block + 1 < Blocks) each<Block + 1>(work);
  }

  static OCTAVO_INLINE void begin() {
    each([](auto block) { clear_tile<block>(); });
  }

  // rows: a tile, of rows `stride` bytes apart. columns(block): a tile of packed lines. Calls meanwhile() kMeanwhile times.
  template <typename Columns, typename Meanwhile>
  static OCTAVO_INLINE void add(const bf16* rows, int64_t, int64_t stride, const Columns& columns, const Meanwhile& meanwhile) {
    load_tile<4>(rows, stride);
    each([&](auto block) {
      meanwhile();
      load_tile<5 + block % 3>(columns(block), 64);
      meanwhile();
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

  // rows: tiles that are `apart`. Nothing is done meanwhile.
  template <typename Columns, typename Meanwhile>
  static OCTAVO_INLINE void add(const bf16* rows, int64_t apart, int64_t stride, const Columns& columns, const Meanwhile&) {
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

// Each row's lanes put together, halves with halves (8 with 8, 4 with 4, …), of 16 rows at once: a lane for each.
template <typename Join>
OCTAVO_INLINE __m512 joined(const __m512 (&rows)[16], const Join& join) {
  __m512 eight[8], four[4], two[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = rows[i], b = rows[i + 8];
    eight[i] = join(_mm512_maskz_shuffle_f32x4(kAll, a, b, 0x44), _mm512_maskz_shuffle_f32x4(kAll, a, b, 0xee));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 a = eight[i], b = eight[i + 4];
    four[i] = join(_mm512_maskz_shuffle_f32x4(kAll, a, b, 0x88), _mm512_maskz_shuffle_f32x4(kAll, a, b, 0xdd));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512d a = (__m512d)four[i], b = (__m512d)four[i + 2];
    two[i] = join((__m512)_mm512_maskz_unpacklo_pd(0xff, a, b), (__m512)_mm512_maskz_unpackhi_pd(0xff, a, b));
  }
  const __m512 last = join(_mm512_maskz_shuffle_ps(kAll, two[0], two[1], 0x88),
                           _mm512_maskz_shuffle_ps(kAll, two[0], two[1], 0xdd));
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return _mm512_maskz_permutexvar_ps(kAll, order, last);
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
      for (int64_t v = first; v < std::min(first + rows * kTileRows, tile_.count); v += kTileRows)
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
    const int64_t groups = padded(high, kLanes) / kLanes - low / kLanes, columns = padded_ / kLanes;
    const int64_t steps = padded(high, kStepPositions) / kStepPositions - low / kStepPositions;
    if constexpr (kScaled<K>) return (steps * kStepPositions * columns + groups * size_) / View::kTurn;
    return (groups * steps_ + steps * columns) * OneRow<1>::kMeanwhile;
  }

  // What is read next is fetched between loads and products of what is kept as bf16, a few lines at a time, for many in a
  // row hold up whatever else is loaded; of 8 bits, while they are widened.
  static OCTAVO_INLINE auto fetch_between(Room& room) {
    return [&room] {
      if constexpr (!kScaled<K>) room.ahead.fetch();
    };
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
      score_groups<Rows, blocks>(keys_of, queries, room.scores + group - blocks * kLanes, room);
    };
    int64_t group = low;
    for (; group + (kBlocks - 1) * kLanes < high; group += kBlocks * kLanes)
      score_some(std::integral_constant<int, kBlocks>(), group);
    for (; group < high; group += kLanes) score_some(std::integral_constant<int, 1>(), group);
  }

  template <int Rows, int Blocks>
  OCTAVO_INLINE void score_groups(const bf16* const (&keys_of)[Blocks], const bf16* queries, float* scores, Room& room) const {
    Products<Rows, Blocks>::begin();
    for (int64_t step = 0; step < steps_; ++step)
      Products<Rows, Blocks>::add(queries + step * kTileHalves, steps_ * kTileHalves, kLine,
                                  [&](int block) { return keys_of[block] + step * kTileHalves; }, fetch_between(room));
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

  // The positions of a partition that a vector sees, in those from `low` to `high`.
  struct Seen {
    int64_t begin, end;
  };

  // Of up to 16 vectors from v on: scores to weights e^(score - most), 0 where the vector may not look; their sums and the
  // largest scores. low and high are multiples of 32.
  void soften(int64_t v, int64_t base, int64_t low, int64_t high, float* scores, const Room& room, State& state) const {
    constexpr float kLog2E = 1.44269504088896341f;
    const float scale = kScaled<K> || call_.softcap > 0.0f ? 1.0f : call_.scale;  // or it is in the scores
    const int64_t count = std::min<int64_t>(tile_.count - v, kTileRows);
    Seen seen[kTileRows];
    __m512 rows[kTileRows];
    for (int64_t i = 0; i < kTileRows; ++i) rows[i] = _mm512_set1_ps(-__builtin_inff());
    for (int64_t i = 0; i < count; ++i) {
      seen[i] = {std::max(low, begin_[v + i] - base), std::min(high, end_[v + i] - base)};
      if (seen[i].begin < seen[i].end) rows[i] = largest(seen[i], scores + i * kWeightsStride, room);
    }
    // A NaN takes the place of what was there, and is found in the weights.
    const auto larger = [](__m512 a, __m512 b) { return _mm512_maskz_max_ps(kAll, a, b); };
    alignas(64) float offsets[kTileRows];
    const __m512 peaks = _mm512_mul_ps(joined(rows, larger), _mm512_set1_ps(scale));
    _mm512_storeu_ps(state.most + v, peaks);
    _mm512_store_ps(offsets, _mm512_mul_ps(peaks, _mm512_set1_ps(kLog2E)));
    for (int64_t i = 0; i < kTileRows; ++i) rows[i] = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; ++i) {
      bf16* weights = room.weights + (v + i) * kWeightsLine;
      const auto clear_weights = [&](int64_t from, int64_t to) {
        const __m256i nothing = _mm256_setzero_si256();
        for (; from < to; from += kLanes) _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + from), nothing);
      };
      if (seen[i].begin >= seen[i].end) {
        clear_weights(low, high);
        continue;
      }
      clear_weights(low, seen[i].begin / kLanes * kLanes);
      clear_weights(padded(seen[i].end, kLanes), high);
      rows[i] = weigh(seen[i], scores + i * kWeightsStride, scale * kLog2E, offsets[i], room.factors[1], weights);
    }
    const auto both = [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); };
    _mm512_storeu_ps(state.total + v, joined(rows, both));
  }

  // The largest of every 16th score. Factors and soft caps are in the scores afterwards.
  OCTAVO_INLINE __m512 largest(const Seen& seen, float* scores, const Room& room) const {
    if (kScaled<K> || call_.softcap > 0.0f) {
      for (int64_t i = seen.begin / kLanes * kLanes; i < seen.end; i += kLanes) {
        f32x16 score = load(scores + i);
        if constexpr (kScaled<K>) score = score * load(room.factors[0] + i);
        else score = score * call_.scale;
        if (call_.softcap > 0.0f) score = tanh(score / call_.softcap) * call_.softcap;
        store(scores + i, score);
      }
    }
    __m512 most = _mm512_set1_ps(-__builtin_inff()), other = most;
    each_group(
        seen.begin, seen.end,
        [&](int64_t i, __mmask16 some) { most = _mm512_mask_max_ps(most, some, most, _mm512_load_ps(scores + i)); },
        [&](int64_t i) {
          most = _mm512_maskz_max_ps(kAll, most, _mm512_load_ps(scores + i));
          other = _mm512_maskz_max_ps(kAll, other, _mm512_load_ps(scores + i + kLanes));
        });
    return _mm512_maskz_max_ps(kAll, most, other);
  }

  // Writes 2^(score * factor - offset), times the values' factors, and gives the sums of every 16th without these.
  OCTAVO_INLINE __m512 weigh(const Seen& seen, const float* scores, float factor, float offset, const float* factors,
                             bf16* weights) const {
    constexpr float kLeast = kScaled<K> ? -100.0f : -126.0f;  // times a value's factor it is still in the normal range
    __m512 total = _mm512_setzero_ps();
    const auto power = [&](int64_t i) {
      return power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + i), _mm512_set1_ps(factor), _mm512_set1_ps(offset)), kLeast);
    };
    const auto scaled = [&](__m512 weight, int64_t i, __mmask16 some) {  // for the sum of values
      if constexpr (!kScaled<K>) return weight;
      return _mm512_maskz_mul_ps(some, weight, _mm512_loadu_ps(factors + i));
    };
    each_group(
        seen.begin, seen.end,
        [&](int64_t i, __mmask16 some) {
          const __m512 weight = _mm512_maskz_mov_ps(some, power(i));
          total = _mm512_add_ps(total, weight);
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i), (__m256i)_mm512_cvtneps_pbh(scaled(weight, i, some)));
        },
        [&](int64_t i) {
          const __m512 first = power(i), second = power(i + kLanes);
          total = _mm512_add_ps(_mm512_add_ps(total, first), second);
          _mm512_storeu_si512(weights + i,
                              (__m512i)_mm512_cvtne2ps_pbh(scaled(second, i + kLanes, kAll), scaled(first, i, kAll)));
        });
    return total;
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
                                  [&](int block) { return tiles + block * apart; }, fetch_between(room));
    }
    Products<Rows, Blocks>::end(sums, padded_);
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL

#endif
