// Rotary embedding, and the write into the KV cache (its layout is drawn at KVCache): in float32, rounded once.

#include <algorithm>

#include "kernels.hpp"
#include "levels.hpp"
#include "rows.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kTogether = 128;  // channels of a key that are rotated before they are put into its tile

// Never inlined: products and sums may be fused in one copy of this and not in another, and queries and keys are to be
// rotated alike.
template <typename T>
__attribute__((noinline)) void rotate(const T* first, const T* second, const float* cosines, const float* sines,
                                      int64_t count, T* to_first, T* to_second) {
  by_vectors(count, [&](int64_t i, auto lanes) {
    const f32x16 x = load(first + i, lanes), y = load(second + i, lanes);
    const f32x16 cosine = load(cosines + i, lanes), sine = load(sines + i, lanes);
    store(to_first + i, x * cosine - y * sine, lanes);
    store(to_second + i, y * cosine + x * sine, lanes);
  });
}

// Where one token's key and value of a head lie: the key in its lane of a tile, the value in a row of its own.
template <typename T, int Together>
struct Place {
  Place(const KVCache& cache, int64_t slot, int64_t head) : width(cache.tile()) {
    const int64_t half = cache.heads * cache.block_size * cache.head_size;
    const int64_t offset = slot % cache.block_size, lane = offset % width;
    T* keys = static_cast<T*>(cache.data) + slot / cache.block_size * 2 * half;
    key = keys + (head * cache.block_size + offset - lane) * cache.head_size + lane * Together;
    value = keys + half + (head * cache.block_size + offset) * cache.head_size;
  }
  void put_key(int64_t channel, T element) const {
    key[channel / Together * Together * width + channel % Together] = element;
  }

  T* key;
  T* value;
  int64_t width;
};

template <typename T, int Together>
void store_row(const StoreKV& call, int64_t row) {
  const KVCache& cache = call.cache;
  for (int64_t head = 0; head < cache.heads; ++head) {
    const Place<T, Together> place(cache, call.slots[row], head);
    const T* key = static_cast<const T*>(call.key) + row * call.key_stride + head * cache.head_size;
    for (int64_t i = 0; i < cache.head_size; ++i) place.put_key(i, key[i]);
    const T* value = static_cast<const T*>(call.value) + row * call.value_stride + head * cache.head_size;
    std::copy_n(value, cache.head_size, place.value);
  }
}

template <typename T>
void rotate_queries(const RotaryKV& call, const float* cosines, int64_t row) {
  const int64_t size = call.cache.head_size, half = call.rotary_dim / 2;
  for (int64_t head = 0; head < call.query_heads; ++head) {
    const T* query = static_cast<const T*>(call.query) + row * call.query_stride + head * size;
    T* out = static_cast<T*>(call.out) + (row * call.query_heads + head) * size;
    rotate(query, query + half, cosines, cosines + half, half, out, out + half);
    std::copy(query + call.rotary_dim, query + size, out + call.rotary_dim);
  }
}

template <typename T, int Together>
void rotate_key(const T* key, const float* cosines, int64_t half, const Place<T, Together>& place) {
  T turned[2][kTogether];
  for (int64_t begin = 0; begin < half; begin += kTogether) {
    const int64_t count = std::min(kTogether, half - begin);
    rotate(key + begin, key + half + begin, cosines + begin, cosines + half + begin, count, turned[0], turned[1]);
    for (int64_t i = 0; i < count; ++i) place.put_key(begin + i, turned[0][i]);
    for (int64_t i = 0; i < count; ++i) place.put_key(half + begin + i, turned[1][i]);
  }
}

template <typename T, int Together>
void rotary_row(const RotaryKV& call, int64_t row) {
  const float* cosines = call.cos_sin + call.positions[row] * call.rotary_dim;
  rotate_queries<T>(call, cosines, row);
  const int64_t size = call.cache.head_size;
  for (int64_t head = 0; head < call.cache.heads; ++head) {
    const Place<T, Together> place(call.cache, call.slots[row], head);
    const T* key = static_cast<const T*>(call.key) + row * call.key_stride + head * size;
    rotate_key(key, cosines, call.rotary_dim / 2, place);
    for (int64_t i = call.rotary_dim; i < size; ++i) place.put_key(i, key[i]);
    std::copy_n(static_cast<const T*>(call.value) + row * call.value_stride + head * size, size, place.value);
  }
}

}  // namespace

void rotary_kv(const RotaryKV& call) {
  const KVCache& cache = call.cache;
  by_rows(call.rows, (call.query_heads + 2 * cache.heads) * cache.head_size, [&](int64_t row) {
    if (cache.type == Type::bf16) rotary_row<bf16, 2>(call, row);
    else rotary_row<float, 1>(call, row);
  });
}

void store_kv(const StoreKV& call) {
  by_rows(call.rows, 2 * call.cache.heads * call.cache.head_size, [&](int64_t row) {
    if (call.cache.type == Type::bf16) store_row<bf16, 2>(call, row);
    else store_row<float, 1>(call, row);
  });
}

}  // namespace octavo::OCTAVO_LEVEL
