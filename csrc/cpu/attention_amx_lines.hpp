// What attention by AMX (attention_amx.hpp) reads of a tile's queries, keys and values, as lines of tiles: 16 pairs of bf16.
//
// Keys of 16 positions, a line for each two channels; values of 32 positions and 16 channels, a line for each two positions:
//
//   keys     channels c, c+1     │ k[p][c] k[p][c+1]  k[p+1][c] k[p+1][c+1] … k[p+15][c] k[p+15][c+1] │ the next two channels
//   values   positions p, p+1    │ v[p][c] v[p+1][c]  v[p][c+1] v[p+1][c+1] … v[p][c+15] v[p+1][c+15] │ the next two positions
//
// A cache of bf16 has keys as such lines. In one of 8 bits a line is made of two times 16 numbers that follow each other
// (eight_bits.hpp), of keys as of values: bf16 has each of them exactly.
#pragma once

#if defined(__AMX_BF16__)

#include <optional>

#include "attention_tile.hpp"
#include "tiles.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// Words of two registers in turn, of their lower halves and of their upper ones; and of the halves of one.
struct Turns {
  constexpr Turns() : at(), own() {
    for (int16_t i = 0; i < 32; ++i) {
      at[2 * i] = i;
      at[2 * i + 1] = static_cast<int16_t>(32 + i);
      own[i] = static_cast<int16_t>(i / 2 + i % 2 * 16);
    }
  }
  alignas(64) int16_t at[64];
  alignas(64) int16_t own[32];
};
constexpr Turns kTurns;

// A line of 16 numbers and 16 others in turn: times 1 / kUnit. Whole numbers of 8 bits are in a float's upper half.
OCTAVO_INLINE __m512i in_turns(__m128i first, __m128i second, Int8) {
  const auto wide = [](__m128i numbers) {
    return (__m512i)_mm512_maskz_cvtepi32_ps(kAll, _mm512_maskz_cvtepi8_epi32(kAll, numbers));
  };
  return _mm512_or_si512(_mm512_maskz_srli_epi32(kAll, wide(first), 16), wide(second));
}

// Exponents and mantissas move to their places, and the exponent's upper bits are 0111: a bias of 127 - 8. What has no
// leading one is one of eight numbers. (Arithmetic on numbers below the normal range takes 100 cycles.)
OCTAVO_INLINE __m512i in_turns(__m128i first, __m128i second, E4M3) {
  constexpr int kAndOr = 0xea, kOrAnd = 0xf8;  // (a & b) | c, a | (b & c)
  const __m512i small = _mm512_setr_epi32(0x37000000, 0x37c03780, 0x38203800, 0x38603840, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
  const __m512i wide = _mm512_maskz_cvtepi8_epi16(~0u, both);
  const __m512i words = _mm512_maskz_permutexvar_epi16(~0u, _mm512_load_si512(kTurns.own), wide);
  __m512i found = _mm512_ternarylogic_epi32(_mm512_maskz_slli_epi16(~0u, words, 4), _mm512_set1_epi16(0x7f0),
                                            _mm512_set1_epi16(0x3800), kAndOr);
  const __mmask32 is_small = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x78));
  found = _mm512_mask_permutexvar_epi16(found, is_small, words, small);
  return _mm512_ternarylogic_epi32(found, words, _mm512_set1_epi16(-0x8000), kOrAnd);
}

// The keys and values that a thread reads next, in groups of 16 positions: they are fetched while it works on others.
template <typename K>
class Ahead {
 public:
  // Forgets what was left. Groups of so many bytes follow, of whole lines.
  void begin(int64_t bytes) {
    count_ = at_ = offset_ = pace_ = 0;
    bytes_ = bytes;
  }
  void add(const void* group) { groups_[count_++] = static_cast<const char*>(group); }
  // All of them in so many calls of `fetch`.
  void spread(int64_t calls) { pace_ = calls == 0 ? 0 : (count_ * bytes_ / kLine + calls - 1) / calls; }

  OCTAVO_INLINE void fetch() {
    for (int64_t i = 0; i < pace_ && at_ < count_; ++i) {
      __builtin_prefetch(groups_[at_] + offset_, 0, 2);
      offset_ += kLine;
      if (offset_ == bytes_) {
        offset_ = 0;
        ++at_;
      }
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  const char* groups_[2 * kPartition / kLanes];
  int64_t count_ = 0, bytes_ = 0, pace_ = 0;
  int64_t at_ = 0, offset_ = 0;  // what is fetched next: a group, and bytes in it
};

// What a thread needs while it reduces tiles.
template <typename K>
class AmxRoom {
 public:
  static constexpr int64_t kStepChannels = 32, kStepPositions = 32;
  static constexpr int64_t kTileHalves = 512;  // of 16 bits
  static constexpr int64_t kWeightsLine = kPartition + kStepPositions;  // an odd number of cache lines
  static constexpr int64_t kVectors = 6 * kTileRows;
  using Factors = float[kPartition];

  static int64_t steps(const KVCache& cache) { return padded(cache.head_size, kStepChannels) / kStepChannels; }
  static int64_t bytes(const KVCache& cache) {
    const int64_t tiles = (kVectors / kTileRows + kGroups) * steps(cache);
    return (kScores + kFactors) * 4 + 2 * (kWeights + tiles * kTileHalves + pairs_size(cache)) +
           kLanes * cache.head_size * static_cast<int64_t>(sizeof(K));
  }

  AmxRoom(const KVCache& cache, void* memory)
      : scores(static_cast<float*>(memory)),
        factors(reinterpret_cast<Factors*>(scores + kScores)),
        weights(reinterpret_cast<bf16*>(scores + kScores + kFactors)),
        queries(weights + kWeights),
        keys(queries + kVectors / kTileRows * steps(cache) * kTileHalves),
        pairs(keys + kGroups * steps(cache) * kTileHalves),
        gathered(reinterpret_cast<K*>(pairs + pairs_size(cache))) {}

  // Tiles of so many rows: see Tiles.
  void configure(int64_t rows) {
    if (rows == rows_) return;
    tiles_.emplace(static_cast<int>(rows));
    rows_ = rows;
  }

  float* scores;     // [32 vectors, kWeightsStride]
  Factors* factors;  // [keys' and values'], where the cache has them: the keys' times the scale
  bf16* weights;     // [vectors, kWeightsLine]
  bf16* queries;     // [tiles of 16 vectors, steps of 32 channels, 16, 32]
  bf16* keys;        // [groups of 16 positions, steps of 32 channels, 16, 32], where the cache has no such lines
  bf16* pairs;       // [16 channels, steps of 32 positions, 16, 32]: values
  K* gathered;       // keys of 16 positions, where the cache's tiles are narrower
  Ahead<K> ahead;

 private:
  static constexpr int64_t kScores = 2 * kTileRows * kWeightsStride, kFactors = kScaled<K> ? 2 * kPartition : 0;
  static constexpr int64_t kWeights = kVectors * kWeightsLine;
  static constexpr int64_t kGroups = kScaled<K> ? kPartition / kLanes : 4;
  static int64_t pairs_size(const KVCache& cache) { return padded(cache.head_size, kLanes) * kPartition; }

  std::optional<Tiles> tiles_;
  int64_t rows_ = 0;
};

template <typename K>
class AmxView : public TileView<K, AmxRoom<K>::kVectors> {
  using View = TileView<K, AmxRoom<K>::kVectors>;

 protected:
  using View::call_, View::tile_, View::size_, View::padded_, View::row_, View::half_, View::width_, View::low_, View::high_;
  using View::last_begin_, View::first_end_, View::query_, View::begin_, View::end_;
  using View::keys, View::value, View::gather, View::gather_factors;
  using Room = AmxRoom<K>;
  static constexpr int64_t kStepChannels = Room::kStepChannels, kStepPositions = Room::kStepPositions;
  static constexpr int64_t kTileHalves = Room::kTileHalves, kWeightsLine = Room::kWeightsLine;

  AmxView(const Attention& call, const Tile& tile) : View(call, tile), steps_(Room::steps(call.cache)) {}

  // What is fetched ahead of a tile whose keys and values are read once.
  int64_t group_bytes() const { return row_ * kLanes * static_cast<int64_t>(sizeof(K)); }
  void list_groups(int64_t partition, Ahead<K>& ahead) const {
    if (tile_.count > kTileRows || width_ != kLanes || size_ % kStepChannels != 0) return;
    const int64_t low = std::max(low_, partition * kPartition) / kLanes * kLanes;
    const int64_t high = std::min(high_, (partition + 1) * kPartition);
    for (int64_t group = low; group < high; group += kLanes) ahead.add(keys(group));
    for (int64_t group = low; group < high; group += kLanes) ahead.add(keys(group) + half_);
  }

  // Zero times infinity or NaN is NaN: values that only some of the vectors see are to be finite, or each vector goes by
  // itself. All numbers of 8 bits are, and factors go into the weights of those that see them.
  bool hides_what_is_not_finite(int64_t partition) const {
    if constexpr (kScaled<K>) {
      return false;
    } else {
      const int64_t low = std::max(low_, partition * kPartition), high = std::min(high_, (partition + 1) * kPartition);
      return not_finite(low, std::min(last_begin_, high)) || not_finite(std::max(low, first_end_), high);
    }
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

  // Of the positions from `low` to `high` in a partition, times the scale.
  void copy_factors(int64_t base, int64_t low, int64_t high, float (*factors)[kPartition]) const {
    if constexpr (kScaled<K>) {
      // Not all positions of a group have a block.
      for (int which = 0; which < 2; ++which) std::fill_n(factors[which], kPartition, 0.0f);
      gather_factors(base, base + low, base + high, factors);
      for (int64_t i = low; i < high; i += kLanes) store(factors[0] + i, load(factors[0] + i) * call_.scale);
    }
  }

  // The lines of 16 positions' keys: in the cache, or put there. Calls meanwhile() for each eight channels that are widened.
  template <typename Meanwhile>
  OCTAVO_INLINE const bf16* key_lines(int64_t position, Room& room, bf16* to, const Meanwhile& meanwhile) const {
    const bool whole = width_ == kLanes;
    if constexpr (kScaled<K>) {
      if (!whole) gather(position, room.gathered);
      widen_keys(whole ? keys(position) : room.gathered, size_, to, meanwhile);
    } else {
      if (whole && size_ % kStepChannels == 0) return keys(position);
      gather(position, to);
    }
    const int64_t made = (size_ + 1) / 2;
    std::fill_n(to + made * 2 * kLanes, steps_ * kTileHalves - made * 2 * kLanes, bf16{});  // channels beyond the last one
    return to;
  }

  // Values of 32 positions and these channels in tiles that are `apart`; what nobody sees is finite. Calls meanwhile(), of 8
  // bits, for each eight positions and 16 channels that are widened.
  template <typename Meanwhile>
  OCTAVO_INLINE void pair_values(int64_t position, int64_t channel, int64_t end, int64_t apart, bf16* to,
                                 const Meanwhile& meanwhile) const {
    const K* rows[kStepPositions];
    for (int64_t first = 0; first < kStepPositions; first += width_) {
      const int64_t from = low_ - position - first, until = high_ - position - first;
      const K* at = from < width_ && until > 0 ? value(position + first) : nullptr;
      for (int64_t i = 0; i < width_; ++i) {
        // Numbers of 8 bits are all finite: what nobody sees may be any, for its weight is zero.
        if constexpr (kScaled<K>) rows[first + i] = at != nullptr ? at + i * size_ : value(low_);
        else rows[first + i] = i >= from && i < until ? at + i * size_ : nullptr;
      }
    }
    if constexpr (kScaled<K>) {
      for (; channel + kLanes <= std::min(end, size_); channel += kLanes, to += apart)
        widen_values(rows, channel, ~__mmask16{0}, std::true_type(), to, meanwhile);
      const __mmask16 some = static_cast<__mmask16>(channels(channel));
      if (channel < end) widen_values(rows, channel, some, std::false_type(), to, meanwhile);
    } else {
      alignas(64) static constexpr bf16 kNothing[kStepChannels] = {};
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
        }
      }
    }
  }

  static constexpr int64_t kTurn = 8;  // channels, or positions, that are widened between two calls of meanwhile()
  const int64_t steps_;                // of 32 channels

 private:
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

  // Those of 32 channels from this one on that there are.
  __mmask32 channels(int64_t channel) const {
    const int64_t left = size_ - channel;
    return left >= kStepChannels ? ~__mmask32{0} : (__mmask32{1} << std::max<int64_t>(left, 0)) - 1;
  }

  static OCTAVO_INLINE __m128i numbers_at(const K* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }

  template <typename Meanwhile>
  static OCTAVO_INLINE void widen_keys(const K* from, int64_t size, bf16* to, const Meanwhile& meanwhile) {
    const auto widen = [&](int64_t channel) {
      const K* at = from + channel * kLanes;
      _mm512_store_si512(to + channel * kLanes, in_turns(numbers_at(at), numbers_at(at + kLanes), K()));
    };
    int64_t channel = 0;
    for (; channel + kTurn <= size; channel += kTurn) {
      for (int64_t i = 0; i < kTurn; i += 2) widen(channel + i);
      meanwhile();
    }
    for (; channel + 2 <= size; channel += 2) widen(channel);
    if (channel < size)
      _mm512_store_si512(to + channel * kLanes, in_turns(numbers_at(from + channel * kLanes), _mm_setzero_si128(), K()));
  }

  template <typename Whole, typename Meanwhile>
  static OCTAVO_INLINE void widen_values(const K* const* rows, int64_t channel, __mmask16 some, Whole, bf16* to,
                                         const Meanwhile& meanwhile) {
    const auto numbers = [&](int64_t i) {
      return Whole() ? numbers_at(rows[i] + channel) : _mm_maskz_loadu_epi8(some, rows[i] + channel);
    };
    for (int64_t position = 0; position < kStepPositions; position += kTurn) {
      for (int64_t i = position; i < position + kTurn; i += 2)
        _mm512_store_si512(to + i * kLanes, in_turns(numbers(i), numbers(i + 1), K()));
      meanwhile();
    }
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL

#endif
