// AMX on machines without it, for tests: a handler of SIGILL that does what the tile instruction at hand would have done.
//
// The definitions are those of the Intel SDM, volume 2: LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD(T1),
// TILESTORED, TDPBF16PS, TDPB[SU][SU]D. Where the SDM has #UD or #GP the process ends with a line that says why. Tile state
// is the thread's own. On a machine with AMX nothing faults, and this library is not loaded.
//
// The native library asks octavo_amx_emulator() whether the level `amx` may be chosen; that is in no other library.

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <immintrin.h>
#include <ucontext.h>

namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;  // palette 1

struct Shape {
  uint16_t colsb;
  uint8_t rows;
};

struct State {
  bool configured;
  uint8_t start_row;
  Shape shape[kTiles];
  alignas(64) uint8_t data[kTiles][kRows][kRowBytes];
};

thread_local State state;

enum Instruction { kLoadConfig, kStoreConfig, kRelease, kZero, kLoad, kStore, kMultiply, kInstructions };
std::atomic<int64_t> executed[kInstructions];
std::atomic<int> configured_threads{0};
std::atomic<int> offered{0};
struct sigaction previous;

[[noreturn]] void fault(const char* kind, const char* why) {
  std::fprintf(stderr, "amx emulator: %s: %s\n", kind, why);
  std::abort();
}

void require(bool condition, const char* why) {
  if (!condition) fault("#UD", why);
}

struct Decoded {
  uint8_t prefix;  // 0: none, 1: 66, 2: F3, 3: F2
  uint8_t opcode;
  uint8_t mod, reg, rm, vvvv;
  uint8_t* address;  // of the memory operand
  int64_t stride;    // index << scale
  bool sib;
  int length;
};

int64_t general_register(const ucontext_t& context, int number) {
  static constexpr int kOrder[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                     REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context.uc_mcontext.gregs[kOrder[number]];
}

int32_t displacement(const uint8_t* at, int bytes) {
  if (bytes == 1) return static_cast<int8_t>(*at);
  int32_t found = 0;
  if (bytes == 4) std::memcpy(&found, at, 4);
  return found;
}

// VEX of three bytes (C4, map 0F38, L = 0, W = 0), opcode, ModRM, and where mod is not 3: SIB, displacement.
bool decode(const uint8_t* code, const ucontext_t& context, Decoded* out) {
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) return false;
  const int extend_x = (~code[1] >> 6 & 1) * 8, extend_b = (~code[1] >> 5 & 1) * 8;
  out->prefix = code[2] & 3;
  out->vvvv = ~(code[2] >> 3) & 15;
  out->opcode = code[3];
  out->mod = code[4] >> 6;
  out->reg = (code[4] >> 3 & 7) + (~code[1] >> 7 & 1) * 8;
  const int low = code[4] & 7;
  out->rm = low + extend_b;
  out->sib = out->mod != 3 && low == 4;
  out->address = nullptr;
  out->stride = 0;
  int at = 5;
  if (out->mod != 3) {
    int64_t base = 0, offset = 0;
    int bytes = out->mod == 1 ? 1 : out->mod == 2 ? 4 : 0;
    bool relative = false;
    if (out->sib) {
      const uint8_t sib = code[at++];
      const int index = (sib >> 3 & 7) + extend_x;
      if (index != 4) out->stride = general_register(context, index) << (sib >> 6);
      if ((sib & 7) == 5 && out->mod == 0) bytes = 4;  // no base
      else base = general_register(context, (sib & 7) + extend_b);
    } else if (low == 5 && out->mod == 0) {
      bytes = 4;
      relative = true;
    } else {
      base = general_register(context, out->rm);
    }
    offset = displacement(code + at, bytes);
    at += bytes;
    if (relative) base = reinterpret_cast<int64_t>(code + at);
    out->address = reinterpret_cast<uint8_t*>(base + offset);
  }
  out->length = at;
  return true;
}

const Shape& shape_of(int tile) {
  require(state.configured, "no tiles are configured");
  require(tile < kTiles, "there are eight tiles");
  require(state.shape[tile].rows != 0 && state.shape[tile].colsb != 0, "a tile that is not configured");
  require(state.shape[tile].colsb % 4 == 0, "a tile's rows are not whole words");
  return state.shape[tile];
}

void release() {
  if (state.configured) --configured_threads;
  std::memset(&state, 0, sizeof state);
}

// Bytes 0: palette; 1: start row; 16 to 31: bytes of a row, for each tile 2; 48 to 55: rows; the rest 0.
void load_config(const uint8_t* from) {
  if (from[0] == 0) return release();
  if (from[0] != 1) fault("#GP", "no such palette");
  Shape shape[kTiles];
  for (int byte = 2; byte < 64; ++byte)
    if ((byte < 16 || (byte >= 32 && byte < 48) || byte >= 56) && from[byte] != 0)
      fault("#GP", "reserved bytes of the configuration are not zero");
  for (int tile = 0; tile < kTiles; ++tile) {
    std::memcpy(&shape[tile].colsb, from + 16 + 2 * tile, 2);
    shape[tile].rows = from[48 + tile];
    if (shape[tile].colsb > kRowBytes || shape[tile].rows > kRows) fault("#GP", "a tile is larger than the palette has");
    if ((shape[tile].colsb == 0) != (shape[tile].rows == 0)) fault("#GP", "a tile has rows or columns alone");
  }
  release();
  ++configured_threads;
  state.configured = true;
  state.start_row = from[1];
  std::memcpy(state.shape, shape, sizeof shape);
}

void store_config(uint8_t* to) {
  std::memset(to, 0, 64);
  if (!state.configured) return;
  to[0] = 1;
  to[1] = state.start_row;
  for (int tile = 0; tile < kTiles; ++tile) {
    std::memcpy(to + 16 + 2 * tile, &state.shape[tile].colsb, 2);
    to[48 + tile] = state.shape[tile].rows;
  }
}

void load(int tile, const uint8_t* from, int64_t stride) {
  const Shape& shape = shape_of(tile);
  require(state.start_row < shape.rows, "the start row is beyond the tile");
  const int first = state.start_row;
  std::memset(state.data[tile][first], 0, static_cast<size_t>(kRows - first) * kRowBytes);
  for (int row = first; row < shape.rows; ++row) std::memcpy(state.data[tile][row], from + row * stride, shape.colsb);
  state.start_row = 0;
}

void store(int tile, uint8_t* to, int64_t stride) {
  const Shape& shape = shape_of(tile);
  require(state.start_row < shape.rows, "the start row is beyond the tile");
  for (int row = state.start_row; row < shape.rows; ++row)
    std::memcpy(to + row * stride, state.data[tile][row], shape.colsb);
  state.start_row = 0;
}

void check_product(int to, int left, int right) {
  require(to != left && to != right && left != right, "a product of a tile with itself");
  const Shape &c = shape_of(to), &a = shape_of(left), &b = shape_of(right);
  require(c.rows == a.rows, "the sums have not as many rows as the left factor");
  require(c.colsb == b.colsb, "the sums have not as many columns as the right factor");
  require(a.colsb / 4 == b.rows, "the left factor's columns are not the right factor's rows");
}

float word(const uint8_t* row, int index) {
  float found;
  std::memcpy(&found, row + 4 * index, 4);
  return found;
}

float widen(const uint8_t* row, int index) {
  uint16_t half;
  std::memcpy(&half, row + 2 * index, 2);
  const uint32_t bits = uint32_t{half} << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

// TDPBF16PS: from zero, one chain of fused multiply-adds for the even elements of the pairs and one for the odd ones, in
// ascending k; then their sum; then the sum of that and what was there. Rounded to nearest even each time, denormals
// (in and out) are zero.
__attribute__((noinline)) void multiply_bf16(int to, int left, int right) {
  const int columns = state.shape[to].colsb / 4, pairs = state.shape[right].rows;
  float b[2][kRows][16];
  for (int k = 0; k < pairs; ++k)
    for (int n = 0; n < 16; ++n)
      for (int odd = 0; odd < 2; ++odd) b[odd][k][n] = widen(state.data[right][k], 2 * n + odd);
  for (int m = 0; m < state.shape[to].rows; ++m) {
    float chain[2][16] = {};
    for (int k = 0; k < pairs; ++k)
      for (int odd = 0; odd < 2; ++odd) {
        const float a = widen(state.data[left][m], 2 * k + odd);
        for (int n = 0; n < 16; ++n) chain[odd][n] = __builtin_fmaf(a, b[odd][k][n], chain[odd][n]);
      }
    float row[16] = {};
    for (int n = 0; n < columns; ++n) row[n] = word(state.data[to][m], n) + (chain[0][n] + chain[1][n]);
    std::memcpy(state.data[to][m], row, sizeof row);
  }
}

// TDPB[SU][SU]D: four products of bytes are added to a word, which wraps.
void multiply_int8(int to, int left, int right, bool left_signed, bool right_signed) {
  const int columns = state.shape[to].colsb / 4, quads = state.shape[right].rows;
  for (int m = 0; m < state.shape[to].rows; ++m) {
    uint32_t row[16] = {};
    std::memcpy(row, state.data[to][m], static_cast<size_t>(columns) * 4);
    for (int k = 0; k < quads; ++k)
      for (int n = 0; n < columns; ++n)
        for (int byte = 0; byte < 4; ++byte) {
          const uint8_t a = state.data[left][m][4 * k + byte], b = state.data[right][k][4 * n + byte];
          const int32_t x = left_signed ? static_cast<int8_t>(a) : a, y = right_signed ? static_cast<int8_t>(b) : b;
          row[n] += static_cast<uint32_t>(x * y);
        }
    std::memcpy(state.data[to][m], row, sizeof row);
  }
}

void multiply(const Decoded& op) {
  check_product(op.reg, op.rm, op.vvvv);
  require(state.start_row == 0, "a product in a tile that is partly loaded");
  if (op.opcode == 0x5c) {
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(0x9fc0);  // to nearest even, denormals flushed, nothing raised
    multiply_bf16(op.reg, op.rm, op.vvvv);
    _mm_setcsr(saved);
    return;
  }
  multiply_int8(op.reg, op.rm, op.vvvv, op.prefix >= 2, op.prefix == 3 || op.prefix == 1);
}

// True: it was a tile instruction, and it is done.
bool emulate(const Decoded& op) {
  const bool memory = op.mod != 3;
  Instruction done;
  if (op.opcode == 0x49 && memory && op.reg == 0 && op.prefix == 0) {
    load_config(op.address);
    done = kLoadConfig;
  } else if (op.opcode == 0x49 && memory && op.reg == 0 && op.prefix == 1) {
    store_config(op.address);
    done = kStoreConfig;
  } else if (op.opcode == 0x49 && !memory && op.prefix == 0 && op.reg == 0 && op.rm == 0) {
    release();
    done = kRelease;
  } else if (op.opcode == 0x49 && !memory && op.prefix == 3 && op.rm == 0) {
    shape_of(op.reg);
    std::memset(state.data[op.reg], 0, sizeof state.data[op.reg]);
    state.start_row = 0;
    done = kZero;
  } else if (op.opcode == 0x4b && memory && op.prefix != 0) {
    require(op.sib, "a tile's memory operand without SIB");
    if (op.prefix == 2) store(op.reg, op.address, op.stride);
    else load(op.reg, op.address, op.stride);
    done = op.prefix == 2 ? kStore : kLoad;
  } else if (!memory && ((op.opcode == 0x5c && op.prefix == 2) || op.opcode == 0x5e)) {
    multiply(op);
    done = kMultiply;
  } else {
    return false;
  }
  if (op.opcode < 0x5c) require(op.vvvv == 0, "VEX.vvvv is used");
  executed[done].fetch_add(1, std::memory_order_relaxed);
  return true;
}

void on_illegal_instruction(int, siginfo_t*, void* raw) {
  ucontext_t& context = *static_cast<ucontext_t*>(raw);
  const uint8_t* code = reinterpret_cast<const uint8_t*>(context.uc_mcontext.gregs[REG_RIP]);
  Decoded op;
  if (decode(code, context, &op) && emulate(op)) {
    context.uc_mcontext.gregs[REG_RIP] += op.length;
    return;
  }
  sigaction(SIGILL, &previous, nullptr);  // it is somebody else's: it will fault again
}

}  // namespace

extern "C" {

// 1: this process runs AMX instructions, and the level may be chosen.
int octavo_amx_emulator() { return offered.load(); }

// From now on AMX instructions are emulated, until somebody else handles SIGILL (as Python's faulthandler does).
// `offer`: whether octavo_amx_emulator says so. Not zero: it failed.
int octavo_amx_emulate(int offer) {
  struct sigaction action;
  offered = 0;
  if (sigaction(SIGILL, nullptr, &action) != 0) return -1;
  if (action.sa_sigaction != on_illegal_instruction) {
    previous = action;
    std::memset(&action, 0, sizeof action);
    action.sa_sigaction = on_illegal_instruction;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    if (sigaction(SIGILL, &action, nullptr) != 0) return -1;
  }
  offered = offer;
  return 0;
}

// How often this process has executed an instruction: 0 LDTILECFG, 1 STTILECFG, 2 TILERELEASE, 3 TILEZERO, 4 TILELOADD(T1),
// 5 TILESTORED, 6 TDP….
int64_t octavo_amx_executed(int instruction) { return executed[instruction].load(); }

// Threads whose tiles are configured now.
int octavo_amx_configured_threads() { return configured_threads.load(); }
}
