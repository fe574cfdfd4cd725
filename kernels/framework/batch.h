// Checks of the ragged batch, the paged cache and the slots that the operators take.
#pragma once

#include <cstdint>

#include "framework/tensor.h"
#include "math/paged.h"

namespace hybridge {

// Checks that query_start is a prefix sum from 0 to at most `tokens`, and context_len is no
// less than 0. Raises OpError.
Batch check_batch(const Tensor& query_start, const Tensor& context_len, int64_t tokens);

// Checks the shapes, and that every entry a sequence with tokens in this call will read names a
// block of the cache. Entries beyond a sequence's length, and those of sequences without tokens,
// may hold anything. Raises OpError.
PagedCache check_paged_cache(const Tensor& cache, const Tensor& block_table, const Batch& batch);

// Checks slot numbers: -1, or within `slots` and used once. `what` is the plural of what a slot
// holds.
void check_slots(const Tensor& slot_numbers, int64_t slots, const char* what);

}  // namespace hybridge
