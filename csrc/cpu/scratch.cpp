#include "scratch.hpp"

#include <cstdlib>
#include <memory>
#include <new>

namespace octavo {
namespace {

struct Free {
  void operator()(void* data) const { std::free(data); }
};

// Kept from call to call: a thread has what the largest of its kernels needed.
struct Scratch {
  std::unique_ptr<void, Free> data;
  int64_t bytes = 0;
};

thread_local Scratch own;

}  // namespace

void* scratch(int64_t bytes) {
  if (bytes > own.bytes) {
    const int64_t whole = (bytes + 4095) / 4096 * 4096;
    own.data.reset();
    own.bytes = 0;
    own.data.reset(std::aligned_alloc(4096, static_cast<size_t>(whole)));
    if (own.data == nullptr) throw std::bad_alloc();
    own.bytes = whole;
  }
  return own.data.get();
}

}  // namespace octavo
