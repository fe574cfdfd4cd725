// MlaAttention(query, latent_cache, query_start, context_len, block_table; scale, value_dim) ->
// out: absorbed latent attention of every token to all positions of its sequence up to its own.
#include <algorithm>

#include "framework/attention.h"
#include "framework/batch.h"
#include "framework/op.h"

namespace hybridge {
namespace {

// Blocks run on from token to token of a sequence, so that several tokens share the rows loaded.
std::vector<QueryBlock> dense_blocks(const Batch& batch, int64_t heads) {
  std::vector<QueryBlock> blocks;
  for (int64_t b = 0; b < batch.sequences; ++b) {
    const int64_t begin = batch.first_token(b) * heads;
    const int64_t end = begin + batch.query_tokens(b) * heads;
    for (int64_t query = begin; query < end; query += QueryBlock::kMaxQueries) {
      const int64_t count = std::min(QueryBlock::kMaxQueries, end - query);
      const int64_t last_token = (query + count - 1 - begin) / heads;
      blocks.push_back({b, query, count, nullptr, batch.context_len[b] + last_token + 1});
    }
  }
  return blocks;
}

class MlaAttention : public Kernel {
 public:
  explicit MlaAttention(const Attributes& attributes) : attention_(attributes) {}

  void compute(Context& context) const override {
    const Tensor query = context.input(0);
    const Tensor latent_cache = context.input(1);
    query.expect_rank(3, "[T, H, C + R]");
    const Batch batch = check_batch(context.input(2), context.input(3), query.dim(0));
    const PagedCache cache = check_paged_cache(latent_cache, context.input(4), batch);
    attention_.check(query, latent_cache);
    attention_.run(context, query, batch, cache, dense_blocks(batch, query.dim(1)));
  }

 private:
  Attention attention_;
};

const OpRegistration registration({
    "MlaAttention",
    {{"query", {DType::f32}},
     {"latent_cache", {DType::f32, DType::bf16}},
     {"query_start", {DType::i32}},
     {"context_len", {DType::i32}},
     {"block_table", {DType::i32}}},
    {{"out", DType::f32}},
    nullptr,
    make_kernel<MlaAttention>,
});

}  // namespace
}  // namespace hybridge
