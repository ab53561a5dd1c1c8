// Memory of a thread's own, for what a kernel needs while it works.
#pragma once

#include <cstdint>

namespace octavo {

// At least `bytes` bytes, aligned to 64, of any content. They are the calling thread's until its next call.
void* scratch(int64_t bytes);

}  // namespace octavo
