#include "framework/batch.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace hybridge {
namespace {

void check_block_ids(const Tensor& block_table, const PagedCache& cache, const Batch& batch,
                     int64_t b) {
  const int64_t length = batch.length(b);
  const int64_t used = (length + cache.block - 1) / cache.block;
  if (used > cache.table_width) {
    block_table.fail(text("sequence ", b, " has ", length, " tokens, more than ", cache.table_width,
                          " blocks of ", cache.block, " hold"),
                     "widen the table or shorten the sequence");
  }
  for (int64_t i = 0; i < used; ++i) {
    const int32_t id = cache.table[b * cache.table_width + i];
    if (id < 0 || id >= cache.blocks) {
      block_table.fail(text("block id ", id, " at [", b, ", ", i, "] is outside the cache of ",
                            cache.blocks, " blocks"),
                       text("the first ", used, " entries of row ", b, " must name blocks in use"));
    }
  }
}

// The cost follows the tokens of the call, not the size of the cache.
void check_slots_differ(const Tensor& slot_numbers) {
  std::vector<std::pair<int32_t, int64_t>> sorted;
  for (int64_t i = 0; i < slot_numbers.elements(); ++i) {
    if (slot_numbers.i32()[i] >= 0) sorted.emplace_back(slot_numbers.i32()[i], i);
  }
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i].first != sorted[i - 1].first) continue;
    slot_numbers.fail(text(sorted[i].first, " at index ", sorted[i].second, " is used twice"),
                      "give each a slot of its own");
  }
}

}  // namespace

Batch check_batch(const Tensor& query_start, const Tensor& context_len, int64_t tokens) {
  query_start.expect_rank(1, "[B + 1] prefix sums");
  context_len.expect_rank(1, "[B]");
  const int64_t sequences = context_len.dim(0);
  query_start.expect_dim(0, sequences + 1, "one more than context_len");
  const Batch batch{sequences, tokens, query_start.i32(), context_len.i32()};
  if (batch.query_start[0] != 0) {
    query_start.fail(text("starts at ", batch.query_start[0]), "prefix sums start at 0");
  }
  for (int64_t b = 0; b < sequences; ++b) {
    if (batch.query_start[b + 1] < batch.query_start[b]) {
      query_start.fail(text("falls from ", batch.query_start[b], " to ", batch.query_start[b + 1],
                            " at index ", b + 1),
                       "pass prefix sums of the sequences' token counts");
    }
    if (batch.context_len[b] < 0) {
      context_len.fail(text(batch.context_len[b], " at index ", b), "a length is at least 0");
    }
    if (batch.length(b) > std::numeric_limits<int32_t>::max()) {
      context_len.fail(text(batch.context_len[b], " at index ", b, " makes ", batch.length(b),
                            " tokens with this call's"),
                       "positions are int32: keep a sequence below 2^31 tokens");
    }
  }
  if (batch.used_tokens() > tokens) {
    query_start.fail(text("ends at ", batch.used_tokens(), ", beyond the ", tokens, " tokens"),
                     "pass prefix sums of the sequences' token counts");
  }
  return batch;
}

PagedCache check_paged_cache(const Tensor& cache, const Tensor& block_table, const Batch& batch) {
  cache.expect_rank(4, "[blocks, block, 1, row]").expect_dim(2, 1, "one head");
  block_table.expect_rank(2, "[B, blocks]").expect_dim(0, batch.sequences, "sequences");
  PagedCache out;
  out.data = cache.raw();
  out.bf16 = cache.is_bf16();
  out.blocks = cache.dim(0);
  out.block = cache.dim(1);
  out.row = cache.dim(3);
  out.table = block_table.i32();
  out.table_width = block_table.dim(1);
  if (out.block < 1 || out.block > std::numeric_limits<int32_t>::max()) {
    cache.fail(text("blocks of ", out.block, " rows"), "a block has 1 to 2^31 - 1 rows");
  }
  for (int64_t b = 0; b < batch.sequences; ++b) {
    if (batch.query_tokens(b) > 0) check_block_ids(block_table, out, batch, b);
  }
  return out;
}

void check_slots(const Tensor& slot_numbers, int64_t slots, const char* what) {
  const int32_t* numbers = slot_numbers.i32();
  const int64_t count = slot_numbers.elements();
  bool ascending = true;
  int32_t largest = -1;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t slot = numbers[i];
    if (slot == -1) continue;
    if (slot < 0 || slot >= slots) {
      slot_numbers.fail(text(slot, " at index ", i, " is outside the ", slots, " ", what),
                        "use a number in range, or -1 for none");
    }
    ascending = ascending && slot > largest;
    largest = std::max(largest, slot);
  }
  if (!ascending) check_slots_differ(slot_numbers);
}

}  // namespace hybridge
