// The table of one level.

#include "levels.hpp"

namespace octavo::OCTAVO_LEVEL {

namespace {

#if defined(__AMX_BF16__)
constexpr auto kEncode = encode;
constexpr auto kQuantized = linear_quantized;
constexpr bool kHalves = true;
#else
constexpr auto kQuantized = linear_integer;
constexpr bool kHalves = false;
constexpr bool (*kEncode)(const Encode&) = nullptr;
#endif

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {linear,     kQuantized, embedding, norm,          cast,         reorder,
                         activation, rotary_kv,  store_kv,  attention,     sample,       quantize,
                         kEncode,    kHalves,    stream,    multiply_bf16, multiply_f32, multiply_int8};

}  // namespace octavo::OCTAVO_LEVEL
