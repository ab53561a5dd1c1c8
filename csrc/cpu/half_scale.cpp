// How large quantized weights can be, for those that are computed with in half precision (quantized_lines.hpp).

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "formats.hpp"
#include "half.hpp"
#include "thread_pool.hpp"

namespace octavo {
namespace {

constexpr float kNoFloat = std::numeric_limits<float>::infinity();  // larger than what is finite: it stays the largest

// No weight of this output in this span is larger, by the largest numbers that there can be.
float largest_weight(Format format, const Layout& layout, const uint8_t* header, int64_t lane) {
  const float numbers = static_cast<float>((1 << layout.bits) - 1);
  float scale;
  switch (format) {
    case Format::q4_1:
    case Format::q5_1: return numbers * std::fabs(half(header + 2 * lane)) + std::fabs(half(header + 32 + 2 * lane));
    case Format::q4_k:
    case Format::q5_k: return 63.0f * (numbers * std::fabs(half(header + 2 * lane)) + std::fabs(half(header + 32 + 2 * lane)));
    case Format::q6_k: return 128.0f * numbers * std::fabs(half(header + 2 * lane));
    case Format::u4:
    case Format::u8: std::memcpy(&scale, header + 4 * lane, sizeof scale); return numbers * std::fabs(scale);
    default: return numbers * std::fabs(half(header + 2 * lane));
  }
}

}  // namespace

float half_scale(Format format, int64_t span_inputs, const uint8_t* packed, int64_t blocks, int64_t in_size) {
  if (in_size % kGroup != 0) return 0.0f;
  const Layout layout = layout_of(format, span_inputs);
  const int64_t spans = blocks * layout.spans(in_size), pieces = pool().size();
  std::vector<float> largest(static_cast<size_t>(pieces));
  pool().run(pieces, [&](int64_t piece) {
    float& most = largest[static_cast<size_t>(piece)];
    for (int64_t span = spans * piece / pieces; span < spans * (piece + 1) / pieces; ++span)
      for (int64_t lane = 0; lane < kBlockOutputs; ++lane) {
        const float found = largest_weight(format, layout, packed + span * layout.span_bytes(), lane);
        most = std::isfinite(found) ? std::max(most, found) : kNoFloat;
      }
  });
  const float most = *std::max_element(largest.begin(), largest.end());
  if (!(most > 0x1p-80f && most < 0x1p80f)) return 0.0f;
  return std::ldexp(1.0f, 14 - (std::ilogb(most) + 1));
}

}  // namespace octavo
