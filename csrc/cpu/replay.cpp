#include "replay.hpp"

#include <chrono>
#include <stdexcept>
#include <tuple>

#include "check.hpp"
#include "row_tensors.hpp"
#include "shares.hpp"
#include "thread_pool.hpp"

namespace octavo {
namespace {

// All that a call is. A field that is missing here does not compile.
auto fields(const KVCache& cache) {
  const auto& [type, kept, data, blocks, block_size, heads, head_size] = cache;
  return std::tie(type, kept, data, blocks, block_size, heads, head_size);
}
auto fields(const Linear& call) {
  const auto& [type, x, x_stride, format, span, weight, bias, out, out_stride, out_type, rows, in_size, out_size,
               residual, multiplier, softcap, gated, function, half_scale] = call;
  return std::tie(type, x, x_stride, format, span, weight, bias, out, out_stride, out_type, rows, in_size, out_size,
                  residual, multiplier, softcap, gated, function, half_scale);
}
auto fields(const Embedding& call) {
  const auto& [type, ids, format, span, weight, scale, out_type, out, rows, size, vocabulary] = call;
  return std::tie(type, ids, format, span, weight, scale, out_type, out, rows, size, vocabulary);
}
auto fields(const Norm& call) {
  const auto& [type, x, x_stride, weight_type, weight, bias, head_weights, residual, out_type, out, rows, heads, size,
               eps, center] = call;
  return std::tie(type, x, x_stride, weight_type, weight, bias, head_weights, residual, out_type, out, rows, heads,
                  size, eps, center);
}
auto fields(const Cast& call) {
  const auto& [type, x, x_stride, out_type, out, rows, size] = call;
  return std::tie(type, x, x_stride, out_type, out, rows, size);
}
auto fields(const Reorder& call) {
  const auto& [type, x, x_stride, order, back, out, rows, size] = call;
  return std::tie(type, x, x_stride, order, back, out, rows, size);
}
auto fields(const Activation& call) {
  const auto& [type, function, x, x_stride, out, rows, size] = call;
  return std::tie(type, function, x, x_stride, out, rows, size);
}
auto fields(const RotaryKV& call) {
  const auto& [cache, positions, query, key, value, query_stride, key_stride, value_stride, cos_sin, slots, out, rows,
               query_heads, rotary_dim, max_position] = call;
  return std::tuple_cat(fields(cache), std::tie(positions, query, key, value, query_stride, key_stride, value_stride,
                                                cos_sin, slots, out, rows, query_heads, rotary_dim, max_position));
}
auto fields(const StoreKV& call) {
  const auto& [cache, key, value, key_stride, value_stride, slots, rows] = call;
  return std::tuple_cat(fields(cache), std::tie(key, value, key_stride, value_stride, slots, rows));
}
auto fields(const Attention& call) {
  const auto& [cache, query, query_stride, out, query_start, seq_lens, block_table, table_stride, table_width,
               requests, rows, query_heads, scale, window, softcap, sinks] = call;
  return std::tuple_cat(fields(cache), std::tie(query, query_stride, out, query_start, seq_lens, block_table,
                                                table_stride, table_width, requests, rows, query_heads, scale, window,
                                                softcap, sinks));
}

const char* name(const Linear&) { return "linear"; }
const char* name(const Embedding&) { return "embedding"; }
const char* name(const Norm&) { return "norm"; }
const char* name(const Cast&) { return "cast"; }
const char* name(const Reorder&) { return "reorder"; }
const char* name(const Activation&) { return "activation"; }
const char* name(const RotaryKV&) { return "rotary_kv"; }
const char* name(const StoreKV&) { return "store_kv"; }
const char* name(const Attention&) { return "attention"; }

void invoke(const Kernels& kernels, const Linear& call) {
  if (call.format == Format::coded && kernels.encode == nullptr)
    throw std::invalid_argument("the weights were coded for another level than the chosen one");
  if (call.half_scale != 0.0f && !kernels.halves)
    throw std::invalid_argument("the weights were made ready for another level than the chosen one");
  const bool floats = call.format == Format::plain || call.format == Format::f8 || call.format == Format::coded;
  (floats ? kernels.linear : kernels.linear_quantized)(call);
}
void invoke(const Kernels& kernels, const Embedding& call) { kernels.embedding(call); }
void invoke(const Kernels& kernels, const Norm& call) { kernels.norm(call); }
void invoke(const Kernels& kernels, const Cast& call) { kernels.cast(call); }
void invoke(const Kernels& kernels, const Reorder& call) { kernels.reorder(call); }
void invoke(const Kernels& kernels, const Activation& call) { kernels.activation(call); }
void invoke(const Kernels& kernels, const RotaryKV& call) { kernels.rotary_kv(call); }
void invoke(const Kernels& kernels, const StoreKV& call) { kernels.store_kv(call); }
void invoke(const Kernels& kernels, const Attention& call) { kernels.attention(call); }

// Only attention knows requests.
template <typename C>
int64_t* requests_of(C&) { return nullptr; }
int64_t* requests_of(Attention& call) { return &call.requests; }

// Distances between rows.
void forget_strides(Linear& call) { call.x_stride = 0; }
void forget_strides(Norm& call) { call.x_stride = 0; }
void forget_strides(Cast& call) { call.x_stride = 0; }
void forget_strides(Reorder& call) { call.x_stride = 0; }
void forget_strides(Activation& call) { call.x_stride = 0; }
void forget_strides(RotaryKV& call) { call.query_stride = call.key_stride = call.value_stride = 0; }
void forget_strides(StoreKV& call) { call.key_stride = call.value_stride = 0; }
void forget_strides(Attention& call) { call.query_stride = 0; }
template <typename C>
void forget_strides(C&) {}

template <typename C>
void check_and_invoke(const Kernels& kernels, const C& call) {
  check(call);
  invoke(kernels, call);
}

}  // namespace

thread_local Recording* recording = nullptr;

void make(const Kernels& kernels, const Call& call) {
  std::visit([&](const auto& one) { check_and_invoke(kernels, one); }, call);
}

void Recording::add(const Call& call) {
  calls_.push_back(call);
  std::visit(
      [&](auto& kept) {
        if (kept.rows % rows_ != 0)
          throw std::invalid_argument(std::string(name(kept)) + " was called for " + std::to_string(kept.rows) +
                                      " rows in a forward of " + std::to_string(rows_) + " tokens");
        kept.rows /= rows_;
        if (int64_t* requests = requests_of(kept)) {
          if (*requests != requests_)
            throw std::invalid_argument("attention was called for " + std::to_string(*requests) + " requests of " +
                                        std::to_string(requests_));
          *requests = 0;
        }
      },
      calls_.back());
  if (!stretches_.empty() && go_together(&calls_[stretches_.back().first], stretches_.back().count, rows_))
    ++stretches_.back().count;
  else stretches_.push_back({calls_.size() - 1, 1});
}

bool Recording::same_calls(const Recording& other) const {
  if (calls_.size() != other.calls_.size()) return false;
  for (size_t i = 0; i < calls_.size(); ++i) {
    const bool same = std::visit(
        [&](auto mine) {
          const auto* found = std::get_if<decltype(mine)>(&other.calls_[i]);
          if (found == nullptr) return false;
          auto theirs = *found;
          if (rows_ == 1 || other.rows_ == 1) {
            forget_strides(mine);
            forget_strides(theirs);
          }
          return fields(mine) == fields(theirs);
        },
        calls_[i]);
    if (!same) return false;
  }
  return true;
}

void Recording::run(const Kernels& kernels, int64_t rows, int64_t requests) const {
  const bool in_blocks = RowBlocks::worth(rows, pool().size());
  for (const Stretch& stretch : stretches_) {
    if (in_blocks && stretch.count > 1) run_blocks(kernels, stretch, rows);
    else run_whole(kernels, stretch, rows, requests);
  }
}

void Recording::run_whole(const Kernels& kernels, const Stretch& stretch, int64_t rows, int64_t requests) const {
  for (size_t i = stretch.first; i < stretch.first + stretch.count; ++i)
    std::visit(
        [&](auto call) {
          call.rows *= rows;
          if (int64_t* own = requests_of(call)) *own = requests;
          check_and_invoke(kernels, call);
        },
        calls_[i]);
}

void Recording::run_blocks(const Kernels& kernels, const Stretch& stretch, int64_t rows) const {
  using Clock = std::chrono::steady_clock;
  const int64_t threads = pool().size();
  const RowBlocks blocks(rows, paces_.of(threads));
  Shares shares(blocks.count(), threads);
  std::vector<double> speeds(static_cast<size_t>(threads));
  pool().run(threads, [&](int64_t) {
    const int64_t self = ThreadPool::self() % threads;
    const Alone alone;
    const auto start = Clock::now();
    int64_t done = 0;
    for (int64_t block = shares.take(self); block >= 0; block = shares.take(self)) {
      if (blocks.rows(block) == 0) continue;
      for (size_t i = stretch.first; i < stretch.first + stretch.count; ++i)
        make(kernels, rows_from(calls_[i], blocks.begin(block), blocks.rows(block)));
      done += blocks.rows(block);
    }
    if (done > 0)
      speeds[static_cast<size_t>(self)] =
          static_cast<double>(done) / std::chrono::duration<double>(Clock::now() - start).count();
  });
  paces_.learn(speeds);
}

std::vector<std::string> Recording::kernels() const {
  std::vector<std::string> names;
  for (const Call& call : calls_) names.push_back(std::visit([](const auto& one) { return std::string(name(one)); }, call));
  return names;
}

}  // namespace octavo
