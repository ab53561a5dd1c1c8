// Activations, and rows in another type: in float32, rounded once; and rows whose columns change places.

#include "functions.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "rows.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

template <typename T, Function F>
void activation_row(const Activation& call, int64_t row) {
  const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
  T* out = static_cast<T*>(call.out) + row * call.size;
  by_vectors(call.size, [&](int64_t i, auto lanes) { store(out + i, function<F>(load(x + i, lanes)), lanes); });
}

template <Function F>
void activation_rows(const Activation& call) {
  by_rows(call.rows, call.size, [&](int64_t row) {
    if (call.type == Type::bf16) activation_row<bf16, F>(call, row);
    else activation_row<float, F>(call, row);
  });
}

template <typename X, typename Out>
void cast_rows(const Cast& call) {
  by_rows(call.rows, call.size, [&](int64_t row) {
    const X* x = static_cast<const X*>(call.x) + row * call.x_stride;
    Out* out = static_cast<Out*>(call.out) + row * call.size;
    by_vectors(call.size, [&](int64_t i, auto lanes) { store(out + i, load(x + i, lanes), lanes); });
  });
}

template <typename T>
void reorder_rows(const Reorder& call) {
  by_rows(call.rows, call.size, [&](int64_t row) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    T* out = static_cast<T*>(call.out) + row * call.size;
    if (call.back)
      for (int64_t i = 0; i < call.size; ++i) out[call.order[i]] = x[i];
    else
      for (int64_t i = 0; i < call.size; ++i) out[i] = x[call.order[i]];
  });
}

}  // namespace

void activation(const Activation& call) {
  switch (call.function) {
    case Function::silu: return activation_rows<Function::silu>(call);
    case Function::gelu: return activation_rows<Function::gelu>(call);
    case Function::gelu_tanh: return activation_rows<Function::gelu_tanh>(call);
  }
}

void cast(const Cast& call) {
  const bool wide = call.out_type == Type::f32;
  if (call.type == Type::f32) (wide ? cast_rows<float, float> : cast_rows<float, bf16>)(call);
  else (wide ? cast_rows<bf16, float> : cast_rows<bf16, bf16>)(call);
}

void reorder(const Reorder& call) { (call.type == Type::f32 ? reorder_rows<float> : reorder_rows<bf16>)(call); }

}  // namespace octavo::OCTAVO_LEVEL
