// out = x · weightᵀ + bias, for any number of rows. The packed layout is drawn at Linear.
//
// Each output is one sum over the inputs in ascending order, in one accumulator, whatever the rows around it: a row's
// result has the same bits alone and among a thousand. Threads share out the blocks of outputs.

#include <algorithm>

#include "kernels.hpp"
#include "levels.hpp"
#include "simd.hpp"
#include "step.hpp"
#include "thread_pool.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kRows = 6, kBlocks = 4;  // 24 accumulators of 32 registers
#else
constexpr int kRows = 3, kBlocks = 1;  // 6 accumulators of 16 registers
#endif
constexpr int64_t kRowsInCache = 256;  // rows whose inputs stay in the second-level cache while weights go by

// Sums of Rows rows and Blocks blocks of 16 outputs.
template <typename Step, int Rows, int Blocks>
OCTAVO_INLINE void sums(const typename Step::Element* x, int64_t x_stride, const uint32_t* weight, int64_t block_words,
                        int64_t in_size, f32x16 (&sum)[Rows][Blocks]) {
  for (int row = 0; row < Rows; ++row)
    for (int block = 0; block < Blocks; ++block) sum[row][block] = f32x16{};
  const int64_t steps = in_size / Step::kTogether;
  for (int64_t step = 0; step < steps; ++step) {
    u32x16 line[Blocks];
    for (int block = 0; block < Blocks; ++block) {
      const uint32_t* at = weight + block * block_words + step * kLine;
      std::memcpy(&line[block], at, sizeof line[block]);
      if (Rows == 1) __builtin_prefetch(at + 16 * kLine);
    }
    for (int row = 0; row < Rows; ++row) {
      const uint32_t value = word(x + row * x_stride + step * Step::kTogether);
      for (int block = 0; block < Blocks; ++block) sum[row][block] = Step::add(sum[row][block], value, line[block]);
    }
  }
  if (in_size % Step::kTogether != 0) {  // an odd number of bf16 inputs: the last one has no partner
    for (int row = 0; row < Rows; ++row) {
      const uint32_t value = static_cast<uint32_t>(x[row * x_stride + in_size - 1]);
      for (int block = 0; block < Blocks; ++block) {
        u32x16 line;
        std::memcpy(&line, weight + block * block_words + steps * kLine, sizeof line);
        sum[row][block] = Step::add(sum[row][block], value, line);
      }
    }
  }
}

template <typename Bias, typename Out>
OCTAVO_INLINE void finish(f32x16 sum, const Bias* bias, Out* out, int64_t outputs) {
  if (outputs >= kLanes) {
    store(out, bias == nullptr ? sum : sum + load(bias));
  } else {
    const int count = static_cast<int>(outputs);
    store_part(out, bias == nullptr ? sum : sum + load_part(bias, count), count);
  }
}

template <typename Step, typename Out, int Rows, int Blocks>
void tile(const Linear& call, int64_t row, int64_t block, int64_t block_words) {
  using Element = typename Step::Element;
  f32x16 sum[Rows][Blocks];
  sums<Step, Rows, Blocks>(static_cast<const Element*>(call.x) + row * call.x_stride, call.x_stride,
                           static_cast<const uint32_t*>(call.weight) + block * block_words, block_words, call.in_size,
                           sum);
  const Element* bias = static_cast<const Element*>(call.bias);
  for (int r = 0; r < Rows; ++r)
    for (int b = 0; b < Blocks; ++b) {
      const int64_t first = (block + b) * kLanes;
      finish(sum[r][b], bias == nullptr ? nullptr : bias + first,
             static_cast<Out*>(call.out) + (row + r) * call.out_size + first, call.out_size - first);
    }
}

template <typename Step, typename Out, int Blocks>
void rows_of(const Linear& call, int64_t row, int64_t rows, int64_t block, int64_t block_words) {
  for (; rows >= kRows; row += kRows, rows -= kRows) tile<Step, Out, kRows, Blocks>(call, row, block, block_words);
  switch (rows) {
    case 5: tile<Step, Out, 5, Blocks>(call, row, block, block_words); break;
    case 4: tile<Step, Out, 4, Blocks>(call, row, block, block_words); break;
    case 3: tile<Step, Out, 3, Blocks>(call, row, block, block_words); break;
    case 2: tile<Step, Out, 2, Blocks>(call, row, block, block_words); break;
    case 1: tile<Step, Out, 1, Blocks>(call, row, block, block_words); break;
    default: break;
  }
}

template <typename Step, typename Out>
void multiply(const Linear& call) {
  const int64_t words = (call.in_size + Step::kTogether - 1) / Step::kTogether * kLine;
  const int64_t blocks = (call.out_size + kLanes - 1) / kLanes;
  // Few rows: each thread streams one range of the weights. Many: smaller pieces, so that no thread waits long.
  const int64_t threads = pool().size();
  const int64_t pieces = call.rows < 32 ? std::min(threads, blocks) : std::min(8 * threads, (blocks + kBlocks - 1) / kBlocks);
  pool().run(pieces, [&](int64_t piece) {
    const int64_t begin = blocks * piece / pieces, end = blocks * (piece + 1) / pieces;
    for (int64_t row = 0; row < call.rows; row += kRowsInCache) {
      const int64_t rows = std::min(kRowsInCache, call.rows - row);
      int64_t block = begin;
      for (; block + kBlocks <= end; block += kBlocks) rows_of<Step, Out, kBlocks>(call, row, rows, block, words);
      for (; block < end; ++block) rows_of<Step, Out, 1>(call, row, rows, block, words);
    }
  });
}

}  // namespace

void linear(const Linear& call) {
  if (call.type == Type::bf16) {
    if (call.out_type == Type::bf16) multiply<PairStep, bf16>(call);
    else multiply<PairStep, float>(call);
  } else {
    multiply<SingleStep, float>(call);
  }
}

}  // namespace octavo::OCTAVO_LEVEL
