// The table of one level.

#include "levels.hpp"

namespace octavo::OCTAVO_LEVEL {

extern const Kernels kernels;
const Kernels kernels = {linear,    linear_integer, embedding, norm,     cast,   activation,    rotary_kv,    store_kv,
                         attention, sample,         quantize,  stream,   multiply_bf16, multiply_f32, multiply_int8};

}  // namespace octavo::OCTAVO_LEVEL
