// The machine's limits, measured with the library's own threads: how fast memory is read, and how fast products are made.

#include <cstdint>

#if defined(__AVX512VNNI__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "kernels.hpp"
#include "levels.hpp"
#include "simd.hpp"
#include "step.hpp"
#include "thread_pool.hpp"
#if defined(__AMX_BF16__)
#include "tiles.hpp"
#endif

namespace octavo::OCTAVO_LEVEL {
namespace {

// What a measurement computes must be used, or the compiler leaves it out.
void keep(uint32_t value) { asm volatile("" : : "r"(value)); }

constexpr int kChains = 12;  // independent sums, more than a product takes cycles
constexpr int64_t kRounds = 1 << 20;

// Multiplies and adds a number of the type `Step` reads, 1, as the products do; returns the operations done.
template <typename Step>
int64_t multiply(uint32_t one) {
  pool().run(pool().size(), [one](int64_t piece) {
    f32x16 sum[kChains];
    for (int i = 0; i < kChains; ++i) sum[i] = splat(static_cast<float>(i));  // equal chains would be computed once
    const u32x16 line = u32x16{} + one;
    uint32_t x = one + static_cast<uint32_t>(piece);
    for (int64_t round = 0; round < kRounds; ++round) {
      asm volatile("" : "+r"(x));  // not known at compile time
      for (int i = 0; i < kChains; ++i) sum[i] = Step::add(sum[i], x, line);
    }
    for (int i = 1; i < kChains; ++i) sum[0] = sum[0] + sum[i];
    keep(static_cast<uint32_t>(sum[0][0]));
  });
  return pool().size() * kRounds * kChains * kLanes * Step::kTogether * 2;
}

}  // namespace

// Reads `bytes` (whole pages of 4096) once, each thread one range of them.
void stream(const void* data, int64_t bytes) {
  const int64_t pages = bytes / 4096, threads = pool().size();
  pool().run(threads, [&](int64_t piece) {
    const char* at = static_cast<const char*>(data) + pages * piece / threads * 4096;
    const char* end = static_cast<const char*>(data) + pages * (piece + 1) / threads * 4096;
    u32x16 sum[4] = {};
    for (; at < end; at += 256)
      for (int i = 0; i < 4; ++i) {
        u32x16 line;
        std::memcpy(&line, at + 64 * i, sizeof line);
        __builtin_prefetch(at + 64 * i + 2048);
        sum[i] += line;
      }
    const u32x16 total = sum[0] + sum[1] + sum[2] + sum[3];
    uint32_t one = 0;
    for (int lane = 0; lane < kLanes; ++lane) one += total[lane];
    keep(one);
  });
}

int64_t multiply_f32() { return multiply<SingleStep>(0x3f800000u); }

#if defined(__AMX_BF16__)

namespace {

constexpr int64_t kTileProducts = 4;  // four sums, as the products of many rows have
constexpr int64_t kTileRounds = 1 << 20;

void clear_tiles() {
  clear_tile<0>();
  clear_tile<1>();
  clear_tile<2>();
  clear_tile<3>();
  clear_tile<4>();
  clear_tile<5>();
  clear_tile<6>();
  clear_tile<7>();
}

}  // namespace

// Multiplies tiles of bf16 as the products do; returns the operations done.
int64_t multiply_bf16() {
  pool().run(pool().size(), [](int64_t) {
    const Tiles tiles(kTileRows);
    clear_tiles();
    for (int64_t round = 0; round < kTileRounds; ++round) {
      multiply_tiles<0, 4, 6>();
      multiply_tiles<1, 4, 7>();
      multiply_tiles<2, 5, 6>();
      multiply_tiles<3, 5, 7>();
    }
  });
  return pool().size() * kTileRounds * kTileProducts * kTileRows * kLanes * 32 * 2;
}

// The same with bytes summed in int32.
int64_t multiply_int8() {
  pool().run(pool().size(), [](int64_t) {
    const Tiles tiles(kTileRows);
    clear_tiles();
    for (int64_t round = 0; round < kTileRounds; ++round) {
      multiply_byte_tiles<0, 4, 6>();
      multiply_byte_tiles<1, 4, 7>();
      multiply_byte_tiles<2, 5, 6>();
      multiply_byte_tiles<3, 5, 7>();
    }
  });
  return pool().size() * kTileRounds * kTileProducts * kTileRows * kLanes * 64 * 2;
}

#else

int64_t multiply_bf16() { return multiply<PairStep>(0x3f803f80u); }

// The same with bytes summed in int32, where the level has such an instruction; else 0.
int64_t multiply_int8() {
#if defined(__AVX512VNNI__)
  pool().run(pool().size(), [](int64_t piece) {
    __m512i sum[kChains];
    for (int i = 0; i < kChains; ++i) sum[i] = _mm512_set1_epi32(i);
    __m512i line = _mm512_set1_epi32(static_cast<int>(piece));
    for (int64_t round = 0; round < kRounds; ++round) {
      asm volatile("" : "+m"(line));
      for (int i = 0; i < kChains; ++i) sum[i] = _mm512_dpbusd_epi32(sum[i], line, line);
    }
    u32x16 total = {};
    for (int i = 0; i < kChains; ++i) total += (u32x16)sum[i];
    keep(total[0]);
  });
  return pool().size() * kRounds * kChains * kLanes * 4 * 2;
#else
  return 0;
#endif
}

#endif

}  // namespace octavo::OCTAVO_LEVEL
