// How quantized weights are kept: the file's own integers and scales, in the order in which the product reads them.
//
// A weight [out_size, in_size] is cut into blocks of 16 outputs (gated: blocks of both halves take turns, see Linear). A
// block is its inputs in groups of 32; groups that share a scale are a span:
//
//   block b │ span: header │ group: header, numbers │ group: header, numbers │ … ║ span: … ║ …
//
// Numbers are unsigned, in eight lines of 16 outputs x 4 inputs (64 bytes where a number is a byte). Of each eight inputs
// of the group, line 2i has inputs 0 4 1 5, line 2i + 1 inputs 2 6 3 7, so that halves of bytes, and bytes of 8 bits, that
// are equally far from the ends of their 16-bit words are pairs of neighbours, 0 1, 2 3, 4 5, 6 7: what bf16 is multiplied by.
//
//   4 bits  four times 64 bytes: line 2i in the low halves of bytes, line 2i + 1 in the high ones
//   5 bits  as 4 bits, and 64 bytes whose bit j is the fifth bit of the number at that place in line j
//   6 bits  as 4 bits, and twice 64 bytes: bits 2j and 2j + 1 belong to line j of the first four, then of the last four
//   8 bits  eight times 64 bytes
//
//           span header            group header              weight (q: the number that is kept)
//   q4_0    16 fp16 d              -                         d (q - 8)
//   q4_1    16 fp16 d, 16 fp16 m   -                         d q + m
//   q5_0    16 fp16 d              -                         d (q - 16)
//   q5_1    16 fp16 d, 16 fp16 m   -                         d q + m
//   q8_0    16 fp16 d              -                         d (q - 128)
//   q4_k    16 fp16 d, 16 fp16 m   16 uint8 s, 16 uint8 o    d s q - m o
//   q5_k    as q4_k                                          d s q - m o
//   q6_k    16 fp16 d              2 x 16 int8 s             d s (q - 32), an s for each half of the group
//   u4, u8  16 fp32 d, 16 uint8 z  -                         d (q - z)
//
//   f8      16 fp32 d              -                         d q, q a number of e4m3
//
// Numbers of f8 are in lines of 16 outputs x 2 inputs (32 bytes): that is how bf16 has them, to which they are widened.
//
// Spans are one group, of *_k eight, and of u4, u8 and f8 what the checkpoint says. Outputs and inputs beyond the weight's
// have numbers and scales of 0.
#pragma once

#include <cstdint>

namespace octavo {

// plain: not quantized, see Linear; coded: the same numbers in fewer bits, see coded.hpp.
enum class Format : int { plain = 0, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, u4, u8, f8, coded };

constexpr int64_t kGroup = 32;         // inputs
constexpr int64_t kBlockOutputs = 16;

struct Layout {
  int64_t bits;          // of a number
  int64_t span;          // groups
  int64_t span_header;   // bytes
  int64_t group_header;  // bytes

  constexpr int64_t numbers() const { return bits * kGroup * kBlockOutputs / 8; }  // bytes of a group's
  constexpr int64_t group_bytes() const { return group_header + numbers(); }
  constexpr int64_t span_bytes() const { return span_header + span * group_bytes(); }
  constexpr int64_t spans(int64_t in_size) const { return (in_size + span * kGroup - 1) / (span * kGroup); }
  constexpr int64_t block_bytes(int64_t in_size) const { return spans(in_size) * span_bytes(); }
};

// `span_inputs`: of u4, u8 and f8, inputs that share a scale: a multiple of 32.
static constexpr Layout layout_of(Format format, int64_t span_inputs) {
  switch (format) {
    case Format::q4_0: return {4, 1, 32, 0};
    case Format::q4_1: return {4, 1, 64, 0};
    case Format::q5_0: return {5, 1, 32, 0};
    case Format::q5_1: return {5, 1, 64, 0};
    case Format::q8_0: return {8, 1, 32, 0};
    case Format::q4_k: return {4, 8, 64, 32};
    case Format::q5_k: return {5, 8, 64, 32};
    case Format::q6_k: return {6, 8, 32, 32};
    case Format::u4: return {4, span_inputs / kGroup, 80, 0};
    case Format::u8: return {8, span_inputs / kGroup, 80, 0};
    case Format::f8: return {8, span_inputs / kGroup, 64, 0};
    case Format::coded:
    case Format::plain: break;
  }
  return {};
}

// The order of each eight inputs in two lines.
constexpr int64_t kInputOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// Bytes of a quantized weight, packed.
int64_t packed_block_bytes(Format format, int64_t span_inputs, int64_t out_size, int64_t in_size, bool gated);

// Bytes of one row as checkpoints have it: GGUF's blocks; of u4 and u8 for each span | fp32 scale | uint8 zero | 3 bytes |
// numbers, of u4 two in a byte, the lower half first |; of f8 | fp32 scale | numbers |.
int64_t file_row_bytes(Format format, int64_t span_inputs, int64_t in_size);

// Writes rows of blocks, as checkpoints have them, to their places in `packed`, as `pack` does (kernels.hpp).
void pack_blocks(Format format, int64_t span_inputs, const void* rows, int64_t first_row, int64_t count,
                 int64_t out_size, int64_t in_size, bool gated, void* packed);

// The 32 weights of one output (lane of a block) and one group, as the formulas above say: each product is rounded before
// the next step. `block`: the packed block.
void unpack_group(Format format, const Layout& layout, const uint8_t* block, int64_t lane, int64_t group, float* values);

// What the weights of these blocks, packed, are multiplied by so that each is at most 2^14: a power of two. 0: there is none,
// because a scale is not finite, all are zero or so small or large that it would not be a float, or rows end within a group.
float half_scale(Format format, int64_t span_inputs, const uint8_t* packed, int64_t blocks, int64_t in_size);

}  // namespace octavo
