// Rows of numbers → blocks of 32, bit for bit what octavo/kernels/quantize.py says: no sum is in another order, and no
// product is rounded together with an addition (built without contraction). Several groups at a time, one in each lane.

#include "half.hpp"
#include "levels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// As many lanes as a register has: what a search adds up stays in registers.
#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
using Floats = float __attribute__((vector_size(4 * kWidth)));
using Words = uint32_t __attribute__((vector_size(4 * kWidth)));
using Mask = int32_t __attribute__((vector_size(4 * kWidth)));

constexpr int kSteps = 3;  // of each end of a range that is cut

// Weights of several groups: [32 values][groups].
using Tile = float[kGroup * kWidth];

OCTAVO_INLINE Floats all(float value) { return value - Floats{}; }
OCTAVO_INLINE Floats either(Mask mask, Floats yes, Floats no) { return mask ? yes : no; }
OCTAVO_INLINE Floats least(Floats a, Floats b) { return a < b ? a : b; }
OCTAVO_INLINE Floats most(Floats a, Floats b) { return a > b ? a : b; }
OCTAVO_INLINE Floats size_of(Floats x) { return (Floats)((Words)x & 0x7fffffffu); }

OCTAVO_INLINE Floats at(const Tile& tile, int64_t k) {
  Floats found;
  std::memcpy(&found, tile + k * kWidth, sizeof found);
  return found;
}

// To the nearest whole number, ties to even, of numbers below 2^22.
OCTAVO_INLINE Floats nearest(Floats x) {
  const Floats magic = all(12582912.0f);  // 1.5 * 2^23
  return (x + magic) - magic;
}

// To the nearest number that half precision has; infinite beyond its largest.
OCTAVO_INLINE Floats to_half(Floats x) {
  const Words sign = (Words)x & 0x80000000u;
  const Words size = (Words)x & 0x7fffffffu;
  const Floats normal = (Floats)((size + 0xfffu + ((size >> 13) & 1u)) & 0xffffe000u);
  const Floats magic = all(0.75f);  // adding it rounds to a multiple of 2^-24
  const Floats small = ((Floats)size + magic) - magic;
  Floats found = either((Floats)size < all(0x1p-14f), small, normal);
  found = either(found > all(65504.0f), all(__builtin_inff()), found);
  return (Floats)((Words)found | sign);
}

OCTAVO_INLINE Floats inverse(Floats d) { return either(d != Floats{}, 1.0f / d, Floats{}); }

// The numbers that stand for weights t above their offset.
OCTAVO_INLINE Floats four_bits(Floats t, Floats inverse_d) {
  return nearest(least(most(t * inverse_d, Floats{}), all(15.0f)));
}

struct Best {
  Floats d, m, error;

  OCTAVO_INLINE void consider(Floats new_d, Floats new_m, Floats new_error) {
    const Mask better = new_error < error;  // never of an error that is not a number
    d = either(better, new_d, d);
    m = either(better, new_m, m);
    error = either(better, new_error, error);
  }
};

struct Sums {
  Floats error, q, qq, t, tq;
};

// Of d q + m as approximations of the weights, and of the numbers q and what they stand for, t = weight - m.
OCTAVO_INLINE Sums sums_of(const Tile& tile, Floats d, Floats m) {
  const Floats inverse_d = inverse(d);
  Sums sums = {};
  for (int64_t k = 0; k < kGroup; ++k) {
    const Floats weight = at(tile, k), t = weight - m, q = four_bits(t, inverse_d);
    const Floats off = (q * d + m) - weight;
    sums.error = sums.error + off * off;
    sums.q = sums.q + q;
    sums.qq = sums.qq + q * q;
    sums.t = sums.t + t;
    sums.tq = sums.tq + t * q;
  }
  return sums;
}

// A candidate, and the scale and offset of least squares for the numbers that it gives.
OCTAVO_INLINE void consider(const Tile& tile, Floats d, Floats m, Best& best) {
  d = to_half(d);
  m = to_half(m);
  const Sums sums = sums_of(tile, d, m);
  best.consider(d, m, sums.error);
  const float count = kGroup;
  const Floats fitted_d = (count * sums.tq - sums.q * sums.t) / (count * sums.qq - sums.q * sums.q);
  const Floats fitted_m = m + (sums.t - fitted_d * sums.q) * (1.0f / kGroup);
  d = to_half(fitted_d);
  m = to_half(fitted_m);
  best.consider(d, m, sums_of(tile, d, m).error);
}

// | d | m | nibbles |: d q + m
void q4_1(const Tile& tile, int64_t groups, uint8_t* blocks) {
  Floats low = at(tile, 0), high = low;
  for (int64_t k = 1; k < kGroup; ++k) {
    low = least(low, at(tile, k));
    high = most(high, at(tile, k));
  }
  low = low + 0.0f;  // of zeros of either sign, the positive one
  high = high + 0.0f;
  const Floats range = high - low, infinite = all(__builtin_inff());
  Best best = {Floats{}, Floats{}, infinite};
  for (int below = 0; below < kSteps; ++below)
    for (int above = 0; above < kSteps; ++above) {
      const float a = static_cast<float>(below) / 32.0f, b = static_cast<float>(above) / 32.0f;
      consider(tile, range * ((1.0f - a - b) / 15.0f), low + range * a, best);
    }
  const Floats d = to_half(either(high < -low, low, high) * -0.125f);  // symmetric: d (q - 8)
  consider(tile, d, d * -8.0f, best);

  const Floats inverse_d = inverse(best.d);
  uint8_t q[kGroup][kWidth];
  for (int64_t k = 0; k < kGroup; ++k) {
    const Floats numbers = four_bits(at(tile, k) - best.m, inverse_d);
    for (int lane = 0; lane < kWidth; ++lane) q[k][lane] = static_cast<uint8_t>(numbers[lane]);
  }
  for (int64_t lane = 0; lane < groups; ++lane, blocks += 20) {
    put_half(best.d[lane], blocks);
    put_half(best.m[lane], blocks + 2);
    for (int64_t i = 0; i < kGroup / 2; ++i)
      blocks[4 + i] = static_cast<uint8_t>(q[i][lane] | q[kGroup / 2 + i][lane] << 4);
  }
}

OCTAVO_INLINE Floats eight_bits(Floats weight, Floats inverse_d) {
  return nearest(least(most(weight * inverse_d, all(-127.0f)), all(127.0f)));
}

// | d | int8 |: d q
void q8_0(const Tile& tile, int64_t groups, uint8_t* blocks) {
  Floats largest = {};
  for (int64_t k = 0; k < kGroup; ++k) largest = most(largest, size_of(at(tile, k)));
  const Floats d = to_half(largest * (1.0f / 127.0f)), inverse_d = inverse(d);
  int8_t q[kGroup][kWidth];
  for (int64_t k = 0; k < kGroup; ++k) {
    const Floats numbers = eight_bits(at(tile, k), inverse_d);
    for (int lane = 0; lane < kWidth; ++lane) q[k][lane] = static_cast<int8_t>(numbers[lane]);
  }
  for (int64_t lane = 0; lane < groups; ++lane, blocks += 34) {
    put_half(d[lane], blocks);
    for (int64_t k = 0; k < kGroup; ++k) blocks[2 + k] = static_cast<uint8_t>(q[k][lane]);
  }
}

// Groups first to first + count of the rows, in columns; what is beyond a row's end is zero. Rows may lie anywhere.
template <typename T>
void fill(const void* rows, int64_t in_size, int64_t first, int64_t count, Tile& tile) {
  const int64_t of_row = (in_size + kGroup - 1) / kGroup;
  std::memset(tile, 0, sizeof tile);
  for (int64_t lane = 0; lane < count; ++lane) {
    const int64_t row = (first + lane) / of_row, start = (first + lane) % of_row * kGroup;
    const int64_t values = in_size - start < kGroup ? in_size - start : kGroup;
    T group[kGroup] = {};
    std::memcpy(group, static_cast<const T*>(rows) + row * in_size + start, values * sizeof(T));
    for (int64_t k = 0; k < kGroup; ++k) tile[k * kWidth + lane] = widen(group[k]);
  }
}

bool can_be_kept(const Tile& tile) {
  Mask can = ~Mask{};
  for (int64_t k = 0; k < kGroup; ++k)
    can &= size_of(at(tile, k)) <= all(65504.0f);
  for (int lane = 0; lane < kWidth; ++lane)
    if (!can[lane]) return false;
  return true;
}

}  // namespace

bool quantize(const Quantize& call) {
  const int64_t groups = call.rows * ((call.in_size + kGroup - 1) / kGroup);
  const int64_t block_bytes = call.format == Format::q8_0 ? 34 : 20;
  Tile tile;
  uint8_t* blocks = call.blocks;
  for (int64_t first = 0; first < groups; first += kWidth, blocks += kWidth * block_bytes) {
    const int64_t count = groups - first < kWidth ? groups - first : kWidth;
    if (call.type == Type::bf16) fill<bf16>(call.x, call.in_size, first, count, tile);
    else fill<float>(call.x, call.in_size, first, count, tile);
    if (!can_be_kept(tile)) return false;
    if (call.format == Format::q8_0) q8_0(tile, count, blocks);
    else q4_1(tile, count, blocks);
  }
  return true;
}

}  // namespace octavo::OCTAVO_LEVEL
