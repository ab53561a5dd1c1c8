#include "dispatch.hpp"

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
namespace avx512_bf16 {
extern const Kernels kernels;
}
#endif

namespace {

struct Level {
  const char* name;
  const Kernels* kernels;
  bool available;
};

std::vector<Level> levels() {
  std::vector<Level> found;
#if defined(OCTAVO_X86_LEVELS)
  // __builtin_cpu_supports also asks the operating system whether it saves the registers.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  found.push_back({"avx512_bf16", &avx512_bf16::kernels, avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")});
  found.push_back({"avx512", &avx512::kernels, avx512});
  found.push_back({"avx2", &avx2::kernels, avx2});
#endif
  found.push_back({"generic", &generic::kernels, true});
  return found;
}

}  // namespace

std::vector<std::string> available_levels() {
  std::vector<std::string> names;
  for (const Level& level : levels())
    if (level.available) names.emplace_back(level.name);
  return names;
}

const Kernels* kernels_of(const std::string& name) {
  for (const Level& level : levels())
    if (level.available && name == level.name) return level.kernels;
  return nullptr;
}

}  // namespace octavo
