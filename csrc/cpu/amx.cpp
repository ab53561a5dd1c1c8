#include "amx.hpp"

#include <cerrno>
#include <cstdint>
#include <cstring>

#if defined(OCTAVO_X86_LEVELS)
#include <cpuid.h>
#include <dlfcn.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {

#if defined(OCTAVO_X86_LEVELS)

namespace {

// Tests run the level on machines without AMX, under a handler that does what each of its instructions would
// (tests/kernels/amx). Nothing but a library that handles them defines this function, and octavo installs none: nobody
// can be led to an illegal instruction by a variable or an argument.
bool emulated() {
  using Ask = int (*)();
  const auto ask = reinterpret_cast<Ask>(dlsym(RTLD_DEFAULT, "octavo_amx_emulator"));
  return ask != nullptr && ask() != 0;
}

bool has_vbmi() {
  return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
}

std::string ask_system() {
  if (!processor_has_amx()) return "the processor has no AMX";
  if (!has_vbmi()) return "AVX-512 VBMI and VBMI2, which each processor with AMX has, are hidden from this machine";
  uint32_t saved, high;
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  constexpr uint32_t kTileConfig = 1u << 17, kTileData = 1u << 18;
  if ((saved & kTileConfig) == 0 || (saved & kTileData) == 0)
    return "the operating system does not save AMX registers (Linux 5.16 and later do)";
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileDataFeature = 18;  // ARCH_REQ_XCOMP_PERM
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileDataFeature) != 0)
    return std::string("the operating system refused AMX registers to this process: ") + std::strerror(errno);
#endif
  return "";
}

}  // namespace

bool processor_has_amx() {
  uint32_t a, b, c, d;
  constexpr uint32_t kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kBf16) != 0 && (d & kTile) != 0 && (d & kInt8) != 0;
}

bool processor_has_halves() { return __builtin_cpu_supports("avx512fp16"); }

const std::string& amx_refused() {
  static const std::string none;
  if (emulated()) return none;
  static const std::string found = ask_system();
  return found;
}

#else

bool processor_has_amx() { return false; }

const std::string& amx_refused() {
  static const std::string found = "the processor has no AMX";
  return found;
}

#endif

}  // namespace octavo
