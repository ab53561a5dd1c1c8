// The library's threads: they share out the pieces of one kernel at a time, and sleep when there is nothing to do.
//
// Which thread does a piece never changes a result: every output is made by one piece alone, in a fixed order, and all
// threads round in the same way.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// While it lives, this thread rounds to nearest and keeps denormal numbers, whatever its caller has set.
class PlainFloats {
 public:
  PlainFloats();
  ~PlainFloats();
  PlainFloats(const PlainFloats&) = delete;
  PlainFloats& operator=(const PlainFloats&) = delete;

 private:
  unsigned saved_;
};

class ThreadPool {
 public:
  // `threads` includes the caller's. The others are started when there is something to share out.
  explicit ThreadPool(int threads) : size_(threads) {}
  ~ThreadPool() { stop(); }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_.load(std::memory_order_relaxed); }

  // Which of a pool's threads this is: 0, the caller, to size() - 1. What each thread did in one kernel it finds in its
  // own caches in the next.
  static int self();

  // Waits for the kernel that is running.
  void resize(int threads);

  // Calls work(piece) for every piece from 0 to pieces - 1, the caller's thread helping; returns when all are done. What
  // a piece throws is thrown here, once no thread works any more.
  template <typename Work>
  void run(int64_t pieces, const Work& work) {
    if (pieces <= 1 || size() == 1) {
      for (int64_t piece = 0; piece < pieces; ++piece) work(piece);
      return;
    }
    run_shared(pieces, [](const void* context, int64_t piece) { (*static_cast<const Work*>(context))(piece); }, &work);
  }

 private:
  using Call = void (*)(const void*, int64_t);

  void run_shared(int64_t pieces, Call call, const void* context);
  void start();
  void stop();
  void work_off();
  void live(int self, uint64_t seen);

  std::atomic<int> size_;
  std::mutex one_at_a_time_;
  std::vector<std::thread> workers_;  // under one_at_a_time_

  // The job. Written by the caller while no worker is in it, published by `open_`.
  Call call_ = nullptr;
  const void* context_ = nullptr;
  int64_t pieces_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> open_{false};
  std::atomic<int> inside_{0};  // workers
  std::atomic<uint64_t> generation_{0};

  std::mutex sleep_;
  std::condition_variable wake_;
  int sleeping_ = 0;            // under sleep_
  std::exception_ptr failure_;  // under sleep_: the first that a piece threw
  std::atomic<bool> stop_{false};
};

// The pool of this process; within Alone one of a single thread.
ThreadPool& pool();

// While it lives, what this thread calls is not shared out.
class Alone {
 public:
  Alone();
  ~Alone();
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;
};

}  // namespace octavo
