// Rotary embedding, and the write into the KV cache (its layout is drawn at KVCache): in float32, rounded once, and then
// to 8 bits where that is how the cache keeps it.

#include <algorithm>

#include "eight_bits.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "rows.hpp"
#include "scratch.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// Never inlined: products and sums may be fused in one copy of this and not in another, and queries and keys are to be
// rotated alike.
template <typename T>
__attribute__((noinline)) void rotate(const T* first, const T* second, const float* cosines, const float* sines,
                                      int64_t count, T* to_first, T* to_second) {
  by_vectors(count, [&](int64_t i, auto lanes) {
    const f32x16 x = load(first + i, lanes), y = load(second + i, lanes);
    const f32x16 cosine = load(cosines + i, lanes), sine = load(sines + i, lanes);
    put(to_first + i, x * cosine - y * sine, lanes);
    put(to_second + i, y * cosine + x * sine, lanes);
  });
}

// What a thread needs for one key of `size` channels: rotated, and as it is kept.
template <typename T, typename K>
struct Room {
  explicit Room(int64_t size)
      : key(static_cast<T*>(scratch(size * static_cast<int64_t>(sizeof(T) + sizeof(K))))),
        codes(reinterpret_cast<K*>(key + size)) {}

  T* key;
  K* codes;
};

// Where a token's key and value of a head are: a lane of a tile of keys, and a row of a tile of values.
template <typename K>
struct Place {
  Place(const KVCache& cache, int64_t slot, int64_t head) : size(cache.head_size), width(cache.tile()) {
    const int64_t row = size + (kScaled<K> ? kFactor : 0), half = cache.heads * cache.block_size * row;
    const int64_t offset = slot % cache.block_size;
    lane = offset % width;
    keys = static_cast<K*>(cache.data) + slot / cache.block_size * 2 * half +
           (head * cache.block_size + offset - lane) * row;
    values = keys + half;
  }

  // A key has a few bytes in each line of its tile: the lines are fetched while something else is done.
  void prefetch() const {
    const char* at = reinterpret_cast<const char*>(keys);
    for (int64_t line = 0; line < width * size * static_cast<int64_t>(sizeof(K)); line += 64)
      __builtin_prefetch(at + line, 1);
    __builtin_prefetch(values + lane * size, 1);
  }

  int64_t size, width, lane;  // lane: of so many in a tile
  K *keys, *values;           // of the tile
};

// Writes one token's key and value of a head, of T, into a cache of K, and the factors, where there are some, behind their
// tiles.
template <typename T, typename K>
void put(const KVCache& cache, int64_t slot, int64_t head, const T* key, const T* value, K* codes) {
  constexpr int64_t Together = sizeof(K) == 2 ? 2 : 1;
  const Place<K> place(cache, slot, head);
  const int64_t size = place.size, width = place.width, lane = place.lane;
  K *keys = place.keys, *values = place.values;
  const K* from;
  if constexpr (kScaled<K>) {
    const float factors[2] = {keep(key, size, codes), keep(value, size, values + lane * size)};
    std::memcpy(keys + width * size + lane * kFactor, &factors[0], sizeof factors[0]);
    std::memcpy(values + width * size + lane * kFactor, &factors[1], sizeof factors[1]);
    from = codes;
  } else {
    std::copy_n(value, size, values + lane * size);
    from = key;
  }
  for (int64_t i = 0; i < size; i += Together)
    std::memcpy(keys + i * width + lane * Together, from + i, Together * sizeof(K));
}

template <typename T, typename K>
void store_row(const StoreKV& call, int64_t row) {
  const int64_t size = call.cache.head_size;
  const T* key = static_cast<const T*>(call.key) + row * call.key_stride;
  const T* value = static_cast<const T*>(call.value) + row * call.value_stride;
  const Room<T, K> room(size);
  for (int64_t head = 0; head < call.cache.heads; ++head)
    put(call.cache, call.slots[row], head, key + head * size, value + head * size, room.codes);
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

template <typename T, typename K>
void rotary_row(const RotaryKV& call, int64_t row) {
  const int64_t size = call.cache.head_size, half = call.rotary_dim / 2;
  const float* cosines = call.cos_sin + call.positions[row] * call.rotary_dim;
  for (int64_t head = 0; head < call.cache.heads; ++head) Place<K>(call.cache, call.slots[row], head).prefetch();
  rotate_queries<T>(call, cosines, row);
  const Room<T, K> room(size);
  for (int64_t head = 0; head < call.cache.heads; ++head) {
    const T* key = static_cast<const T*>(call.key) + row * call.key_stride + head * size;
    const T* value = static_cast<const T*>(call.value) + row * call.value_stride + head * size;
    rotate(key, key + half, cosines, cosines + half, half, room.key, room.key + half);
    std::copy(key + call.rotary_dim, key + size, room.key + call.rotary_dim);
    put(call.cache, call.slots[row], head, room.key, value, room.codes);
  }
}

// Calls visit with a T and a K: the type of what comes, and what it is kept as.
template <typename Visit>
OCTAVO_INLINE void with_types(const KVCache& cache, const Visit& visit) {
  const auto of = [&](auto type) {
    if (cache.kept == Kept::int8) return visit(type, Int8());
    if (cache.kept == Kept::fp8) return visit(type, E4M3());
    visit(type, type);
  };
  if (cache.type == Type::bf16) of(bf16());
  else of(float());
}

}  // namespace

void rotary_kv(const RotaryKV& call) {
  const KVCache& cache = call.cache;
  with_types(cache, [&](auto type, auto kept) {
    by_rows(call.rows, (call.query_heads + 2 * cache.heads) * cache.head_size,
            [&](int64_t row) { rotary_row<decltype(type), decltype(kept)>(call, row); });
  });
}

void store_kv(const StoreKV& call) {
  with_types(call.cache, [&](auto type, auto kept) {
    by_rows(call.rows, 2 * call.cache.heads * call.cache.head_size,
            [&](int64_t row) { store_row<decltype(type), decltype(kept)>(call, row); });
  });
}

}  // namespace octavo::OCTAVO_LEVEL
