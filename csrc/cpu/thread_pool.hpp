// The library's threads: they share out the pieces of one kernel at a time, and sleep when there is nothing to do.
//
// Which thread does a piece never changes a result: every output is made by one piece alone, in a fixed order.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

class ThreadPool {
 public:
  // `threads` includes the caller's.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls work(piece) for every piece from 0 to pieces - 1, the caller's thread helping; returns when all are done.
  template <typename Work>
  void run(int64_t pieces, const Work& work) {
    if (pieces <= 1 || workers_.empty()) {
      for (int64_t piece = 0; piece < pieces; ++piece) work(piece);
      return;
    }
    run_shared(pieces, [](const void* context, int64_t piece) { (*static_cast<const Work*>(context))(piece); }, &work);
  }

 private:
  using Call = void (*)(const void*, int64_t);

  void run_shared(int64_t pieces, Call call, const void* context);
  void work_off();
  void live();

  std::vector<std::thread> workers_;
  std::mutex one_at_a_time_;

  // The job. Written by the caller while no worker is in it, published by `generation_`.
  Call call_ = nullptr;
  const void* context_ = nullptr;
  int64_t pieces_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<int> busy_{0};  // workers that have not finished with the job
  std::atomic<uint64_t> generation_{0};

  std::mutex sleep_;
  std::condition_variable wake_;
  int sleeping_ = 0;
  std::atomic<bool> stop_{false};
};

// The pool of this process. `threads` > 0 replaces it, where the number differs.
ThreadPool& pool();
void set_threads(int threads);

}  // namespace octavo
