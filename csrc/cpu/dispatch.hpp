// Which instruction sets this machine has, and the kernels of the chosen one.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace octavo {

// Levels that this machine can run, best first: "amx", "avx512", "avx512_bf16" (before "avx512" on
// AMD's processors), "avx2", "generic".
std::vector<std::string> available_levels();

// Levels that the processor has and that can't be used all the same, each with the reason.
std::vector<std::pair<std::string, std::string>> refused_levels();

// The kernels of a level; null: there is none of that name, or this machine can't run it.
const Kernels* kernels_of(const std::string& level);

}  // namespace octavo
