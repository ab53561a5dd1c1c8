// A step in one call, for requests that want nothing of the sampler but a token: the increments go into the batch, then
// inputs, forward, logits and sampling, and the tokens go to where the next step's inputs come from.
//
// What it saves is Python between the kernels: each of them empties the caches, and whatever runs next begins cold.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.hpp"
#include "replay.hpp"
#include "sample.hpp"
#include "step_inputs.hpp"

namespace octavo {

// What each request of the batch asks, [max_rows] each: as in Sample.
struct SamplingColumns {
  const double *temperature, *min_p, *top_p;
  const int64_t *top_k, *seed, *choice_index, *num_prompt_tokens;
};

// Where a recording leaves its rows.
struct RecordedRows {
  void* data;
  int64_t row_bytes;
};

class FusedStep {
 public:
  // The recordings must outlive it. `logits` reads the first rows of `hidden`, and leaves float32.
  FusedStep(const StepInputs& inputs, const SamplingColumns& columns, const Recording& forward, RecordedRows hidden,
            const Recording& logits, RecordedRows scores, int64_t vocabulary);

  // Takes in the increments, and fills the inputs. All four run parallel; see CachedRequestData, and
  // SchedulerOutput.num_scheduled_tokens. Throws std::out_of_range like fill().
  void begin(const std::vector<int64_t>& rows, const std::vector<int64_t>& num_computed,
             const std::vector<int64_t>& num_output, const std::vector<int64_t>& num_scheduled);

  void compute(const Kernels& kernels);

  // Appends the tokens. One for each request: -1 where it does not sample, else below that what is wrong with its logits,
  // -1 - Status.
  std::vector<int64_t> end();

 private:
  StepInputs inputs_;
  SamplingColumns columns_;
  const Recording *forward_, *logits_;
  RecordedRows hidden_, scores_;
  int64_t vocabulary_;

  // The step that has begun.
  int64_t num_reqs_ = 0;
  Filled filled_ = {};
  // [max_reqs] each: of the requests that sample.
  std::vector<int64_t> rows_;
  std::vector<double> temperature_, min_p_, top_p_;
  std::vector<int64_t> top_k_, seed_, choice_index_, position_, tokens_;
  std::vector<Status> status_;
};

}  // namespace octavo
