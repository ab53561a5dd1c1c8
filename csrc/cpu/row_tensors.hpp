// Which rows of which tensors a recorded call reads and writes: so that it can be made for a block of rows, and to tell
// whether several calls can be made for one block after the other.
#pragma once

#include <cstdint>

#include "replay.hpp"

namespace octavo {

// The call for `count` rows of the forward from `first` on. `kept`: its rows are those for each row of the forward.
Call rows_from(const Call& kept, int64_t first, int64_t count);

// Whether calls[0] to calls[before] may all be made for some rows before any of them is made for other rows: none looks at
// other rows, and what is one row's memory in one of them is not another's in the next. `rows`: of the forward, at most.
bool go_together(const Call* calls, size_t before, int64_t rows);

}  // namespace octavo
