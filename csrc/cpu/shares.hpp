// Tasks of a kernel shared out among threads, so that each knows what it does next and none waits long.
//
//   thread 0: 0 1 2 ──▶  …  ◀── taken by others when they are done │ thread 1: n/2 n/2+1 ──▶ …
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace octavo {

class Shares {
 public:
  // Tasks 0 to count - 1, fewer than 2^32.
  Shares(int64_t count, int64_t threads) : threads_(threads), shares_(new Share[static_cast<size_t>(threads)]) {
    for (int64_t i = 0; i < threads; ++i) shares_[i].left = pack(count * i / threads, count * (i + 1) / threads);
  }

  // A thread's next task: the first of its own, then the last of another's; -1: none is left.
  int64_t take(int64_t thread) {
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

  // What the thread takes next, unless another does; -1: nothing of its own.
  int64_t next(int64_t thread) const {
    const uint64_t seen = shares_[thread].left.load(std::memory_order_relaxed);
    return first(seen) < end(seen) ? first(seen) : -1;
  }

 private:
  struct alignas(64) Share {
    std::atomic<uint64_t> left{0};
  };

  static uint64_t pack(int64_t first, int64_t end) {
    return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(end);
  }
  static int64_t first(uint64_t left) { return static_cast<int64_t>(left >> 32); }
  static int64_t end(uint64_t left) { return static_cast<int64_t>(left & 0xffffffffu); }

  const int64_t threads_;
  std::unique_ptr<Share[]> shares_;
};

}  // namespace octavo
