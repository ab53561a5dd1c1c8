#include "thread_pool.hpp"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

// A worker looks for the next kernel so long before it sleeps. Waking a sleeping thread takes longer than most kernels
// of a small model; between two of them there is only a little Python.
constexpr auto kAwake = std::chrono::microseconds(100);
constexpr int kLooks = 64;  // between two looks at the clock

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  for (int index = 1; index < threads; ++index) workers_.emplace_back([this] { live(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(sleep_);
    stop_ = true;
    generation_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run_shared(int64_t pieces, Call call, const void* context) {
  std::lock_guard<std::mutex> turn(one_at_a_time_);
  call_ = call;
  context_ = context;
  pieces_ = pieces;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  {
    // Under the lock, so that a worker cannot fall asleep between its last look and this.
    std::unique_lock<std::mutex> lock(sleep_);
    generation_.fetch_add(1, std::memory_order_release);
    if (sleeping_ > 0) {
      lock.unlock();
      wake_.notify_all();
    }
  }
  work_off();
  for (int looks = 0; busy_.load(std::memory_order_acquire) > 0; ++looks) {
    // A worker may have lost its core to another process: give it ours.
    if (looks < 1 << 14) relax();
    else std::this_thread::yield();
  }
}

void ThreadPool::work_off() {
  for (int64_t piece = next_.fetch_add(1, std::memory_order_relaxed); piece < pieces_;
       piece = next_.fetch_add(1, std::memory_order_relaxed))
    call_(context_, piece);
}

void ThreadPool::live() {
  uint64_t seen = 0;
  for (;;) {
    auto deadline = std::chrono::steady_clock::now() + kAwake;
    for (int looks = 0; generation_.load(std::memory_order_acquire) == seen; ++looks) {
      relax();
      if (looks % kLooks != 0 || std::chrono::steady_clock::now() < deadline) continue;
      std::unique_lock<std::mutex> lock(sleep_);
      ++sleeping_;
      wake_.wait(lock, [this, seen] { return generation_.load(std::memory_order_acquire) != seen; });
      --sleeping_;
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    work_off();
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

namespace {
std::unique_ptr<ThreadPool> the_pool;
}

ThreadPool& pool() {
  if (!the_pool) the_pool = std::make_unique<ThreadPool>(1);
  return *the_pool;
}

void set_threads(int threads) {
  if (!the_pool || the_pool->size() != threads) the_pool = std::make_unique<ThreadPool>(threads);
}

}  // namespace octavo
