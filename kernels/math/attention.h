// Absorbed latent attention over a paged cache: one key row for all heads, of which the first
// value_dim elements are the value.
//   out[q] = sum_s softmax_s(scale query[q] . row[s]) row[s][:value_dim]
// Dense: s runs over the positions up to the query's own. Sparse: over positions given.
#pragma once

#include <cstdint>

#include "math/levels.h"
#include "math/paged.h"
#include "math/parallel.h"

namespace hybridge {

// Neighbouring queries that read the same rows. A query is one head of one token; query
// token * heads + head is row `query` of the query tensor flattened to [T * heads, row].
struct QueryBlock {
  int64_t sequence;
  int64_t first_query;
  int64_t queries;  // at most kMaxQueries
  // Dense: nullptr, and rows [0, rows) of the sequence are read, each query only those up to its
  // own position. Sparse: `rows` positions, of which negative ones are skipped.
  const int32_t* positions;
  int64_t rows;

  static constexpr int64_t kMaxQueries = 64;
};

// A range of a block's rows: what one task attends to.
struct AttentionTask {
  int64_t block;
  int64_t first_row;
  int64_t end_row;
  // Where the unfinished result goes if the block's rows are shared by several tasks; -1: this task
  // has all rows and finishes.
  int64_t partial;
};

struct AttentionArgs {
  const float* query;  // [T * heads, cache.row]
  int64_t heads;
  Batch batch;
  PagedCache cache;
  int64_t value_dim;
  float scale;
  const QueryBlock* blocks;
  int64_t block_count;
  const AttentionTask* tasks;  // costliest first; those of one block with ascending `partial`
  int64_t task_count;
  int64_t partial_count;
  const int64_t* first_partial;  // [block_count + 1]: partials of a block, none if it is one task
  float* out;                    // [T * heads, value_dim]
};

// Online softmax, statistics and sums in float32. With a bfloat16 cache on a machine that
// multiplies bfloat16 pairs, queries and probabilities are rounded to bfloat16 (relative error 2^-8
// at most); the probabilities' sum is that of the rounded ones. A query without rows gives zeros.
HYBRIDGE_DECLARE_LEVELS(attention, void(const AttentionArgs&, const Parallel&))

}  // namespace hybridge
