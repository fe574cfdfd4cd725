#include "math/lightning_indexer.h"

#include <algorithm>

#include "math/panel.h"
#include "math/scratch.h"
#include "math/top_k.h"

namespace hybridge::HYBRIDGE_ISA {
namespace {

// With no more groups than this, a group's keys are shared out over the threads; with more, whole
// groups are.
constexpr int64_t kSharedGroups = 16;
// Keys of one task where keys are shared out.
constexpr int64_t kTaskKeys = 1024;

// How many tiles of kRowTile keys ahead of the products keys are fetched.
constexpr int64_t kTilesAhead = 1;

// What the tokens of a group bring along, in the form that the products read.
struct PackedQueries {
  float* panels;   // per token, per block of up to kPanelLanes heads: a panel
  float* weights;  // per token: head weights, padded with zeros to whole Lanes
  int64_t panel_stride;
  int64_t weight_stride;
};

template <class Words>
PackedQueries take_queries(ScratchArena& arena, const LightningIndexerArgs& args, int64_t tokens) {
  PackedQueries packed;
  packed.weight_stride = round_up(args.heads, kWidth);
  packed.panel_stride = steps_of<Words>(args.cache.row) * packed.weight_stride;
  packed.panels = arena.take<float>(static_cast<size_t>(tokens * packed.panel_stride));
  packed.weights = arena.take<float>(static_cast<size_t>(tokens * packed.weight_stride));
  return packed;
}

// Rounds to bfloat16 what is multiplied as float, so that all levels see the same query.
void round_values(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = float_from_bf16(bf16_from_float(values[i]));
}

template <class Stored>
void pack_token(const LightningIndexerArgs& args, int64_t token, int64_t slot,
                const PackedQueries& packed) {
  using Words = typename RowsAs<Stored>::Words;
  const int64_t row = args.cache.row;
  const float* query = args.query + token * args.heads * row;
  float* panel = packed.panels + slot * packed.panel_stride;
  for (int64_t head = 0; head < args.heads; head += kPanelLanes) {
    const int64_t count = std::min(kPanelLanes, args.heads - head);
    pack_panel<Words>(query + head * row, row, count, row, panel);
    panel += steps_of<Words>(row) * panel_lanes(count);
  }
  if constexpr (kWidened<Stored>) {
    round_values(packed.panels + slot * packed.panel_stride, packed.panel_stride);
  }
  float* weights = packed.weights + slot * packed.weight_stride;
  for (int64_t head = 0; head < packed.weight_stride; ++head) {
    weights[head] = head < args.heads ? args.head_weights[token * args.heads + head] : 0.0f;
  }
}

// totals[i] += weights * relu(rows[i] . queries), lane by lane over the heads of one panel.
template <class Words, int kVectors, bool kFetch>
void add_heads(const typename Words::Element* const* rows, const float* panel, int64_t row,
               const float* weights, Lanes (&totals)[kRowTile], RowsAhead ahead) {
  Lanes sums[kRowTile][kVectors];
  clear_sums(sums);
  multiply_panel_rows<Words, kVectors, kFetch>(rows, panel, kVectors * kWidth, row, sums, ahead);
  for (int v = 0; v < kVectors; ++v) {
    const Lanes weight = Lanes::load(weights + v * kWidth);
    for (int i = 0; i < kRowTile; ++i) {
      totals[i] = multiply_add(weight, maximum(Lanes::zero(), sums[i][v]), totals[i]);
    }
  }
}

// The scores of kRowTile keys for one token. `ahead`: keys to fetch meanwhile, or nullptr.
template <class Words>
void score_tile(const typename Words::Element* const* rows, const float* panel,
                const float* weights, int64_t heads, int64_t row, float* scores, RowsAhead ahead) {
  Lanes totals[kRowTile];
  for (Lanes& total : totals) total = Lanes::zero();
  for (int64_t head = 0; head < heads; head += kPanelLanes) {
    const float* head_weights = weights + head;
    if (heads - head <= kWidth) {
      add_heads<Words, 1, false>(rows, panel, row, head_weights, totals, nullptr);
    } else if (head == 0 && ahead != nullptr) {
      add_heads<Words, kPanelVectors, true>(rows, panel, row, head_weights, totals, ahead);
    } else {
      add_heads<Words, kPanelVectors, false>(rows, panel, row, head_weights, totals, nullptr);
    }
    panel += steps_of<Words>(row) * kPanelLanes;
  }
  // Adding +0 makes -0 into +0: the two are equal and must tie.
  for (int i = 0; i < kRowTile; ++i) scores[i] = sum_of(totals[i]) + 0.0f;
}

// Whether a token has more positions than it may choose.
bool must_choose(const LightningIndexerArgs& args, int64_t visible) { return visible > args.top_k; }

// Scores keys [begin, end) for the tokens of a group. scores[i * stride + s] is token i's of key s;
// up to kRowTile beyond the last key may be written.
template <class Stored>
void score_keys(const LightningIndexerArgs& args, const TokenGroup& group,
                const PackedQueries& packed, int64_t begin, int64_t end, float* widened,
                float* scores, int64_t stride) {
  using Words = typename RowsAs<Stored>::Words;
  for (int64_t key = begin; key < end; key += kRowTile) {
    const int64_t count = std::min<int64_t>(kRowTile, end - key);
    const Stored* rows[kRowTile];
    row_pointers(args.cache, group.sequence, key, count, rows);
    const typename Words::Element* readable[kRowTile];
    readable_rows(rows, count, args.cache.row, widened, readable);
    const Stored* later[kRowTile];
    const int64_t later_key = std::min(key + kTilesAhead * kRowTile, end - count);
    row_pointers(args.cache, group.sequence, later_key, count, later);
    const char* ahead[kRowTile];
    for (int64_t i = 0; i < kRowTile; ++i) {
      ahead[i] = reinterpret_cast<const char*>(later[std::min(i, count - 1)]);
    }
    bool first = true;
    for (int64_t i = 0; i < group.tokens; ++i) {
      const int64_t visible = group.first_position + i + 1;
      if (!must_choose(args, visible) || key >= visible) continue;
      score_tile<Words>(readable, packed.panels + i * packed.panel_stride,
                        packed.weights + i * packed.weight_stride, args.heads, args.cache.row,
                        scores + i * stride + key, first ? ahead : nullptr);
      first = false;
    }
  }
}

// Writes one token's positions. `scores` is read only if the token must choose.
void choose(const LightningIndexerArgs& args, int64_t token, int64_t visible, const float* scores,
            uint32_t* orders, uint32_t* work) {
  int32_t* out = args.out + token * args.top_k;
  if (must_choose(args, visible)) {
    if (!select_top_k(scores, visible, args.top_k, orders, work, out)) {
      args.nan_token->store(token, std::memory_order_relaxed);
    }
    return;
  }
  for (int64_t i = 0; i < args.top_k; ++i) out[i] = i < visible ? static_cast<int32_t>(i) : -1;
}

int64_t last_visible(const TokenGroup& group) { return group.first_position + group.tokens; }

// Scores of a token are this far apart: whole cache lines, and room for a whole tile at the end.
int64_t score_stride(int64_t visible) { return round_up(visible + kRowTile, 16); }

int64_t most_visible(const LightningIndexerArgs& args) {
  int64_t most = 0;
  for (int64_t g = 0; g < args.group_count; ++g) {
    most = std::max(most, last_visible(args.groups[g]));
  }
  return most;
}

// Working memory of one task.
struct TaskScratch {
  float* widened;
  float* scores;
  uint32_t* orders;
  uint32_t* work;
  PackedQueries packed;
};

template <class Stored>
TaskScratch cut_task_scratch(ScratchArena& arena, const LightningIndexerArgs& args,
                             int64_t score_rows, int64_t stride) {
  using Words = typename RowsAs<Stored>::Words;
  TaskScratch scratch;
  scratch.widened =
      arena.take<float>(kWidened<Stored> ? static_cast<size_t>(kRowTile * args.cache.row) : 0);
  scratch.scores = arena.take<float>(static_cast<size_t>(score_rows * stride));
  scratch.orders = arena.take<uint32_t>(static_cast<size_t>(stride + 16));
  scratch.work = arena.take<uint32_t>(static_cast<size_t>(stride + 16));
  scratch.packed = take_queries<Words>(arena, args, score_rows);
  return scratch;
}

template <class Stored>
TaskScratch task_scratch(const LightningIndexerArgs& args, int64_t score_rows, int64_t stride) {
  ScratchArena measure;
  cut_task_scratch<Stored>(measure, args, score_rows, stride);
  ScratchArena arena(scratch_bytes(ScratchSlot::kTask, measure.used()));
  return cut_task_scratch<Stored>(arena, args, score_rows, stride);
}

// Many groups: a task scores and chooses for one group, with its scores in its own memory.
template <class Stored>
void group_by_group(const LightningIndexerArgs& args, const Parallel& parallel) {
  parallel_for(parallel, static_cast<size_t>(args.group_count), [&](size_t g) {
    const TokenGroup& group = args.groups[g];
    const int64_t keys = last_visible(group);
    const int64_t stride = score_stride(keys);
    TaskScratch scratch = task_scratch<Stored>(args, group.tokens, stride);
    if (must_choose(args, keys)) {
      for (int64_t i = 0; i < group.tokens; ++i) {
        pack_token<Stored>(args, group.first_token + i, i, scratch.packed);
      }
      score_keys<Stored>(args, group, scratch.packed, 0, keys, scratch.widened, scratch.scores,
                         stride);
    }
    for (int64_t i = 0; i < group.tokens; ++i) {
      choose(args, group.first_token + i, group.first_position + i + 1, scratch.scores + i * stride,
             scratch.orders, scratch.work);
    }
  });
}

// Few groups (decode): tasks share a group's keys, then choose.
template <class Stored>
void key_by_key(const LightningIndexerArgs& args, const Parallel& parallel) {
  using Words = typename RowsAs<Stored>::Words;
  const int64_t slots = args.group_count * TokenGroup::kMaxTokens;
  const int64_t keys = most_visible(args);
  const int64_t stride = score_stride(keys);
  const auto cut = [&](ScratchArena& arena, float*& scores) {
    scores = arena.take<float>(static_cast<size_t>(slots * stride));
    return take_queries<Words>(arena, args, slots);
  };
  float* scores = nullptr;
  ScratchArena measure;
  cut(measure, scores);
  ScratchArena arena(scratch_bytes(ScratchSlot::kOperator, measure.used()));
  const PackedQueries packed = cut(arena, scores);

  parallel_for(parallel, static_cast<size_t>(slots), [&](size_t slot) {
    const TokenGroup& group = args.groups[slot / TokenGroup::kMaxTokens];
    const int64_t i = static_cast<int64_t>(slot) % TokenGroup::kMaxTokens;
    if (i >= group.tokens || !must_choose(args, group.first_position + i + 1)) return;
    pack_token<Stored>(args, group.first_token + i, static_cast<int64_t>(slot), packed);
  });

  const int64_t chunks = (keys + kTaskKeys - 1) / kTaskKeys;
  parallel_for(parallel, static_cast<size_t>(args.group_count * chunks), [&](size_t task) {
    const int64_t g = static_cast<int64_t>(task) / chunks;
    const int64_t begin = static_cast<int64_t>(task) % chunks * kTaskKeys;
    const int64_t end = std::min(begin + kTaskKeys, last_visible(args.groups[g]));
    if (begin >= end || !must_choose(args, last_visible(args.groups[g]))) return;
    const int64_t first = g * TokenGroup::kMaxTokens;
    PackedQueries own = packed;
    own.panels += first * packed.panel_stride;
    own.weights += first * packed.weight_stride;
    float* widened = task_scratch<Stored>(args, 0, 0).widened;
    score_keys<Stored>(args, args.groups[g], own, begin, end, widened, scores + first * stride,
                       stride);
  });

  parallel_for(parallel, static_cast<size_t>(slots), [&](size_t slot) {
    const TokenGroup& group = args.groups[slot / TokenGroup::kMaxTokens];
    const int64_t i = static_cast<int64_t>(slot) % TokenGroup::kMaxTokens;
    if (i >= group.tokens) return;
    const TaskScratch scratch = task_scratch<Stored>(args, 0, stride);
    choose(args, group.first_token + i, group.first_position + i + 1,
           scores + static_cast<int64_t>(slot) * stride, scratch.orders, scratch.work);
  });
}

template <class Stored>
void index_tokens(const LightningIndexerArgs& args, const Parallel& parallel) {
  if (args.group_count <= kSharedGroups) return key_by_key<Stored>(args, parallel);
  return group_by_group<Stored>(args, parallel);
}

}  // namespace

void lightning_indexer(const LightningIndexerArgs& args, const Parallel& parallel) {
  if (args.cache.bf16) return index_tokens<uint16_t>(args, parallel);
  return index_tokens<float>(args, parallel);
}

}  // namespace hybridge::HYBRIDGE_ISA
