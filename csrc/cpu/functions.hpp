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

#if defined(__AMX_BF16__)
// silu for a result that is rounded to bf16, by up to 4e-3: within 2e-4. e^-x = 2^(n + f), n whole and 0 <= f < 1, 2^f by a
// fit of degree 3 (8e-5), and an instruction that guesses the inverse (6e-5). Beyond 2^125 the divisor counts as that; a NaN
// stays.
OCTAVO_INLINE f32x16 silu_for_bf16(f32x16 x) {
  __m512 t = (__m512)(x * -1.44269504088896341f);
  t = _mm512_maskz_min_ps(kAll, _mm512_set1_ps(125.0f), _mm512_maskz_max_ps(kAll, _mm512_set1_ps(-125.0f), t));
  const __m512 f = _mm512_maskz_reduce_ps(kAll, t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(7.802452147e-2f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.260671556e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.958335638e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.999251962e-1f));
  const f32x16 divisor = 1.0f + (f32x16)_mm512_maskz_scalef_ps(kAll, p, t);
  return x * (f32x16)_mm512_maskz_rcp14_ps(kAll, (__m512)divisor);
}
#endif

}  // namespace octavo::OCTAVO_LEVEL
