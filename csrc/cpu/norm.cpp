// RMSNorm and LayerNorm of rows, or of each head of a row: in float32, rounded once.

#include <cmath>
#include <type_traits>

#include "kernels.hpp"
#include "levels.hpp"
#include "rows.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// Lanes beyond the row hold zero; here they stay zero when the mean is taken off.
OCTAVO_INLINE f32x16 centered(f32x16 value, float mean, Whole) { return value - mean; }
OCTAVO_INLINE f32x16 centered(f32x16 value, float mean, int count) {
  for (int lane = 0; lane < count; ++lane) value[lane] -= mean;
  return value;
}

// The sum of value(i, lanes) over a row, added up in four vectors: each sum waits for the one before.
template <typename Value>
OCTAVO_INLINE float sum_of(int64_t size, const Value& value) {
  f32x16 sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int part = 0; part < 4; ++part) sums[part] = sums[part] + value(i + part * kLanes, Whole());
  by_vectors(size - i, [&](int64_t rest, auto lanes) { sums[0] = sums[0] + value(i + rest, lanes); });
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// `addend`: of the result, in float32, or null.
template <typename X, typename W, typename Out>
void norm_head(const Norm& call, const X* x, const W* weight, const W* bias, const float* addend, Out* out) {
  const float size = static_cast<float>(call.size);
  float mean = 0.0f;
  if (call.center) mean = sum_of(call.size, [&](int64_t i, auto lanes) { return load(x + i, lanes); }) / size;
  const float squares = sum_of(call.size, [&](int64_t i, auto lanes) {
    const f32x16 value = centered(load(x + i, lanes), mean, lanes);
    return value * value;
  });
  const float scale = 1.0f / std::sqrt(squares / size + call.eps);
  // A loop for each case: with a branch between product and sum it is up to the compiler whether they are fused. They are
  // in whole vectors, and not in the rest of a row.
  const auto write = [&](auto biased, auto added) {
    by_vectors(call.size, [&](int64_t i, auto lanes) {
      f32x16 normed = centered(load(x + i, lanes), mean, lanes) * scale * load(weight + i, lanes);
      if constexpr (std::is_same_v<decltype(lanes), int>) asm("" : "+m"(normed));
      if constexpr (biased) normed = normed + load(bias + i, lanes);
      if constexpr (added) normed = normed + load(addend + i, lanes);
      put(out + i, normed, lanes);
    });
  };
  constexpr std::true_type yes;
  constexpr std::false_type no;
  if (bias != nullptr) addend != nullptr ? write(yes, yes) : write(yes, no);
  else addend != nullptr ? write(no, yes) : write(no, no);
}

template <typename X, typename W, typename Out>
void norm_row(const Norm& call, int64_t row) {
  const int64_t first = row * call.heads * call.size;
  for (int64_t head = 0; head < call.heads; ++head) {
    const int64_t at = head * call.size, own = call.head_weights ? at : 0;
    norm_head(call, static_cast<const X*>(call.x) + row * call.x_stride + at, static_cast<const W*>(call.weight) + own,
              call.bias == nullptr ? nullptr : static_cast<const W*>(call.bias) + own,
              call.residual == nullptr ? nullptr : call.residual + first + at, static_cast<Out*>(call.out) + first + at);
  }
}

template <typename X, typename W>
void norm_rows(const Norm& call) {
  by_rows(call.rows, call.heads * call.size, [&](int64_t row) {
    if (call.out_type == Type::f32) norm_row<X, W, float>(call, row);
    else norm_row<X, W, bf16>(call, row);
  });
}

}  // namespace

void norm(const Norm& call) {
  const bool wide = call.weight_type == Type::f32;
  if (call.type == Type::f32) (wide ? norm_rows<float, float> : norm_rows<float, bf16>)(call);
  else (wide ? norm_rows<bf16, float> : norm_rows<bf16, bf16>)(call);
}

}  // namespace octavo::OCTAVO_LEVEL
