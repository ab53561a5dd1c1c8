// The kernels of one level. Each file of kernels is compiled once for each level, in the level's namespace.
#pragma once

#include "kernels.hpp"

namespace octavo::OCTAVO_LEVEL {

void linear(const Linear& call);
void linear_integer(const Linear& call);  // of quantized weights
#if defined(__AMX_BF16__)
void linear_amx(const Linear& call);          // of bf16, which hands on to the next two:
void linear_many_amx(const Linear& call);     // more than 16 rows
void linear_coded_amx(const Linear& call);    // of coded weights and few rows:
constexpr int64_t kCodedRows = 64;
bool encode(const Encode& call);
void linear_integer_amx(const Linear& call);  // of quantized weights and so many rows that tiles are faster:
constexpr int64_t kFewestTileRows = 32;
#endif
void embedding(const Embedding& call);
void norm(const Norm& call);
void cast(const Cast& call);
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
