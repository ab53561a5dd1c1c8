#pragma once

#include <nanobind/nanobind.h>

namespace octavo {

void bind_step_inputs(nanobind::module_& m);

}  // namespace octavo
