// Blocks of quantized weights, from the order of checkpoints into that of the products (drawn in formats.hpp) and back.
//
// An output's numbers are whole 32-bit words of the packed lines, and its scales have places of their own: rows are packed
// one by one, by any thread. Built without contraction: unpacked weights have the bits of
// octavo/checkpoints/dequantize_*.py.

#include <algorithm>
#include <cstring>

#include "formats.hpp"
#include "half.hpp"

namespace octavo {
namespace {

using Numbers = uint8_t[kGroup];

constexpr int64_t kLineBytes = 64;
constexpr uint32_t kLows = 0x0f0f0f0f;

uint32_t word(const uint8_t* at) {
  uint32_t found;
  std::memcpy(&found, at, sizeof found);
  return found;
}

void put_word(uint32_t value, uint8_t* at) { std::memcpy(at, &value, sizeof value); }

// One output's numbers to their places: `to` is its first word.
void pack_numbers(int64_t bits, const Numbers& in_order, uint8_t* to) {
  Numbers q;
  for (int64_t k = 0; k < kGroup; ++k) q[k] = in_order[k / 8 * 8 + kInputOrder[k % 8]];
  if (bits == 8) {
    for (int64_t j = 0; j < 8; ++j) std::memcpy(to + j * kLineBytes, q + 4 * j, 4);
    return;
  }
  for (int64_t i = 0; i < 4; ++i)
    put_word((word(q + 8 * i) & kLows) | (word(q + 8 * i + 4) & kLows) << 4, to + i * kLineBytes);
  uint32_t high[2] = {};
  for (int64_t j = 0; j < 8; ++j) {
    const uint32_t rest = word(q + 4 * j) >> 4;
    if (bits == 5) high[0] |= (rest & 0x01010101) << j;
    if (bits == 6) high[j / 4] |= (rest & 0x03030303) << (2 * (j % 4));
  }
  for (int64_t i = 0; i < bits - 4; ++i) put_word(high[i], to + (4 + i) * kLineBytes);
}

void unpack_numbers(int64_t bits, const uint8_t* from, Numbers& in_order) {
  Numbers q;
  for (int64_t j = 0; j < 8; ++j) {
    uint32_t found;
    if (bits == 8) {
      found = word(from + j * kLineBytes);
    } else {
      found = word(from + j / 2 * kLineBytes) >> (j % 2 * 4) & kLows;
      if (bits == 5) found |= (word(from + 4 * kLineBytes) >> j & 0x01010101) << 4;
      if (bits == 6) found |= (word(from + (4 + j / 4) * kLineBytes) >> (j % 4 * 2) & 0x03030303) << 4;
    }
    put_word(found, q + 4 * j);
  }
  for (int64_t k = 0; k < kGroup; ++k) in_order[k / 8 * 8 + kInputOrder[k % 8]] = q[k];
}

// GGUF's nibbles: the low halves of 16 bytes, then the high ones. `fifth`: four bytes of fifth bits, or null.
void read_nibbles(const uint8_t* packed, const uint8_t* fifth, Numbers& q) {
  for (int64_t i = 0; i < kGroup / 2; ++i) {
    q[i] = packed[i] & 15;
    q[kGroup / 2 + i] = packed[i] >> 4;
  }
  if (fifth == nullptr) return;
  const uint32_t bits = word(fifth);
  for (int64_t i = 0; i < kGroup; ++i) q[i] |= (bits >> i & 1) << 4;
}

// A row of checkpoint blocks, span by span: `header` and `group` are where this output's first byte of an item would be
// if items were bytes; items of two bytes are at lane * 2, and so on.
struct Place {
  uint8_t* span;
  int64_t lane;
  const Layout& layout;

  void put16(int64_t at, const uint8_t* half) const { std::memcpy(span + at + 2 * lane, half, 2); }
  uint8_t* group(int64_t g) const { return span + layout.span_header + g * layout.group_bytes(); }
  void put_numbers(int64_t g, const Numbers& q) const {
    pack_numbers(layout.bits, q, group(g) + layout.group_header + 4 * lane);
  }
};

// | d | [m] | [fifth bits] | nibbles |
void pack_small(Format format, const uint8_t* from, const Place& to) {
  const bool five = format == Format::q5_0 || format == Format::q5_1;
  const bool offset = format == Format::q4_1 || format == Format::q5_1;
  to.put16(0, from);
  if (offset) to.put16(32, from + 2);
  const uint8_t* rest = from + (offset ? 4 : 2);
  Numbers q;
  read_nibbles(rest + (five ? 4 : 0), five ? rest : nullptr, q);
  to.put_numbers(0, q);
}

// | d | 32 x int8 |
void pack_q8_0(const uint8_t* from, const Place& to) {
  to.put16(0, from);
  Numbers q;
  for (int64_t i = 0; i < kGroup; ++i) q[i] = from[2 + i] ^ 0x80;
  to.put_numbers(0, q);
}

// | d | m | 12 bytes: 8 scales and 8 offsets of six bits | [32 bytes: bit g is the fifth of part g] | 4 x 32 nibbles |
//
// byte      0 … 3                       4 … 7                       8 … 11
// bits 0-5  scale of part byte          offset of part byte - 4     low four bits: scale of part byte - 4's
// bits 6-7  high two bits of scale of   of offset of part byte      high four bits: offset of part byte - 4's
//           part byte + 4
void pack_k(bool five, const uint8_t* from, const Place& to) {
  to.put16(0, from);
  to.put16(32, from + 2);
  const uint8_t* six = from + 4;
  const uint8_t* nibbles = from + (five ? 48 : 16);
  for (int64_t g = 0; g < 8; ++g) {
    const int64_t i = g % 4;
    to.group(g)[to.lane] = g < 4 ? six[i] & 63 : (six[8 + i] & 15) | (six[i] >> 6) << 4;
    to.group(g)[16 + to.lane] = g < 4 ? six[4 + i] & 63 : six[8 + i] >> 4 | (six[4 + i] >> 6) << 4;
    Numbers q;
    for (int64_t k = 0; k < kGroup; ++k) {
      q[k] = nibbles[g / 2 * kGroup + k] >> (g % 2 * 4) & 15;
      if (five) q[k] |= (from[16 + k] >> g & 1) << 4;
    }
    to.put_numbers(g, q);
  }
}

// | 2 x 64 bytes of nibbles | 2 x 32 bytes of high bit pairs | 16 int8 scales | d |; each half: 64 low nibbles, then 64
// high ones; the lowest pairs of 32 bytes belong to the first 32 of them, and so on.
void pack_q6_k(const uint8_t* from, const Place& to) {
  to.put16(0, from + 208);
  for (int64_t g = 0; g < 8; ++g) {
    const int64_t half = g / 4, quarter = g % 4;
    const uint8_t* nibbles = from + half * 64 + quarter % 2 * 32;
    const uint8_t* pairs = from + 128 + half * 32;
    Numbers q;
    for (int64_t k = 0; k < kGroup; ++k)
      q[k] = (nibbles[k] >> (quarter / 2 * 4) & 15) | (pairs[k] >> (2 * quarter) & 3) << 4;
    to.group(g)[to.lane] = from[192 + 2 * g];
    to.group(g)[16 + to.lane] = from[192 + 2 * g + 1];
    to.put_numbers(g, q);
  }
}

// | fp32 scale | uint8 zero | 3 bytes | numbers |
void pack_zeroed(const uint8_t* from, const Place& to) {
  std::memcpy(to.span + 4 * to.lane, from, 4);
  to.span[64 + to.lane] = from[4];
  from += 8;
  for (int64_t g = 0; g < to.layout.span; ++g) {
    Numbers q;
    if (to.layout.bits == 8) std::memcpy(q, from + g * kGroup, kGroup);
    else
      for (int64_t k = 0; k < kGroup; ++k) q[k] = from[(g * kGroup + k) / 2] >> (k % 2 * 4) & 15;
    to.put_numbers(g, q);
  }
}

// | fp32 scale | numbers of e4m3 |
void pack_f8(const uint8_t* from, const Place& to) {
  std::memcpy(to.span + 4 * to.lane, from, 4);
  from += 4;
  for (int64_t g = 0; g < to.layout.span; ++g)
    for (int64_t pair = 0; pair < kGroup / 2; ++pair, from += 2)
      std::memcpy(to.group(g) + pair * 2 * kBlockOutputs + 2 * to.lane, from, 2);
}

// (OCP 8-bit Floating Point Specification 1.0: 1 sign, 4 exponent and 3 mantissa bits; no infinities, one NaN.)
float e4m3(uint8_t byte) {
  const uint32_t rest = byte & 0x7f;
  const uint32_t wide = static_cast<uint32_t>(byte & 0x80) << 24 | (rest == 0x7f ? 0x7fc00000 : rest << 20);
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return rest == 0x7f ? value : value * 0x1p120f;  // the exponent's bias is 7 instead of 127
}

void unpack_f8(const Layout& layout, const uint8_t* header, int64_t lane, int64_t group, float* values) {
  float scale;
  std::memcpy(&scale, header + 4 * lane, sizeof scale);
  const uint8_t* numbers = header + layout.span_header + group * layout.group_bytes();
  for (int64_t k = 0; k < kGroup; ++k)
    values[k] = scale * e4m3(numbers[k / 2 * 2 * kBlockOutputs + 2 * lane + k % 2]);
}

void pack_span(Format format, const uint8_t* from, const Place& to) {
  switch (format) {
    case Format::q8_0: return pack_q8_0(from, to);
    case Format::q4_k: return pack_k(false, from, to);
    case Format::q5_k: return pack_k(true, from, to);
    case Format::q6_k: return pack_q6_k(from, to);
    case Format::u4:
    case Format::u8: return pack_zeroed(from, to);
    case Format::f8: return pack_f8(from, to);
    default: return pack_small(format, from, to);
  }
}

int64_t file_span_bytes(Format format, int64_t span_inputs) {
  switch (format) {
    case Format::q4_0: return 18;
    case Format::q4_1: return 20;
    case Format::q5_0: return 22;
    case Format::q5_1: return 24;
    case Format::q8_0: return 34;
    case Format::q4_k: return 144;
    case Format::q5_k: return 176;
    case Format::q6_k: return 210;
    case Format::u4: return 8 + span_inputs / 2;
    case Format::u8: return 8 + span_inputs;
    case Format::f8: return 4 + span_inputs;
    case Format::coded:
    case Format::plain: break;
  }
  return 0;
}

float half_at(const uint8_t* header, int64_t lane) { return half(header + 2 * lane); }

}  // namespace

int64_t packed_block_bytes(Format format, int64_t span_inputs, int64_t out_size, int64_t in_size, bool gated) {
  const int64_t size = gated ? out_size / 2 : out_size;
  const int64_t blocks = (size + kBlockOutputs - 1) / kBlockOutputs * (gated ? 2 : 1);
  return blocks * layout_of(format, span_inputs).block_bytes(in_size);
}

int64_t file_row_bytes(Format format, int64_t span_inputs, int64_t in_size) {
  return layout_of(format, span_inputs).spans(in_size) * file_span_bytes(format, span_inputs);
}

void pack_blocks(Format format, int64_t span_inputs, const void* rows, int64_t first_row, int64_t count,
                 int64_t out_size, int64_t in_size, bool gated, void* packed) {
  const Layout layout = layout_of(format, span_inputs);
  const int64_t spans = layout.spans(in_size), from_bytes = file_span_bytes(format, span_inputs);
  const int64_t half = gated ? out_size / 2 : out_size;
  const uint8_t* from = static_cast<const uint8_t*>(rows);
  for (int64_t row = first_row; row < first_row + count; ++row) {
    const bool up = row >= half;
    const int64_t place = up ? row - half : row;
    const int64_t block = gated ? place / kBlockOutputs * 2 + up : place / kBlockOutputs;
    uint8_t* to = static_cast<uint8_t*>(packed) + block * layout.block_bytes(in_size);
    for (int64_t span = 0; span < spans; ++span, to += layout.span_bytes(), from += from_bytes)
      pack_span(format, from, Place{to, place % kBlockOutputs, layout});
  }
}

void unpack_group(Format format, const Layout& layout, const uint8_t* block, int64_t lane, int64_t group,
                  float* values) {
  const uint8_t* header = block + group / layout.span * layout.span_bytes();
  if (format == Format::f8) return unpack_f8(layout, header, lane, group % layout.span, values);
  const uint8_t* own = header + layout.span_header + group % layout.span * layout.group_bytes();
  Numbers q;
  unpack_numbers(layout.bits, own + layout.group_header + 4 * lane, q);
  float scale[2], offset = 0.0f;
  int centre = 0;
  switch (format) {
    case Format::q4_k:
    case Format::q5_k:
      scale[0] = scale[1] = half_at(header, lane) * static_cast<float>(own[lane]);
      offset = -(half_at(header + 32, lane) * static_cast<float>(own[16 + lane]));
      break;
    case Format::q6_k:
      for (int i = 0; i < 2; ++i)
        scale[i] = half_at(header, lane) * static_cast<float>(static_cast<int8_t>(own[16 * i + lane]));
      centre = 32;
      break;
    case Format::u4:
    case Format::u8:
      std::memcpy(scale, header + 4 * lane, 4);
      scale[1] = scale[0];
      centre = header[64 + lane];
      break;
    default:
      scale[0] = scale[1] = half_at(header, lane);
      if (format == Format::q4_1 || format == Format::q5_1) offset = half_at(header + 32, lane);
      centre = format == Format::q4_0 ? 8 : format == Format::q5_0 ? 16 : format == Format::q8_0 ? 128 : 0;
  }
  for (int64_t k = 0; k < kGroup; ++k) {
    values[k] = static_cast<float>(q[k] - centre) * scale[k / 16];
    values[k] = values[k] + offset;
  }
}

}  // namespace octavo
