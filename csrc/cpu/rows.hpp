// Rows of a row-wise kernel, shared out among threads in pieces that are worth it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.hpp"
#include "thread_pool.hpp"

namespace octavo::OCTAVO_LEVEL {

// A piece is worth a thread from about so many elements; of many rows there are so many pieces a thread, for neighbours in
// memory are better written by one of them.
constexpr int64_t kElements = 1 << 12, kPieces = 4;

template <typename Row>
OCTAVO_INLINE void by_rows(int64_t rows, int64_t size, const Row& row_work) {
  const int64_t fewest = std::max<int64_t>(1, kElements / std::max<int64_t>(size, 1));
  const int64_t together = std::max(fewest, rows / (kPieces * pool().size()));
  pool().run((rows + together - 1) / together, [&](int64_t piece) {
    for (int64_t row = piece * together; row < std::min(rows, (piece + 1) * together); ++row) row_work(row);
  });
}

}  // namespace octavo::OCTAVO_LEVEL
