// out = x · weightᵀ and what follows it (epilogue.hpp) for quantized weights (drawn in formats.hpp) and any number of rows.
//
// Each row of x is quantized in groups of 32 inputs: scale = largest |x| / 127, inputs = x / scale rounded to int8, ties to
// even. Products within a group are summed exactly, in int32, and a group adds to the output's float32 sum
//
//   (weight scale * x scale) * integer sum        and what the format has of offsets (integer_formats.hpp),
//
// groups in ascending order, whatever the rows around it: a row has the same bits alone and among a thousand. Threads
// share out panels: pairs of blocks of 16 outputs. A group that holds an infinity or NaN makes the row's outputs NaN.
//
// A thread's own copy of the rows, for each: int8 inputs │ scales of groups │ what the format needs beside them

#include <algorithm>
#include <atomic>

#include "integer_rows.hpp"
#include "kernels.hpp"
#include "levels.hpp"
#include "scratch.hpp"
#include "simd.hpp"
#include "thread_pool.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// Rows of a tile, and blocks: integer sums and float sums of each in registers.
#if defined(__AVX512F__)
constexpr int kRows = 6, kBlocks = 2;
#elif defined(__AVX2__)
constexpr int kRows = 4, kBlocks = 1;
#else
constexpr int kRows = 1, kBlocks = 1;
#endif
constexpr int64_t kInputsInCache = 1 << 20;  // bytes of inputs that stay in the second-level cache
constexpr int64_t kManyRows = 64;
// Bytes that the first-level cache is filled ahead: a single row takes what memory gives, more rows take longer.
constexpr int64_t ahead(int rows) { return rows == 1 ? 4096 : 1536; }
constexpr int64_t kFarAhead = 1 << 14;  // and the second-level one: a core waits for few lines at once in the first

// Quantized rows, `stride` bytes and `groups` groups apart.
struct Inputs {
  int8_t* numbers;
  float* scales;
  float* beside;  // int32 where the format's Beside::start says so; Halves for each group
  int64_t stride, groups;
};

int32_t word(const int8_t* at) {
  int32_t found;
  std::memcpy(&found, at, sizeof found);
  return found;
}

// Sums of Rows rows and Blocks blocks of 16 outputs, `block_bytes` apart.
template <typename F, int Rows, int Blocks>
__attribute__((noinline)) void add_up(const Inputs& x, int64_t row, const uint8_t* weight, const Layout& given,
                                      int64_t block_bytes, float* sums) {
  const Layout layout = F::layout(given);
  constexpr int kChains = Rows * Blocks <= 2 ? 2 : 1;  // of integer sums: one after the other they would wait
  constexpr int kPairs = kLines / 2 / F::kHalves;
  const int8_t* numbers = x.numbers + row * x.stride;
  const float* scales = x.scales + row * x.groups;
  const float* beside = x.beside + row * x.groups * F::kHalves;
  const int64_t spans = x.groups / layout.span, group_bytes = layout.group_bytes();
  f32x16 sum[Rows][Blocks];
  for (int r = 0; r < Rows; ++r)
    for (int b = 0; b < Blocks; ++b) sum[r][b] = f32x16{};
  int64_t group = 0;
  for (int64_t span = 0; span < spans; ++span) {
    const uint8_t* at = weight + span * layout.span_bytes();
    const auto heads = [&](int b) { return typename F::Head(at + b * block_bytes); };
    const typename F::Head head[2] = {heads(0), heads(Blocks - 1)};
    at += layout.span_header;
    for (int64_t g = 0; g < layout.span; ++g, ++group, at += group_bytes, numbers += kGroup) {
      const auto lines_of = [&](int b) { return typename F::Lines(at + b * block_bytes + layout.group_header); };
      const typename F::Lines lines[2] = {lines_of(0), lines_of(Blocks - 1)};
      for (int b = 0; b < Blocks; ++b)
        for (int64_t line = 0; line < group_bytes; line += kLineBytes) {
          __builtin_prefetch(at + b * block_bytes + ahead(Rows) + line);
          __builtin_prefetch(at + b * block_bytes + kFarAhead + line, 0, 2);
        }
      f32x16 totals[Rows][Blocks][F::kHalves];
#pragma GCC unroll 2
      for (int half = 0; half < F::kHalves; ++half) {
        i32x16 total[Rows][Blocks][kChains];
        for (int r = 0; r < Rows; ++r) {
          int32_t start = 0;
          if constexpr (F::kBeside == Beside::start)
            std::memcpy(&start, beside + (r * x.groups + group) * F::kHalves + half, sizeof start);
          for (int b = 0; b < Blocks; ++b) {
            total[r][b][0] = splat_words(start);
            if constexpr (kChains == 2) total[r][b][1] = i32x16{};
          }
        }
#pragma GCC unroll 4
        for (int pair = half * kPairs; pair < (half + 1) * kPairs; ++pair) {
          u32x16 even[Blocks], odd[Blocks];
          for (int b = 0; b < Blocks; ++b) lines[b].open(pair, even[b], odd[b]);
          for (int r = 0; r < Rows; ++r) {
            const int8_t* own = numbers + r * x.stride + pair * 8;
            const int32_t first = word(own), second = word(own + 4);
            for (int b = 0; b < Blocks; ++b) {
              total[r][b][0] = dot<F::Lines::kBits>(total[r][b][0], even[b], first);
              total[r][b][kChains - 1] = dot<F::Lines::kBits>(total[r][b][kChains - 1], odd[b], second);
            }
          }
        }
        for (int r = 0; r < Rows; ++r)
          for (int b = 0; b < Blocks; ++b) {
            i32x16 whole = total[r][b][0];
            if constexpr (kChains == 2) whole = whole + total[r][b][1];
            totals[r][b][half] = __builtin_convertvector(whole, f32x16);
          }
      }
      const auto scales_of = [&](int b) { return typename F::Scales(head[b], at + b * block_bytes); };
      const typename F::Scales weights[2] = {scales_of(0), scales_of(Blocks - 1)};
      for (int r = 0; r < Rows; ++r) {
        const int64_t index = r * x.groups + group;
        for (int b = 0; b < Blocks; ++b)
          sum[r][b] = F::add(sum[r][b], totals[r][b], weights[b], scales[index], beside[index * F::kHalves]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int b = 0; b < Blocks; ++b) store(sums + r * kSumsStride + b * kLanes, sum[r][b]);
}

// The sums of `rows` rows, at most kRows, and one panel.
template <typename F, int Rows = kRows>
OCTAVO_INLINE void add_up_rows(int64_t rows, const Inputs& x, int64_t row, const uint8_t* weight, const Layout& layout,
                               int64_t block_bytes, float* sums) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return add_up_rows<F, Rows - 1>(rows, x, row, weight, layout, block_bytes, sums);
    add_up<F, Rows, kBlocks>(x, row, weight, layout, block_bytes, sums);
  } else {
    add_up<F, 1, 1>(x, row, weight, layout, block_bytes, sums);
  }
}

template <typename F>
class IntegerProduct {
 public:
  explicit IntegerProduct(const Linear& call)
      : call_(call),
        layout_(layout_of(call.format, call.span)),
        blocks_(blocks_of(call)),
        panels_((blocks_ + kPanel - 1) / kPanel),
        block_bytes_(layout_.block_bytes(call.in_size)),
        groups_(layout_.spans(call.in_size) * layout_.span),
        // An odd number of cache lines, so that rows do not fall into the same sets of a cache.
        stride_(((groups_ * kGroup + kLineBytes - 1) / kLineBytes | 1) * kLineBytes) {
    row_bytes_ = stride_ + groups_ * static_cast<int64_t>(sizeof(float)) * (1 + F::kHalves);
    const int64_t in_cache = std::max<int64_t>(kRows, kInputsInCache / row_bytes_);
    row_blocks_ = (call.rows + in_cache - 1) / in_cache;
    // Few rows: each thread streams one range of the weights. Many: smaller ranges, so that no thread waits long.
    const int64_t threads = pool().size();
    ranges_ = std::min(panels_, call.rows < kManyRows ? threads : 8 * threads);
  }

  void run() const {
    std::atomic<int64_t> next{0};
    pool().run(std::min<int64_t>(pool().size(), ranges_ * row_blocks_), [&](int64_t) { work_off(next); });
  }

 private:
  int64_t row_of(int64_t row_block) const { return call_.rows * row_block / row_blocks_; }

  // Ranges of panels of the first rows, then of the next.
  void work_off(std::atomic<int64_t>& next) const {
    Inputs x{};
    int64_t at_hand = -1;
    for (int64_t task = next++; task < ranges_ * row_blocks_; task = next++) {
      const int64_t row_block = task / ranges_, range = task % ranges_;
      const int64_t row = row_of(row_block), rows = row_of(row_block + 1) - row;
      if (row_block != at_hand) x = call_.type == Type::bf16 ? inputs<bf16>(row, rows) : inputs<float>(row, rows);
      at_hand = row_block;
      for (int64_t panel = panels_ * range / ranges_; panel < panels_ * (range + 1) / ranges_; ++panel)
        multiply(x, row, rows, panel * kPanel);
    }
  }

  // These rows, quantized, in this thread's own memory.
  template <typename T>
  Inputs inputs(int64_t row, int64_t rows) const {
    char* memory = static_cast<char*>(scratch(rows * row_bytes_));
    float* scales = reinterpret_cast<float*>(memory + rows * stride_);
    const Inputs x{reinterpret_cast<int8_t*>(memory), scales, scales + rows * groups_, stride_, groups_};
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t group = 0; group < groups_; ++group) {
        const int64_t index = r * groups_ + group;
        const Group found = quantize_group<T>(call_, row + r, group);
        int8_t* numbers = x.numbers + r * stride_ + group * kGroup;
        for (int half = 0; half < 2; ++half) store_inputs(numbers + half * kLanes, found.numbers[half]);
        x.scales[index] = found.scale;
        put_beside<F>(found, x.beside + index * F::kHalves);
      }
    return x;
  }

  __attribute__((noinline)) void multiply(const Inputs& x, int64_t row, int64_t rows, int64_t block) const {
    alignas(64) float sums[kRows * kSumsStride];
    const int64_t blocks = std::min(kPanel, blocks_ - block);
    const uint8_t* weight = static_cast<const uint8_t*>(call_.weight) + block * block_bytes_;
    // A last block without a partner is multiplied row by row.
    const int64_t tiles = blocks == kPanel ? (rows + kRows - 1) / kRows : rows;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
      if (count == 1 || kBlocks == 1) {
        for (int64_t b = 0; b < blocks; ++b)
          add_up_rows<F>(count, x, first, weight + b * block_bytes_, layout_, block_bytes_, sums + b * kLanes);
      } else {
        add_up_rows<F>(count, x, first, weight, layout_, block_bytes_, sums);
      }
      finish_rows(call_, row + first, count, block, blocks, sums);
    }
  }

  const Linear& call_;
  Layout layout_;
  int64_t blocks_, panels_, block_bytes_, groups_, stride_;
  int64_t row_bytes_, row_blocks_, ranges_;
};

}  // namespace

void linear_integer(const Linear& call) {
  if (call.rows == 0) return;
  by_format(call.format, [&](auto format) { IntegerProduct<decltype(format)>(call).run(); });
}

}  // namespace octavo::OCTAVO_LEVEL
