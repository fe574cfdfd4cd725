#include "framework/attention.h"

#include <algorithm>

namespace hybridge {
namespace {

// With at least this many blocks of queries there is work for every thread without sharing rows.
constexpr int64_t kEnoughBlocks = 16;
// Rows that make a task of their own worthwhile: some 50 microseconds against 5 to set up and
// merge.
constexpr int64_t kTaskRows = 256;
constexpr int64_t kMaxTasksOfBlock = 16;

struct Plan {
  std::vector<AttentionTask> tasks;
  std::vector<int64_t> first_partial{0};
};

int64_t tasks_of(const QueryBlock& block, size_t blocks) {
  if (static_cast<int64_t>(blocks) >= kEnoughBlocks) return 1;
  return std::clamp<int64_t>(block.rows / kTaskRows, 1, kMaxTasksOfBlock);
}

Plan plan_tasks(const std::vector<QueryBlock>& blocks) {
  Plan plan;
  int64_t partials = 0;
  for (size_t b = 0; b < blocks.size(); ++b) {
    const int64_t count = tasks_of(blocks[b], blocks.size());
    const int64_t rows = (blocks[b].rows + count - 1) / count;
    for (int64_t i = 0; i < count; ++i) {
      plan.tasks.push_back({static_cast<int64_t>(b), std::min(blocks[b].rows, i * rows),
                            std::min(blocks[b].rows, (i + 1) * rows),
                            count == 1 ? -1 : partials++});
    }
    plan.first_partial.push_back(partials);
  }
  // Costliest first: handed out in that order, the last tasks are the cheapest.
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                   [](const AttentionTask& a, const AttentionTask& b) {
                     return a.end_row - a.first_row > b.end_row - b.first_row;
                   });
  return plan;
}

}  // namespace

Attention::Attention(const Attributes& attributes)
    : scale_(attributes.get_positive_float("scale")),
      value_dim_(attributes.get_int_at_least("value_dim", 1)) {}

void Attention::check(const Tensor& query, const Tensor& latent_cache) const {
  latent_cache.expect_dim(3, query.dim(2), "row of query");
  if (value_dim_ > latent_cache.dim(3)) {
    throw OpError(
        "attribute value_dim",
        text(value_dim_, " is more than the ", latent_cache.dim(3), " elements of a cache row"),
        "the value is the first part of the row");
  }
}

void Attention::run(Context& context, const Tensor& query, const Batch& batch,
                    const PagedCache& cache, const std::vector<QueryBlock>& blocks) const {
  const int64_t heads = query.dim(1);
  const Tensor out = context.output(0, {query.dim(0), heads, value_dim_});
  float* values = out.data<float>();
  std::fill(values + batch.used_tokens() * heads * value_dim_, values + out.elements(), 0.0f);
  const Plan plan = plan_tasks(blocks);
  AttentionArgs args;
  args.query = query.f32();
  args.heads = heads;
  args.batch = batch;
  args.cache = cache;
  args.value_dim = value_dim_;
  args.scale = scale_;
  args.blocks = blocks.data();
  args.block_count = static_cast<int64_t>(blocks.size());
  args.tasks = plan.tasks.data();
  args.task_count = static_cast<int64_t>(plan.tasks.size());
  args.partial_count = plan.first_partial.back();
  args.first_partial = plan.first_partial.data();
  args.out = values;
  run_(args, context.parallel());
}

}  // namespace hybridge
