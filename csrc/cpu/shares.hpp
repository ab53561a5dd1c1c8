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
  Shares(int64_t count, int64_t threads);

  // A thread's next task: the first of its own, then the last of another's; -1: none is left.
  int64_t take(int64_t thread);

  // What the thread takes next, unless another does; -1: nothing of its own.
  int64_t next(int64_t thread) const;

 private:
  struct alignas(64) Share {
    std::atomic<uint64_t> left{0};
  };

  const int64_t threads_;
  std::unique_ptr<Share[]> shares_;
};

}  // namespace octavo
