// The kernels of one level. Each file of kernels is compiled once for each level, in the level's namespace.
#pragma once

#include "kernels.hpp"

namespace octavo::OCTAVO_LEVEL {

void linear(const Linear& call);
void linear_integer(const Linear& call);  // of quantized weights, as integers
#if defined(__AMX_BF16__)
void linear_amx(const Linear& call);          // of bf16, which hands on to the next two:
void linear_many_amx(const Linear& call);     // more than 16 rows
void linear_coded_amx(const Linear& call);    // of coded weights and few rows:
constexpr int64_t kWidenedRows = 64;
bool encode(const Encode& call);
void linear_quantized(const Linear& call);    // of quantized weights, as bf16 where it is called so

// Widens a tile of quantized weights, 16 outputs x 32 inputs, to `to`, and fetches another: of these blocks, the steps of 32
// inputs.
struct TileToWiden {
  const uint8_t* block;
  int64_t step;
  const uint8_t* later_block;
  int64_t later_step;
  uint8_t* to;
};
using WidenTile = void (*)(const Linear& call, const TileToWiden& tile);
WidenTile widen_tile_of(Format format);
#endif
void embedding(const Embedding& call);
void norm(const Norm& call);
void cast(const Cast& call);
void reorder(const Reorder& call);
void activation(const Activation& call);
void rotary_kv(const RotaryKV& call);
void store_kv(const StoreKV& call);
void attention(const Attention& call);
void sample(const Sample& call);
bool quantize(const Quantize& call);

void stream(const void* data, int64_t bytes);
int64_t multiply_bf16();
int64_t multiply_f32();
int64_t multiply_int8();

}  // namespace octavo::OCTAVO_LEVEL
