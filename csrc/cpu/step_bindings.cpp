// Python's view of step_inputs.hpp: an object that holds the addresses of arrays, made once.

#include "step_bindings.hpp"

#include <stdexcept>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "step_inputs.hpp"

namespace octavo {
namespace {

namespace nb = nanobind;

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Group = std::tuple<uintptr_t, int64_t, int64_t, uintptr_t, uintptr_t>;

StepInputs make(const std::vector<uintptr_t>& batch, int64_t max_rows, int64_t max_model_len,
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

}  // namespace

void bind_step_inputs(nb::module_& m) {
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
  m.def("step_inputs", &make);
}

}  // namespace octavo
