// Blocks of GGUF's types of 32 values → float32, bit for bit what octavo/checkpoints/dequantize_blocks.py says. Built
// without contraction: each product is rounded before its offset is added.

#include "dequantize.hpp"

#include <cstring>

#include "half.hpp"

namespace octavo {
namespace {

constexpr int kValues = 32;  // of a block

// | d | 32 x int8 |
void q8_0(const uint8_t* block, float* values) {
  const float d = half(block);
  for (int i = 0; i < kValues; ++i) values[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * d;
}

// Nibbles: the low halves of 16 bytes, then the high ones. `high`: a fifth bit for each value, or null.
void numbers(const uint8_t* packed, const uint8_t* high, int32_t* q) {
  for (int i = 0; i < kValues / 2; ++i) {
    q[i] = packed[i] & 15;
    q[kValues / 2 + i] = packed[i] >> 4;
  }
  if (high == nullptr) return;
  uint32_t fifth;
  std::memcpy(&fifth, high, 4);
  for (int i = 0; i < kValues; ++i) q[i] |= static_cast<int32_t>((fifth >> i & 1) << 4);
}

// | d | [4 bytes of fifth bits] | nibbles |: d · (q - middle)
void centred(const uint8_t* block, bool five, float* values) {
  int32_t q[kValues];
  numbers(block + (five ? 6 : 2), five ? block + 2 : nullptr, q);
  const float d = half(block);
  for (int i = 0; i < kValues; ++i) values[i] = static_cast<float>(q[i] - (five ? 16 : 8)) * d;
}

// | d | m | [4 bytes of fifth bits] | nibbles |: d · q + m
void offset(const uint8_t* block, bool five, float* values) {
  int32_t q[kValues];
  numbers(block + (five ? 8 : 4), five ? block + 4 : nullptr, q);
  const float d = half(block), m = half(block + 2);
  for (int i = 0; i < kValues; ++i) values[i] = static_cast<float>(q[i]) * d + m;
}

}  // namespace

void dequantize(Blocks type, const void* blocks, int64_t count, float* values) {
  static constexpr int64_t kBytes[] = {34, 18, 20, 22, 24};
  const uint8_t* block = static_cast<const uint8_t*>(blocks);
  for (int64_t i = 0; i < count; ++i, block += kBytes[static_cast<int>(type)], values += kValues) switch (type) {
      case Blocks::q8_0: q8_0(block, values); break;
      case Blocks::q4_0: centred(block, false, values); break;
      case Blocks::q4_1: offset(block, false, values); break;
      case Blocks::q5_0: centred(block, true, values); break;
      case Blocks::q5_1: offset(block, true, values); break;
    }
}

}  // namespace octavo
