// Addresses from octavo/sample/native.py, which has checked types and sizes; check.cpp looks at what is in them.

#include "sample_bindings.hpp"

#include <nanobind/stl/array.h>

namespace octavo {
namespace {

using Address = uintptr_t;
template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// In the order of the structs' members.
Changes changes_from(int64_t count, const std::array<Address, 13>& members) {
  const auto& [rows, ready, copies, penalty_start, penalty_ids, penalty_counts, penalties, bias_start, bias_ids, bias,
               forbidden, banned_start, banned_ids] = members;
  return {count,
          at<int64_t>(rows),
          at<bool>(ready),
          at<float>(copies),
          at<int64_t>(penalty_start),
          at<int64_t>(penalty_ids),
          at<int64_t>(penalty_counts),
          at<double>(penalties),
          at<int64_t>(bias_start),
          at<int64_t>(bias_ids),
          at<double>(bias),
          at<uint64_t>(forbidden),
          at<int64_t>(banned_start),
          at<int64_t>(banned_ids)};
}

Logprobs logprobs_from(const std::array<Address, 5>& members) {
  const auto& [start, named, ids, logprobs, ranks] = members;
  return {at<int64_t>(start), at<bool>(named), at<int64_t>(ids), at<float>(logprobs), at<int64_t>(ranks)};
}

}  // namespace

void bind_sample(nanobind::module_& m, void (*run)(const Sample&)) {
  m.def("sample", [run](Address logits, int64_t stride, int64_t rows, int64_t vocabulary,
                        const std::array<Address, 7>& parameters, int64_t num_changes,
                        const std::array<Address, 13>& changes, const std::array<Address, 5>& logprobs, Address tokens,
                        Address status) {
    const auto& [temperature, min_p, top_p, top_k, seed, choice_index, position] = parameters;
    run({at<float>(logits), stride, rows, vocabulary, false, at<double>(temperature), at<double>(min_p),
         at<double>(top_p), at<int64_t>(top_k), at<int64_t>(seed), at<int64_t>(choice_index), at<int64_t>(position),
         changes_from(num_changes, changes), logprobs_from(logprobs), at<int64_t>(tokens), at<Status>(status)});
  });
  m.def("score", [run](Address logits, int64_t stride, int64_t rows, int64_t vocabulary,
                       const std::array<Address, 5>& logprobs, Address tokens, Address status) {
    run({at<float>(logits), stride, rows, vocabulary, true, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
         nullptr, {}, logprobs_from(logprobs), at<int64_t>(tokens), at<Status>(status)});
  });
}

}  // namespace octavo
