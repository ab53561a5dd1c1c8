// Products of up to 64 rows with coded weights.

#include "coded_lines.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "widened_amx.hpp"

namespace octavo::OCTAVO_LEVEL {

void linear_coded_amx(const Linear& call) { multiply<CodedLines>(call); }

}  // namespace octavo::OCTAVO_LEVEL
