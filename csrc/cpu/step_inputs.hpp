// The tensors of one step, filled from the worker's InputBatch: what octavo/worker/step_inputs.py defines with numpy, in
// one call. After a forward has emptied the caches, it is the number of calls that costs, not what they do.
#pragma once

#include <cstdint>
#include <vector>

namespace octavo {

// One KV cache group.
struct StepGroup {
  const int32_t* batch_table;  // [max_rows, width]: blocks of each request
  int64_t width, block_size;
  int32_t* block_table;        // [max_reqs, width]
  int64_t* slot_mapping;       // [max_tokens]
};

struct StepInputs {
  // The batch: a row for each request that the worker holds.
  int32_t* token_ids;  // [max_rows, max_model_len]
  int64_t *num_tokens, *num_computed_tokens;
  int64_t max_rows, max_model_len;
  // The step: requests in the order of the schedule, and so their tokens.
  int64_t* input_ids;        // [max_tokens]
  int64_t* positions;        // [max_tokens]
  int32_t* query_start_loc;  // [max_reqs + 1]
  int32_t* seq_lens;         // [max_reqs]
  int64_t* sampling;         // [max_reqs]: which requests sample
  int64_t* sampling_tokens;  // [max_reqs]: where their last tokens are
  int64_t max_tokens, max_reqs;
  std::vector<StepGroup> groups;
};

struct Filled {
  int64_t num_tokens, max_query_len, max_seq_len, num_sampling;
};

// Takes in how far requests are: InputBatch._update, in one call. Throws std::out_of_range where a row is beyond the batch.
void update(const StepInputs& step, const std::vector<int64_t>& rows, const int64_t* num_prompt_tokens,
            const std::vector<int64_t>& num_computed, const std::vector<int64_t>& num_output);

// Throws std::out_of_range where a row, or a request's or the step's tokens, are beyond the arrays.
Filled fill(const StepInputs& step, const int64_t* rows, const std::vector<int64_t>& num_scheduled);

// One more token for each of the rows. Throws std::out_of_range likewise, with nothing done.
void append_tokens(const StepInputs& step, const int64_t* rows, const int64_t* token_ids, int64_t count);

// Moves some rows of [rows, row_bytes] to the front; `from` ascends.
void gather_rows(void* data, int64_t row_bytes, const int64_t* from, int64_t count);

}  // namespace octavo
