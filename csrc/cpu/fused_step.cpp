#include "fused_step.hpp"

#include <stdexcept>

#include "check.hpp"

namespace octavo {

FusedStep::FusedStep(const StepInputs& inputs, const SamplingColumns& columns, const Recording& forward,
                     RecordedRows hidden, const Recording& logits, RecordedRows scores, int64_t vocabulary)
    : inputs_(inputs),
      columns_(columns),
      forward_(&forward),
      logits_(&logits),
      hidden_(hidden),
      scores_(scores),
      vocabulary_(vocabulary) {
  const size_t most = static_cast<size_t>(inputs.max_reqs);
  for (auto* column : {&temperature_, &min_p_, &top_p_}) column->resize(most);
  for (auto* column : {&rows_, &top_k_, &seed_, &choice_index_, &position_, &tokens_}) column->resize(most);
  status_.resize(most);
}

void FusedStep::begin(const std::vector<int64_t>& rows, const std::vector<int64_t>& num_computed,
                      const std::vector<int64_t>& num_output, const std::vector<int64_t>& num_scheduled) {
  num_reqs_ = static_cast<int64_t>(rows.size());
  if (num_computed.size() != rows.size() || num_output.size() != rows.size() || num_scheduled.size() != rows.size())
    throw std::invalid_argument("increments for each request");
  update(inputs_, rows, columns_.num_prompt_tokens, num_computed, num_output);
  filled_ = fill(inputs_, rows.data(), num_scheduled);
  for (int64_t i = 0; i < filled_.num_sampling; ++i) {
    const int64_t row = rows_[i] = rows[inputs_.sampling[i]];
    temperature_[i] = columns_.temperature[row];
    min_p_[i] = columns_.min_p[row];
    top_p_[i] = columns_.top_p[row];
    top_k_[i] = columns_.top_k[row];
    seed_[i] = columns_.seed[row];
    choice_index_[i] = columns_.choice_index[row];
    position_[i] = inputs_.num_tokens[row] - columns_.num_prompt_tokens[row];
  }
}

void FusedStep::compute(const Kernels& kernels) {
  forward_->run(kernels, filled_.num_tokens, num_reqs_);
  const int64_t count = filled_.num_sampling;
  if (count == 0) return;
  gather_rows(hidden_.data, hidden_.row_bytes, inputs_.sampling_tokens, count);
  logits_->run(kernels, count, 1);
  const Sample call{static_cast<const float*>(scores_.data),
                    scores_.row_bytes / static_cast<int64_t>(sizeof(float)),
                    count,
                    vocabulary_,
                    false,
                    temperature_.data(),
                    min_p_.data(),
                    top_p_.data(),
                    top_k_.data(),
                    seed_.data(),
                    choice_index_.data(),
                    position_.data(),
                    {},
                    {},
                    tokens_.data(),
                    status_.data()};
  check(call);
  kernels.sample(call);
}

std::vector<int64_t> FusedStep::end() {
  std::vector<int64_t> found(static_cast<size_t>(num_reqs_), -1);
  int64_t count = 0;
  for (int64_t i = 0; i < filled_.num_sampling; ++i) {
    int64_t& token = found[inputs_.sampling[i]];
    if (status_[i] != Status::fine) {
      token = -1 - static_cast<int64_t>(status_[i]);
      continue;
    }
    token = tokens_[i];
    rows_[count] = rows_[i];
    tokens_[count++] = token;
  }
  append_tokens(inputs_, rows_.data(), tokens_.data(), count);
  return found;
}

}  // namespace octavo
