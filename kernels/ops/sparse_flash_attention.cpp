// SparseFlashAttention(query, latent_cache, positions, query_start, context_len, block_table;
// scale, value_dim) -> out: absorbed latent attention of every token to the positions chosen for
// it. -1 is no position; a token without any gives zeros.
#include <algorithm>

#include "framework/attention.h"
#include "framework/batch.h"
#include "framework/op.h"

namespace hybridge {
namespace {

// A position must be one that the token can see: what lies beyond may not be written yet.
void check_positions(const Tensor& positions, const Batch& batch) {
  const int64_t width = positions.dim(1);
  for (int64_t b = 0; b < batch.sequences; ++b) {
    for (int64_t i = 0; i < batch.query_tokens(b); ++i) {
      const int64_t token = batch.first_token(b) + i;
      const int64_t own = batch.context_len[b] + i;
      const int32_t* row = positions.i32() + token * width;
      int32_t least = 0, most = 0;
      for (int64_t j = 0; j < width; ++j) {
        least = std::min(least, row[j]);
        most = std::max(most, row[j]);
      }
      if (least >= -1 && most <= own) continue;
      positions.fail(text(least < -1 ? least : most, " in the row of token ", token,
                          " is not among its positions 0 to ", own),
                     "use positions up to the token's own, or -1 for none");
    }
  }
}

// The number of entries up to the last that is a position.
int64_t filled(const int32_t* positions, int64_t width) {
  while (width > 0 && positions[width - 1] < 0) --width;
  return width;
}

std::vector<QueryBlock> sparse_blocks(const Tensor& positions, const Batch& batch, int64_t heads) {
  std::vector<QueryBlock> blocks;
  for (int64_t b = 0; b < batch.sequences; ++b) {
    for (int64_t i = 0; i < batch.query_tokens(b); ++i) {
      const int64_t token = batch.first_token(b) + i;
      const int32_t* chosen = positions.i32() + token * positions.dim(1);
      const int64_t rows = filled(chosen, positions.dim(1));
      for (int64_t head = 0; head < heads; head += QueryBlock::kMaxQueries) {
        blocks.push_back({b, token * heads + head, std::min(QueryBlock::kMaxQueries, heads - head),
                          chosen, rows});
      }
    }
  }
  return blocks;
}

class SparseFlashAttention : public Kernel {
 public:
  explicit SparseFlashAttention(const Attributes& attributes) : attention_(attributes) {}

  void compute(Context& context) const override {
    const Tensor query = context.input(0);
    const Tensor latent_cache = context.input(1);
    const Tensor positions = context.input(2);
    query.expect_rank(3, "[T, H, C + R]");
    positions.expect_rank(2, "[T, k]").expect_dim(0, query.dim(0), "tokens of query");
    const Batch batch = check_batch(context.input(3), context.input(4), query.dim(0));
    const PagedCache cache = check_paged_cache(latent_cache, context.input(5), batch);
    attention_.check(query, latent_cache);
    check_positions(positions, batch);
    attention_.run(context, query, batch, cache, sparse_blocks(positions, batch, query.dim(1)));
  }

 private:
  Attention attention_;
};

const OpRegistration registration({
    "SparseFlashAttention",
    {{"query", {DType::f32}},
     {"latent_cache", {DType::f32, DType::bf16}},
     {"positions", {DType::i32}},
     {"query_start", {DType::i32}},
     {"context_len", {DType::i32}},
     {"block_table", {DType::i32}}},
    {{"out", DType::f32}},
    nullptr,
    make_kernel<SparseFlashAttention>,
});

}  // namespace
}  // namespace hybridge
