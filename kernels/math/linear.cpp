#include "math/linear.h"

#include <algorithm>
#include <type_traits>

#include "math/packed.h"
#include "math/packed_quads.h"
#include "math/panel.h"
#include "math/quads.h"
#include "math/scratch.h"
#include "math/tiles.h"

namespace hybridge::HYBRIDGE_ISA {
namespace {

// Up to this many rows are multiplied as dot products along weight rows, in exact fp32; beyond, the
// panel product does more with each word it loads, but bfloat16 weights must be widened for it
// (measured). Rounded rows have products of their own beyond kDotTokens.
template <class Weight, class Words>
constexpr int64_t kDotRows = !std::is_same_v<Words, FloatWords>                 ? kDotTokens
                             : std::is_same_v<Weight, uint16_t> && kWidth >= 16 ? 64
                                                                                : 12;
// Bytes of weight that one task of the dot-product form reads: small enough to share out evenly.
constexpr int64_t kDotTaskBytes = 128 << 10;
// Bytes of packed x that a task keeps in its core's cache while weight rows pass by.
constexpr int64_t kBlockBytes = 512 << 10;
// How far ahead of the products weight rows are fetched.
constexpr int64_t kFetchBytes = 1024;
constexpr int64_t kTaskOutputs = 32 * kRowTile;

// Stands for the type of a weight in bf12 rows.
struct Packed {};

const uint8_t* packed_row_at(const LinearArgs& args, int64_t row) {
  return static_cast<const uint8_t*>(args.weight.data) + row * packed_row_bytes(args.inputs);
}

// Calls body(weight rows, their number, done) for every task, where done(output, row, sum) stores.
template <class Weight, class Body>
void for_each_dot_task(const LinearArgs& args, const Parallel& parallel, Body&& body) {
  const Weight* weight = static_cast<const Weight*>(args.weight.data);
  const int64_t row_bytes =
      std::max<int64_t>(1, args.inputs * static_cast<int64_t>(sizeof(Weight)));
  const int64_t per_task = std::max<int64_t>(8, kDotTaskBytes / row_bytes / 8 * 8);
  const int64_t tasks = (args.outputs + per_task - 1) / per_task;
  parallel_for(parallel, static_cast<size_t>(tasks), [&](size_t task) {
    const int64_t first = static_cast<int64_t>(task) * per_task;
    const int64_t count = std::min(per_task, args.outputs - first);
    body(weight + first * args.inputs, count, [&](int64_t output, int64_t row, float sum) {
      args.out[row * args.outputs + first + output] = sum;
    });
  });
}

template <class Weight>
void by_dot_products(const LinearArgs& args, const Parallel& parallel) {
  for_each_dot_task<Weight>(args, parallel, [&](const Weight* weight, int64_t count, auto&& done) {
    matrix_times_rows(weight, count, args.inputs, args.x, args.inputs, args.rows, done);
  });
}

// Calls body(first output, number of outputs, store) for every task over packed rows.
template <class Body>
void for_each_packed_task(const LinearArgs& args, const Parallel& parallel, Body&& body) {
  const int64_t per_task = round_up(kPackedTaskBytes / packed_row_bytes(args.inputs) + 1, 16);
  const int64_t tasks = (args.outputs + per_task - 1) / per_task;
  parallel_for(parallel, static_cast<size_t>(tasks), [&](size_t task) {
    const int64_t first = static_cast<int64_t>(task) * per_task;
    body(first, std::min(per_task, args.outputs - first),
         [&](int64_t output, int64_t row, float sum) {
           args.out[row * args.outputs + output] = sum;
         });
  });
}

void by_packed_dot_products(const LinearArgs& args, const Parallel& parallel) {
  const int64_t floats = args.rows * packed_x_floats(args.inputs);
  auto* x = static_cast<float*>(
      scratch_bytes(ScratchSlot::kProduct, static_cast<size_t>(floats) * sizeof(float)));
  arrange_packed_rows(args.x, args.rows, args.inputs, x);
  for_each_packed_task(args, parallel, [&](int64_t first, int64_t count, auto&& store) {
    packed_times_rows(
        packed_row_at(args, first), count, args.inputs, x, args.rows,
        [&](int64_t output, int64_t row, float sum) { store(first + output, row, sum); });
  });
}

#if defined(__AVX512BF16__)
void by_packed_quads(const LinearArgs& args, const Parallel& parallel) {
  const auto bytes = static_cast<size_t>(PackedQuads::bytes(args.inputs));
  void* memory = scratch_bytes(ScratchSlot::kProduct, bytes);
  const PackedQuads x(memory, args.rows, args.inputs);
  x.pack([&](int64_t row) { return args.x + row * args.inputs; });
  for_each_packed_task(args, parallel, [&](int64_t first, int64_t count, auto&& store) {
    packed_times_quads(
        packed_row_at(args, first), count, x,
        [&](int64_t output, int64_t row, float sum) { store(first + output, row, sum); });
  });
}

void by_quads(const LinearArgs& args, const Parallel& parallel) {
  const size_t bytes = static_cast<size_t>(quad_panel_elements(args.inputs)) * sizeof(uint16_t);
  auto* panel = static_cast<uint16_t*>(scratch_bytes(ScratchSlot::kProduct, bytes));
  const auto row_at = [&](int64_t row) { return args.x + row * args.inputs; };
  pack_quads(row_at, args.rows, args.inputs, panel);
  for_each_dot_task<uint16_t>(
      args, parallel, [&](const uint16_t* weight, int64_t count, auto&& done) {
        matrix_times_quads(weight, count, args.inputs, panel, args.rows, done);
      });
}
#endif

// The panel product of up to kRowTile weight rows with the x rows of one panel.
template <class Words, int kVectors, bool kFetch>
void multiply_and_store(const typename Words::Element* const* weight_rows, const float* panel,
                        int64_t inputs, int64_t x_rows, int64_t outputs, float* out,
                        int64_t out_stride) {
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
      out[row * out_stride + i] = tile[i][row];
    }
  }
}

// Bytes that read_tile works in.
template <class Weight, class Words>
size_t tile_bytes(const LinearArgs& args) {
  size_t row_bytes = 0;
  if constexpr (std::is_same_v<Weight, Packed>) {
    row_bytes = sizeof(typename Words::Element) + sizeof(uint16_t);
  } else if constexpr (kWidened<Weight, Words>) {
    row_bytes = sizeof(float);
  }
  return static_cast<size_t>(kRowTile * args.inputs) * row_bytes;
}

// Pointers to up to kRowTile weight rows as the product reads them; `buffer` has tile_bytes.
template <class Weight, class Words>
void read_tile(const LinearArgs& args, int64_t output, int64_t count, void* buffer,
               const typename Words::Element** readable) {
  using Element = typename Words::Element;
  auto* elements = static_cast<Element*>(buffer);
  if constexpr (std::is_same_v<Weight, Packed>) {
    auto* unpacked = reinterpret_cast<uint16_t*>(elements + kRowTile * args.inputs);
    const uint16_t* rows[kRowTile];
    for (int64_t i = 0; i < count; ++i) {
      unpack_row(packed_row_at(args, output + i), args.inputs, unpacked + i * args.inputs);
      rows[i] = unpacked + i * args.inputs;
    }
    readable_rows(rows, count, args.inputs, reinterpret_cast<float*>(buffer), readable);
  } else {
    const Weight* rows[kRowTile];
    const Weight* weight = static_cast<const Weight*>(args.weight.data);
    for (int64_t i = 0; i < count; ++i) rows[i] = weight + (output + i) * args.inputs;
    readable_rows(rows, count, args.inputs, reinterpret_cast<float*>(buffer), readable);
  }
}

// Weight rows [first_output, end_output) times the panels [first_panel, end_panel).
template <class Weight, class Words>
void multiply_block(const LinearArgs& args, const float* panels, int64_t first_panel,
                    int64_t end_panel, int64_t first_output, int64_t end_output) {
  const int64_t panel_size = steps_of<Words>(args.inputs) * kPanelLanes;
  const size_t bytes = tile_bytes<Weight, Words>(args);
  void* buffer = bytes > 0 ? scratch_bytes(ScratchSlot::kTask, bytes) : nullptr;
  for (int64_t output = first_output; output < end_output; output += kRowTile) {
    const int64_t count = std::min<int64_t>(kRowTile, end_output - output);
    const typename Words::Element* readable[kRowTile];
    read_tile<Weight, Words>(args, output, count, buffer, readable);
    for (int64_t p = first_panel; p < end_panel; ++p) {
      const int64_t row = p * kPanelLanes;
      const int64_t x_rows = std::min(kPanelLanes, args.rows - row);
      float* out = args.out + row * args.outputs + output;
      const float* panel = panels + p * panel_size;
      // The first panel brings the weight rows into the cache for the others.
      if (x_rows <= kWidth) {
        multiply_and_store<Words, 1, true>(readable, panel, args.inputs, x_rows, count, out,
                                           args.outputs);
      } else if (p == first_panel) {
        multiply_and_store<Words, kPanelVectors, true>(readable, panel, args.inputs, x_rows, count,
                                                       out, args.outputs);
      } else {
        multiply_and_store<Words, kPanelVectors, false>(readable, panel, args.inputs, x_rows, count,
                                                        out, args.outputs);
      }
    }
  }
}

template <class Words>
void pack_rows(const LinearArgs& args, float* packed, const Parallel& parallel) {
  const int64_t panel_size = steps_of<Words>(args.inputs) * kPanelLanes;
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
  const int64_t panel_size = steps_of<Words>(args.inputs) * kPanelLanes;
  const int64_t panels = (args.rows + kPanelLanes - 1) / kPanelLanes;
  const size_t bytes = static_cast<size_t>(panels * panel_size) * sizeof(float);
  float* packed = static_cast<float*>(scratch_bytes(ScratchSlot::kProduct, bytes));
  pack_rows<Words>(args, packed, parallel);

  const int64_t panel_bytes = panel_size * static_cast<int64_t>(sizeof(float));
  const int64_t per_block = std::max<int64_t>(1, kBlockBytes / std::max<int64_t>(1, panel_bytes));
  const int64_t blocks = (panels + per_block - 1) / per_block;
  const int64_t columns = (args.outputs + kTaskOutputs - 1) / kTaskOutputs;
  parallel_for(parallel, static_cast<size_t>(blocks * columns), [&](size_t task) {
    const int64_t block = static_cast<int64_t>(task) / columns;
    const int64_t output = static_cast<int64_t>(task) % columns * kTaskOutputs;
    multiply_block<Weight, Words>(args, packed, block * per_block,
                                  std::min(panels, (block + 1) * per_block), output,
                                  std::min(args.outputs, output + kTaskOutputs));
  });
}

template <class Weight, class Words>
void linear_of(const LinearArgs& args, const Parallel& parallel) {
  constexpr bool kPacked = std::is_same_v<Weight, Packed>;
  if (args.rows <= kDotRows<Weight, Words>) {
    if constexpr (kPacked) return by_packed_dot_products(args, parallel);
    if constexpr (!kPacked) return by_dot_products<Weight>(args, parallel);
  }
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Words, PairWords>) {
    if (args.rows <= kQuadTokens) {
      return kPacked ? by_packed_quads(args, parallel) : by_quads(args, parallel);
    }
  }
#endif
  return by_panels<Weight, Words>(args, parallel);
}

}  // namespace

void linear(const LinearArgs& args, const Parallel& parallel) {
  if (args.rows == 0 || args.outputs == 0) return;
  if (args.weight.is_packed) {
    if (!args.round_x) return linear_of<Packed, FloatWords>(args, parallel);
    return linear_of<Packed, RowsAs<uint16_t>::Words>(args, parallel);
  }
  if (!args.weight.is_bf16) return linear_of<float, FloatWords>(args, parallel);
  if (!args.round_x) return linear_of<uint16_t, FloatWords>(args, parallel);
  return linear_of<uint16_t, RowsAs<uint16_t>::Words>(args, parallel);
}

}  // namespace hybridge::HYBRIDGE_ISA
