// Norms with the residual addition before them, activations, rotary embedding: row by row, in float32, rounded once.

#include <algorithm>
#include <cmath>

#include "functions.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "simd.hpp"
#include "thread_pool.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// A piece of a row-wise kernel is worth a thread from about so many elements.
constexpr int64_t kElements = 1 << 14;

template <typename Row>
void by_rows(int64_t rows, int64_t size, const Row& row_work) {
  const int64_t together = std::max<int64_t>(1, kElements / std::max<int64_t>(size, 1));
  pool().run((rows + together - 1) / together, [&](int64_t piece) {
    for (int64_t row = piece * together; row < std::min(rows, (piece + 1) * together); ++row) row_work(row);
  });
}

// Lanes beyond the row hold zero; here they stay zero when the mean is taken off.
OCTAVO_INLINE f32x16 centered(f32x16 value, float mean, Whole) { return value - mean; }
OCTAVO_INLINE f32x16 centered(f32x16 value, float mean, int count) {
  for (int lane = 0; lane < count; ++lane) value[lane] -= mean;
  return value;
}

template <typename T, typename W>
void norm_row(const Norm& call, int64_t row) {
  const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
  const int64_t own = row % call.weight_rows * call.size;
  const W* weight = static_cast<const W*>(call.weight) + own;
  const W* bias = call.bias == nullptr ? nullptr : static_cast<const W*>(call.bias) + own;
  T* out = static_cast<T*>(call.out) + row * call.size;
  const float* residual = call.residual == nullptr ? nullptr : call.residual + row * call.size;
  float* total = call.residual == nullptr ? nullptr : call.sum + row * call.size;

  f32x16 values = {};
  if (residual != nullptr)
    by_vectors(call.size, [&](int64_t i, auto lanes) {
      store(total + i, load(residual + i, lanes) + load(x + i, lanes) * call.multiplier, lanes);
    });
  const auto value_at = [&](int64_t i, auto lanes) {
    return residual == nullptr ? load(x + i, lanes) : load(total + i, lanes);
  };
  const float size = static_cast<float>(call.size);
  float mean = 0.0f;
  if (call.center) {
    by_vectors(call.size, [&](int64_t i, auto lanes) { values = values + value_at(i, lanes); });
    mean = sum(values) / size;
  }
  f32x16 squares = {};
  by_vectors(call.size, [&](int64_t i, auto lanes) {
    const f32x16 value = centered(value_at(i, lanes), mean, lanes);
    squares = squares + value * value;
  });
  const float scale = 1.0f / std::sqrt(sum(squares) / size + call.eps);
  by_vectors(call.size, [&](int64_t i, auto lanes) {
    const f32x16 normed = centered(value_at(i, lanes), mean, lanes) * scale * load(weight + i, lanes);
    store(out + i, bias == nullptr ? normed : normed + load(bias + i, lanes), lanes);
  });
}

template <typename T, Function F>
void activation_row(const Activation& call, int64_t row) {
  const T* x = static_cast<const T*>(call.x) + row * call.size * (call.gated ? 2 : 1);
  T* out = static_cast<T*>(call.out) + row * call.size;
  by_vectors(call.size, [&](int64_t i, auto lanes) {
    const f32x16 value = function<F>(load(x + i, lanes));
    store(out + i, call.gated ? value * load(x + call.size + i, lanes) : value, lanes);
  });
}

template <Function F>
void activation_rows(const Activation& call) {
  by_rows(call.rows, call.size, [&](int64_t row) {
    if (call.type == Type::bf16) activation_row<bf16, F>(call, row);
    else activation_row<float, F>(call, row);
  });
}

template <typename T>
void rotary_row(const Rotary& call, int64_t row) {
  const int64_t half = call.rotary_dim / 2;
  const float* cosines = call.cos_sin + call.positions[row] * call.rotary_dim;
  const float* sines = cosines + half;
  for (int64_t head = 0; head < call.heads; ++head) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride + head * call.head_size;
    T* out = static_cast<T*>(call.out) + (row * call.heads + head) * call.head_size;
    by_vectors(half, [&](int64_t i, auto lanes) {
      const f32x16 first = load(x + i, lanes), second = load(x + half + i, lanes);
      const f32x16 cosine = load(cosines + i, lanes), sine = load(sines + i, lanes);
      store(out + i, first * cosine - second * sine, lanes);
      store(out + half + i, second * cosine + first * sine, lanes);
    });
    std::copy(x + call.rotary_dim, x + call.head_size, out + call.rotary_dim);
  }
}

}  // namespace

void norm(const Norm& call) {
  by_rows(call.rows, call.size, [&](int64_t row) {
    const bool wide = call.weight_type == Type::f32;
    if (call.type == Type::f32) (wide ? norm_row<float, float> : norm_row<float, bf16>)(call, row);
    else (wide ? norm_row<bf16, float> : norm_row<bf16, bf16>)(call, row);
  });
}

void activation(const Activation& call) {
  switch (call.function) {
    case Function::silu: return activation_rows<Function::silu>(call);
    case Function::gelu: return activation_rows<Function::gelu>(call);
    case Function::gelu_tanh: return activation_rows<Function::gelu_tanh>(call);
  }
}

void rotary(const Rotary& call) {
  by_rows(call.rows, call.heads * call.head_size, [&](int64_t row) {
    if (call.type == Type::bf16) rotary_row<bf16>(call, row);
    else rotary_row<float>(call, row);
  });
}

}  // namespace octavo::OCTAVO_LEVEL
