#include "check.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

template <typename Index>
void check_indices(const Index* indices, int64_t count, int64_t limit, const char* what) {
  bool wrong = false;
  for (int64_t i = 0; i < count; ++i) wrong |= indices[i] < 0 || indices[i] >= limit;
  if (wrong) throw std::out_of_range(std::string(what) + " must be below " + std::to_string(limit));
}

void check_cache(const KVCache& cache) {
  // Keys of bf16 are kept in pairs of channels.
  if (cache.type == Type::bf16 && cache.kept == Kept::wide && cache.head_size % 2 != 0)
    throw std::invalid_argument("heads of " + std::to_string(cache.head_size) +
                                " channels: in bfloat16 the native kernels need an even number");
}

}  // namespace

void check(const Embedding& call) { check_indices(call.ids, call.rows, call.vocabulary, "token ids"); }

void check(const Reorder& call) { check_indices(call.order, call.size, call.size, "columns"); }

void check(const RotaryKV& call) {
  check_cache(call.cache);
  if (call.rotary_dim > call.cache.head_size)
    throw std::invalid_argument("more channels are rotated than a head has");
  check_indices(call.positions, call.rows, call.max_position, "positions");
  check_indices(call.slots, call.rows, call.cache.blocks * call.cache.block_size, "slots");
}

void check(const StoreKV& call) {
  check_cache(call.cache);
  check_indices(call.slots, call.rows, call.cache.blocks * call.cache.block_size, "slots");
}

void check(const Attention& call) {
  const KVCache& cache = call.cache;
  check_cache(cache);
  if (call.query_heads % cache.heads != 0) throw std::invalid_argument("query heads must be a multiple of KV heads");
  int64_t start = 0;
  for (int64_t request = 0; request < call.requests; ++request) {
    const int64_t end = call.query_start[request + 1], length = call.seq_lens[request];
    if (call.query_start[request] != start || end < start || end > call.rows || length < end - start)
      throw std::invalid_argument("rows of requests must follow each other, and be no more than their sequences have");
    if (length > call.table_width * cache.block_size)
      throw std::out_of_range("a sequence is longer than its row of the block table");
    const int64_t oldest = call.window > 0 ? std::max<int64_t>(0, length - (end - start) - call.window + 1) : 0;
    const int64_t first = oldest / cache.block_size, last = (length + cache.block_size - 1) / cache.block_size;
    if (end > start)
      check_indices(call.block_table + request * call.table_stride + first, last - first, cache.blocks, "block ids");
    start = end;
  }
}

void check(const Sample& call) {
  if (call.vocabulary < 1 || call.vocabulary > 0x7fffffff) throw std::invalid_argument("no such vocabulary");
  if (call.score) check_indices(call.tokens, call.rows, call.vocabulary, "token ids");
  const Changes& changes = call.changes;
  if (changes.count > 0) {
    check_indices(changes.rows, changes.count, call.rows, "changed rows");
    check_indices(changes.penalty_ids, changes.penalty_start[changes.count], call.vocabulary, "penalized ids");
    check_indices(changes.bias_ids, changes.bias_start[changes.count], call.vocabulary, "biased ids");
    check_indices(changes.banned_ids, changes.banned_start[changes.count], call.vocabulary, "banned ids");
  }
  if (const Logprobs& asked = call.logprobs; asked.start != nullptr)
    for (int64_t row = 0; row < call.rows; ++row) {
      const int64_t others = asked.start[row + 1] - asked.start[row] - 1;
      if (others > 0 && asked.named[row])
        check_indices(asked.ids + asked.start[row] + 1, others, call.vocabulary, "named ids");
      else if (others > call.vocabulary)
        throw std::invalid_argument("more logprobs are asked for than there are tokens");
    }
}

}  // namespace octavo
