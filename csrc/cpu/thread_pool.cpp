#include "thread_pool.hpp"

#include <chrono>
#include <utility>

#include <pthread.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

// A worker looks for the next kernel so long before it sleeps: longer than the Python between two steps. Waking a
// sleeping thread takes longer than most kernels of a small model.
constexpr auto kAwake = std::chrono::microseconds(500);
constexpr int kLooks = 64;  // between two looks at the clock

thread_local int self_in_pool = 0;
thread_local bool alone = false;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

#if defined(__x86_64__)
PlainFloats::PlainFloats() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // the state in which a process begins
PlainFloats::~PlainFloats() { _mm_setcsr(saved_); }
#else
PlainFloats::PlainFloats() : saved_(0) {}
PlainFloats::~PlainFloats() {}
#endif

void ThreadPool::resize(int threads) {
  std::lock_guard<std::mutex> turn(one_at_a_time_);
  if (threads == size()) return;
  stop();
  size_ = threads;
}

void ThreadPool::start() {
  const size_t wanted = static_cast<size_t>(size()) - 1;
  if (workers_.size() == wanted) return;
  try {
    workers_.reserve(wanted);
    const uint64_t seen = generation_.load();
    while (workers_.size() < wanted) {
      const int self = static_cast<int>(workers_.size()) + 1;
      workers_.emplace_back([this, self, seen] { live(self, seen); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

void ThreadPool::stop() {
  {
    std::lock_guard<std::mutex> lock(sleep_);
    stop_ = true;
    generation_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
  stop_ = false;
}

void ThreadPool::run_shared(int64_t pieces, Call call, const void* context) {
  std::lock_guard<std::mutex> turn(one_at_a_time_);
  start();
  call_ = call;
  context_ = context;
  pieces_ = pieces;
  next_.store(0, std::memory_order_relaxed);
  open_.store(true);
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
  // Who has not come by now, because it sleeps or its core is another process's, need not come any more.
  open_.store(false);
  for (int looks = 0; inside_.load() > 0; ++looks) {
    // A worker may have lost its core to another process: give it ours.
    if (looks < 1 << 14) relax();
    else std::this_thread::yield();
  }
  // All have left: nobody else touches failure_ now.
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ThreadPool::work_off() {
  try {
    for (int64_t piece = next_.fetch_add(1, std::memory_order_relaxed); piece < pieces_;
         piece = next_.fetch_add(1, std::memory_order_relaxed))
      call_(context_, piece);
  } catch (...) {
    next_.store(pieces_, std::memory_order_relaxed);  // the rest is in vain
    std::lock_guard<std::mutex> lock(sleep_);
    if (!failure_) failure_ = std::current_exception();
  }
}

int ThreadPool::self() { return self_in_pool; }

void ThreadPool::live(int self, uint64_t seen) {
  self_in_pool = self;
  const PlainFloats floats;
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
    // First in, then a look whether it is open, as the caller first closes and then looks who is in (both in one order
    // for all threads): so either it is seen, or it sees that it is too late.
    inside_.fetch_add(1);
    if (open_.load()) work_off();
    inside_.fetch_sub(1);
  }
}

namespace {

// Never destroyed: when the process ends, a thread of Python's may still be in a kernel.
ThreadPool* the_pool = nullptr;

// A child of fork() has none of its parent's threads, and what they held is held for ever: it gets a pool of its own.
void begin_anew() { the_pool = new ThreadPool(the_pool->size()); }

bool make_pool() {
  the_pool = new ThreadPool(1);
  return pthread_atfork(nullptr, nullptr, begin_anew) == 0;
}

[[maybe_unused]] const bool made = make_pool();

}  // namespace

ThreadPool& pool() {
  if (!alone) return *the_pool;
  static ThreadPool* const single = new ThreadPool(1);
  return *single;
}

Alone::Alone() { alone = true; }
Alone::~Alone() { alone = false; }

}  // namespace octavo
