#pragma once

#include <nanobind/nanobind.h>

#include "fused_step.hpp"

namespace octavo {

// `compute` runs a step that has begun on the chosen level.
void bind_steps(nanobind::module_& m, void (*compute)(FusedStep&));

}  // namespace octavo
