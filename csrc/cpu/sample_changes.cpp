// Penalties, bias and bans of one row. Not compiled by level: each value is changed in double, rounded after every
// operation as the definition in octavo/sample/logits_changes.py does, so no two of them may be fused.

#include <cstring>
#include <limits>

#include "sample.hpp"

namespace octavo {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void penalize(const Changes& changes, int64_t change, float* row) {
  const double* penalties = changes.penalties + 3 * change;
  for (int64_t i = changes.penalty_start[change]; i < changes.penalty_start[change + 1]; ++i) {
    const double count = static_cast<double>(changes.penalty_counts[i]);
    double value = row[changes.penalty_ids[i]];
    value = value > 0.0 ? value / penalties[0] : value * penalties[0];
    value -= penalties[1] * count;
    value -= count > 0.0 ? penalties[2] : 0.0;
    row[changes.penalty_ids[i]] = static_cast<float>(value);
  }
}

}  // namespace

void change_row(const Sample& call, int64_t change) {
  const Changes& changes = call.changes;
  const float* raw = call.logits + changes.rows[change] * call.stride;
  float* row = changes.copies + change * call.vocabulary;
  std::memcpy(row, raw, static_cast<size_t>(call.vocabulary) * sizeof(float));
  penalize(changes, change, row);
  for (int64_t i = changes.bias_start[change]; i < changes.bias_start[change + 1]; ++i)
    row[changes.bias_ids[i]] = static_cast<float>(row[changes.bias_ids[i]] + changes.bias[i]);
  if (const bool* forbidden = reinterpret_cast<const bool*>(changes.forbidden[change]))
    for (int64_t id = 0; id < call.vocabulary; ++id) row[id] = forbidden[id] ? kNever : row[id];
  for (int64_t i = changes.banned_start[change]; i < changes.banned_start[change + 1]; ++i)
    row[changes.banned_ids[i]] = kNever;
}

}  // namespace octavo
