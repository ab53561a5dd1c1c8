// Activation functions, sixteen lanes at a time.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

// x / divisor for divisors of at least 1; beyond 2^125 they count as that. Within 2 units in the last place: a guess (12 %)
// and three steps of Newton's method, for sixteen divisions hold a processor up for longer than all of this.
OCTAVO_INLINE f32x16 divided(f32x16 x, f32x16 divisor) {
  const f32x16 inverse = by_registers(
      [](auto part) {
        using Floats = decltype(part);
        using Bits = RegisterOf<uint32_t>::Type;
        const Floats most = 0x1p125f - Floats{};
        const Floats bounded = select(part > most, most, part);  // a NaN stays
        Floats found = (Floats)(0x7ef311c7u - (Bits)bounded);
        for (int step = 0; step < 3; ++step) found = found * (2.0f - bounded * found);
        return found;
      },
      divisor);
  return x * inverse;
}

template <Function F>
OCTAVO_INLINE f32x16 function(f32x16 x) {
  if constexpr (F == Function::silu) return divided(x, 1.0f + exp(-x));
  if constexpr (F == Function::gelu) return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
  // 0.79788456 is the square root of 2 / pi.
  return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

}  // namespace octavo::OCTAVO_LEVEL
