// What products of quantized weights share, whatever multiplies them: how a row's inputs become integers, and what is done
// with its sums.
#pragma once

#include <algorithm>

#include "epilogue.hpp"
#include "integer_formats.hpp"
#include "kernels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

constexpr int64_t kPanel = 2;  // blocks that an epilogue needs at once: gates and what they belong to
constexpr int64_t kSumsStride = kPanel * kLanes;
constexpr float kSmallest = 0x1p-100f;  // groups with no larger number count as zeros: 127 / it is finite

// 32 inputs: numbers * scale.
struct Group {
  i32x16 numbers[2];
  float scale;
};

template <typename T, typename Lanes>
OCTAVO_INLINE Group quantize(const T* from, Lanes first_lanes, Lanes second_lanes) {
  const f32x16 x[2] = {load(from, first_lanes), load(from + kLanes, second_lanes)};
  // Bits of numbers without a sign are in the numbers' order, infinity and then NaN at the end.
  const i32x16 a = (i32x16)x[0] & 0x7fffffff, b = (i32x16)x[1] & 0x7fffffff;
  const int32_t most_bits = largest_of(larger(a, b));
  float most;
  std::memcpy(&most, &most_bits, sizeof most);
  const bool whole = most_bits < 0x7f800000;
  const bool some = whole && most > kSmallest;
  const float inverse = some ? 127.0f / most : 0.0f;
  Group found;
  for (int half = 0; half < 2; ++half) found.numbers[half] = nearest(some ? x[half] * inverse : f32x16{});
  found.scale = whole ? (some ? most / 127.0f : 0.0f) : __builtin_nanf("");
  return found;
}

// A row's inputs of one group, those beyond the last one zero.
template <typename T>
OCTAVO_INLINE Group quantize_group(const Linear& call, int64_t row, int64_t group) {
  const T* from = static_cast<const T*>(call.x) + row * call.x_stride + group * kGroup;
  const int64_t left = call.in_size - group * kGroup;
  if (left >= kGroup) return quantize(from, Whole(), Whole());
  return quantize(from, static_cast<int>(std::clamp<int64_t>(left, 0, kLanes)),
                  static_cast<int>(std::clamp<int64_t>(left - kLanes, 0, kLanes)));
}

// What the format needs of a group beside its numbers and scale: F::kHalves floats or int32.
template <typename F>
OCTAVO_INLINE void put_beside(const Group& group, float* beside) {
  const i32x16* q = group.numbers;
  if constexpr (F::kBeside == Beside::start && F::kHalves == 2) {
    const int32_t starts[2] = {-F::kCentre * total_of(q[0]), -F::kCentre * total_of(q[1])};
    std::memcpy(beside, starts, sizeof starts);
  } else if constexpr (F::kBeside == Beside::start) {
    const int32_t start = -F::kCentre * total_of(q[0] + q[1]);
    std::memcpy(beside, &start, sizeof start);
  } else {
    const float total = static_cast<float>(total_of(q[0] + q[1]));
    *beside = F::kBeside == Beside::offset ? group.scale * total : total;
  }
}

// One copy for all formats. sums: [rows][kSumsStride].
__attribute__((noinline)) static void finish_rows(const Linear& call, int64_t row, int64_t rows, int64_t block,
                                                  int64_t blocks, const float* sums) {
  if (call.type == Type::f32) finish<float, float>(call, row, rows, block, blocks, sums, kSumsStride);
  else if (call.out_type == Type::bf16) finish<bf16, bf16>(call, row, rows, block, blocks, sums, kSumsStride);
  else finish<bf16, float>(call, row, rows, block, blocks, sums, kSumsStride);
}

}  // namespace octavo::OCTAVO_LEVEL
