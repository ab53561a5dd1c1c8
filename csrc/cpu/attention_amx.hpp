// Attention of one tile by AMX, for caches of bf16.
//
// Scores are 16 query vectors x 32 channels (a tile of queries) times 32 channels x 16 positions: 16 lines of packed keys,
// as the cache has them. Weights are rounded to bf16, and 16 vectors x 32 positions of them are multiplied by tiles of
// values, which are put together from the cache's rows, positions in pairs, once for all vectors:
//
//   channels c … c+15 │ v[p][c] v[p+1][c]  v[p][c+1] v[p+1][c+1] … │ the next pair of positions │ … 16 lines
//
// Steps of 32 positions begin at multiples of 32, and what a vector does not see has a weight of zero: each sum is made of
// the same steps whatever the other vectors see.
#pragma once

#if defined(__AMX_BF16__)

#include <optional>

#include "attention_tile.hpp"
#include "tiles.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// 2^x for x <= 0: 0 from -150 down, NaN for NaN. With x = n + f, n whole and 0 <= f < 1, 2^f by a polynomial whose relative
// error is below 8e-5 (a fit of degree 3): weights are rounded to bf16, by up to 4e-3, when they are multiplied.
OCTAVO_INLINE __m512 power_of_two(__m512 x) {
  const __m512 f = _mm512_maskz_reduce_ps(kAll, x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(7.802452147e-2f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.260671556e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.958335638e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.999251962e-1f));
  return _mm512_maskz_scalef_ps(kAll, p, x);  // times 2^n: it rounds x down
}

// Sums of a tile of 16 vectors and Blocks tiles of 16 columns in tiles 0 to 3; tile 4 is the vectors', 5 to 7 are the
// columns' in turn. What was read for the last time is cleared: see linear_amx.cpp.
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

// The keys and values that a thread reads next, in groups of 16 positions: they are fetched while it puts others in pairs,
// where more instructions than memory are in the way.
class Ahead {
 public:
  // Forgets what was left. Groups of so many bytes follow, a multiple of 1,024.
  void begin(int64_t bytes) {
    count_ = at_ = offset_ = pace_ = 0;
    bytes_ = bytes;
  }
  void add(const void* group) { groups_[count_++] = static_cast<const char*>(group); }
  // All of them in so many calls of `fetch`.
  void spread(int64_t calls) { pace_ = calls == 0 ? 0 : (count_ * bytes_ / kBytes + calls - 1) / calls; }

  OCTAVO_INLINE void fetch() {
    for (int64_t i = 0; i < pace_ && at_ < count_; ++i) {
      for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(groups_[at_] + offset_ + line, 0, 2);
      offset_ += kBytes;
      if (offset_ == bytes_) {
        offset_ = 0;
        ++at_;
      }
    }
  }

 private:
  static constexpr int64_t kBytes = 256;

  const char* groups_[2 * kPartition / kLanes];
  int64_t count_ = 0, bytes_ = 0, pace_ = 0;
  int64_t at_ = 0, offset_ = 0;  // what is fetched next: a group, and bytes in it
};

// What a thread needs while it reduces tiles.
class AmxRoom {
 public:
  static constexpr int64_t kStepChannels = 32, kStepPositions = 32;
  static constexpr int64_t kTileHalves = 512;  // of 16 bits
  static constexpr int64_t kWeightsLine = kPartition + kStepPositions;  // an odd number of cache lines
  static constexpr int64_t kVectors = 6 * kTileRows;

  static int64_t steps(const KVCache& cache) { return padded(cache.head_size, kStepChannels) / kStepChannels; }
  static int64_t bytes(const KVCache& cache) {
    return kScores * 4 + 2 * (kWeights + (kVectors / kTileRows + 1) * steps(cache) * kTileHalves + pairs_size(cache));
  }

  AmxRoom(const KVCache& cache, void* memory)
      : scores(static_cast<float*>(memory)),
        weights(reinterpret_cast<bf16*>(scores + kScores)),
        queries(weights + kWeights),
        keys(queries + kVectors / kTileRows * steps(cache) * kTileHalves),
        pairs(keys + steps(cache) * kTileHalves) {}

  // Tiles of so many rows: see Tiles.
  void configure(int64_t rows) {
    if (rows == rows_) return;
    tiles_.emplace(static_cast<int>(rows));
    rows_ = rows;
  }

  float* scores;  // [32 vectors, kWeightsStride]
  bf16* weights;  // [vectors, kWeightsLine]
  bf16* queries;  // [tiles of 16 vectors, steps of 32 channels, 16, 32]
  bf16* keys;     // [steps of 32 channels, 16, 32]: of 16 positions, where the cache's tiles are narrower
  bf16* pairs;    // [16 channels, steps of 32 positions, 16, 32]: values
  Ahead ahead;

 private:
  static constexpr int64_t kScores = 2 * kTileRows * kWeightsStride, kWeights = kVectors * kWeightsLine;
  static int64_t pairs_size(const KVCache& cache) { return padded(cache.head_size, kLanes) * kPartition; }

  std::optional<Tiles> tiles_;
  int64_t rows_ = 0;
};

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

// Words of two registers in turn, of their lower halves and of their upper ones.
struct Turns {
  constexpr Turns() : at() {
    for (int16_t i = 0; i < 32; ++i) {
      at[2 * i] = i;
      at[2 * i + 1] = static_cast<int16_t>(32 + i);
    }
  }
  alignas(64) int16_t at[64];
};
constexpr Turns kTurns;

class AmxTile : public TileView<bf16, AmxRoom::kVectors> {
  static constexpr int64_t kStepChannels = AmxRoom::kStepChannels, kStepPositions = AmxRoom::kStepPositions;
  static constexpr int64_t kTileHalves = AmxRoom::kTileHalves, kWeightsLine = AmxRoom::kWeightsLine;
  static constexpr int64_t kPartitionSteps = kPartition / kStepPositions;
  static constexpr int64_t kTogether = 4;  // tiles of sums
  static constexpr int64_t kLine = 64;     // bytes

 public:
  using Room = AmxRoom;

  AmxTile(const Attention& call, const Tile& tile) : TileView(call, tile), steps_(Room::steps(call.cache)) {}

  void reduce(int64_t partition, State& state, Room& room, const Next<AmxTile>& next) const {
    clear(state);
    if (hides_what_is_not_finite(partition)) return reduce_each(partition, state, room);
    const int64_t base = partition * kPartition;  // positions in what follows are counted from here
    const int64_t low = std::max(low_ - base, int64_t{0}), high = std::min(high_ - base, kPartition);
    const int64_t low_step = low / kStepPositions * kStepPositions, high_step = padded(high, kStepPositions);
    room.configure(std::min<int64_t>(tile_.count, kTileRows));
    copy_queries(room.queries);
    const auto reduce_rows = [&](auto rows, auto fresh, int64_t first) {
      score<rows>(base, low / kLanes * kLanes, high, room.queries + first * steps_ * kStepChannels, room);
      for (int64_t v = first; v < std::min(first + rows * kTileRows, tile_.count); ++v)
        soften(v, base, low_step, high_step, room.scores + (v - first) * kWeightsStride, room.weights + v * kWeightsLine,
               state);
      add_values<rows, fresh>(base, low_step, high, room.weights + first * kWeightsLine, room,
                              state.sums + first * padded_);
    };
    using One = std::integral_constant<int, 1>;
    using Two = std::integral_constant<int, 2>;
    if (tile_.count <= kTileRows) {
      room.ahead.begin(size_ * kLanes * 2);
      if (next.tile != nullptr) next.tile->list_groups(next.partition, room.ahead);
      room.ahead.spread((high_step - low_step) / 2 * steps_);
      return reduce_rows(One(), std::true_type(), 0);
    }
    for (int64_t step = low_step; step < high; step += kStepPositions)
      pair_values(base + step, 0, size_, kPartitionSteps * kTileHalves, room.pairs + step * kLanes, [] {});
    for (int64_t first = 0; first < tile_.count; first += 2 * kTileRows) reduce_rows(Two(), std::false_type(), first);
  }

 private:
  // Where each key and value is read once.
  void list_groups(int64_t partition, Ahead& ahead) const {
    if (tile_.count > kTileRows || width_ != kLanes || size_ % kStepChannels != 0) return;
    const int64_t low = std::max(low_, partition * kPartition) / kLanes * kLanes;
    const int64_t high = std::min(high_, (partition + 1) * kPartition);
    for (int64_t group = low; group < high; group += kLanes) ahead.add(keys(group));
    for (int64_t group = low; group < high; group += kLanes) ahead.add(keys(group) + half_);
  }

  // Zero times infinity or NaN is NaN: values that only some of the vectors see are to be finite, or each vector goes by
  // itself.
  bool hides_what_is_not_finite(int64_t partition) const {
    const int64_t low = std::max(low_, partition * kPartition), high = std::min(high_, (partition + 1) * kPartition);
    return not_finite(low, std::min(last_begin_, high)) || not_finite(std::max(low, first_end_), high);
  }

  bool not_finite(int64_t low, int64_t high) const {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 found = 0;
    for (int64_t position = low; position < high; ++position) {
      const bf16* row = value(position);
      for (int64_t channel = 0; channel < size_; channel += kStepChannels) {
        const __m512i values = _mm512_maskz_loadu_epi16(channels(channel), row + channel);
        found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(values, exponent), exponent);
      }
    }
    return found != 0;
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

  // Those of 32 channels from this one on that there are.
  __mmask32 channels(int64_t channel) const {
    const int64_t left = size_ - channel;
    return left >= kStepChannels ? ~__mmask32{0} : (__mmask32{1} << std::max<int64_t>(left, 0)) - 1;
  }

  void copy_queries(bf16* to) const {
    for (int64_t v = 0; v < tile_.count; ++v) {
      const bf16* from = static_cast<const bf16*>(call_.query) + query_[v];
      bf16* row = to + v / kTileRows * steps_ * kTileHalves + v % kTileRows * kStepChannels;
      for (int64_t step = 0; step < steps_; ++step, row += kTileHalves) {
        const int64_t channel = step * kStepChannels;
        _mm512_storeu_si512(row, _mm512_maskz_loadu_epi16(channels(channel), from + channel));
      }
    }
  }

  // Scores of Rows times 16 vectors and whole groups of 16 positions.
  template <int Rows>
  void score(int64_t base, int64_t low, int64_t high, const bf16* queries, Room& room) const {
    constexpr int kBlocks = Rows == 1 ? 4 : 1;
    int64_t group = low;
    if (width_ == kLanes && size_ % kStepChannels == 0) {
      for (; group + (kBlocks - 1) * kLanes < high; group += kBlocks * kLanes) {
        const bf16* keys_of[kBlocks];
        for (int64_t i = 0; i < kBlocks; ++i) keys_of[i] = keys(base + group + i * kLanes);
        score_groups<Rows, kBlocks>(keys_of, queries, room.scores + group);
      }
      for (; group < high; group += kLanes) {
        const bf16* keys_of[1] = {keys(base + group)};
        score_groups<Rows, 1>(keys_of, queries, room.scores + group);
      }
      return;
    }
    std::fill_n(room.keys, steps_ * kTileHalves, bf16{});  // channels beyond the last one
    for (; group < high; group += kLanes) {
      gather(base + group, room.keys);
      const bf16* keys_of[1] = {room.keys};
      score_groups<Rows, 1>(keys_of, queries, room.scores + group);
    }
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
  void soften(int64_t v, int64_t base, int64_t low, int64_t high, float* scores, bf16* weights, State& state) const {
    constexpr float kLog2E = 1.44269504088896341f;
    const int64_t begin = std::max(low, begin_[v] - base), end = std::min(high, end_[v] - base);
    const auto clear_weights = [&](int64_t from, int64_t to) {
      const __m256i nothing = _mm256_setzero_si256();
      for (; from < to; from += kLanes) _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + from), nothing);
    };
    if (begin >= end) return clear_weights(low, high);
    clear_weights(low, begin / kLanes * kLanes);
    clear_weights(padded(end, kLanes), high);
    float scale = call_.scale;
    if (call_.softcap > 0.0f) {
      for (int64_t i = begin / kLanes * kLanes; i < end; i += kLanes)
        store(scores + i, tanh(load(scores + i) * call_.scale / call_.softcap) * call_.softcap);
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
    const auto weigh = [&](int64_t i) { return power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + i), factor, offset)); };
    each_group(
        begin, end,
        [&](int64_t i, __mmask16 seen) {
          const __m512 weight = _mm512_maskz_mov_ps(seen, weigh(i));
          total = _mm512_add_ps(total, weight);
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i), (__m256i)_mm512_cvtneps_pbh(weight));
        },
        [&](int64_t i) {
          const __m512 first = weigh(i), second = weigh(i + kLanes);
          total = _mm512_add_ps(_mm512_add_ps(total, first), second);
          _mm512_storeu_si512(weights + i, (__m512i)_mm512_cvtne2ps_pbh(second, first));
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
        bf16* own = room.pairs + step / kStepPositions % 2 * kTogether * kTileHalves;
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

  // Values of 32 positions and these channels in tiles that are `apart`; zero what nobody sees. Calls meanwhile() for each
  // two positions and 32 channels.
  template <typename Meanwhile>
  OCTAVO_INLINE void pair_values(int64_t position, int64_t channel, int64_t end, int64_t apart, bf16* to,
                                 const Meanwhile& meanwhile) const {
    alignas(64) static constexpr bf16 kNothing[kStepChannels] = {};
    const bf16* rows[kStepPositions];
    for (int64_t first = 0; first < kStepPositions; first += width_) {
      const int64_t from = low_ - position - first, until = high_ - position - first;
      const bf16* at = from < width_ && until > 0 ? value(position + first) : nullptr;
      for (int64_t i = 0; i < width_; ++i) rows[first + i] = i >= from && i < until ? at + i * size_ : nullptr;
    }
    const __m512i low_half = _mm512_load_si512(kTurns.at), high_half = _mm512_load_si512(kTurns.at + 32);
    for (; channel < end; channel += kStepChannels, to += 2 * apart) {
      const __mmask32 some = channels(channel);
      const auto row = [&](int64_t i) {
        return _mm512_maskz_loadu_epi16(some, rows[i] != nullptr ? rows[i] + channel : kNothing);
      };
      for (int64_t i = 0; i < kStepPositions; i += 2) {
        const __m512i a = row(i), b = row(i + 1);
        _mm512_store_si512(to + i * kLanes, _mm512_permutex2var_epi16(a, low_half, b));
        if (channel + kLanes < end) _mm512_store_si512(to + apart + i * kLanes, _mm512_permutex2var_epi16(a, high_half, b));
        meanwhile();
      }
    }
  }

  const int64_t steps_;  // of 32 channels
};

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL

#endif
