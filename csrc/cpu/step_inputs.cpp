#include "step_inputs.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace octavo {
namespace {

void check_row(const StepInputs& step, int64_t row) {
  if (row < 0 || row >= step.max_rows) throw std::out_of_range("a request's row is beyond the batch");
}

void check(const StepInputs& step, const int64_t* rows, const std::vector<int64_t>& num_scheduled) {
  const int64_t num_reqs = static_cast<int64_t>(num_scheduled.size());
  if (num_reqs > step.max_reqs) throw std::out_of_range("more requests than a step may have (--max-num-seqs)");
  int64_t num_tokens = 0;
  for (int64_t i = 0; i < num_reqs; ++i) {
    check_row(step, rows[i]);
    const int64_t computed = step.num_computed_tokens[rows[i]];
    if (num_scheduled[i] < 1 || computed < 0 || num_scheduled[i] > step.max_model_len - computed)
      throw std::out_of_range("a request's tokens are beyond the model's length");
    num_tokens += num_scheduled[i];
  }
  if (num_tokens > step.max_tokens) throw std::out_of_range("more tokens than a step may have (--max-num-batched-tokens)");
}

void fill_group(const StepGroup& group, int64_t row, int64_t request, int64_t first, int64_t count, int64_t place) {
  const int32_t* table = group.batch_table + row * group.width;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = first + i;
    group.slot_mapping[place + i] =
        table[position / group.block_size] * group.block_size + position % group.block_size;
  }
  const int64_t blocks = (first + count + group.block_size - 1) / group.block_size;
  std::copy_n(table, blocks, group.block_table + request * group.width);
}

}  // namespace

void update(const StepInputs& step, const std::vector<int64_t>& rows, const int64_t* num_prompt_tokens,
            const std::vector<int64_t>& num_computed, const std::vector<int64_t>& num_output) {
  for (size_t i = 0; i < rows.size(); ++i) {
    check_row(step, rows[i]);
    if (num_output[i] < 0) throw std::out_of_range("a request cannot have fewer tokens than its prompt");
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t row = rows[i];
    step.num_computed_tokens[row] = num_computed[i];
    step.num_tokens[row] = std::min(step.num_tokens[row], num_prompt_tokens[row] + num_output[i]);
  }
}

Filled fill(const StepInputs& step, const int64_t* rows, const std::vector<int64_t>& num_scheduled) {
  check(step, rows, num_scheduled);
  Filled filled = {};
  step.query_start_loc[0] = 0;
  const int64_t num_reqs = static_cast<int64_t>(num_scheduled.size());
  for (int64_t request = 0; request < num_reqs; ++request) {
    const int64_t row = rows[request], count = num_scheduled[request], place = filled.num_tokens;
    const int64_t first = step.num_computed_tokens[row], end = first + count;
    for (int64_t i = 0; i < count; ++i) {
      step.positions[place + i] = first + i;
      step.input_ids[place + i] = step.token_ids[row * step.max_model_len + first + i];
    }
    for (const StepGroup& group : step.groups) fill_group(group, row, request, first, count, place);
    filled.num_tokens += count;
    step.query_start_loc[request + 1] = static_cast<int32_t>(filled.num_tokens);
    step.seq_lens[request] = static_cast<int32_t>(end);
    filled.max_query_len = std::max(filled.max_query_len, count);
    filled.max_seq_len = std::max(filled.max_seq_len, end);
    if (end == step.num_tokens[row]) {
      step.sampling[filled.num_sampling] = request;
      step.sampling_tokens[filled.num_sampling++] = filled.num_tokens - 1;
    }
  }
  return filled;
}

void append_tokens(const StepInputs& step, const int64_t* rows, const int64_t* token_ids, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    check_row(step, rows[i]);
    if (step.num_tokens[rows[i]] >= step.max_model_len) throw std::out_of_range("a request is as long as it may be");
  }
  for (int64_t i = 0; i < count; ++i)
    step.token_ids[rows[i] * step.max_model_len + step.num_tokens[rows[i]]++] = static_cast<int32_t>(token_ids[i]);
}

void gather_rows(void* data, int64_t row_bytes, const int64_t* from, int64_t count) {
  char* bytes = static_cast<char*>(data);
  for (int64_t i = 0; i < count; ++i)
    if (from[i] != i) std::memcpy(bytes + i * row_bytes, bytes + from[i] * row_bytes, row_bytes);
}

}  // namespace octavo
