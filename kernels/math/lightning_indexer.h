// For each token the k positions of its sequence with the largest
//   score[s] = sum_h head_weights[h] * relu(query[h] . key[s]),   s <= position of the token.
#pragma once

#include <atomic>
#include <cstdint>

#include "math/levels.h"
#include "math/paged.h"
#include "math/parallel.h"

namespace hybridge {

// Neighbouring tokens of one sequence, scored together so that a key is loaded once for all.
struct TokenGroup {
  int64_t sequence;
  int64_t first_token;
  int64_t first_position;
  int64_t tokens;  // at most kMaxTokens

  static constexpr int64_t kMaxTokens = 4;
};

struct LightningIndexerArgs {
  const float* query;         // [T, heads, cache.row]
  const float* head_weights;  // [T, heads]
  int64_t heads;
  PagedCache cache;
  const TokenGroup* groups;  // costliest first
  int64_t group_count;
  int64_t top_k;
  int32_t* out;                     // [T, top_k]: positions ascending, then -1
  std::atomic<int64_t>* nan_token;  // set to a token that has a NaN among its scores
};

// With a bfloat16 cache the query is rounded to bfloat16, at every level; sums are float32, so that
// a score differs from the exact one of the rounded query by at most about
//   (row + heads) 2^-23 sum_h |head_weights[h]| |query[h]| . |key[s]|.
// Equal keys have equal scores, bit for bit. Where a token sees no more than top_k positions, all
// are taken and none is scored. Memory: one float and two words a position and thread, times
// kMaxTokens; no [T, S] tensor exists.
HYBRIDGE_DECLARE_LEVELS(lightning_indexer, void(const LightningIndexerArgs&, const Parallel&))

}  // namespace hybridge
