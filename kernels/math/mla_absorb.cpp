#include "math/mla_absorb.h"

#include <algorithm>
#include <cstring>

#include "math/panel.h"
#include "math/scratch.h"
#include "math/tiles.h"

namespace hybridge::HYBRIDGE_ISA {
namespace {

// Up to this many tokens a head's rows stream by once, in exact fp32, and their way from memory is
// the limit; beyond, panels of the weight are made, and all tokens of a block pass over each.
constexpr int64_t kStreamTokens = 8;
// Tokens whose x stays in the core's cache while panels are made and pass by.
constexpr int64_t kBlockTokens = 256;
// Weight rows that are read side by side.
constexpr int kStreamRows = kWidth >= 16 ? 8 : 4;

enum class Product { kAbsorb, kExpand };

template <Product kProduct>
int64_t inputs_of(const MlaAbsorbArgs& args) {
  return kProduct == Product::kAbsorb ? args.rows : args.columns;
}
template <Product kProduct>
int64_t outputs_of(const MlaAbsorbArgs& args) {
  return kProduct == Product::kAbsorb ? args.columns : args.rows;
}

template <class Weight>
const Weight* head_weight(const MlaAbsorbArgs& args, int64_t head) {
  const int64_t row = head * args.head_rows + args.first_row;
  return static_cast<const Weight*>(args.weight) + row * args.columns;
}

// ---- Few tokens -------------------------------------------------------------------------------

// sums[t][c] += sum over r of x[t][r] * rows[r][c]; the next kRows rows are fetched meanwhile.
template <int kRows, class Weight>
void add_scaled_rows(const Weight* rows, int64_t columns, const float* x, int64_t x_stride,
                     int64_t tokens, float* sums, int64_t sums_stride) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Weight));
  const auto add = [&](int64_t column, auto&& load, auto&& load_sum, auto&& store_sum) {
    Lanes right[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) right[r] = load(rows + r * columns + column);
    for (int64_t t = 0; t < tokens; ++t) {
      float* at = sums + t * sums_stride + column;
      Lanes sum = load_sum(at);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        sum = multiply_add(Lanes::broadcast(x[t * x_stride + r]), right[r], sum);
      }
      store_sum(at, sum);
    }
  };
  int64_t column = 0;
  for (; column + kWidth <= columns; column += kWidth) {
    if (column % kLine == 0) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) prefetch_far(rows + (kRows + r) * columns + column);
    }
    add(
        column, [](const Weight* from) { return load_lanes(from); },
        [](const float* from) { return Lanes::load(from); },
        [](float* to, Lanes lanes) { lanes.store(to); });
  }
  const int64_t tail = columns - column;
  if (tail == 0) return;
  add(
      column, [&](const Weight* from) { return load_lanes(from, tail); },
      [&](const float* from) { return load_first(from, tail); },
      [&](float* to, Lanes lanes) { store_first(to, lanes, tail); });
}

// Sums lie in working memory: rows of `out` may be whole pages apart, which few caches hold at
// once.
template <class Weight>
void absorb_few(const MlaAbsorbArgs& args, int64_t head) {
  const Weight* weight = head_weight<Weight>(args, head);
  const size_t row_bytes = static_cast<size_t>(args.columns) * sizeof(float);
  const size_t bytes = static_cast<size_t>(args.tokens) * row_bytes;
  auto* sums = static_cast<float*>(scratch_bytes(ScratchSlot::kTask, bytes));
  std::memset(sums, 0, bytes);
  const float* x = args.x + head * args.rows;
  const int64_t x_stride = args.heads * args.rows;
  int64_t row = 0;
  for (; row + kStreamRows <= args.rows; row += kStreamRows) {
    add_scaled_rows<kStreamRows>(weight + row * args.columns, args.columns, x + row, x_stride,
                                 args.tokens, sums, args.columns);
  }
  for (; row < args.rows; ++row) {
    add_scaled_rows<1>(weight + row * args.columns, args.columns, x + row, x_stride, args.tokens,
                       sums, args.columns);
  }
  for (int64_t t = 0; t < args.tokens; ++t) {
    std::memcpy(args.out + (t * args.heads + head) * args.columns, sums + t * args.columns,
                row_bytes);
  }
}

template <class Weight>
void expand_few(const MlaAbsorbArgs& args, int64_t head) {
  matrix_times_rows(head_weight<Weight>(args, head), args.rows, args.columns,
                    args.x + head * args.columns, args.heads * args.columns, args.tokens,
                    [&](int64_t row, int64_t token, float sum) {
                      args.out[(token * args.heads + head) * args.rows + row] = sum;
                    });
}

// ---- Many tokens ------------------------------------------------------------------------------

// One row of x as the product reads it, whole words.
constexpr int64_t x_elements(int64_t inputs, FloatWords) { return inputs; }
inline void write_x(const float* from, int64_t inputs, float* to, FloatWords) {
  std::copy_n(from, inputs, to);
}
#if defined(__AVX512BF16__)
constexpr int64_t x_elements(int64_t inputs, PairWords) { return round_up(inputs, 2); }
inline void write_x(const float* from, int64_t inputs, uint16_t* to, PairWords) {
  for (int64_t i = 0; i < inputs; ++i) to[i] = bf16_from_float(from[i]);
  if (inputs % 2 != 0) to[inputs] = 0;
}
#endif

// A panel whose lanes are neighbouring columns: its steps are the weight's rows, widened.
template <class Weight>
void panel_of_columns(const Weight* weight, int64_t stride, int64_t rows, int64_t count,
                      float* panel, FloatWords) {
  const int64_t lanes = panel_lanes(count);
  for (int64_t row = 0; row < rows; ++row, weight += stride, panel += lanes) {
    for (int64_t lane = 0; lane < lanes; lane += kWidth) {
      const int64_t left = count - lane;
      const Lanes words =
          left >= kWidth ? load_lanes(weight + lane) : load_lanes(weight + lane, left);
      words.store(panel + lane);
    }
  }
}
#if defined(__AVX512BF16__)
// The same for pairs of rows; behind an odd last row are zeros.
void panel_of_columns(const uint16_t* weight, int64_t stride, int64_t rows, int64_t count,
                      float* panel, PairWords) {
  const int64_t lanes = panel_lanes(count);
  for (int64_t row = 0; row < rows; row += 2, weight += 2 * stride, panel += lanes) {
    for (int64_t lane = 0; lane < lanes; lane += kWidth) {
      const int64_t left = std::min<int64_t>(kWidth, count - lane);
      const auto mask = static_cast<__mmask16>((1u << left) - 1u);
      const auto second = static_cast<__mmask16>(row + 1 < rows ? mask : 0);
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, weight + lane));
      const __m512i high =
          _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(second, weight + stride + lane));
      _mm512_storeu_si512(panel + lane, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}
#endif

// A panel whose lanes are neighbouring rows of the weight. `widened` has kPanelLanes rows.
template <class Words>
void panel_of_rows(const float* weight, int64_t columns, int64_t count, float* panel, float*) {
  pack_panel<Words>(weight, columns, count, columns, panel);
}
template <class Words>
void panel_of_rows(const uint16_t* weight, int64_t columns, int64_t count, float* panel,
                   float* widened) {
  for (int64_t row = 0; row < count; ++row) {
    widen_row(weight + row * columns, columns, widened + row * columns);
  }
  pack_panel<Words>(widened, columns, count, columns, panel);
}

// The panel's product with `count` <= kRowTile rows of x, to `outputs` floats of each row of out.
template <class Words, int kVectors>
void multiply_tile_rows(const typename Words::Element* x, int64_t x_stride, int64_t count,
                        const float* panel, int64_t steps, int64_t outputs, float* out,
                        int64_t out_stride) {
  const typename Words::Element* rows[kRowTile];
  for (int64_t i = 0; i < kRowTile; ++i) rows[i] = x + std::min(i, count - 1) * x_stride;
  Lanes sums[kRowTile][kVectors];
  clear_sums(sums);
  multiply_panel<Words, kVectors>(rows, Words::kElements, panel, kVectors * kWidth, steps, sums);
  for (int64_t i = 0; i < count; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t left = outputs - v * kWidth;
      if (left > 0) store_first_or_all(out + i * out_stride + v * kWidth, sums[i][v], left);
    }
  }
}

// One head, the tokens [first, first + count).
template <Product kProduct, class Weight, class Words>
void multiply_block(const MlaAbsorbArgs& args, int64_t head, int64_t first, int64_t count) {
  using Element = typename Words::Element;
  const int64_t inputs = inputs_of<kProduct>(args), outputs = outputs_of<kProduct>(args);
  const int64_t steps = steps_of<Words>(inputs), x_stride = x_elements(inputs, Words());
  constexpr bool kWiden = kProduct == Product::kExpand && sizeof(Weight) != sizeof(float);
  ScratchArena sizes;
  const auto take = [&](ScratchArena& arena, Element*& x, float*& panel, float*& widened) {
    x = arena.take<Element>(static_cast<size_t>(count * x_stride));
    panel = arena.take<float>(static_cast<size_t>(steps * kPanelLanes));
    widened = arena.take<float>(static_cast<size_t>(kWiden ? kPanelLanes * args.columns : 0));
  };
  Element* x = nullptr;
  float *panel = nullptr, *widened = nullptr;
  take(sizes, x, panel, widened);
  ScratchArena memory(scratch_bytes(ScratchSlot::kTask, sizes.used()));
  take(memory, x, panel, widened);

  for (int64_t t = 0; t < count; ++t) {
    write_x(args.x + ((first + t) * args.heads + head) * inputs, inputs, x + t * x_stride, Words());
  }
  const Weight* weight = head_weight<Weight>(args, head);
  const int64_t out_stride = args.heads * outputs;
  for (int64_t output = 0; output < outputs; output += kPanelLanes) {
    const int64_t here = std::min(kPanelLanes, outputs - output);
    if constexpr (kProduct == Product::kAbsorb) {
      panel_of_columns(weight + output, args.columns, args.rows, here, panel, Words());
    } else {
      panel_of_rows<Words>(weight + output * args.columns, args.columns, here, panel, widened);
    }
    float* out = args.out + first * out_stride + head * outputs + output;
    for (int64_t t = 0; t < count; t += kRowTile) {
      const int64_t tile = std::min<int64_t>(kRowTile, count - t);
      const auto multiply =
          here > kWidth ? multiply_tile_rows<Words, kPanelVectors> : multiply_tile_rows<Words, 1>;
      multiply(x + t * x_stride, x_stride, tile, panel, steps, here, out + t * out_stride,
               out_stride);
    }
  }
}

template <Product kProduct, class Weight, class Words>
void multiply_many(const MlaAbsorbArgs& args, const Parallel& parallel) {
  const int64_t blocks = (args.tokens + kBlockTokens - 1) / kBlockTokens;
  parallel_for(parallel, static_cast<size_t>(blocks * args.heads), [&](size_t task) {
    const int64_t first = static_cast<int64_t>(task) / args.heads * kBlockTokens;
    multiply_block<kProduct, Weight, Words>(args, static_cast<int64_t>(task) % args.heads, first,
                                            std::min(kBlockTokens, args.tokens - first));
  });
}

template <Product kProduct, class Weight, class Words>
void multiply(const MlaAbsorbArgs& args, const Parallel& parallel) {
  if (args.tokens > kStreamTokens) return multiply_many<kProduct, Weight, Words>(args, parallel);
  parallel_for(parallel, static_cast<size_t>(args.heads), [&](size_t head) {
    if constexpr (kProduct == Product::kAbsorb) {
      absorb_few<Weight>(args, static_cast<int64_t>(head));
    } else {
      expand_few<Weight>(args, static_cast<int64_t>(head));
    }
  });
}

template <Product kProduct>
void multiply(const MlaAbsorbArgs& args, const Parallel& parallel) {
  if (args.tokens == 0 || outputs_of<kProduct>(args) == 0) return;
  if (!args.weight_bf16) return multiply<kProduct, float, FloatWords>(args, parallel);
  if (!args.round_x) return multiply<kProduct, uint16_t, FloatWords>(args, parallel);
  return multiply<kProduct, uint16_t, RowsAs<uint16_t>::Words>(args, parallel);
}

}  // namespace

void mla_absorb_query(const MlaAbsorbArgs& args, const Parallel& parallel) {
  multiply<Product::kAbsorb>(args, parallel);
}

void mla_expand_value(const MlaAbsorbArgs& args, const Parallel& parallel) {
  multiply<Product::kExpand>(args, parallel);
}

}  // namespace hybridge::HYBRIDGE_ISA
