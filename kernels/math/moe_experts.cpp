#include "math/expert_panel.h"
#include "math/moe.h"
#include "math/scratch.h"

namespace hybridge {
namespace HYBRIDGE_ISA {
namespace {

// Experts with at most this many rows read their weights straight through, in fp32: memory is the
// limit. With more rows the weights are repacked once and multiplied in tiles.
constexpr std::int64_t kFewRows = 4;
// Bound on the working memory; more tokens are processed in several rounds.
constexpr std::int64_t kRoundBytes = std::int64_t{128} << 20;
constexpr std::int64_t kTaskBytes = 64 * 1024;

std::size_t size_of(std::int64_t count) { return static_cast<std::size_t>(count); }
std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// The rows that chose one expert: pairs (token, slot) in ascending order.
struct Group {
  std::int64_t expert = 0;
  std::int64_t first = 0;  // index into Plan::pairs
  std::int64_t count = 0;
  float* input = nullptr;   // few rows: [count, row floats]; many: tiles [steps][8]
  float* hidden = nullptr;  // the same for the intermediate activations

  bool few() const { return count <= kFewRows; }
  std::int64_t tiles() const { return (count + kPanelRows - 1) / kPanelRows; }
};

// One round: who goes where.
struct Plan {
  std::int64_t tokens = 0;
  std::int64_t first_token = 0;
  std::int64_t groups = 0;
  Group* group = nullptr;          // [experts in use]
  std::int32_t* pairs = nullptr;   // token * top_k + slot within the round, sorted by expert
  std::int64_t* cursor = nullptr;  // [experts], working memory
  float* results = nullptr;        // [pairs, L]
};

// A piece of work: one group and a range of weight rows.
struct Task {
  const Group* group;
  std::int64_t first;
  std::int64_t count;
};

std::int64_t row_bytes_of(WeightFormat format, std::int64_t columns) {
  if (format == WeightFormat::kMxfp4) return columns / 2 + columns / kScaleBlock;
  if (format == WeightFormat::kPacked) return packed_row_bytes(columns);
  return columns * (format == WeightFormat::kBfloat16 ? 2 : 4);
}

template <typename Steps>
class Experts {
 public:
  Experts(const MoeExperts& args, const Parallel& parallel) : args_(args), parallel_(parallel) {}

  void run() {
    const std::int64_t per_round = tokens_per_round();
    ScratchArena measure;
    take_plan(measure, smaller(per_round, args_.tokens));
    ScratchArena arena(scratch_bytes(ScratchSlot::kOperator, measure.used()));
    take_plan(arena, smaller(per_round, args_.tokens));
    for (std::int64_t first = 0; first < args_.tokens; first += per_round) {
      plan_.first_token = first;
      plan_.tokens = smaller(per_round, args_.tokens - first);
      sort_pairs();
      gather_inputs();
      run_gate_up();
      arrange_hiddens();
      run_down();
      combine();
    }
  }

 private:
  // ---- Working memory --------------------------------------------------------------------------

  std::int64_t few_floats(const ExpertWeights& weights, std::int64_t columns) const {
    if (weights.format == WeightFormat::kPacked) return packed_x_floats(columns);
    return weights.format == WeightFormat::kMxfp4 ? mx_row_floats(columns) : columns;
  }

  // Floats that `count` rows of `columns` elements take as the left side of a product.
  std::int64_t left_floats(const ExpertWeights& weights, std::int64_t columns,
                           std::int64_t count) const {
    if (count <= kFewRows) return count * few_floats(weights, columns);
    return round_up(count, kPanelRows) * steps_of<Steps>(columns);
  }

  std::int64_t tokens_per_round() const {
    const std::int64_t floats =
        args_.top_k * (2 * args_.latent + args_.intermediate + 2 * kMxChunk);
    const std::int64_t fit = kRoundBytes / (4 * (floats > 0 ? floats : 1));
    return fit < 1 ? 1 : fit;
  }

  // Groups pad their rows to whole tiles; at worst every group does so.
  std::int64_t most_left_floats(const ExpertWeights& weights, std::int64_t columns,
                                std::int64_t pairs, std::int64_t groups) const {
    const std::int64_t few = pairs * few_floats(weights, columns);
    const std::int64_t padded = pairs + smaller(groups, pairs / (kFewRows + 1)) * (kPanelRows - 1);
    return few + padded * steps_of<Steps>(columns);
  }

  void take_plan(ScratchArena& arena, std::int64_t tokens) {
    const std::int64_t pairs = tokens * args_.top_k;
    const std::int64_t groups = smaller(pairs, args_.experts);
    plan_.group = arena.take<Group>(size_of(groups));
    plan_.pairs = arena.take<std::int32_t>(size_of(pairs));
    plan_.cursor = arena.take<std::int64_t>(size_of(args_.experts));
    plan_.results = arena.take<float>(size_of(pairs * args_.latent));
    inputs_ =
        arena.take<float>(size_of(most_left_floats(args_.gate_up, args_.latent, pairs, groups)));
    hiddens_ =
        arena.take<float>(size_of(most_left_floats(args_.down, args_.intermediate, pairs, groups)));
  }

  // ---- Grouping --------------------------------------------------------------------------------

  // A stable counting sort of the round's (token, slot) pairs by expert.
  void sort_pairs() {
    const std::int64_t pairs = plan_.tokens * args_.top_k;
    const std::int32_t* ids = args_.expert_ids + plan_.first_token * args_.top_k;
    for (std::int64_t e = 0; e < args_.experts; ++e) plan_.cursor[e] = 0;
    for (std::int64_t p = 0; p < pairs; ++p) ++plan_.cursor[ids[p]];
    plan_.groups = 0;
    std::int64_t first = 0;
    float* input = inputs_;
    float* hidden = hiddens_;
    for (std::int64_t e = 0; e < args_.experts; ++e) {
      const std::int64_t count = plan_.cursor[e];
      plan_.cursor[e] = first;
      if (count == 0) continue;
      Group& group = plan_.group[plan_.groups++];
      group = {e, first, count, input, hidden};
      first += count;
      input += left_floats(args_.gate_up, args_.latent, count);
      hidden += left_floats(args_.down, args_.intermediate, count);
    }
    for (std::int64_t p = 0; p < pairs; ++p) {
      plan_.pairs[plan_.cursor[ids[p]]++] = static_cast<std::int32_t>(p);
    }
  }

  const float* row_of_pair(const Group& group, std::int64_t row) const {
    const std::int64_t pair = plan_.pairs[group.first + row];
    return args_.x + (plan_.first_token + pair / args_.top_k) * args_.latent;
  }

  void gather_tile(const Group& group, std::int64_t tile) const {
    const std::int64_t steps = steps_of<Steps>(args_.latent);
    auto* packed = reinterpret_cast<std::uint32_t*>(group.input) + tile * steps * kPanelRows;
    const std::int64_t rows = smaller(kPanelRows, group.count - tile * kPanelRows);
    if (rows < kPanelRows) std::memset(packed, 0, size_of(steps * kPanelRows * 4));
    for (std::int64_t r = 0; r < rows; ++r) {
      pack_row(Steps{}, row_of_pair(group, tile * kPanelRows + r), 0, args_.latent, r, packed);
    }
  }

  void gather_rows(const Group& group) const {
    const std::int64_t stride = few_floats(args_.gate_up, args_.latent);
    for (std::int64_t r = 0; r < group.count; ++r) {
      float* to = group.input + r * stride;
      if (args_.gate_up.format == WeightFormat::kMxfp4) {
        mx_arrange_row(row_of_pair(group, r), args_.latent, to);
      } else if (args_.gate_up.format == WeightFormat::kPacked) {
        arrange_packed_x(row_of_pair(group, r), args_.latent, to);
      } else {
        std::memcpy(to, row_of_pair(group, r), size_of(args_.latent * 4));
      }
    }
  }

  // Where tasks wrote a row of hidden activations piece by piece, its scale is known only now.
  void arrange_hiddens() const {
    if (args_.down.format != WeightFormat::kPacked) return;
    const std::int64_t stride = few_floats(args_.down, args_.intermediate);
    for (std::int64_t g = 0; g < plan_.groups; ++g) {
      const Group& group = plan_.group[g];
      if (!group.few()) continue;
      for (std::int64_t r = 0; r < group.count; ++r) {
        arrange_packed_x(group.hidden + r * stride, args_.intermediate, group.hidden + r * stride);
      }
    }
  }

  void gather_inputs() const {
    const auto groups = size_of(plan_.groups);
    const auto gather = [&](std::size_t index) {
      const Group& group = plan_.group[index];
      if (group.few()) return gather_rows(group);
      for (std::int64_t tile = 0; tile < group.tiles(); ++tile) gather_tile(group, tile);
    };
    // A few rows are copied faster than other threads wake.
    parallel_for(plan_.tokens <= kFewRows ? Parallel{} : parallel_, groups, gather);
  }

  // ---- Tasks -----------------------------------------------------------------------------------

  // Splits `rows` weight rows of every group into tasks of whole panels.
  template <typename Body>
  void for_each_task(std::int64_t rows, std::int64_t bytes_per_row, Body&& body) const {
    const bool packed = args_.gate_up.format == WeightFormat::kPacked;
    const std::int64_t task_bytes = packed ? kPackedTaskBytes : kTaskBytes;
    const std::int64_t wanted = task_bytes / (bytes_per_row > 0 ? bytes_per_row : 1) + 1;
    const std::int64_t step = round_up(smaller(wanted, kMostRows), kPanelColumns);
    const std::int64_t tasks = (rows + step - 1) / step;
    parallel_for(parallel_, size_of(plan_.groups * tasks), [&](std::size_t index) {
      const std::int64_t task = static_cast<std::int64_t>(index);
      const std::int64_t first = task % tasks * step;
      body(Task{plan_.group + task / tasks, first, smaller(step, rows - first)});
    });
  }

  WeightRows rows_of(const ExpertWeights& weights, std::int64_t expert, std::int64_t matrix_rows,
                     std::int64_t columns, std::int64_t first, std::int64_t rows) const {
    WeightRows out = {weights.format, nullptr, nullptr, columns, rows, kWidth};
    const std::int64_t row = expert * matrix_rows + first;
    out.data = static_cast<const char*>(weights.data) + row * out.row_bytes();
    if (weights.scale != nullptr) out.scale = weights.scale + row * (columns / kScaleBlock);
    return out;
  }

  // act(gate, up), kWidth at a time.
  Lanes activate(Lanes gate, Lanes up) const {
    if (args_.activation == Activation::kSilu) return silu(gate) * up;
    const Lanes beta = Lanes::broadcast(args_.beta);
    const Lanes bounded = beta * hyperbolic_tangent(gate / beta) * sigmoid(gate);
    if (!args_.has_linear_beta) return bounded * up;
    const Lanes linear = Lanes::broadcast(args_.linear_beta);
    return bounded * (linear * hyperbolic_tangent(up / linear));
  }

  // ---- Gate and up -----------------------------------------------------------------------------

  void run_gate_up() const {
    const std::int64_t bytes = 2 * row_bytes_of(args_.gate_up.format, args_.latent);
    for_each_task(args_.intermediate, bytes, [&](const Task& task) {
      if (task.group->few()) {
        gate_up_few(task);
      } else {
        gate_up_many(task);
      }
    });
  }

  void gate_up_few(const Task& task) const {
    // Sums of gate rows and of up rows, one line per token.
    float gate[kFewRows][kMostRows], up[kFewRows][kMostRows];
    const Group& group = *task.group;
    const std::int64_t expert = group.expert, rows = 2 * args_.intermediate;
    const std::int64_t stride = few_floats(args_.gate_up, args_.latent);
    const WeightRows gates =
        rows_of(args_.gate_up, expert, rows, args_.latent, task.first, task.count);
    const WeightRows ups = rows_of(args_.gate_up, expert, rows, args_.latent,
                                   args_.intermediate + task.first, task.count);
    multiply_few(gates, group.input, stride, group.count,
                 [&](std::int64_t row, std::int64_t m, float sum) { gate[m][row] = sum; });
    multiply_few(ups, group.input, stride, group.count,
                 [&](std::int64_t row, std::int64_t m, float sum) { up[m][row] = sum; });
    const std::int64_t hidden_stride = few_floats(args_.down, args_.intermediate);
    for (std::int64_t m = 0; m < group.count; ++m) {
      for (std::int64_t i = 0; i < task.count; i += kWidth) {
        const std::int64_t here = task.count - i;
        const Lanes act =
            activate(load_first_or_all(gate[m] + i, here), load_first_or_all(up[m] + i, here));
        store_hidden(act, smaller(here, kWidth), task.first + i, group.hidden + m * hidden_stride);
      }
      if (task.first + task.count == args_.intermediate) pad_hidden(group.hidden, m);
    }
  }

  void store_hidden(Lanes act, std::int64_t count, std::int64_t column, float* row) const {
    if (args_.down.format != WeightFormat::kMxfp4) {
      return store_first_or_all(row + column, act, count);
    }
    float lanes[kWidth];
    act.store(lanes);
    for (std::int64_t i = 0; i < count; ++i) row[mx_position(column + i)] = lanes[i];
  }

  // Elements past the last one, in the arranged form, must be zero.
  void pad_hidden(float* hidden, std::int64_t m) const {
    if (args_.down.format != WeightFormat::kMxfp4) return;
    const std::int64_t floats = mx_row_floats(args_.intermediate);
    for (std::int64_t c = args_.intermediate; c < floats; ++c) {
      hidden[m * floats + mx_position(c)] = 0.0f;
    }
  }

  void gate_up_many(const Task& task) const {
    const Group& group = *task.group;
    const std::int64_t steps = steps_of<Steps>(args_.latent);
    const std::int64_t rows = 2 * args_.intermediate;
    float* panel = panel_memory(args_.latent);
    for (std::int64_t i = task.first; i < task.first + task.count; i += kWidth) {
      const std::int64_t here = smaller(kWidth, task.first + task.count - i);
      pack_panel_half<Steps>(rows_of(args_.gate_up, group.expert, rows, args_.latent, i, here),
                             panel, unpacked_memory(panel, args_.latent));
      pack_panel_half<Steps>(
          rows_of(args_.gate_up, group.expert, rows, args_.latent, args_.intermediate + i, here),
          panel + kWidth, unpacked_memory(panel, args_.latent));
      for (std::int64_t tile = 0; tile < group.tiles(); ++tile) {
        const auto* packed =
            reinterpret_cast<const std::uint32_t*>(group.input) + tile * steps * kPanelRows;
        for (std::int64_t r = 0; r < kPanelRows; r += kRowTile) {
          Lanes sums[kRowTile][2];
          multiply_panel(Steps{}, packed, r, panel, steps, sums);
          store_hidden_tile(group, tile, r, i, here, sums);
        }
      }
    }
  }

  void store_hidden_tile(const Group& group, std::int64_t tile, std::int64_t row,
                         std::int64_t column, std::int64_t count,
                         Lanes (&sums)[kRowTile][2]) const {
    const std::int64_t steps = steps_of<Steps>(args_.intermediate);
    auto* packed = reinterpret_cast<std::uint32_t*>(group.hidden) + tile * steps * kPanelRows;
    for (int r = 0; r < kRowTile; ++r) {
      float lanes[kWidth];
      activate(sums[r][0], sums[r][1]).store(lanes);
      pack_row(Steps{}, lanes, column, count, row + r, packed);
    }
  }

  // ---- Down ------------------------------------------------------------------------------------

  void run_down() const {
    const std::int64_t bytes = row_bytes_of(args_.down.format, args_.intermediate);
    for_each_task(args_.latent, bytes, [&](const Task& task) {
      if (task.group->few()) {
        down_few(task);
      } else {
        down_many(task);
      }
    });
  }

  float* result_of(const Group& group, std::int64_t row) const {
    return plan_.results + plan_.pairs[group.first + row] * args_.latent;
  }

  void down_few(const Task& task) const {
    const Group& group = *task.group;
    const WeightRows weights =
        rows_of(args_.down, group.expert, args_.latent, args_.intermediate, task.first, task.count);
    multiply_few(weights, group.hidden, few_floats(args_.down, args_.intermediate), group.count,
                 [&](std::int64_t row, std::int64_t m, float sum) {
                   result_of(group, m)[task.first + row] = sum;
                 });
  }

  void down_many(const Task& task) const {
    const Group& group = *task.group;
    const std::int64_t steps = steps_of<Steps>(args_.intermediate);
    float* panel = panel_memory(args_.intermediate);
    for (std::int64_t n = task.first; n < task.first + task.count; n += kPanelColumns) {
      const std::int64_t here = smaller(kPanelColumns, task.first + task.count - n);
      void* memory = unpacked_memory(panel, args_.intermediate);
      pack_down_half(group, n, smaller(here, kWidth), panel, memory);
      pack_down_half(group, n + kWidth, here > kWidth ? here - kWidth : 0, panel + kWidth, memory);
      for (std::int64_t tile = 0; tile < group.tiles(); ++tile) {
        const auto* packed =
            reinterpret_cast<const std::uint32_t*>(group.hidden) + tile * steps * kPanelRows;
        for (std::int64_t r = 0; r < kPanelRows; r += kRowTile) {
          Lanes sums[kRowTile][2];
          multiply_panel(Steps{}, packed, r, panel, steps, sums);
          store_results(group, tile * kPanelRows + r, n, here, sums);
        }
      }
    }
  }

  void pack_down_half(const Group& group, std::int64_t first, std::int64_t rows, float* panel,
                      void* memory) const {
    if (rows == 0) first = 0;  // the half counts as zero; keep its pointer inside the matrix
    WeightRows weights =
        rows_of(args_.down, group.expert, args_.latent, args_.intermediate, first, rows);
    weights.ahead = kPanelColumns;
    pack_panel_half<Steps>(weights, panel, memory);
  }

  void store_results(const Group& group, std::int64_t row, std::int64_t column, std::int64_t count,
                     Lanes (&sums)[kRowTile][2]) const {
    for (int r = 0; r < kRowTile && row + r < group.count; ++r) {
      float* to = result_of(group, row + r) + column;
      store_first_or_all(to, sums[r][0], count);
      if (count > kWidth) store_first_or_all(to + kWidth, sums[r][1], count - kWidth);
    }
  }

  // ---- Shared ----------------------------------------------------------------------------------

  float* panel_memory(std::int64_t columns) const {
    const std::int64_t bytes = 4 * panel_floats(columns);
    const std::int64_t unpacked = unpacked_bytes(args_.gate_up.format, columns);
    return static_cast<float*>(scratch_bytes(ScratchSlot::kTask, size_of(bytes + unpacked)));
  }

  static std::int64_t panel_floats(std::int64_t columns) {
    return panel_steps<Steps>(columns) * kPanelColumns;
  }

  static void* unpacked_memory(float* panel, std::int64_t columns) {
    return panel + panel_floats(columns);
  }

  // Calls done(row, m, sum) for every weight row and each of `count` <= kFewRows rows of x.
  template <typename Done>
  void multiply_few(const WeightRows& weights, const float* x, std::int64_t stride,
                    std::int64_t count, Done&& done) const {
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

  template <int kTokens, typename Done>
  void multiply_tokens(const WeightRows& weights, const float* x, std::int64_t stride,
                       Done&& done) const {
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

  template <int kTokens, typename Done>
  static void multiply_mxfp4(const WeightRows& weights, const float* x, std::int64_t stride,
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

  // Weighted sums over the slots, always in slot order: the result does not depend on threads.
  void combine() const {
    const std::int64_t latent = args_.latent;
    parallel_for(plan_.tokens <= kFewRows ? Parallel{} : parallel_, size_of(plan_.tokens),
                 [&](std::size_t index) {
                   const std::int64_t t = static_cast<std::int64_t>(index);
                   const std::int64_t token = plan_.first_token + t;
                   const float* weights = args_.expert_weights + token * args_.top_k;
                   const float* results = plan_.results + t * args_.top_k * latent;
                   for (std::int64_t c = 0; c < latent; c += kWidth) {
                     Lanes sum = Lanes::zero();
                     for (std::int64_t j = 0; j < args_.top_k; ++j) {
                       const Lanes result = load_first_or_all(results + j * latent + c, latent - c);
                       sum = multiply_add(Lanes::broadcast(weights[j]), result, sum);
                     }
                     store_first_or_all(args_.output + token * latent + c, sum, latent - c);
                   }
                 });
  }

  static constexpr std::int64_t kMostRows = 128;  // weight rows in a task

  const MoeExperts& args_;
  const Parallel& parallel_;
  Plan plan_;
  float* inputs_ = nullptr;
  float* hiddens_ = nullptr;
};

}  // namespace

void moe_experts(const MoeExperts& args, const Parallel& parallel) {
#if defined(__AVX512BF16__)
  if (args.round_x && args.gate_up.format != WeightFormat::kFloat32) {
    Experts<PairSteps>(args, parallel).run();
    return;
  }
#endif
  Experts<FloatSteps>(args, parallel).run();
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
