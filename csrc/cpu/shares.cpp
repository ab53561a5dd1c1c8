#include "shares.hpp"

namespace octavo {
namespace {

// The tasks that a share has left, in one word that threads exchange: the first of them, and the end.
uint64_t pack(int64_t first, int64_t end) { return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(end); }
int64_t first(uint64_t left) { return static_cast<int64_t>(left >> 32); }
int64_t end(uint64_t left) { return static_cast<int64_t>(left & 0xffffffffu); }

}  // namespace

Shares::Shares(int64_t count, int64_t threads)
    : threads_(threads), shares_(new Share[static_cast<size_t>(threads)]) {
  for (int64_t i = 0; i < threads; ++i) shares_[i].left = pack(count * i / threads, count * (i + 1) / threads);
}

int64_t Shares::take(int64_t thread) {
  for (int64_t i = 0; i < threads_; ++i) {
    std::atomic<uint64_t>& left = shares_[(thread + i) % threads_].left;
    uint64_t seen = left.load(std::memory_order_relaxed);
    while (first(seen) < end(seen)) {
      const int64_t task = i == 0 ? first(seen) : end(seen) - 1;
      const uint64_t rest = i == 0 ? pack(task + 1, end(seen)) : pack(first(seen), task);
      if (left.compare_exchange_weak(seen, rest, std::memory_order_relaxed)) return task;
    }
  }
  return -1;
}

int64_t Shares::next(int64_t thread) const {
  const uint64_t seen = shares_[thread % threads_].left.load(std::memory_order_relaxed);
  return first(seen) < end(seen) ? first(seen) : -1;
}

}  // namespace octavo
