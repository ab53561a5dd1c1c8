// What follows a product (the formula is at Linear): in float32, on sums that are still in the first-level cache, rounded
// once when it is stored.
//
// Every kernel of products hands its sums to `finish`, a few rows and blocks at a time: it does the same to a row's sums
// whatever rows are beside it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "functions.hpp"
#include "kernels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

// Outputs of a row: a gated product has one for each gate.
OCTAVO_INLINE int64_t row_size(const Linear& call) { return call.gated ? call.out_size / 2 : call.out_size; }

// Blocks of 16 outputs that the weight is packed in; gated: an even number.
OCTAVO_INLINE int64_t blocks_of(const Linear& call) {
  return (row_size(call) + kLanes - 1) / kLanes * (call.gated ? 2 : 1);
}

// The function of a gate, as Out is to have it.
template <typename Out, Function F>
OCTAVO_INLINE f32x16 opened(f32x16 gate) {
#if defined(__AMX_BF16__)
  if constexpr (F == Function::silu && std::is_same_v<Out, bf16>) return silu_for_bf16(gate);
#endif
  return function<F>(gate);
}

// Scaled: of quantized weights that became bf16 (quantized_lines.hpp); a power of two.
OCTAVO_INLINE float sum_scale(const Linear& call) { return call.half_scale == 0.0f ? 1.0f : 0x1p16f / call.half_scale; }

template <bool Scaled>
OCTAVO_INLINE f32x16 load_sums(const float* sums, float scale) {
  if constexpr (Scaled) return load(sums) * scale;
  return load(sums);
}

// Bare: there is no bias, no multiplier and no soft cap.
template <bool Bare, typename Bias, typename Lanes>
OCTAVO_INLINE f32x16 finished(const Linear& call, int64_t row, int64_t first, f32x16 value, Lanes lanes) {
  if constexpr (!Bare) {
    if (call.bias != nullptr) value = value + load(static_cast<const Bias*>(call.bias) + first, lanes);
    value = value * call.multiplier;
    if (call.softcap != 0.0f) value = call.softcap * tanh(value / call.softcap);
  }
  if (call.residual != nullptr) value = load(call.residual + row * call.out_stride + first, lanes) + value;
  return value;
}

template <bool Scaled, bool Bare, typename Bias, typename Out>
OCTAVO_INLINE void finish_blocks(const Linear& call, int64_t row, int64_t rows, int64_t block, int64_t blocks,
                                 const float* sums, int64_t stride) {
  const int64_t whole = std::min(blocks, call.out_size / kLanes - block), first = block * kLanes;
  const float scale = Scaled ? sum_scale(call) : 1.0f;
  const auto value = [&](int64_t r, int64_t b, auto lanes) {
    const f32x16 sum = load_sums<Scaled>(sums + r * stride + b * kLanes, scale);
    return finished<Bare, Bias>(call, row + r, first + b * kLanes, sum, lanes);
  };
  for (int64_t r = 0; r < rows; ++r) {
    Out* out = static_cast<Out*>(call.out) + (row + r) * call.out_stride + first;
    int64_t b = 0;
    for (; b + 1 < whole; b += 2) put(out + b * kLanes, value(r, b, Whole()), value(r, b + 1, Whole()));
    if (b < whole) put(out + b * kLanes, value(r, b, Whole()), Whole());
    if (whole < blocks) {
      const int lanes = static_cast<int>(call.out_size % kLanes);
      put(out + whole * kLanes, value(r, whole, lanes), lanes);
    }
  }
}

template <typename Bias, typename Out, Function F, typename Lanes>
OCTAVO_INLINE void finish_gate(const Linear& call, int64_t row, int64_t first, f32x16 gate, f32x16 up, Lanes lanes) {
  const int64_t size = row_size(call);
  if (call.bias != nullptr) {
    const Bias* bias = static_cast<const Bias*>(call.bias) + first;
    gate = gate + load(bias, lanes);
    up = up + load(bias + size, lanes);
  }
  put(static_cast<Out*>(call.out) + row * call.out_stride + first, opened<Out, F>(gate) * up, lanes);
}

// A row of a call whose gates are silu, of whole blocks and without a bias: of the sums of a gate's block and its value's.
template <typename Out>
OCTAVO_INLINE void finish_silu(const float* sums, Out* out, float scale) {
  put(out, opened<Out, Function::silu>(load(sums) * scale) * (load(sums + kLanes) * scale), Whole());
}

template <bool Scaled, typename Bias, typename Out, Function F>
OCTAVO_INLINE void finish_gates(const Linear& call, int64_t row, int64_t rows, int64_t block, int64_t blocks,
                                const float* sums, int64_t stride) {
  const float scale = Scaled ? sum_scale(call) : 1.0f;
  for (int64_t pair = 0; pair < blocks; pair += 2) {
    const int64_t first = (block + pair) / 2 * kLanes, left = row_size(call) - first;
    for (int64_t r = 0; r < rows; ++r) {
      const float* at = sums + r * stride + pair * kLanes;
      const f32x16 gate = load_sums<Scaled>(at, scale), up = load_sums<Scaled>(at + kLanes, scale);
      if (left >= kLanes) finish_gate<Bias, Out, F>(call, row + r, first, gate, up, Whole());
      else finish_gate<Bias, Out, F>(call, row + r, first, gate, up, static_cast<int>(left));
    }
  }
}

// Writes the outputs of `rows` rows from `row` on and `blocks` blocks of weights from `block` on; gated: both are even.
// Bias is the type of the call's bias, Out that of its outputs; Scaled: the sums are those of weights times half_scale.
// sums: [rows][blocks][16], rows `stride` floats apart.
template <typename Bias, typename Out, bool Scaled = false>
OCTAVO_INLINE void finish(const Linear& call, int64_t row, int64_t rows, int64_t block, int64_t blocks,
                          const float* sums, int64_t stride) {
  if (call.gated) {
    switch (call.function) {
      case Function::silu: return finish_gates<Scaled, Bias, Out, Function::silu>(call, row, rows, block, blocks, sums, stride);
      case Function::gelu: return finish_gates<Scaled, Bias, Out, Function::gelu>(call, row, rows, block, blocks, sums, stride);
      case Function::gelu_tanh:
        return finish_gates<Scaled, Bias, Out, Function::gelu_tanh>(call, row, rows, block, blocks, sums, stride);
    }
  }
  const bool bare = call.bias == nullptr && call.multiplier == 1.0f && call.softcap == 0.0f;
  if (bare) finish_blocks<Scaled, true, Bias, Out>(call, row, rows, block, blocks, sums, stride);
  else finish_blocks<Scaled, false, Bias, Out>(call, row, rows, block, blocks, sums, stride);
}

}  // namespace octavo::OCTAVO_LEVEL
