#include "math/attention.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "math/panel.h"
#include "math/scratch.h"

namespace hybridge::HYBRIDGE_ISA {
namespace {

// Rows that pass through the softmax together: their values stay in the core's cache meanwhile.
constexpr int64_t kTileRows = 64;

// Everything a task works in.
struct Working {
  float* panels;   // the queries, one panel for each kPanelLanes of them
  float* scores;   // [kTileRows, lanes]
  float* weights;  // [steps of kTileRows, lanes]: probabilities as words; FloatWords: = scores
  float* values;   // panel
  float* sums;     // [lanes, value_stride]: the output so far, not normalised
  float* maximum;  // [lanes]
  float* exp_sum;  // [lanes]
  float* rescale;  // [lanes]
  float* visible;  // [lanes]
  int64_t lanes;
  int64_t value_stride;
  int64_t row_stride;  // of a float copy of the rows
};

template <class Words>
Working cut_working(ScratchArena& arena, const AttentionArgs& args, int64_t queries) {
  Working w;
  const auto floats = [&](int64_t count) { return arena.take<float>(static_cast<size_t>(count)); };
  w.lanes = round_up(queries, kWidth);
  w.value_stride = round_up(args.value_dim, kWidth);
  w.row_stride = std::max(round_up(args.cache.row, kWidth), w.value_stride);
  w.panels = floats(steps_of<Words>(args.cache.row) * w.lanes);
  w.scores = floats(kTileRows * w.lanes);
  const bool pairs = Words::kElements == 2;
  w.weights = pairs ? floats(kTileRows / 2 * w.lanes) : w.scores;
  w.values = floats(pairs ? kTileRows / 2 * w.value_stride : kTileRows * w.row_stride);
  w.sums = floats(w.lanes * w.value_stride);
  w.maximum = floats(w.lanes);
  w.exp_sum = floats(w.lanes);
  w.rescale = floats(w.lanes);
  w.visible = floats(w.lanes);
  return w;
}

template <class Words>
Working take_working(const AttentionArgs& args, int64_t queries) {
  ScratchArena measure;
  cut_working<Words>(measure, args, queries);
  ScratchArena arena(scratch_bytes(ScratchSlot::kTask, measure.used()));
  return cut_working<Words>(arena, args, queries);
}

template <class Words>
void begin(const AttentionArgs& args, const QueryBlock& block, const Working& w) {
  const int64_t row = args.cache.row;
  const float* query = args.query + block.first_query * row;
  float* panel = w.panels;
  for (int64_t first = 0; first < block.queries; first += kPanelLanes) {
    const int64_t count = std::min(kPanelLanes, block.queries - first);
    pack_panel<Words>(query + first * row, row, count, row, panel);
    panel += steps_of<Words>(row) * panel_lanes(count);
  }
  std::fill(w.sums, w.sums + w.lanes * w.value_stride, 0.0f);
  std::fill(w.exp_sum, w.exp_sum + w.lanes, 0.0f);
  // Not minus infinity: a query that has seen only masked rows must not compute inf - inf.
  std::fill(w.maximum, w.maximum + w.lanes, -FLT_MAX);
}

// ---- One tile: rows, scores, softmax, values ----------------------------------------------------

// Pointers to the next rows of a task, at most kTileRows; `at` moves past what was taken.
template <class Stored>
int64_t next_rows(const AttentionArgs& args, const QueryBlock& block, int64_t end, int64_t& at,
                  const Stored** rows) {
  if (block.positions == nullptr) {
    const int64_t count = std::min(kTileRows, end - at);
    row_pointers(args.cache, block.sequence, at, count, rows);
    at += count;
    return count;
  }
  const Stored* data = static_cast<const Stored*>(args.cache.data);
  int64_t count = 0;
  for (; at < end && count < kTileRows; ++at) {
    if (block.positions[at] < 0) continue;
    rows[count++] =
        data + args.cache.row_index(block.sequence, block.positions[at]) * args.cache.row;
  }
  return count;
}

// Makes the value panel of a tile, and leaves in `readable` the rows as the score product reads
// them.
template <class Stored>
void load_tile(const AttentionArgs& args, const Stored* const* rows, int64_t count,
               const Working& w, const float** readable, FloatWords) {
  for (int64_t r = 0; r < count; ++r) {
    float* copy = w.values + r * w.row_stride;
    widen_row(rows[r], args.cache.row, copy);
    std::fill(copy + args.cache.row, copy + w.row_stride, 0.0f);
    readable[r] = copy;
  }
}

#if defined(__AVX512BF16__)
// Two rows' values, element by element side by side.
void interleave(const uint16_t* even, const uint16_t* odd, int64_t count, float* words) {
  alignas(64) static constexpr uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                    37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                    11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m512i a = _mm512_loadu_si512(even + i);
    const __m512i b = _mm512_loadu_si512(odd + i);
    _mm512_storeu_si512(words + i, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(words + i + 16, _mm512_permutex2var_epi16(a, high, b));
  }
  for (; i < count; ++i) {
    words[i] = float_from_bits(even[i] | static_cast<uint32_t>(odd[i]) << 16);
  }
}

void load_tile(const AttentionArgs& args, const uint16_t* const* rows, int64_t count,
               const Working& w, const uint16_t** readable, PairWords) {
  for (int64_t r = 0; r < count; ++r) readable[r] = rows[r];
  for (int64_t r = 0; r < count; r += 2) {
    float* words = w.values + r / 2 * w.value_stride;
    interleave(rows[r], rows[std::min(r + 1, count - 1)], args.value_dim, words);
    std::fill(words + args.value_dim, words + w.value_stride, 0.0f);
  }
}
#endif

// `ahead`: the next tile's rows, which are fetched meanwhile if kFetch.
template <class Words, int kVectors, bool kFetch>
void score_rows(const typename Words::Element* const* rows, int64_t count, int64_t row,
                const float* panel, float* scores, int64_t stride, RowsAhead ahead) {
  for (int64_t r = 0; r < count; r += kRowTile) {
    const typename Words::Element* tile[kRowTile];
    for (int64_t i = 0; i < kRowTile; ++i) tile[i] = rows[std::min(r + i, count - 1)];
    Lanes sums[kRowTile][kVectors];
    clear_sums(sums);
    multiply_panel_rows<Words, kVectors, kFetch>(tile, panel, kVectors * kWidth, row, sums,
                                                 ahead + r);
    for (int i = 0; i < kRowTile; ++i) {
      for (int v = 0; v < kVectors; ++v) sums[i][v].store(scores + (r + i) * stride + v * kWidth);
    }
  }
}

template <class Words>
void score_tile(const AttentionArgs& args, const typename Words::Element* const* rows,
                int64_t count, const Working& w, RowsAhead ahead) {
  const int64_t row = args.cache.row;
  const float* panel = w.panels;
  for (int64_t lane = 0; lane < w.lanes; lane += kPanelLanes) {
    float* scores = w.scores + lane;
    if (w.lanes - lane <= kWidth) {
      score_rows<Words, 1, true>(rows, count, row, panel, scores, w.lanes, ahead);
    } else if (lane == 0) {
      score_rows<Words, kPanelVectors, true>(rows, count, row, panel, scores, w.lanes, ahead);
    } else {
      score_rows<Words, kPanelVectors, false>(rows, count, row, panel, scores, w.lanes, ahead);
    }
    panel += steps_of<Words>(row) * kPanelLanes;
  }
}

// Minus infinity for rows past a query's own position. first_row is the tile's.
void mask_future(const AttentionArgs& args, const QueryBlock& block, int64_t first_row,
                 int64_t count, const Working& w) {
  const int64_t sequence_query = args.batch.first_token(block.sequence) * args.heads;
  const int64_t context = args.batch.context_len[block.sequence];
  const auto visible_rows = [&](int64_t query) {
    return context + (query - sequence_query) / args.heads + 1 - first_row;
  };
  if (visible_rows(block.first_query) >= count) return;
  for (int64_t lane = 0; lane < w.lanes; ++lane) {
    const int64_t query = block.first_query + std::min(lane, block.queries - 1);
    w.visible[lane] = static_cast<float>(std::clamp<int64_t>(visible_rows(query), 0, kTileRows));
  }
  const Lanes hidden = Lanes::broadcast(-INFINITY);
  for (int64_t r = 0; r < count; ++r) {
    const Lanes position = Lanes::broadcast(static_cast<float>(r));
    for (int64_t lane = 0; lane < w.lanes; lane += kWidth) {
      float* score = w.scores + r * w.lanes + lane;
      select_less(position, Lanes::load(w.visible + lane), Lanes::load(score), hidden).store(score);
    }
  }
}

// exp(scale score - maximum) of two neighbouring rows, stored as the second product reads them; the
// sum of what was stored.
Lanes store_weights(Lanes even, Lanes odd, float* weights, int64_t stride, FloatWords) {
  even.store(weights);
  odd.store(weights + stride);
  return even + odd;
}
float* weights_of(const Working& w, int64_t row, FloatWords) { return w.weights + row * w.lanes; }

#if defined(__AVX512BF16__)
Lanes store_weights(Lanes even, Lanes odd, float* weights, int64_t, PairWords) {
  const auto rounded = [](Lanes x) {
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(x.value);
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
  };
  const __m512i low = rounded(even), high = rounded(odd);
  _mm512_storeu_si512(weights, _mm512_or_si512(high, _mm512_srli_epi32(low, 16)));
  return {_mm512_add_ps(_mm512_castsi512_ps(low), _mm512_castsi512_ps(high))};
}
float* weights_of(const Working& w, int64_t row, PairWords) {
  return w.weights + row / 2 * w.lanes;
}
#endif

// Turns scores into probabilities relative to the largest score so far, for kWidth queries.
template <class Words>
void soften_lanes(const Working& w, int64_t count, int64_t lane, Lanes scale) {
  const float* scores = w.scores + lane;
  const Lanes before = Lanes::load(w.maximum + lane);
  Lanes largest = before;
  for (int64_t r = 0; r < count; ++r) {
    largest = maximum(largest, Lanes::load(scores + r * w.lanes) * scale);
  }
  Lanes total = Lanes::zero();
  for (int64_t r = 0; r < count; r += 2) {
    const Lanes even = exponential(Lanes::load(scores + r * w.lanes) * scale - largest);
    const Lanes odd = r + 1 < count
                          ? exponential(Lanes::load(scores + (r + 1) * w.lanes) * scale - largest)
                          : Lanes::zero();
    float* weights = weights_of(w, r, Words()) + lane;
    total = total + store_weights(even, odd, weights, w.lanes, Words());
  }
  const Lanes rescale = exponential(before - largest);
  multiply_add(Lanes::load(w.exp_sum + lane), rescale, total).store(w.exp_sum + lane);
  rescale.store(w.rescale + lane);
  largest.store(w.maximum + lane);
}

void rescale_sums(const Working& w, int64_t queries) {
  for (int64_t q = 0; q < queries; ++q) {
    if (w.rescale[q] == 1.0f) continue;
    const Lanes factor = Lanes::broadcast(w.rescale[q]);
    float* sums = w.sums + q * w.value_stride;
    for (int64_t d = 0; d < w.value_stride; d += kWidth) {
      (Lanes::load(sums + d) * factor).store(sums + d);
    }
  }
}

// Adds the tile's values, weighted, for kRowTile queries and kVectors vectors of elements.
template <class Words, int kVectors>
void add_values_at(const Working& w, int64_t query, int64_t steps, int64_t value_lanes,
                   int64_t element) {
  using Element = typename Words::Element;
  const Element* rows[kRowTile];
  for (int i = 0; i < kRowTile; ++i) {
    rows[i] = reinterpret_cast<const Element*>(w.weights + query + i);
  }
  Lanes sums[kRowTile][kVectors];
  float* out = w.sums + query * w.value_stride + element;
  for (int i = 0; i < kRowTile; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      sums[i][v] = Lanes::load(out + i * w.value_stride + v * kWidth);
    }
  }
  multiply_panel<Words, kVectors>(rows, w.lanes * Words::kElements, w.values + element, value_lanes,
                                  steps, sums);
  for (int i = 0; i < kRowTile; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      sums[i][v].store(out + i * w.value_stride + v * kWidth);
    }
  }
}

template <class Words>
void add_values(const Working& w, int64_t count, int64_t queries) {
  const int64_t steps = steps_of<Words>(count);
  const int64_t value_lanes = Words::kElements == 2 ? w.value_stride : w.row_stride;
  for (int64_t element = 0; element < w.value_stride; element += kPanelLanes) {
    for (int64_t query = 0; query < queries; query += kRowTile) {
      if (w.value_stride - element <= kWidth) {
        add_values_at<Words, 1>(w, query, steps, value_lanes, element);
      } else {
        add_values_at<Words, kPanelVectors>(w, query, steps, value_lanes, element);
      }
    }
  }
}

// Asks for whole rows of `bytes` bytes to be brought into the cache.
template <class Stored>
void fetch_rows(const Stored* const* rows, int64_t count, int64_t bytes) {
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t at = 0; at < bytes; at += 64) {
      prefetch(reinterpret_cast<const char*>(rows[r]) + at);
    }
  }
}

template <class Stored>
void attend(const AttentionArgs& args, const QueryBlock& block, const AttentionTask& task,
            const Working& w) {
  using Words = typename RowsAs<Stored>::Words;
  const Lanes scale = Lanes::broadcast(args.scale);
  const typename Words::Element* readable[kTileRows];
  // The rows of this tile and of the next; where that has fewer, any address will do.
  const Stored* rows[2][kTileRows];
  std::fill_n(rows[0], 2 * kTileRows, static_cast<const Stored*>(args.cache.data));
  int64_t at = task.first_row, first = at;
  int64_t count = next_rows(args, block, task.end_row, at, rows[0]);
  fetch_rows(rows[0], count, args.cache.row * static_cast<int64_t>(sizeof(Stored)));
  begin<Words>(args, block, w);
  for (int64_t tile = 0; count > 0; ++tile) {
    const int64_t next_first = at;
    const Stored** next = rows[(tile + 1) % 2];
    const int64_t next_count = next_rows(args, block, task.end_row, at, next);
    load_tile(args, rows[tile % 2], count, w, readable, Words());
    const char* ahead[kTileRows];
    for (int64_t r = 0; r < kTileRows; ++r) ahead[r] = reinterpret_cast<const char*>(next[r]);
    score_tile<Words>(args, readable, count, w, ahead);
    if (block.positions == nullptr) mask_future(args, block, first, count, w);
    for (int64_t lane = 0; lane < w.lanes; lane += kWidth) {
      soften_lanes<Words>(w, count, lane, scale);
    }
    rescale_sums(w, block.queries);
    add_values<Words>(w, count, block.queries);
    first = next_first;
    count = next_count;
  }
}

// ---- Results --------------------------------------------------------------------------------

void write_query(const AttentionArgs& args, int64_t query, const float* sums, float exp_sum) {
  float* out = args.out + query * args.value_dim;
  const float factor = exp_sum == 0.0f ? 0.0f : 1.0f / exp_sum;
  for (int64_t d = 0; d < args.value_dim; ++d) out[d] = sums[d] * factor;
}

// Unfinished results of tasks that share a block.
struct Partials {
  float* sums;     // [partials, kMaxQueries, value_dim]
  float* maximum;  // [partials, kMaxQueries]
  float* exp_sum;  // [partials, kMaxQueries]
};

Partials cut_partials(ScratchArena& arena, const AttentionArgs& args) {
  const size_t rows = static_cast<size_t>(args.partial_count * QueryBlock::kMaxQueries);
  Partials partials;
  partials.sums = arena.take<float>(rows * static_cast<size_t>(args.value_dim));
  partials.maximum = arena.take<float>(rows);
  partials.exp_sum = arena.take<float>(rows);
  return partials;
}

Partials take_partials(const AttentionArgs& args) {
  ScratchArena measure;
  cut_partials(measure, args);
  ScratchArena arena(scratch_bytes(ScratchSlot::kOperator, measure.used()));
  return cut_partials(arena, args);
}

void keep_partial(const AttentionArgs& args, const Working& w, int64_t queries,
                  const Partials& partials, int64_t partial) {
  const int64_t first = partial * QueryBlock::kMaxQueries;
  for (int64_t q = 0; q < queries; ++q) {
    std::copy_n(w.sums + q * w.value_stride, args.value_dim,
                partials.sums + (first + q) * args.value_dim);
    partials.maximum[first + q] = w.maximum[q];
    partials.exp_sum[first + q] = w.exp_sum[q];
  }
}

// Sums the partial results of query q of a block into the first of them, and writes it.
void merge_query(const AttentionArgs& args, int64_t block, int64_t q, const Partials& partials) {
  const int64_t begin = args.first_partial[block], end = args.first_partial[block + 1];
  const auto row = [&](int64_t partial) { return partial * QueryBlock::kMaxQueries + q; };
  float largest = -FLT_MAX;
  for (int64_t p = begin; p < end; ++p) largest = std::max(largest, partials.maximum[row(p)]);
  float* total = partials.sums + row(begin) * args.value_dim;
  float exp_sum = 0;
  for (int64_t p = begin; p < end; ++p) {
    const float factor = std::exp(partials.maximum[row(p)] - largest);
    exp_sum += factor * partials.exp_sum[row(p)];
    const float* sums = partials.sums + row(p) * args.value_dim;
    for (int64_t d = 0; d < args.value_dim; ++d) {
      total[d] = p == begin ? factor * sums[d] : total[d] + factor * sums[d];
    }
  }
  write_query(args, args.blocks[block].first_query + q, total, exp_sum);
}

template <class Stored>
void attention_of(const AttentionArgs& args, const Parallel& parallel) {
  using Words = typename RowsAs<Stored>::Words;
  const Partials partials = take_partials(args);
  parallel_for(parallel, static_cast<size_t>(args.task_count), [&](size_t t) {
    const AttentionTask& task = args.tasks[t];
    const QueryBlock& block = args.blocks[task.block];
    const Working w = take_working<Words>(args, block.queries);
    attend<Stored>(args, block, task, w);
    if (task.partial >= 0) return keep_partial(args, w, block.queries, partials, task.partial);
    for (int64_t q = 0; q < block.queries; ++q) {
      write_query(args, block.first_query + q, w.sums + q * w.value_stride, w.exp_sum[q]);
    }
  });
  if (args.partial_count == 0) return;
  parallel_for(parallel, static_cast<size_t>(args.block_count), [&](size_t b) {
    const int64_t block = static_cast<int64_t>(b);
    if (args.first_partial[block] == args.first_partial[block + 1]) return;
    for (int64_t q = 0; q < args.blocks[block].queries; ++q) {
      merge_query(args, block, q, partials);
    }
  });
}

}  // namespace

void attention(const AttentionArgs& args, const Parallel& parallel) {
  if (args.cache.bf16) return attention_of<uint16_t>(args, parallel);
  return attention_of<float>(args, parallel);
}

}  // namespace hybridge::HYBRIDGE_ISA
