// The tile registers of AMX: eight of 16 rows x 64 bytes, loaded, multiplied and stored as a whole.
//
// Written as assembler, for the compiler's own functions (gcc 12) take no constants as template arguments, and do not say
// that memory is read: what is stored just before could be stored after.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

constexpr int kTileRows = 16;
constexpr int64_t kTileBytes = 1024;

// While it lives, this thread's tiles have 64 bytes in a row: tiles 0 to 4 `rows` rows, 5 to 7 `weight_rows`; tile 4 four
// bytes for each of those. Then they are empty again, so that the system has nothing to save when it changes threads.
class Tiles {
 public:
  OCTAVO_INLINE explicit Tiles(int rows, int weight_rows = kTileRows) {
    // Byte 0: the palette; 16 to 31: bytes of a row, two for each tile; 48 to 55: rows.
    alignas(64) uint8_t config[64] = {1};
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = static_cast<uint8_t>(tile == 4 ? 4 * weight_rows : 64);
      config[48 + tile] = static_cast<uint8_t>(tile <= 4 ? rows : weight_rows);
    }
    asm volatile("ldtilecfg (%0)" : : "r"(config) : "memory");
  }
  OCTAVO_INLINE ~Tiles() { asm volatile("tilerelease" : : : "memory"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int Tile>
OCTAVO_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile) : "memory");
}

// Rows are `stride` bytes apart.
template <int Tile>
OCTAVO_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(Tile), "r"(from), "r"(stride) : "memory");
}

// The same for what is soon in the first-level cache's way: it is read from the second-level cache and stays there.
template <int Tile>
OCTAVO_INLINE void stream_tile(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(Tile), "r"(from), "r"(stride) : "memory");
}

template <int Tile>
OCTAVO_INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(Tile), "r"(to), "r"(stride) : "memory");
}

// Sums (float32) += rows of pairs of bf16 x lines of pairs.
template <int Sums, int Left, int Right>
OCTAVO_INLINE void multiply_tiles() {
  static_assert(Sums != Left && Sums != Right && Left != Right, "AMX multiplies different tiles");
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Left), "i"(Right) : "memory");
}

// Sums (int32) += rows of four unsigned bytes x lines of four signed ones.
template <int Sums, int Left, int Right>
OCTAVO_INLINE void multiply_byte_tiles() {
  static_assert(Sums != Left && Sums != Right && Left != Right, "AMX multiplies different tiles");
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Left), "i"(Right) : "memory");
}

// Sums (int32) += rows of four signed bytes x lines of four, which are signed as well or not.
template <int Sums, int Left, int Right, bool Signed>
OCTAVO_INLINE void multiply_signed_tiles() {
  static_assert(Sums != Left && Sums != Right && Left != Right, "AMX multiplies different tiles");
  if constexpr (Signed)
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Left), "i"(Right) : "memory");
  else
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Left), "i"(Right) : "memory");
}

}  // namespace octavo::OCTAVO_LEVEL
