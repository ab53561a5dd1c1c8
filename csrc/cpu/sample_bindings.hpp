// Python's entry to sampling.
#pragma once

#include <nanobind/nanobind.h>

#include "sample.hpp"

namespace octavo {

// `run` checks a call and runs it on the chosen level.
void bind_sample(nanobind::module_& m, void (*run)(const Sample&));

}  // namespace octavo
