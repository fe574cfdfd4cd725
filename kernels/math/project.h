// Products of a weight matrix with a few rows, at memory speed, in fp32 whatever the weight's type.
#pragma once

#include "math/parallel.h"
#include "math/tiles.h"
#include "math/weight_matrix.h"

namespace hybridge {
namespace HYBRIDGE_ISA {

// A few tens of kilobytes of weights per task: small enough to spread evenly and to stay in cache
// while several rows of x pass over them, large enough to amortise handing it out.
constexpr std::int64_t kTaskBytes = 64 * 1024;
constexpr std::int64_t kTaskTokens = 64;

inline std::int64_t rows_per_task(std::int64_t row_bytes) {
  return round_up(kTaskBytes / (row_bytes > 0 ? row_bytes : 1) + 1, 4);
}

// Calls done(row, token, sum) for rows [first, first + rows) of the weight.
template <typename Done>
inline void multiply_weight(const WeightMatrix& weight, std::int64_t first, std::int64_t rows,
                            std::int64_t columns, const float* x, std::int64_t x_stride,
                            std::int64_t tokens, Done&& done) {
  if (weight.is_bf16) {
    const auto* data = static_cast<const std::uint16_t*>(weight.data) + first * columns;
    matrix_times_rows(data, rows, columns, x, x_stride, tokens, done);
  } else {
    const auto* data = static_cast<const float*>(weight.data) + first * columns;
    matrix_times_rows(data, rows, columns, x, x_stride, tokens, done);
  }
}

// y [tokens, rows] = x [tokens, columns] times the weight's rows, in parallel.
inline void project(const WeightMatrix& weight, std::int64_t rows, std::int64_t columns,
                    const float* x, std::int64_t tokens, float* y, const Parallel& parallel) {
  const std::int64_t step = rows_per_task(columns * (weight.is_bf16 ? 2 : 4));
  const std::int64_t row_tasks = (rows + step - 1) / step;
  const std::int64_t token_tasks = (tokens + kTaskTokens - 1) / kTaskTokens;
  parallel_for(parallel, static_cast<std::size_t>(row_tasks * token_tasks), [&](std::size_t task) {
    const std::int64_t first = static_cast<std::int64_t>(task) % row_tasks * step;
    const std::int64_t token = static_cast<std::int64_t>(task) / row_tasks * kTaskTokens;
    const std::int64_t here = rows - first < step ? rows - first : step;
    const std::int64_t count = tokens - token < kTaskTokens ? tokens - token : kTaskTokens;
    float* to = y + token * rows + first;
    multiply_weight(weight, first, here, columns, x + token * columns, columns, count,
                    [&](std::int64_t row, std::int64_t t, float sum) { to[t * rows + row] = sum; });
  });
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
