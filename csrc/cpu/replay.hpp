// Step replay: the kernel calls of a forward, recorded once and run again for other rows.
//
// While a thread records, the calls that it makes are kept instead of made. What a call is about (tensors, weights, the
// KV cache) stays where it was; how many rows there are is all that changes:
//
//   recorded with 5 rows │ norm x: 5 rows │ linear: 5 rows │ norm of 9 heads: 45 rows │ attention: 5 rows, 2 requests
//   kept                 │ 1 a row        │ 1 a row        │ 9 a row                  │ 1 a row, the step's requests
//
// Of many rows, calls that follow each other and need nothing of other rows, which is all but attention, are made for a
// block of rows at a time, by one thread: what a call leaves is in the caches of the core that reads it next.
//
//           │ norm │ linear │ rotary │ attention │ linear │ norm │ linear │ linear │ …
//   block 0 │ ───────────────────▶   │   all     │ ──────────────────────────────────▶  a thread
//   block 1 │ ───────────────────▶   │   rows    │ ──────────────────────────────────▶  another
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "kernels.hpp"
#include "row_blocks.hpp"

namespace octavo {

using Call = std::variant<Linear, Embedding, Norm, Cast, Reorder, Activation, RotaryKV, StoreKV, Attention>;

// Checks a call's indices, then makes it with the kernels of a level.
void make(const Kernels& kernels, const Call& call);

class Recording {
 public:
  // `rows`, and `requests` of attention: those of the forward that is recorded.
  Recording(int64_t rows, int64_t requests) : rows_(rows), requests_(requests) {}

  // Throws std::invalid_argument where the call's rows are not a multiple of the forward's, or its requests others.
  void add(const Call& call);

  // Whether the other has the same calls but for the number of rows. Of a single row the distance to the next one says
  // nothing.
  bool same_calls(const Recording& other) const;

  // All calls in their order, for so many rows and requests.
  void run(const Kernels& kernels, int64_t rows, int64_t requests) const;

  // Names of the kernels, in order.
  std::vector<std::string> kernels() const;

 private:
  // Calls that follow each other, and may be made for some rows before the next is made for others.
  struct Stretch {
    size_t first, count;
  };

  void run_whole(const Kernels& kernels, const Stretch& stretch, int64_t rows, int64_t requests) const;
  void run_blocks(const Kernels& kernels, const Stretch& stretch, int64_t rows) const;

  int64_t rows_, requests_;
  std::vector<Call> calls_;  // `rows` of each: how many for each row of the forward
  std::vector<Stretch> stretches_;
  mutable Paces paces_;
};

// The recording that this thread makes, or null.
extern thread_local Recording* recording;

}  // namespace octavo
