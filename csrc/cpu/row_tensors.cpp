#include "row_tensors.hpp"

#include <algorithm>
#include <vector>

namespace octavo {
namespace {

int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// visit(pointer, bytes from row to row, bytes of a row) for each tensor that has rows.
template <typename Visit>
void row_tensors(Linear& call, const Visit& visit) {
  const int64_t size = size_of(call.out_type), width = call.gated ? call.out_size / 2 : call.out_size;
  visit(call.x, call.x_stride * size_of(call.type), call.in_size * size_of(call.type));
  visit(call.out, call.out_stride * size, width * size);
  visit(call.residual, call.out_stride * size_of(Type::f32), width * size_of(Type::f32));
}
template <typename Visit>
void row_tensors(Embedding& call, const Visit& visit) {
  const int64_t row = call.size * size_of(call.out_type);
  visit(call.ids, sizeof *call.ids, sizeof *call.ids);
  visit(call.out, row, row);
}
template <typename Visit>
void row_tensors(Norm& call, const Visit& visit) {
  const int64_t numbers = call.heads * call.size, out = numbers * size_of(call.out_type);
  visit(call.x, call.x_stride * size_of(call.type), numbers * size_of(call.type));
  visit(call.residual, numbers * size_of(Type::f32), numbers * size_of(Type::f32));
  visit(call.out, out, out);
}
template <typename Visit>
void row_tensors(Cast& call, const Visit& visit) {
  const int64_t out = call.size * size_of(call.out_type);
  visit(call.x, call.x_stride * size_of(call.type), call.size * size_of(call.type));
  visit(call.out, out, out);
}
template <typename Visit>
void row_tensors(Reorder& call, const Visit& visit) {
  const int64_t out = call.size * size_of(call.type);
  visit(call.x, call.x_stride * size_of(call.type), out);
  visit(call.out, out, out);
}
template <typename Visit>
void row_tensors(Activation& call, const Visit& visit) {
  const int64_t out = call.size * size_of(call.type);
  visit(call.x, call.x_stride * size_of(call.type), out);
  visit(call.out, out, out);
}
template <typename Visit>
void row_tensors(RotaryKV& call, const Visit& visit) {
  const int64_t size = size_of(call.cache.type), own = call.cache.heads * call.cache.head_size * size;
  const int64_t queries = call.query_heads * call.cache.head_size * size;
  visit(call.positions, sizeof *call.positions, sizeof *call.positions);
  visit(call.slots, sizeof *call.slots, sizeof *call.slots);
  visit(call.query, call.query_stride * size, queries);
  visit(call.key, call.key_stride * size, own);
  visit(call.value, call.value_stride * size, own);
  visit(call.out, queries, queries);
}
template <typename Visit>
void row_tensors(StoreKV& call, const Visit& visit) {
  const int64_t size = size_of(call.cache.type), own = call.cache.heads * call.cache.head_size * size;
  visit(call.slots, sizeof *call.slots, sizeof *call.slots);
  visit(call.key, call.key_stride * size, own);
  visit(call.value, call.value_stride * size, own);
}
// Looks at other rows: never split.
template <typename Visit>
void row_tensors(Attention&, const Visit&) {}

bool is_attention(const Call& call) { return std::holds_alternative<Attention>(call); }

// A tensor's memory: of each row of the forward `width` bytes, `stride` from the row before.
struct Span {
  const char* begin;
  int64_t stride, width;
};

std::vector<Span> spans_of(const Call& kept) {
  std::vector<Span> spans;
  std::visit(
      [&](auto call) {
        row_tensors(call, [&](const auto* pointer, int64_t stride, int64_t width) {
          if (pointer == nullptr) return;
          spans.push_back({reinterpret_cast<const char*>(pointer), stride * call.rows, stride * (call.rows - 1) + width});
        });
      },
      kept);
  return spans;
}

// Whether a row of one may have memory of another row of the other.
bool mixes_rows(const Span& one, const Span& other, int64_t rows) {
  const Span &low = one.begin <= other.begin ? one : other, &high = one.begin <= other.begin ? other : one;
  const int64_t distance = high.begin - low.begin;
  if (distance >= low.stride * (rows - 1) + low.width) return false;
  return low.stride != high.stride || distance + high.width > low.stride;
}

}  // namespace

Call rows_from(const Call& kept, int64_t first, int64_t count) {
  Call made = kept;
  std::visit(
      [&](auto& call) {
        row_tensors(call, [&](auto*& pointer, int64_t stride, int64_t) {
          using Pointer = std::remove_reference_t<decltype(pointer)>;
          if (pointer != nullptr)
            pointer = reinterpret_cast<Pointer>(reinterpret_cast<uintptr_t>(pointer) +
                                                static_cast<uintptr_t>(first * call.rows * stride));
        });
        call.rows *= count;
      },
      made);
  return made;
}

bool go_together(const Call* calls, size_t before, int64_t rows) {
  if (std::any_of(calls, calls + before + 1, is_attention)) return false;
  const std::vector<Span> last = spans_of(calls[before]);
  for (size_t i = 0; i < before; ++i)
    for (const Span& earlier : spans_of(calls[i]))
      for (const Span& span : last)
        if (mixes_rows(earlier, span, rows)) return false;
  return true;
}

}  // namespace octavo
