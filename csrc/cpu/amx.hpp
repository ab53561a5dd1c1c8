// Whether this process may use the tile registers of AMX.
#pragma once

#include <string>

namespace octavo {

// The processor has AMX (tiles, bf16 and int8).
bool processor_has_amx();

// The processor computes with half precision (AVX-512 FP16), as each one with AMX does.
bool processor_has_halves();

// Asks the operating system for the registers, once for this process and all its threads. Empty: they may be used. Else
// the processor has no AMX, or what keeps it from use.
const std::string& amx_refused();

}  // namespace octavo
