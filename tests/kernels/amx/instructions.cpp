// One function for each AMX instruction, for tests: memory in, tiles, memory out. Compiled with -mamx-tile -mamx-bf16
// -mamx-int8, and run natively or under the emulator.

#include <cstdint>

#define ASM asm volatile
// The compiler is told that memory is read and written.
#define LOAD(tile, from, stride) \
  ASM("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"(static_cast<int64_t>(stride)) : "memory")
#define STORE(tile, to, stride) \
  ASM("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"(static_cast<int64_t>(stride)) : "memory")

#define PRODUCT(name)                                                                                       \
  void name(const uint8_t* config, const uint8_t* a, const uint8_t* b, uint8_t* c) {                        \
    ASM("ldtilecfg (%0)" : : "r"(config) : "memory");                                                       \
    LOAD(1, c, 64);                                                                                         \
    LOAD(2, a, 64);                                                                                         \
    LOAD(7, b, 64);                                                                                         \
    ASM(#name " %%tmm7, %%tmm2, %%tmm1" : : : "memory");                                                    \
    STORE(1, c, 64);                                                                                        \
    ASM("tilerelease" : : : "memory");                                                                      \
  }

extern "C" {

PRODUCT(tdpbf16ps)
PRODUCT(tdpbssd)
PRODUCT(tdpbsud)
PRODUCT(tdpbusd)
PRODUCT(tdpbuud)

// Loads tile 3 in each form of address, and stores what is in it one kilobyte after the other.
int address_forms(const uint8_t* config, const uint8_t* from, int64_t stride, uint8_t* out) {
  const int64_t row = 64;
  int forms = 0;
#define FORM(instruction, base, index, start, step)                                                          \
  ASM("tilezero %%tmm3\n\tmov %0, %%" base "\n\tmov %1, %%" index "\n\t" instruction                         \
      : : "r"(from - (start)), "r"(static_cast<int64_t>(step)) : "memory", base, index);                     \
  STORE(3, out + 1024 * forms++, row)
  ASM("ldtilecfg (%0)" : : "r"(config) : "memory");
  FORM("tileloadd (%%rax,%%rcx,1), %%tmm3", "rax", "rcx", 0, stride);
  FORM("tileloaddt1 (%%rax,%%rcx,1), %%tmm3", "rax", "rcx", 0, stride);
  FORM("tileloadd (%%rsi,%%rdi,2), %%tmm3", "rsi", "rdi", 0, stride / 2);
  FORM("tileloadd (%%r12,%%r15,4), %%tmm3", "r12", "r15", 0, stride / 4);
  FORM("tileloadd (%%r13,%%r12,8), %%tmm3", "r13", "r12", 0, stride / 8);
  FORM("tileloadd 0x40(%%r13,%%r14,1), %%tmm3", "r13", "r14", 0x40, stride);
  FORM("tileloadd -0x40(%%rdx,%%r9,1), %%tmm3", "rdx", "r9", -0x40, stride);
  FORM("tileloadd 0x12345(%%r8,%%rdx,1), %%tmm3", "r8", "rdx", 0x12345, stride);
  FORM("tileloadd -0x12345(%%r11,%%r10,1), %%tmm3", "r11", "r10", -0x12345, stride);
  FORM("tileloadd 8(%%r10), %%tmm3", "r10", "r11", 8, 0);  // without an index the stride is zero
#undef FORM
  // Stored with another stride, a displacement and high registers.
  ASM("mov %0, %%r14\n\tmov %1, %%r13\n\ttilestored %%tmm3, 0x400(%%r14,%%r13,1)"
      : : "r"(out + 1024 * forms++ - 0x400), "r"(row) : "memory", "r13", "r14");
  ASM("tilerelease" : : : "memory");
  return forms;
}

// The configuration as it is read back, before and after it is released; through an address relative to RIP too.
void configure(const uint8_t* config, uint8_t* out) {
  static uint8_t place[64];
  ASM("ldtilecfg 0x40(%0)" : : "r"(config - 0x40) : "memory");
  ASM("sttilecfg (%0)" : : "r"(out) : "memory");
  ASM("sttilecfg %0" : "=m"(place) : : "memory");
  for (int i = 0; i < 64; ++i) out[64 + i] = place[i];
  ASM("tilerelease" : : : "memory");
  ASM("sttilecfg (%0)" : : "r"(out + 128) : "memory");
}

// A tile that was loaded and then cleared.
void zero(const uint8_t* config, const uint8_t* from, uint8_t* out) {
  ASM("ldtilecfg (%0)" : : "r"(config) : "memory");
  LOAD(5, from, 64);
  ASM("tilezero %%tmm5" : : : "memory");
  STORE(5, out, 64);
  ASM("tilerelease" : : : "memory");
}

// What the SDM forbids: each is to end the process. (The assembler refuses this one: tmm1 += tmm2 * tmm2.)
void product_of_a_tile_with_itself(const uint8_t* config) {
  ASM("ldtilecfg (%0)\n\t.byte 0xc4, 0xe2, 0x6a, 0x5c, 0xca" : : "r"(config) : "memory");
}

void product_without_a_configuration(const uint8_t*) { ASM("tdpbf16ps %%tmm7, %%tmm2, %%tmm1" : : : "memory"); }

void product(const uint8_t* config) {
  ASM("ldtilecfg (%0)\n\ttdpbf16ps %%tmm7, %%tmm2, %%tmm1\n\ttilerelease" : : "r"(config) : "memory");
}

// No AMX at all: the emulator leaves it to whoever handled it before.
void undefined_instruction(const uint8_t*) { ASM("ud2"); }
}
