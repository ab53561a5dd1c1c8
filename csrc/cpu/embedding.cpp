// Rows of a packed table (the layout is drawn at Linear), scaled in float32 and rounded once.

#include <algorithm>

#include "coded.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "rows.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// The next `count` channels of a row, whose own begin at `from`: pieces of Together channels, one in each line.
template <typename T, int Together>
OCTAVO_INLINE f32x16 gathered(const T* from, int count) {
  T found[kLanes] = {};
  for (int i = 0; i < count; ++i) found[i] = from[i / Together * kLanes * Together + i % Together];
  return load(found);
}

template <typename T, int Together, typename Out>
void embed_row(const Embedding& call, int64_t row) {
  const int64_t block_size = (call.size + Together - 1) / Together * Together * kLanes;
  const T* from =
      static_cast<const T*>(call.weight) + call.ids[row] / kLanes * block_size + call.ids[row] % kLanes * Together;
  Out* out = static_cast<Out*>(call.out) + row * call.size;
  by_vectors(call.size, [&](int64_t i, auto lanes) {
    store(out + i, gathered<T, Together>(from + i * kLanes, lanes) * call.scale, lanes);
  });
}

template <typename T, int Together>
void embed_rows(const Embedding& call) {
  by_rows(call.rows, call.size, [&](int64_t row) {
    if (call.out_type == Type::f32) embed_row<T, Together, float>(call, row);
    else embed_row<T, Together, bf16>(call, row);
  });
}

// Of a quantized table (drawn in formats.hpp): a row is one output's groups.
template <typename Out>
void embed_quantized_row(const Embedding& call, const Layout& layout, int64_t row) {
  const uint8_t* block =
      static_cast<const uint8_t*>(call.weight) + call.ids[row] / kLanes * layout.block_bytes(call.size);
  Out* out = static_cast<Out*>(call.out) + row * call.size;
  alignas(64) float values[kGroup];
  for (int64_t i = 0; i < call.size; i += kGroup) {
    unpack_group(call.format, layout, block, call.ids[row] % kLanes, i / kGroup, values);
    by_vectors(std::min(kGroup, call.size - i), [&](int64_t k, auto lanes) {
      store(out + i + k, load(values + k, lanes) * call.scale, lanes);
    });
  }
}

void embed_quantized(const Embedding& call) {
  const Layout layout = layout_of(call.format, call.span);
  by_rows(call.rows, call.size, [&](int64_t row) {
    if (call.out_type == Type::f32) embed_quantized_row<float>(call, layout, row);
    else embed_quantized_row<bf16>(call, layout, row);
  });
}

template <typename Out>
void embed_coded_row(const Embedding& call, int64_t row) {
  const uint8_t* block =
      static_cast<const uint8_t*>(call.weight) + call.ids[row] / kLanes * coded_block_bytes(call.size);
  Out* out = static_cast<Out*>(call.out) + row * call.size;
  for (int64_t i = 0; i < call.size; i += kLanes) {
    alignas(64) bf16 values[kLanes];
    for (int64_t k = 0; k < kLanes; ++k) values[k] = coded_weight(block, call.ids[row] % kLanes, i + k);
    store(out + i, load(values) * call.scale);
  }
}

void embed_coded(const Embedding& call) {
  by_rows(call.rows, call.size, [&](int64_t row) {
    if (call.out_type == Type::f32) embed_coded_row<float>(call, row);
    else embed_coded_row<bf16>(call, row);
  });
}

}  // namespace

void embedding(const Embedding& call) {
  if (call.format == Format::coded) return embed_coded(call);
  if (call.format != Format::plain) return embed_quantized(call);
  if (call.type == Type::bf16) embed_rows<bf16, 2>(call);
  else embed_rows<float, 1>(call);
}

}  // namespace octavo::OCTAVO_LEVEL
