// Products with quantized weights, which become bf16 while they are multiplied (quantized_lines.hpp) where the call says
// so: the sums of linear_amx.cpp with those weights.

#include "kernels.hpp"
#include "levels.hpp"
#include "quantized_lines.hpp"
#include "widened_amx.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

// Calls use(QuantizedLines<format>*).
template <typename Use>
auto by_lines(Format format, const Use& use) {
  switch (format) {
    case Format::q4_0: return use(static_cast<QuantizedLines<Format::q4_0>*>(nullptr));
    case Format::q4_1: return use(static_cast<QuantizedLines<Format::q4_1>*>(nullptr));
    case Format::q5_0: return use(static_cast<QuantizedLines<Format::q5_0>*>(nullptr));
    case Format::q5_1: return use(static_cast<QuantizedLines<Format::q5_1>*>(nullptr));
    case Format::q4_k: return use(static_cast<QuantizedLines<Format::q4_k>*>(nullptr));
    case Format::q5_k: return use(static_cast<QuantizedLines<Format::q5_k>*>(nullptr));
    case Format::q6_k: return use(static_cast<QuantizedLines<Format::q6_k>*>(nullptr));
    case Format::u4: return use(static_cast<QuantizedLines<Format::u4>*>(nullptr));
    case Format::u8: return use(static_cast<QuantizedLines<Format::u8>*>(nullptr));
    default: return use(static_cast<QuantizedLines<Format::q8_0>*>(nullptr));
  }
}

template <typename Lines>
void widen(const Linear& call, const TileToWiden& tile) {
  const Lines lines(call);
  widen_tile<true>(lines, lines.tile(tile.block, tile.step), tile.to,
                   Lines::fetched(lines.tile(tile.later_block, tile.later_step)));
}

}  // namespace

WidenTile widen_tile_of(Format format) {
  return by_lines(format, [](auto* lines) -> WidenTile { return widen<std::remove_pointer_t<decltype(lines)>>; });
}

void linear_quantized(const Linear& call) {
  if (call.half_scale == 0.0f || call.rows == 0) return linear_integer(call);
  if (call.rows > kWidenedRows) return linear_many_amx(call);
  by_lines(call.format, [&](auto* lines) { multiply<std::remove_pointer_t<decltype(lines)>>(call); });
}

}  // namespace octavo::OCTAVO_LEVEL
