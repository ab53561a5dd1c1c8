// Packing of weights (the layout is drawn at Linear), and the embedding, which reads single rows of it.

#include <algorithm>
#include <cstring>

#include "kernels.hpp"
#include "thread_pool.hpp"

namespace octavo {
namespace {

constexpr int64_t kOutputs = 16;  // of a block

int64_t blocks(int64_t out_size, bool gated) {
  const int64_t size = gated ? out_size / 2 : out_size;
  return (size + kOutputs - 1) / kOutputs * (gated ? 2 : 1);
}

// Elements of a block: inputs are padded to whole pairs where they come in pairs.
int64_t block_size(int64_t in_size, int64_t together) {
  return (in_size + together - 1) / together * together * kOutputs;
}

template <typename T>
void pack_blocks(const T* weight, int64_t out_size, int64_t in_size, bool gated, int64_t together, T* packed) {
  const int64_t size = block_size(in_size, together);
  pool().run(blocks(out_size, gated), [=](int64_t block) {
    T* to = packed + block * size;
    std::memset(to, 0, size * sizeof(T));
    const int64_t half = gated ? out_size / 2 : out_size;
    const int64_t first = (gated ? block / 2 : block) * kOutputs, outputs = std::min(kOutputs, half - first);
    const T* source = weight + (gated && block % 2 == 1 ? half + first : first) * in_size;
    for (int64_t lane = 0; lane < outputs; ++lane) {
      const T* from = source + lane * in_size;
      for (int64_t k = 0; k < in_size; ++k) to[(k / together * kOutputs + lane) * together + k % together] = from[k];
    }
  });
}

template <typename T>
void embed_rows(const Embedding& call, int64_t together) {
  const T* weight = static_cast<const T*>(call.weight);
  T* out = static_cast<T*>(call.out);
  const int64_t size = block_size(call.size, together);
  for (int64_t row = 0; row < call.rows; ++row) {
    const T* from = weight + call.ids[row] / kOutputs * size + call.ids[row] % kOutputs * together;
    T* to = out + row * call.size;
    for (int64_t k = 0; k < call.size; ++k) to[k] = from[k / together * kOutputs * together + k % together];
  }
}

}  // namespace

int64_t packed_bytes(Type type, int64_t out_size, int64_t in_size, bool gated) {
  return type == Type::bf16 ? blocks(out_size, gated) * block_size(in_size, 2) * 2
                            : blocks(out_size, gated) * block_size(in_size, 1) * 4;
}

void pack(Type type, const void* weight, int64_t out_size, int64_t in_size, bool gated, void* packed) {
  if (type == Type::bf16)
    pack_blocks(static_cast<const uint16_t*>(weight), out_size, in_size, gated, 2, static_cast<uint16_t*>(packed));
  else
    pack_blocks(static_cast<const float*>(weight), out_size, in_size, gated, 1, static_cast<float*>(packed));
}

void embed(const Embedding& call) {
  if (call.type == Type::bf16)
    embed_rows<uint16_t>(call, 2);
  else
    embed_rows<float>(call, 1);
}

}  // namespace octavo
