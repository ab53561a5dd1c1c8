// Types of GGUF that keep 32 values in a block.
#pragma once

#include <cstdint>

namespace octavo {

enum class Blocks : int { q8_0 = 0, q4_0 = 1, q4_1 = 2, q5_0 = 3, q5_1 = 4 };

// `count` blocks → 32 * count values. Blocks need not be aligned.
void dequantize(Blocks type, const void* blocks, int64_t count, float* values);

}  // namespace octavo
