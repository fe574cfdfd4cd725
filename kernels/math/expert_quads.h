// Products of expert weights with five to sixteen rows, read straight through, where the machine
// multiplies bfloat16 pairs and rows may be rounded (math/quads.h): repacking weights for so few
// rows takes longer than multiplying them.
#pragma once

#include "math/expert_panel.h"
#include "math/packed_quads.h"

namespace hybridge {
namespace HYBRIDGE_ISA {

constexpr std::int64_t kMostQuadRows = 16;

#if defined(__AVX512BF16__)

constexpr bool multiplies_quads(WeightFormat format) {
  return format == WeightFormat::kBfloat16 || format == WeightFormat::kPacked;
}

// Floats that the panel of eight rows takes.
constexpr std::int64_t quad_floats(std::int64_t columns) {
  return round_up(PackedQuads::bytes(columns), 64) / 4;
}

// Calls body(panel, first row, rows) for every panel of `count` rows, which lie one after another.
template <typename Body>
inline void for_each_quad_panel(float* panels, std::int64_t columns, std::int64_t count,
                                Body&& body) {
  for (std::int64_t first = 0; first < count; first += kQuadTokens) {
    const std::int64_t rows = count - first < kQuadTokens ? count - first : kQuadTokens;
    body(panels + first / kQuadTokens * quad_floats(columns), first, rows);
  }
}

// Fills the panels of `count` rows row_at(0), row_at(1) and so on.
template <typename RowAt>
inline void pack_expert_quads(WeightFormat format, RowAt&& row_at, std::int64_t count,
                              std::int64_t columns, float* panels) {
  for_each_quad_panel(panels, columns, count, [&](float* panel, std::int64_t first, auto rows) {
    const auto row = [&](std::int64_t m) { return row_at(first + m); };
    if (format == WeightFormat::kPacked) return PackedQuads(panel, rows, columns).pack(row);
    pack_quads(row, rows, columns, reinterpret_cast<std::uint16_t*>(panel));
  });
}

// Calls done(weight row, m, sum) for every weight row and each of `count` packed rows.
template <typename Done>
inline void multiply_expert_quads(const WeightRows& weights, float* panels, std::int64_t count,
                                  Done&& done) {
  const std::int64_t columns = weights.columns;
  for_each_quad_panel(panels, columns, count, [&](float* panel, std::int64_t first, auto rows) {
    const auto store = [&](std::int64_t row, std::int64_t m, float sum) {
      done(row, first + m, sum);
    };
    if (weights.format == WeightFormat::kPacked) {
      const auto* data = reinterpret_cast<const std::uint8_t*>(weights.data);
      return packed_times_quads(data, weights.rows, PackedQuads(panel, rows, columns), store);
    }
    const auto* data = reinterpret_cast<const std::uint16_t*>(weights.data);
    matrix_times_quads(data, weights.rows, columns, reinterpret_cast<std::uint16_t*>(panel), rows,
                       store);
  });
}

#else

constexpr bool multiplies_quads(WeightFormat) { return false; }
constexpr std::int64_t quad_floats(std::int64_t) { return 0; }
template <typename RowAt>
inline void pack_expert_quads(WeightFormat, RowAt&&, std::int64_t, std::int64_t, float*) {}
template <typename Done>
inline void multiply_expert_quads(const WeightRows&, float*, std::int64_t, Done&&) {}

#endif

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
