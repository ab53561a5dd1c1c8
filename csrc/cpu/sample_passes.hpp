// Passes over the logits of a row, or a chunk of one, for sample.cpp.
//
// Maxima: logits are taken in groups of 256, sixteen vectors; of a group one vector is kept, each lane the largest of its
// sixteen logits. The 40th largest of all maxima, say, is a bound that at least 40 logits reach, and few others do.
//
//   logits │ group 0: v0 v1 … v15 │ group 1 …        maxima │ max of v0 … v15 by lane │ …
#pragma once

#include <cstdint>
#include <cstring>

#include <math.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

using f32x8 = float __attribute__((vector_size(32)));
using i32x8 = int32_t __attribute__((vector_size(32)));
using f64x8 = double __attribute__((vector_size(64)));
using i64x8 = int64_t __attribute__((vector_size(64)));

constexpr int64_t kGroup = 256;
constexpr float kLowest = -__builtin_inff();

// Calls visit(index, sixteen logits) along `count` of them; behind the last there is -inf.
template <typename Visit>
OCTAVO_INLINE void by_sixteens(const float* at, int64_t count, const Visit& visit) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) visit(i, at + i);
  if (i == count) return;
  float rest[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) rest[lane] = i + lane < count ? at[i + lane] : kLowest;
  visit(i, static_cast<const float*>(rest));
}

// One bit a lane: whether it is at least `bound`; false for NaN.
OCTAVO_INLINE uint32_t at_least(f32x16 value, f32x16 bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)value, (__m512)bound, _CMP_GE_OQ);
#elif defined(__AVX2__)
  __m256 values[2], bounds[2];
  std::memcpy(values, &value, sizeof values);
  std::memcpy(bounds, &bound, sizeof bounds);
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(values[0], bounds[0], _CMP_GE_OQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(values[1], bounds[1], _CMP_GE_OQ));
  return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 8;
#else
  const i32x16 reached = reaches(value, bound);
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= (static_cast<uint32_t>(reached[lane]) & 1u) << lane;
  return bits;
#endif
}

OCTAVO_INLINE int64_t sum_lanes(i32x16 value) {
  int64_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += value[lane];
  return total;
}

// Halves are added to halves.
OCTAVO_INLINE double sum_lanes(f64x8 value) {
  double lane[8];
  std::memcpy(lane, &value, sizeof lane);
  for (int half = 4; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

struct Scanned {
  float best;  // -inf where there is nothing else; not of NaN
  bool nan;
};

// Looks at all logits once. `maxima`: null, or of as many groups as there are.
OCTAVO_INLINE Scanned scan(const float* logits, int64_t count, float* maxima) {
  f32x16 best = splat(kLowest);
  i32x16 nan = {};
  for (int64_t group = 0; group < count; group += kGroup) {
    f32x16 most = splat(kLowest);
    by_sixteens(logits + group, count - group < kGroup ? count - group : kGroup, [&](int64_t, const float* sixteen) {
      const f32x16 value = load(sixteen);
      nan |= is_nan(value);
      most = max(value, most);
    });
    if (maxima != nullptr) store(maxima + group / kLanes, most);
    best = max(most, best);
  }
  return {max_lane(best), sum_lanes(nan) != 0};
}

// e^x for x <= 0 within 1 unit in the last place or so; 0 from -708 down.
// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by the Taylor polynomial of degree 13 (its error there is 4e-18).
OCTAVO_INLINE f64x8 exp(f64x8 x) {
  const f64x8 low = f64x8{} - 708.0;
  const i64x8 nothing = x < low;
  const f64x8 bounded = (f64x8)(((i64x8)low & nothing) | ((i64x8)x & ~nothing));
  const f64x8 magic = f64x8{} + 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number
  const f64x8 shifted = bounded * 1.4426950408889634074 + magic;
  const f64x8 n = shifted - magic;
  f64x8 r = bounded - n * 6.93147180369123816490e-01;
  r = r - n * 1.90821492927058770002e-10;
  f64x8 p = f64x8{} + 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const i64x8 whole = (i64x8)shifted - (i64x8)magic;
  const f64x8 found = p * (f64x8)((whole + 1023) << 52);
  return (f64x8)((i64x8)found & ~nothing);
}

// What tokens are drawn in proportion to: e^((logit - best) / temperature), 1 for the best, be it infinite.
OCTAVO_INLINE f64x8 weights_of(const float* eight, double best, double per_temperature) {
  f32x8 logits;
  std::memcpy(&logits, eight, sizeof logits);
  const f64x8 value = __builtin_convertvector(logits, f64x8);
  const f64x8 below = (value - best) * per_temperature;
  return exp((f64x8)((i64x8)below & ~(i64x8)(value == best)));
}

// Sum of the weights of a chunk.
OCTAVO_INLINE double sum_weights(const float* logits, int64_t count, double best, double per_temperature) {
  f64x8 low = {}, high = {};
  by_sixteens(logits, count, [&](int64_t, const float* sixteen) {
    low = low + weights_of(sixteen, best, per_temperature);
    high = high + weights_of(sixteen + 8, best, per_temperature);
  });
  return sum_lanes(low + high);
}

// The sum of value_of(index, sixteen floats): groups in single precision, then in double.
template <typename Value>
OCTAVO_INLINE double sum_groups(const float* at, int64_t count, const Value& value_of) {
  f64x8 low = {}, high = {};
  for (int64_t group = 0; group < count; group += kGroup) {
    f32x16 sum = {};
    by_sixteens(at + group, count - group < kGroup ? count - group : kGroup,
                [&](int64_t i, const float* sixteen) { sum = sum + value_of(group + i, load(sixteen)); });
    f32x8 halves[2];
    std::memcpy(halves, &sum, sizeof halves);
    low = low + __builtin_convertvector(halves[0], f64x8);
    high = high + __builtin_convertvector(halves[1], f64x8);
  }
  return sum_lanes(low + high);
}

// The weights in single precision.
OCTAVO_INLINE f32x16 rough_weights(f32x16 logits, float best, float per_temperature) {
  return exp(select(equal(logits, splat(best)), f32x16{}, (logits - best) * per_temperature));
}

// Sum of e^(logit - best): for logprobs, which are single.
OCTAVO_INLINE double sum_exponentials(const float* logits, int64_t count, float best) {
  return sum_groups(logits, count, [&](int64_t, f32x16 value) { return rough_weights(value, best, 1.0f); });
}

// How many are at least `bound`. `values`: whole vectors.
OCTAVO_INLINE int64_t count_from(const float* values, int64_t size, float bound) {
  i32x16 reached = {};
  for (int64_t i = 0; i < size; i += kLanes) reached = reached - reaches(load(values + i), splat(bound));
  return sum_lanes(reached);
}

// The weight of those that are at least `bound`. Whole vectors.
OCTAVO_INLINE double weight_from(const float* values, const double* weights, int64_t size, float bound) {
  f64x8 total = {};
  for (int64_t i = 0; i < size; i += 8) {
    f32x8 value;
    f64x8 weight;
    std::memcpy(&value, values + i, sizeof value);
    std::memcpy(&weight, weights + i, sizeof weight);
    const i64x8 reached = __builtin_convertvector((i32x8)(value >= f32x8{} + bound), i64x8);
    total = total + (f64x8)((i64x8)weight & reached);
  }
  return sum_lanes(total);
}

// Floats as integers in the same order.
OCTAVO_INLINE int32_t key_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
OCTAVO_INLINE float of_key(int64_t key) {
  const int32_t bits = key < 0 ? static_cast<int32_t>(key) ^ 0x7fffffff : static_cast<int32_t>(key);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

enum class Verdict { low_enough, too_high, found };

// The largest bound from `low` to `best` that is low enough, or the first that is found good. `low` is low enough.
template <typename Judge>
OCTAVO_INLINE float highest_bound(float low, float best, const Judge& judge) {
  int64_t low_enough = key_of(low), too_high = int64_t{key_of(best)} + 1;
  while (too_high - low_enough > 1) {
    const int64_t middle = low_enough + (too_high - low_enough) / 2;
    const Verdict verdict = judge(of_key(middle));
    if (verdict == Verdict::found) return of_key(middle);
    (verdict == Verdict::low_enough ? low_enough : too_high) = middle;
  }
  return of_key(low_enough);
}

// A bound that at least `wanted` logits reach, and not many more.
OCTAVO_INLINE float bound_of(const float* maxima, int64_t size, float best, int64_t wanted) {
  if (wanted > size) return kLowest;
  return highest_bound(kLowest, best, [&](float bound) {
    const int64_t count = count_from(maxima, size, bound);
    return count < wanted ? Verdict::too_high : count > 2 * wanted ? Verdict::low_enough : Verdict::found;
  });
}

// A bound so much below the best, and a little lower, for what was rounded. (below: negative.)
OCTAVO_INLINE float bound_below(double best, double below) {
  const double bound = best + below - 1e-6 * (::fabs(best) + ::fabs(below));
  return bound > -3.4e38 ? static_cast<float>(bound) : kLowest;  // NaN where the best is infinite
}

// A bound that logits of at least so much weight reach, and of not much more. Their rough weights go to `room`, [count]
// and the rest of a vector.
OCTAVO_INLINE float bound_of_weight(const float* logits, int64_t count, float best, double temperature, double wanted,
                                    float* room) {
  const float per_temperature = static_cast<float>(1.0 / temperature);
  by_sixteens(logits, count, [&](int64_t i, const float* sixteen) {
    store(room + i, rough_weights(load(sixteen), best, per_temperature));
  });
  const double enough = wanted * (1.0 + 1e-5);
  const float least = highest_bound(0.0f, 1.0f, [&](float bound) {
    const double weight = sum_groups(room, (count + kLanes - 1) / kLanes * kLanes, [&](int64_t, f32x16 weights) {
      return select(reaches(weights, splat(bound)), weights, f32x16{});
    });
    return weight < enough ? Verdict::too_high : weight > 1.02 * enough ? Verdict::low_enough : Verdict::found;
  });
  if (!(least > 0.0f)) return kLowest;
  return bound_below(best, temperature * (::log(static_cast<double>(least)) - 1e-4));
}

// How many logits there may be at most that reach a bound.
OCTAVO_INLINE int64_t most_from(const float* maxima, int64_t size, float bound) {
  return count_from(maxima, size, bound) * kLanes;
}

// Calls visit(id, logit) for the logits that reach a bound, in ascending order of ids.
template <typename Visit>
OCTAVO_INLINE void visit_from(const float* logits, const float* maxima, int64_t count, float bound, const Visit& visit) {
  const f32x16 bounds = splat(bound);
  for (int64_t group = 0; group < count; group += kGroup) {
    if (at_least(load(maxima + group / kLanes), bounds) == 0) continue;
    const int64_t size = count - group < kGroup ? count - group : kGroup;
    by_sixteens(logits + group, size, [&](int64_t i, const float* sixteen) {
      for (uint32_t bits = at_least(load(sixteen), bounds); bits != 0; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        if (i + lane < size) visit(group + i + lane, sixteen[lane]);
      }
    });
  }
}

// The first id of a value that is there.
OCTAVO_INLINE int64_t find(const float* logits, int64_t count, float value) {
  int64_t found = -1;
  for (int64_t i = 0; i < count && found < 0; i += kLanes)
    by_sixteens(logits + i, count - i < kLanes ? count - i : kLanes, [&](int64_t, const float* sixteen) {
      const uint32_t bits = at_least(load(sixteen), splat(value));
      if (bits != 0) found = i + __builtin_ctz(bits);
    });
  return found;
}

// How many tokens are more likely than one.
OCTAVO_INLINE int64_t count_before(const float* logits, int64_t count, int64_t id) {
  const f32x16 own = splat(logits[id]);
  i32x16 before = {};
  // Lower ids are before it when they are equal. The vector in which it stands is looked at lane by lane.
  const int64_t at = id - id % kLanes;
  by_sixteens(logits, at, [&](int64_t, const float* sixteen) { before = before - reaches(load(sixteen), own); });
  int64_t found = 0;
  for (int64_t i = at; i < count && i < at + kLanes; ++i)
    found += logits[i] > logits[id] || (i < id && logits[i] == logits[id]);
  if (at + kLanes < count)
    by_sixteens(logits + at + kLanes, count - at - kLanes,
                [&](int64_t, const float* sixteen) { before = before - less(own, load(sixteen)); });
  return found + sum_lanes(before);
}

}  // namespace octavo::OCTAVO_LEVEL
