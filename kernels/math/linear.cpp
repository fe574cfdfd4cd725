#include "math/linear.h"

#include <algorithm>
#include <cmath>

#include "math/panel.h"
#include "math/scratch.h"
#include "math/tiles.h"

namespace hybridge::HYBRIDGE_ISA {
namespace {

// Up to this many rows the weight's way from memory is the limit, and dot products along rows keep
// up with it; beyond, the packed panel product does more with each word it loads.
template <class Words>
constexpr int64_t kDotRows = Words::kElements == 2 ? 4 : std::max(4, kWidth / 2);
// Up to this many rows a product of bfloat16 pairs takes x as the sum of two bfloat16 numbers: the
// vector has lanes to spare, and few rows are where exact sums are expected (decoding).
constexpr int64_t kSplitRows = kWidth / 2;
// Bytes of weight that one task of the dot-product form reads: small enough to share out evenly.
constexpr int64_t kDotTaskBytes = 128 << 10;
// Bytes of packed x that a task keeps in its core's cache while weight rows pass by.
constexpr int64_t kBlockBytes = 512 << 10;
// How far ahead of the products weight rows are fetched.
constexpr int64_t kFetchBytes = 1024;
constexpr int64_t kTaskOutputs = 32 * kRowTile;

template <class Weight>
void by_dot_products(const LinearArgs& args, const Parallel& parallel) {
  const Weight* weight = static_cast<const Weight*>(args.weight);
  const int64_t row_bytes =
      std::max<int64_t>(1, args.inputs * static_cast<int64_t>(sizeof(Weight)));
  const int64_t per_task = std::max<int64_t>(4, kDotTaskBytes / row_bytes / 4 * 4);
  const int64_t tasks = (args.outputs + per_task - 1) / per_task;
  parallel_for(parallel, static_cast<size_t>(tasks), [&](size_t task) {
    const int64_t first = static_cast<int64_t>(task) * per_task;
    const int64_t count = std::min(per_task, args.outputs - first);
    matrix_times_rows(weight + first * args.inputs, count, args.inputs, args.x, args.inputs,
                      args.rows, [&](int64_t output, int64_t row, float sum) {
                        args.out[row * args.outputs + first + output] = sum;
                      });
  });
}

// The panel product of up to kRowTile weight rows with the x rows of one panel. If `split`, lane
// x_rows + i holds the rest of row i.
template <class Words, int kVectors, bool kFetch>
void multiply_and_store(const typename Words::Element* const* weight_rows, const float* panel,
                        int64_t inputs, int64_t x_rows, int64_t outputs, float* out,
                        int64_t out_stride, bool split) {
  Lanes sums[kRowTile][kVectors];
  clear_sums(sums);
  const char* ahead[kRowTile];
  for (int i = 0; i < kRowTile; ++i) {
    ahead[i] = reinterpret_cast<const char*>(weight_rows[i]) + kFetchBytes;
  }
  multiply_panel_rows<Words, kVectors, kFetch>(weight_rows, panel, kVectors * kWidth, inputs, sums,
                                               ahead);
  alignas(64) float tile[kRowTile][kVectors * kWidth];
  for (int i = 0; i < kRowTile; ++i) {
    for (int v = 0; v < kVectors; ++v) sums[i][v].store(tile[i] + v * kWidth);
  }
  for (int64_t row = 0; row < x_rows; ++row) {
    for (int64_t i = 0; i < outputs; ++i) {
      out[row * out_stride + i] = split ? tile[i][row] + tile[i][row + x_rows] : tile[i][row];
    }
  }
}

// Weight rows [first_output, end_output) times the panels [first_panel, end_panel).
template <class Weight, class Words>
void multiply_block(const LinearArgs& args, const float* panels, int64_t first_panel,
                    int64_t end_panel, int64_t first_output, int64_t end_output, bool split) {
  const Weight* weight = static_cast<const Weight*>(args.weight);
  const int64_t panel_size = steps_of<Words>(args.inputs) * kPanelLanes;
  float* widened = nullptr;
  if constexpr (kWidened<Weight, Words>) {
    const size_t bytes = static_cast<size_t>(kRowTile * args.inputs) * sizeof(float);
    widened = static_cast<float*>(scratch_bytes(ScratchSlot::kTask, bytes));
  }
  for (int64_t output = first_output; output < end_output; output += kRowTile) {
    const int64_t count = std::min<int64_t>(kRowTile, end_output - output);
    const Weight* rows[kRowTile];
    for (int64_t i = 0; i < count; ++i) rows[i] = weight + (output + i) * args.inputs;
    const typename Words::Element* readable[kRowTile];
    readable_rows(rows, count, args.inputs, widened, readable);
    for (int64_t p = first_panel; p < end_panel; ++p) {
      const int64_t row = p * kPanelLanes;
      const int64_t x_rows = std::min(kPanelLanes, args.rows - row);
      float* out = args.out + row * args.outputs + output;
      const float* panel = panels + p * panel_size;
      // The first panel brings the weight rows into the cache for the others.
      if (x_rows <= kWidth) {
        multiply_and_store<Words, 1, true>(readable, panel, args.inputs, x_rows, count, out,
                                           args.outputs, split);
      } else if (p == first_panel) {
        multiply_and_store<Words, kPanelVectors, true>(readable, panel, args.inputs, x_rows, count,
                                                       out, args.outputs, split);
      } else {
        multiply_and_store<Words, kPanelVectors, false>(readable, panel, args.inputs, x_rows, count,
                                                        out, args.outputs, split);
      }
    }
  }
}

// Writes to `parts` the rows of x rounded to bfloat16, then what the rounding left.
void split_rows(const LinearArgs& args, float* parts) {
  const int64_t count = args.rows * args.inputs;
  for (int64_t i = 0; i < count; ++i) {
    const float rounded = float_from_bf16(bf16_from_float(args.x[i]));
    parts[i] = rounded;
    // An infinity leaves nothing, rather than inf - inf.
    parts[count + i] = std::isfinite(rounded) ? args.x[i] - rounded : 0.0f;
  }
}

template <class Words>
void pack_rows(const LinearArgs& args, bool split, float* packed, float* parts,
               const Parallel& parallel) {
  const int64_t panel_size = steps_of<Words>(args.inputs) * kPanelLanes;
  if (split) {
    split_rows(args, parts);
    return pack_panel<Words>(parts, args.inputs, 2 * args.rows, args.inputs, packed);
  }
  const int64_t panels = (args.rows + kPanelLanes - 1) / kPanelLanes;
  parallel_for(parallel, static_cast<size_t>(panels), [&](size_t p) {
    const int64_t row = static_cast<int64_t>(p) * kPanelLanes;
    pack_panel<Words>(args.x + row * args.inputs, args.inputs,
                      std::min(kPanelLanes, args.rows - row), args.inputs,
                      packed + static_cast<int64_t>(p) * panel_size);
  });
}

template <class Weight, class Words>
void by_panels(const LinearArgs& args, const Parallel& parallel) {
  const bool split = Words::kElements == 2 && args.rows <= kSplitRows;
  const int64_t panel_size = steps_of<Words>(args.inputs) * kPanelLanes;
  const int64_t panels = (args.rows + kPanelLanes - 1) / kPanelLanes;
  const auto cut = [&](ScratchArena& arena, float*& packed, float*& parts) {
    packed = arena.take<float>(static_cast<size_t>(panels * panel_size));
    parts = arena.take<float>(split ? static_cast<size_t>(2 * args.rows * args.inputs) : 0);
  };
  float *packed, *parts;
  ScratchArena measure;
  cut(measure, packed, parts);
  ScratchArena arena(scratch_bytes(ScratchSlot::kOperator, measure.used()));
  cut(arena, packed, parts);
  pack_rows<Words>(args, split, packed, parts, parallel);

  const int64_t panel_bytes = panel_size * static_cast<int64_t>(sizeof(float));
  const int64_t per_block = std::max<int64_t>(1, kBlockBytes / std::max<int64_t>(1, panel_bytes));
  const int64_t blocks = (panels + per_block - 1) / per_block;
  const int64_t columns = (args.outputs + kTaskOutputs - 1) / kTaskOutputs;
  parallel_for(parallel, static_cast<size_t>(blocks * columns), [&](size_t task) {
    const int64_t block = static_cast<int64_t>(task) / columns;
    const int64_t output = static_cast<int64_t>(task) % columns * kTaskOutputs;
    multiply_block<Weight, Words>(args, packed, block * per_block,
                                  std::min(panels, (block + 1) * per_block), output,
                                  std::min(args.outputs, output + kTaskOutputs), split);
  });
}

template <class Weight, class Words>
void linear_of(const LinearArgs& args, const Parallel& parallel) {
  if (args.rows <= kDotRows<Words>) return by_dot_products<Weight>(args, parallel);
  return by_panels<Weight, Words>(args, parallel);
}

}  // namespace

void linear(const LinearArgs& args, const Parallel& parallel) {
  if (args.rows == 0 || args.outputs == 0) return;
  if (!args.weight_bf16) return linear_of<float, FloatWords>(args, parallel);
  if (!args.round_x) return linear_of<uint16_t, FloatWords>(args, parallel);
  return linear_of<uint16_t, RowsAs<uint16_t>::Words>(args, parallel);
}

}  // namespace hybridge::HYBRIDGE_ISA
