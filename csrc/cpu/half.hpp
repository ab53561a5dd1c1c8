// Half-precision numbers (IEEE 754 binary16) on any machine.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {

// The value of the two bytes at `from`.
inline float half(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7fff;
  float value;
  if (rest < 0x400) {  // zero, or without a leading one: a multiple of 2^-24
    value = static_cast<float>(rest) * 0x1p-24f;
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    wide |= sign;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  const uint32_t wide = sign | (rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest << 13) + (112u << 23));
  std::memcpy(&value, &wide, 4);
  return value;
}

// Two bytes of a value that half precision has.
__attribute__((always_inline)) inline void put_half(float value, uint8_t* to) {
  uint32_t wide;
  std::memcpy(&wide, &value, 4);
  const uint32_t sign = wide >> 16 & 0x8000, rest = wide & 0x7fffffff;
  float size;
  std::memcpy(&size, &rest, 4);
  uint32_t small = rest >> 13;
  if (size < 0x1p-14f) small = static_cast<uint32_t>(size * 0x1p24f);
  else small -= 112u << 10;
  const uint16_t bits = static_cast<uint16_t>(sign | small);
  std::memcpy(to, &bits, 2);
}

}  // namespace octavo
