// LightningIndexer(query, head_weights, indexer_cache, query_start, context_len, block_table;
// top_k)
// -> positions [T, top_k]: each token's best positions, ascending, then -1; padding tokens all -1.
#include "math/lightning_indexer.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "framework/batch.h"
#include "framework/op.h"

namespace hybridge {
namespace {

// Cuts every sequence's tokens into groups, those with the most keys first: handed out in that
// order, the last tasks are the cheapest and threads finish together.
std::vector<TokenGroup> group_tokens(const Batch& batch) {
  std::vector<TokenGroup> groups;
  for (int64_t b = 0; b < batch.sequences; ++b) {
    const int64_t tokens = batch.query_tokens(b);
    for (int64_t first = 0; first < tokens; first += TokenGroup::kMaxTokens) {
      groups.push_back({b, batch.first_token(b) + first, batch.context_len[b] + first,
                        std::min(TokenGroup::kMaxTokens, tokens - first)});
    }
  }
  std::stable_sort(groups.begin(), groups.end(), [](const TokenGroup& a, const TokenGroup& b) {
    return a.first_position + a.tokens > b.first_position + b.tokens;
  });
  return groups;
}

class LightningIndexer : public Kernel {
 public:
  explicit LightningIndexer(const Attributes& attributes)
      : top_k_(attributes.get_int_at_least("top_k", 1)) {}

  void compute(Context& context) const override {
    const Tensor query = context.input(0);
    const Tensor head_weights = context.input(1);
    const Tensor indexer_cache = context.input(2);
    const Tensor block_table = context.input(5);
    query.expect_rank(3, "[T, H, D]");
    head_weights.expect_rank(2, "[T, H]")
        .expect_dim(0, query.dim(0), "tokens of query")
        .expect_dim(1, query.dim(1), "heads of query");
    const Batch batch = check_batch(context.input(3), context.input(4), query.dim(0));
    const PagedCache cache = check_paged_cache(indexer_cache, block_table, batch);
    indexer_cache.expect_dim(3, query.dim(2), "row of query");

    const Tensor out = context.output(0, {query.dim(0), top_k_});
    int32_t* positions = out.data<int32_t>();
    std::fill(positions + batch.used_tokens() * top_k_, positions + batch.tokens * top_k_, -1);
    const std::vector<TokenGroup> groups = group_tokens(batch);
    std::atomic<int64_t> nan_token{-1};
    run_({query.f32(), head_weights.f32(), query.dim(1), cache, groups.data(),
          static_cast<int64_t>(groups.size()), top_k_, positions, &nan_token},
         context.parallel());
    if (nan_token >= 0) {
      query.fail(text("token ", nan_token.load(), " has a score that is not a number"),
                 "look for NaN or infinity in query, head_weights and the rows of indexer_cache");
    }
  }

 private:
  int64_t top_k_;
  plain::lightning_indexer_signature* run_ = select_lightning_indexer();
};

const OpRegistration registration({
    "LightningIndexer",
    {{"query", {DType::f32}},
     {"head_weights", {DType::f32}},
     {"indexer_cache", {DType::f32, DType::bf16}},
     {"query_start", {DType::i32}},
     {"context_len", {DType::i32}},
     {"block_table", {DType::i32}}},
    {{"positions", DType::i32}},
    nullptr,
    make_kernel<LightningIndexer>,
});

}  // namespace
}  // namespace hybridge
