// Weights of 8-bit floats (f8 in formats.hpp) as the lines of bf16 that products read (drawn at Linear), block by block,
// while they are multiplied: a product of them has the bits of one with the widened weight.
#pragma once

#include "dots.hpp"
#include "formats.hpp"
#include "kernels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

// Sixteen numbers of e4m3, in the low eight bits.
OCTAVO_INLINE f32x16 from_e4m3(u32x16 bytes) {
  const u32x16 rest = bytes & 0x7fu, sign = (bytes & 0x80u) << 24;
  const f32x16 value = (f32x16)(rest << 20 | sign) * 0x1p120f;  // the exponent's bias is 7 instead of 127
  return select((i32x16)(rest == 0x7fu), splat(__builtin_nanf("")), value);
}

// The bits of a bf16, nearest, ties to even, in the upper half.
OCTAVO_INLINE u32x16 upper_half(f32x16 value) {
  const u32x16 bits = (u32x16)value, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  const u32x16 is_nan = (u32x16)(value != value);
  return ((is_nan & (bits | 0x400000u)) | (~is_nan & rounded)) & 0xffff0000u;
}

// `blocks` blocks from `block` on; to: a line of 16 words for each pair of inputs.
inline __attribute__((always_inline)) void widen_blocks(const Linear& call, const Layout& layout, int64_t block,
                                                        int64_t blocks, uint32_t* to) {
  const int64_t spans = layout.spans(call.in_size);
  const uint8_t* at = static_cast<const uint8_t*>(call.weight) + block * layout.block_bytes(call.in_size);
  for (int64_t span = 0; span < blocks * spans; ++span) {
    const f32x16 scale = load(reinterpret_cast<const float*>(at));
    at += layout.span_header;
    for (int64_t pair = 0; pair < layout.span * kGroup / 2; ++pair, at += 2 * kLanes, to += kLanes) {
      const u32x16 both = load_pairs(at);
      const f32x16 even = from_e4m3(both & 0xffu) * scale, odd = from_e4m3(both >> 8) * scale;
      const u32x16 line = upper_half(even) >> 16 | upper_half(odd);
      std::memcpy(to, &line, sizeof line);
      __builtin_prefetch(at + 2048);
    }
  }
}

}  // namespace octavo::OCTAVO_LEVEL
