#include "dispatch.hpp"

#include <algorithm>
#include <utility>

#include "amx.hpp"

namespace octavo {

namespace generic {
extern const Kernels kernels;
}
#if defined(OCTAVO_X86_LEVELS)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512_vnni {
void linear_integer(const Linear& call);
int64_t multiply_int8();
}
namespace avx512_bf16 {
extern const Kernels kernels;
}
#endif
#if defined(OCTAVO_AMX_LEVEL)
namespace amx {
extern const Kernels kernels;
}
#endif

namespace {

struct Level {
  const char* name;
  const Kernels& (*kernels)();
  bool (*available)();
};

#if defined(OCTAVO_X86_LEVELS)
// __builtin_cpu_supports also asks the operating system whether it saves the registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
// The kernels of avx512, with dot products of bytes.
const Kernels& avx512_vnni_kernels() {
  static const Kernels kernels = [] {
    Kernels found = avx512::kernels;
    found.linear_quantized = avx512_vnni::linear_integer;
    found.multiply_int8 = avx512_vnni::multiply_int8;
    return found;
  }();
  return kernels;
}
#endif

// A dot product of bfloat16 pairs takes Intel's processors as long as four float32 FMAs, and those are exact: 175 GFLOP/s
// against 300 on two cores of a Sapphire Rapids. AMD's (from Zen 4 on) take as long as for one FMA.
bool fast_dot_products() {
#if defined(OCTAVO_X86_LEVELS)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

template <const Kernels& table>
const Kernels& of() {
  return table;
}

constexpr Level kLevels[] = {
#if defined(OCTAVO_AMX_LEVEL)
    {"amx", of<amx::kernels>, [] { return has_avx512_bf16() && amx_refused().empty(); }},
#endif
#if defined(OCTAVO_X86_LEVELS)
    {"avx512_bf16", of<avx512_bf16::kernels>, has_avx512_bf16},
    {"avx512_vnni", avx512_vnni_kernels, has_avx512_vnni},
    {"avx512", of<avx512::kernels>, has_avx512},
    {"avx2", of<avx2::kernels>, has_avx2},
#endif
    {"generic", of<generic::kernels>, [] { return true; }},
};

}  // namespace

std::vector<std::string> available_levels() {
  std::vector<std::string> names;
  for (const Level& level : kLevels)
    if (level.available()) names.emplace_back(level.name);
  if (!fast_dot_products()) {
    const auto dots = std::find(names.begin(), names.end(), "avx512_bf16");
    if (dots != names.end()) std::swap(dots[0], dots[1]);  // avx512_vnni comes next
  }
  return names;
}

std::vector<std::pair<std::string, std::string>> refused_levels() {
  if (!processor_has_amx()) return {};
#if defined(OCTAVO_AMX_LEVEL)
  if (amx_refused().empty()) return {};
  return {{"amx", amx_refused()}};
#else
  return {{"amx", "octavo was built by a compiler that does not know AMX (gcc 12 or clang 14 and later do)"}};
#endif
}

const Kernels* kernels_of(const std::string& name) {
  for (const Level& level : kLevels)
    if (name == level.name && level.available()) return &level.kernels();
  return nullptr;
}

}  // namespace octavo
