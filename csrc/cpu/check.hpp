// Refuses calls that would lead out of their arrays, before a kernel runs: std::out_of_range for an index that is wrong,
// std::invalid_argument for a size (Python's IndexError and ValueError).
#pragma once

#include "kernels.hpp"
#include "sample.hpp"

namespace octavo {

void check(const Embedding& call);
void check(const Reorder& call);
void check(const RotaryKV& call);
void check(const StoreKV& call);
void check(const Attention& call);
void check(const Sample& call);

// Tensors' sizes say all about these.
inline void check(const Linear&) {}
inline void check(const Norm&) {}
inline void check(const Cast&) {}
inline void check(const Activation&) {}

}  // namespace octavo
