// Activation functions, sixteen lanes at a time.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

template <Function F>
OCTAVO_INLINE f32x16 function(f32x16 x) {
  if constexpr (F == Function::silu) return x / (1.0f + exp(-x));
  if constexpr (F == Function::gelu) return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
  // 0.79788456 is the square root of 2 / pi.
  return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

}  // namespace octavo::OCTAVO_LEVEL
