// Products of expert weights with up to four rows in fp32, read straight through: memory is the
// limit.
#pragma once

#include "math/expert_panel.h"

namespace hybridge {
namespace HYBRIDGE_ISA {

constexpr std::int64_t kFewExpertRows = 4;

// Floats that a row takes in the form that weights of a format are multiplied with.
inline std::int64_t row_floats(WeightFormat format, std::int64_t columns) {
  if (format == WeightFormat::kPacked) return packed_x_floats(columns);
  return format == WeightFormat::kMxfp4 ? mx_row_floats(columns) : columns;
}

inline void arrange_row(WeightFormat format, const float* from, std::int64_t columns, float* to) {
  if (format == WeightFormat::kMxfp4) return mx_arrange_row(from, columns, to);
  if (format == WeightFormat::kPacked) return arrange_packed_x(from, columns, to);
  std::memcpy(to, from, sizeof(float) * static_cast<std::size_t>(columns));
}

template <int kTokens, typename Done>
inline void multiply_mxfp4(const WeightRows& weights, const float* x, std::int64_t stride,
                           Done&& done) {
  constexpr int kRows = kTokens == 1 ? 4 : 2;
  const auto* packed = reinterpret_cast<const std::uint8_t*>(weights.data);
  const auto row_at = [&](std::int64_t row) {
    return MxRow{packed + row * weights.row_bytes(),
                 weights.scale + row * (weights.columns / kScaleBlock)};
  };
  std::int64_t row = 0;
  for (; row + kRows <= weights.rows; row += kRows) {
    MxRow rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = row_at(row + r);
    float sums[kRows][kTokens];
    mx_dot_rows(rows, kRows * weights.row_bytes(), x, stride, weights.columns, sums);
    for (int r = 0; r < kRows; ++r) {
      for (int m = 0; m < kTokens; ++m) done(row + r, m, sums[r][m]);
    }
  }
  for (; row < weights.rows; ++row) {
    const MxRow rows[1] = {row_at(row)};
    float sums[1][kTokens];
    mx_dot_rows(rows, weights.row_bytes(), x, stride, weights.columns, sums);
    for (int m = 0; m < kTokens; ++m) done(row, m, sums[0][m]);
  }
}

template <int kTokens, typename Done>
inline void multiply_tokens(const WeightRows& weights, const float* x, std::int64_t stride,
                            Done&& done) {
  switch (weights.format) {
    case WeightFormat::kFloat32:
      return matrix_times_tokens<kTokens>(reinterpret_cast<const float*>(weights.data),
                                          weights.rows, weights.columns, x, stride, done);
    case WeightFormat::kBfloat16:
      return matrix_times_tokens<kTokens>(reinterpret_cast<const std::uint16_t*>(weights.data),
                                          weights.rows, weights.columns, x, stride, done);
    case WeightFormat::kMxfp4:
      return multiply_mxfp4<kTokens>(weights, x, stride, done);
    case WeightFormat::kPacked:
      return packed_times_tokens<kTokens>(reinterpret_cast<const std::uint8_t*>(weights.data),
                                          weights.rows, weights.columns, x, done);
  }
}

// Calls done(row, m, sum) for every weight row and each of `count` <= kFewExpertRows rows of x.
template <typename Done>
inline void multiply_few(const WeightRows& weights, const float* x, std::int64_t stride,
                         std::int64_t count, Done&& done) {
  switch (count) {
    case 1:
      return multiply_tokens<1>(weights, x, stride, done);
    case 2:
      return multiply_tokens<2>(weights, x, stride, done);
    case 3:
      return multiply_tokens<3>(weights, x, stride, done);
    default:
      return multiply_tokens<4>(weights, x, stride, done);
  }
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
