// Python's view of step_inputs.hpp and fused_step.hpp: objects that hold the addresses of arrays, made once.

#include "step_bindings.hpp"

#include <stdexcept>

#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>


namespace octavo {
namespace {

namespace nb = nanobind;

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Group = std::tuple<uintptr_t, int64_t, int64_t, uintptr_t, uintptr_t>;

StepInputs make_inputs(const std::vector<uintptr_t>& batch, int64_t max_rows, int64_t max_model_len,
                       const std::vector<uintptr_t>& step, int64_t max_tokens, int64_t max_reqs,
                       const std::vector<Group>& groups) {
  if (batch.size() != 3 || step.size() != 6) throw std::invalid_argument("three arrays of the batch, six of the step");
  StepInputs made{at<int32_t>(batch[0]), at<int64_t>(batch[1]), at<int64_t>(batch[2]), max_rows, max_model_len,
                  at<int64_t>(step[0]),  at<int64_t>(step[1]),  at<int32_t>(step[2]),  at<int32_t>(step[3]),
                  at<int64_t>(step[4]),  at<int64_t>(step[5]),  max_tokens, max_reqs, {}};
  for (const auto& [batch_table, width, block_size, block_table, slot_mapping] : groups)
    made.groups.push_back({at<int32_t>(batch_table), width, block_size, at<int32_t>(block_table),
                           at<int64_t>(slot_mapping)});
  return made;
}

// Address and bytes of a row.
using Rows = std::tuple<uintptr_t, int64_t>;

RecordedRows rows_of(const Rows& given) { return {at<void>(std::get<0>(given)), std::get<1>(given)}; }

void make_fused(FusedStep* self, const StepInputs& inputs, const std::array<uintptr_t, 7>& columns,
                const Recording& forward, const Rows& hidden, const Recording& logits, const Rows& scores,
                int64_t vocabulary) {
  const auto& [temperature, min_p, top_p, top_k, seed, choice_index, num_prompt_tokens] = columns;
  new (self) FusedStep(inputs,
                       {at<double>(temperature), at<double>(min_p), at<double>(top_p), at<int64_t>(top_k),
                        at<int64_t>(seed), at<int64_t>(choice_index), at<int64_t>(num_prompt_tokens)},
                       forward, rows_of(hidden), logits, rows_of(scores), vocabulary);
}

}  // namespace

void bind_steps(nb::module_& m, void (*compute)(FusedStep&)) {
  nb::class_<StepInputs>(m, "StepInputs")
      .def("fill",
           [](const StepInputs& self, const std::vector<int64_t>& rows, const std::vector<int64_t>& num_scheduled) {
             if (rows.size() != num_scheduled.size()) throw std::invalid_argument("a row for each request");
             const Filled filled = fill(self, rows.data(), num_scheduled);
             return std::make_tuple(filled.num_tokens, filled.max_query_len, filled.max_seq_len, filled.num_sampling);
           })
      .def("append_tokens",
           [](const StepInputs& self, const std::vector<int64_t>& rows, const std::vector<int64_t>& token_ids) {
             if (rows.size() != token_ids.size()) throw std::invalid_argument("a token for each row");
             append_tokens(self, rows.data(), token_ids.data(), static_cast<int64_t>(rows.size()));
           })
      .def("gather", [](const StepInputs& self, uintptr_t data, int64_t row_bytes, int64_t count) {
        if (count < 0 || count > self.max_reqs) throw std::out_of_range("more rows than requests");
        gather_rows(at<void>(data), row_bytes, self.sampling_tokens, count);
      });
  m.def("step_inputs", &make_inputs);
  nb::class_<FusedStep>(m, "FusedStep")
      .def("__init__", &make_fused, nb::keep_alive<1, 4>(), nb::keep_alive<1, 6>())
      .def("run", [compute](FusedStep& self, const std::vector<int64_t>& rows, const std::vector<int64_t>& num_computed,
                            const std::vector<int64_t>& num_output, const std::vector<int64_t>& num_scheduled) {
        self.begin(rows, num_computed, num_output, num_scheduled);
        compute(self);
        return self.end();
      });
}

}  // namespace octavo
