// What every level offers: the table that a level fills, and the arguments of its kernels.
//
// Tensors are raw pointers with sizes in elements; rows are contiguous unless a stride is given. `Type` says what the
// pointers of a kernel point to, where it may be either.
#pragma once

#include <cstdint>

#include "formats.hpp"

namespace octavo {

enum class Type : int { f32 = 0, bf16 = 1 };

enum class Function : int { silu = 0, gelu = 1, gelu_tanh = 2 };

// Weights of a linear layer, [out_size, in_size], packed in the order in which the product reads them.
//
// bf16: blocks of 16 outputs; in a block, pairs of inputs; in a pair, 16 outputs x 2 inputs = 64 bytes:
//
//   block b │ pair 0                          │ pair 1                          │ …
//           │ w[16b][0] w[16b][1]  w[16b+1][0] w[16b+1][1] …  w[16b+15][1] │ w[16b][2] …
//
// f32: the same with single inputs, 16 outputs x 4 bytes. Outputs and inputs beyond the weight's are zero.
//
// gated: the first half of the outputs are gates, the second half what they belong to. Each half has blocks of its own,
// and they take turns:
//
//   gates 0-15 │ ups 0-15 │ gates 16-31 │ ups 16-31 │ …
constexpr int kLayoutVersion = 2;  // of this order: what was packed by another version is not to be read

// The product, and what follows it while the sums are at hand (epilogue.hpp). With sums of x and the weight:
//
//   out = residual + cap((sums + bias) * multiplier), or gated: function(gate sums + bias) * (up sums + bias)
struct Linear {
  Type type;
  const void* x;        // [rows, in_size]
  int64_t x_stride;     // elements from row to row
  Format format;        // of the weight; plain: numbers of `type`
  int64_t span;         // of formats that have several: inputs that share a scale
  const void* weight;   // packed
  const void* bias;     // [out_size] of `type`, in the weight's own order; or null
  void* out;            // [rows, out_size]; gated: [rows, out_size / 2]
  int64_t out_stride;   // elements from row to row
  Type out_type;
  int64_t rows, in_size, out_size;
  const float* residual;  // [rows, out_size] with the stride of out, which it may be; or null
  float multiplier;
  float softcap;          // softcap * tanh(… / softcap); 0: none
  bool gated;
  Function function;      // of gates
  float half_scale;       // of quantized weights that become bf16 while they are multiplied (quantized_lines.hpp): what
                          // they are multiplied by to be halves; 0: their integers are multiplied
};

// RMSNorm, or with `center` LayerNorm, of each head of x; plus the residual, where there is one.
struct Norm {
  Type type;              // of x
  const void* x;          // [rows, heads, size]
  int64_t x_stride;       // elements from row to row
  Type weight_type;       // of weight and bias
  const void* weight;     // [size], or with head_weights [heads, size]
  const void* bias;       // likewise, or null
  bool head_weights;
  const float* residual;  // [rows, heads, size], out itself, or null
  Type out_type;
  void* out;              // [rows, heads, size]
  int64_t rows, heads, size;
  float eps;
  bool center;
};

// x in another type.
struct Cast {
  Type type;         // of x
  const void* x;     // [rows, size]
  int64_t x_stride;  // elements from row to row
  Type out_type;
  void* out;         // [rows, size]
  int64_t rows, size;
};

// The columns of x in another order.
struct Reorder {
  Type type;
  const void* x;         // [rows, size]
  int64_t x_stride;      // elements from row to row
  const int32_t* order;  // [size], each column once
  bool back;             // column order[i] of out is column i of x, instead of the other way round
  void* out;             // [rows, size]
  int64_t rows, size;
};

// The function of x.
struct Activation {
  Type type;
  Function function;
  const void* x;     // [rows, size]
  int64_t x_stride;  // elements from row to row
  void* out;         // [rows, size]
  int64_t rows, size;
};

// How a KV cache keeps numbers: in the type that they come in, or in 8 bits, as whole numbers or as e4m3fn (a float of 4
// bits of exponent and 3 of mantissa), with a factor for each token's key and for its value in each head.
enum class Kept : int { wide = 0, int8 = 1, fp8 = 2 };

// One layer's KV cache. A block holds, for each KV head, its tokens' keys in tiles of 16 tokens, and then the values:
//
//   keys of a tile, bf16: pairs of channels; in a pair 16 tokens x 2 channels (64 bytes), as weights are packed
//         f32 and 8 bits: channels; 16 tokens each
//   values of a tile: [token][channel]
//   8 bits: after a tile's keys, and after its values, the factors of its tokens: 16 float32
//
//   block │ head 0: K tile 0 │ K tile 1 │ … │ head 1: … │ head 0: V tile 0 │ V tile 1 │ … │ head 1: …
//
// Where 16 does not divide the block size, tiles are narrower: the largest power of two that does.
struct KVCache {
  Type type;  // of queries, and of keys and values as they come
  Kept kept;
  void* data;
  int64_t blocks, block_size, heads, head_size;

  int64_t tile() const { return (block_size | 16) & -(block_size | 16); }  // tokens
};

struct StoreKV {
  KVCache cache;
  const void* key;    // [rows, heads, head_size]
  const void* value;  // likewise
  int64_t key_stride, value_stride;
  const int64_t* slots;  // [rows]: block * block_size + offset
  int64_t rows;
};

// Rotates channel i with channel i + rotary_dim / 2: queries into `out`, keys on their way into the cache, where the
// values go too.
struct RotaryKV {
  KVCache cache;
  const int64_t* positions;  // [rows]
  const void* query;         // [rows, query_heads, head_size]
  const void* key;           // [rows, heads, head_size]
  const void* value;         // likewise
  int64_t query_stride, key_stride, value_stride;
  const float* cos_sin;      // [max_position, rotary_dim]: cosines, then sines
  const int64_t* slots;      // [rows], as in StoreKV
  void* out;                 // like query, contiguous
  int64_t rows, query_heads, rotary_dim, max_position;
};

struct Attention {
  KVCache cache;
  const void* query;  // [rows, query_heads, head_size]
  int64_t query_stride;
  void* out;          // likewise, contiguous
  const int32_t* query_start;  // [requests + 1]
  const int32_t* seq_lens;     // [requests]
  const int32_t* block_table;  // [requests, table_width], its rows table_stride apart
  int64_t table_stride, table_width, requests, rows, query_heads;
  float scale;
  int64_t window;      // positions that a row looks at; 0: all
  float softcap;       // 0: none
  const float* sinks;  // [query_heads], or null
};

// Rows of a packed table, times the scale.
struct Embedding {
  Type type;           // of the table
  const int64_t* ids;  // [rows]
  Format format;       // of the table, as in Linear
  int64_t span;
  const void* weight;  // packed, [vocabulary, size]
  float scale;
  Type out_type;
  void* out;           // [rows, size]
  int64_t rows, size, vocabulary;
};

// Rows of weights → blocks of 32 as GGUF has them, whose scales make the squared error small.
struct Quantize {
  Type type;
  const void* x;    // [rows, in_size]
  Format format;    // q4_1 or q8_0
  uint8_t* blocks;  // [rows, in_size / 32, rounded up]
  int64_t rows, in_size;
};

// Packed weights of bf16 → coded ones (coded.hpp).
struct Encode {
  const void* packed;  // blocks of 16 outputs, as Linear has them
  uint8_t* coded;      // zeros; coded_block_bytes(in_size) for each block
  int64_t blocks, in_size;
};

struct Sample;  // sample.hpp

struct Kernels {
  void (*linear)(const Linear&);          // of plain and coded weights, and 8-bit floats
  void (*linear_quantized)(const Linear&);  // of all others
  void (*embedding)(const Embedding&);
  void (*norm)(const Norm&);
  void (*cast)(const Cast&);
  void (*reorder)(const Reorder&);
  void (*activation)(const Activation&);
  void (*rotary_kv)(const RotaryKV&);
  void (*store_kv)(const StoreKV&);
  void (*attention)(const Attention&);
  void (*sample)(const Sample&);
  bool (*quantize)(const Quantize&);  // false: a weight is not finite, or larger than half precision's largest
  bool (*encode)(const Encode&);      // null: no coded weights at this level; false: a tile has more than 16 exponents
  bool halves;                        // quantized weights may become bf16 while they are multiplied

  // For measurements (roofline.cpp).
  void (*stream)(const void* data, int64_t bytes);
  int64_t (*multiply_bf16)();
  int64_t (*multiply_f32)();
  int64_t (*multiply_int8)();
};

// Blocks of 16 outputs that a weight is packed in.
int64_t packed_blocks(int64_t out_size, bool gated);

// Bytes of a coded weight; 0: its rows are not whole tiles.
int64_t coded_bytes(int64_t out_size, int64_t in_size, bool gated);

// Bytes of a packed weight, [out_size, in_size].
int64_t packed_bytes(Type type, int64_t out_size, int64_t in_size, bool gated);

// Writes rows of a weight, [rows, in_size], to their places, whatever level will read them. All other bytes stay as they
// are, so `packed` begins as zeros. Threads may pack different rows of the same weight at once.
//
// gated: blocks of the first half of the outputs and blocks of the second take turns.
void pack(Type type, const void* weight, int64_t first_row, int64_t rows, int64_t out_size, int64_t in_size, bool gated,
          void* packed);

}  // namespace octavo
