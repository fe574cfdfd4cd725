// Products of a weight matrix with a few rows, at memory speed, in fp32 whatever the weight's type.
#pragma once

#include "math/packed.h"
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

// Calls done(row, token, sum) for rows [first, first + rows) of a weight that is not packed.
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

// The same for a packed weight and arranged rows of x.
template <typename Done>
inline void multiply_packed(const WeightMatrix& weight, std::int64_t first, std::int64_t rows,
                            std::int64_t columns, const float* arranged, std::int64_t tokens,
                            Done&& done) {
  const auto* data =
      static_cast<const std::uint8_t*>(weight.data) + first * packed_row_bytes(columns);
  packed_times_rows(data, rows, columns, arranged, tokens, done);
}

// Floats of working memory that `project` takes.
inline std::int64_t project_floats(const WeightMatrix& weight, std::int64_t columns,
                                   std::int64_t tokens) {
  return weight.is_packed ? tokens * packed_x_floats(columns) : 0;
}

// y [tokens, rows] = x [tokens, columns] times the weight's rows, in parallel. `memory` has
// project_floats elements.
inline void project(const WeightMatrix& weight, std::int64_t rows, std::int64_t columns,
                    const float* x, std::int64_t tokens, float* y, const Parallel& parallel,
                    float* memory = nullptr) {
  if (weight.is_packed) arrange_packed_rows(x, tokens, columns, memory);
  const std::int64_t step = weight.is_packed
                                ? round_up(kPackedTaskBytes / packed_row_bytes(columns) + 1, 16)
                                : rows_per_task(columns * (weight.is_bf16 ? 2 : 4));
  const std::int64_t row_tasks = (rows + step - 1) / step;
  const std::int64_t token_tasks = (tokens + kTaskTokens - 1) / kTaskTokens;
  parallel_for(parallel, static_cast<std::size_t>(row_tasks * token_tasks), [&](std::size_t task) {
    const std::int64_t first = static_cast<std::int64_t>(task) % row_tasks * step;
    const std::int64_t token = static_cast<std::int64_t>(task) / row_tasks * kTaskTokens;
    const std::int64_t here = rows - first < step ? rows - first : step;
    const std::int64_t count = tokens - token < kTaskTokens ? tokens - token : kTaskTokens;
    float* to = y + token * rows + first;
    const auto store = [&](std::int64_t row, std::int64_t t, float sum) {
      to[t * rows + row] = sum;
    };
    if (weight.is_packed) {
      multiply_packed(weight, first, here, columns, memory + token * packed_x_floats(columns),
                      count, store);
    } else {
      multiply_weight(weight, first, here, columns, x + token * columns, columns, count, store);
    }
  });
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
