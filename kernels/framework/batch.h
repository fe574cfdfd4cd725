// The ragged batch that every cache and state operator takes, checked.
//
// Tokens are packed: sequence b owns tokens [query_start[b], query_start[b+1]); context_len[b]
// tokens of it were cached before this call, so token t has position context_len[b] + t -
// query_start[b].
#pragma once

#include <cstdint>
#include <vector>

#include "framework/tensor.h"

namespace hybridge {

// The sequences of a batch. Pointers are into the inputs.
struct Batch {
  int64_t sequences = 0;
  int64_t tokens = 0;  // T, padding included
  const int32_t* query_start = nullptr;
  const int32_t* context_len = nullptr;

  int64_t first_token(int64_t b) const { return query_start[b]; }
  int64_t query_tokens(int64_t b) const { return query_start[b + 1] - query_start[b]; }
  // Tokens of the sequence including this call's.
  int64_t length(int64_t b) const { return int64_t{context_len[b]} + query_tokens(b); }
  int64_t used_tokens() const { return query_start[sequences]; }
};

// Checks that query_start is a prefix sum from 0 to at most `tokens`, and context_len is no
// less than 0. Raises OpError.
Batch check_batch(const Tensor& query_start, const Tensor& context_len, int64_t tokens);

// A paged cache [blocks, block, ...] read through a block table [B, width].
struct PagedCache {
  const void* data = nullptr;
  bool bf16 = false;
  int64_t blocks = 0;
  int64_t block = 0;  // rows in a block
  int64_t row = 0;    // elements in a row
  const int32_t* table = nullptr;
  int64_t table_width = 0;

  // Index of the row that holds `position` of sequence b; multiply by `row` for elements.
  int64_t row_index(int64_t b, int64_t position) const {
    return int64_t{table[b * table_width + position / block]} * block + position % block;
  }
};

// Checks the shapes, and that every entry a sequence with tokens in this call will read names a
// block of the cache. Entries beyond a sequence's length, and those of sequences without tokens,
// may hold anything. Raises OpError.
PagedCache check_paged_cache(const Tensor& cache, const Tensor& block_table, const Batch& batch);

// Checks slot numbers: -1, or within `slots` and used once. `what` is the plural of what a slot
// holds.
void check_slots(const Tensor& slot_numbers, int64_t slots, const char* what);

}  // namespace hybridge
