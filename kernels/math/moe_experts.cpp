#include <type_traits>

#include "math/expert_quads.h"
#include "math/expert_rows.h"
#include "math/moe.h"
#include "math/scratch.h"

namespace hybridge {
namespace HYBRIDGE_ISA {
namespace {

// Bound on the working memory; more tokens are processed in several rounds.
constexpr std::int64_t kRoundBytes = std::int64_t{128} << 20;
constexpr std::int64_t kTaskBytes = 64 * 1024;

std::size_t size_of(std::int64_t count) { return static_cast<std::size_t>(count); }
std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// How the rows of an expert meet its weights: row by row or eight by eight while the weights are
// read straight through, or in tiles, for which the weights are repacked once.
enum class Form { kRows, kQuads, kTiles };

// The rows that chose one expert: pairs (token, slot) in ascending order.
struct Group {
  std::int64_t expert = 0;
  std::int64_t first = 0;  // index into Plan::pairs
  std::int64_t count = 0;
  Form form = Form::kRows;
  float* input = nullptr;   // [count, row floats], quad panels, or tiles [steps][8]
  float* hidden = nullptr;  // the same for the intermediate activations
  float* rows = nullptr;    // quads: [count, I], the intermediate activations before packing

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
      for_each_group([&](const Group& group) { gather(group); });
      run_gate_up();
      for_each_group([&](const Group& group) { pack_hidden(group); });
      run_down();
      combine();
    }
  }

 private:
  // ---- Working memory --------------------------------------------------------------------------

  Form form_of(std::int64_t count) const {
    if (count <= kFewExpertRows) return Form::kRows;
    return count <= kMostQuadRows && may_quads() ? Form::kQuads : Form::kTiles;
  }

  bool may_quads() const {
    return std::is_same_v<Steps, PairSteps> && multiplies_quads(args_.gate_up.format) &&
           multiplies_quads(args_.down.format);
  }

  // Floats that `count` rows of `columns` elements take as the left side of a product.
  std::int64_t left_floats(const ExpertWeights& weights, std::int64_t columns,
                           std::int64_t count) const {
    switch (form_of(count)) {
      case Form::kRows:
        return count * row_floats(weights.format, columns);
      case Form::kQuads:
        return (count + 7) / 8 * quad_floats(columns);
      case Form::kTiles:
        break;
    }
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
    const std::int64_t few = pairs * row_floats(weights.format, columns);
    const std::int64_t more = smaller(groups, pairs / (kFewExpertRows + 1));
    const std::int64_t padded = pairs + more * (kPanelRows - 1);
    const std::int64_t quads = (pairs / 8 + more) * quad_floats(columns);
    return few + padded * steps_of<Steps>(columns) + quads;
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
    rows_ = arena.take<float>(size_of(may_quads() ? pairs * args_.intermediate : 0));
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
      float* rows = rows_ + (may_quads() ? first * args_.intermediate : 0);
      group = {e, first, count, form_of(count), input, hidden, rows};
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
    const std::int64_t stride = row_floats(args_.gate_up.format, args_.latent);
    for (std::int64_t r = 0; r < group.count; ++r) {
      arrange_row(args_.gate_up.format, row_of_pair(group, r), args_.latent,
                  group.input + r * stride);
    }
  }

  void gather(const Group& group) const {
    switch (group.form) {
      case Form::kRows:
        return gather_rows(group);
      case Form::kQuads:
        return pack_expert_quads(
            args_.gate_up.format, [&](std::int64_t r) { return row_of_pair(group, r); },
            group.count, args_.latent, group.input);
      case Form::kTiles:
        for (std::int64_t tile = 0; tile < group.tiles(); ++tile) gather_tile(group, tile);
    }
  }

  // Where tasks wrote rows of hidden activations piece by piece that must be whole to be packed.
  void pack_hidden(const Group& group) const {
    if (group.form == Form::kQuads) {
      return pack_expert_quads(
          args_.down.format, [&](std::int64_t r) { return group.rows + r * args_.intermediate; },
          group.count, args_.intermediate, group.hidden);
    }
    if (group.form != Form::kRows || args_.down.format != WeightFormat::kPacked) return;
    const std::int64_t stride = row_floats(args_.down.format, args_.intermediate);
    for (std::int64_t r = 0; r < group.count; ++r) {
      arrange_packed_x(group.hidden + r * stride, args_.intermediate, group.hidden + r * stride);
    }
  }

  template <typename Body>
  void for_each_group(Body&& body) const {
    // A few rows are copied faster than other threads wake.
    parallel_for(plan_.tokens <= kFewExpertRows ? Parallel{} : parallel_, size_of(plan_.groups),
                 [&](std::size_t index) { body(plan_.group[index]); });
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
      if (task.group->form == Form::kTiles) {
        gate_up_tiles(task);
      } else {
        gate_up_straight(task);
      }
    });
  }

  // Calls done(weight row, m, sum) for weights that are read straight through.
  template <typename Done>
  static void multiply_straight(const Group& group, const WeightRows& weights, float* left,
                                Done&& done) {
    if (group.form == Form::kQuads) {
      return multiply_expert_quads(weights, left, group.count, done);
    }
    multiply_few(weights, left, row_floats(weights.format, weights.columns), group.count, done);
  }

  void gate_up_straight(const Task& task) const {
    // Sums of gate rows and of up rows, one line per token.
    float gate[kMostQuadRows][kMostRows], up[kMostQuadRows][kMostRows];
    const Group& group = *task.group;
    const std::int64_t expert = group.expert, rows = 2 * args_.intermediate;
    const WeightRows gates =
        rows_of(args_.gate_up, expert, rows, args_.latent, task.first, task.count);
    const WeightRows ups = rows_of(args_.gate_up, expert, rows, args_.latent,
                                   args_.intermediate + task.first, task.count);
    multiply_straight(group, gates, group.input,
                      [&](std::int64_t row, std::int64_t m, float sum) { gate[m][row] = sum; });
    multiply_straight(group, ups, group.input,
                      [&](std::int64_t row, std::int64_t m, float sum) { up[m][row] = sum; });
    for (std::int64_t m = 0; m < group.count; ++m) {
      float* hidden = hidden_row(group, m);
      for (std::int64_t i = 0; i < task.count; i += kWidth) {
        const std::int64_t here = task.count - i;
        const Lanes act =
            activate(load_first_or_all(gate[m] + i, here), load_first_or_all(up[m] + i, here));
        store_hidden(act, smaller(here, kWidth), task.first + i, hidden);
      }
      if (task.first + task.count == args_.intermediate) pad_hidden(hidden);
    }
  }

  float* hidden_row(const Group& group, std::int64_t m) const {
    if (group.form == Form::kQuads) return group.rows + m * args_.intermediate;
    return group.hidden + m * row_floats(args_.down.format, args_.intermediate);
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
  void pad_hidden(float* hidden) const {
    if (args_.down.format != WeightFormat::kMxfp4) return;
    const std::int64_t floats = mx_row_floats(args_.intermediate);
    for (std::int64_t c = args_.intermediate; c < floats; ++c) {
      hidden[mx_position(c)] = 0.0f;
    }
  }

  void gate_up_tiles(const Task& task) const {
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
      if (task.group->form == Form::kTiles) {
        down_tiles(task);
      } else {
        down_straight(task);
      }
    });
  }

  float* result_of(const Group& group, std::int64_t row) const {
    return plan_.results + plan_.pairs[group.first + row] * args_.latent;
  }

  void down_straight(const Task& task) const {
    const Group& group = *task.group;
    const WeightRows weights =
        rows_of(args_.down, group.expert, args_.latent, args_.intermediate, task.first, task.count);
    multiply_straight(group, weights, group.hidden,
                      [&](std::int64_t row, std::int64_t m, float sum) {
                        result_of(group, m)[task.first + row] = sum;
                      });
  }

  void down_tiles(const Task& task) const {
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

  // Weighted sums over the slots, always in slot order: the result does not depend on threads.
  void combine() const {
    const std::int64_t latent = args_.latent;
    parallel_for(plan_.tokens <= kFewExpertRows ? Parallel{} : parallel_, size_of(plan_.tokens),
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
  float* rows_ = nullptr;
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
