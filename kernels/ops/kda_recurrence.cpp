// KdaRecurrence(query, key, value, log_decay, beta, state, query_start, context_len, state_slot)
// -> output, state: the gated delta rule over ragged sequences (spec MODELS.md 3.1 step 7).
#include "ops/kda_inputs.h"

namespace hybridge {
namespace {

class KdaRecurrenceOp : public Kernel {
 public:
  explicit KdaRecurrenceOp(const Attributes&) {}

  void compute(Context& context) const override {
    const Tensor query = context.input(0);
    const Tensor key = context.input(1);
    const Tensor value = context.input(2);
    const Tensor log_decay = context.input(3);
    const Tensor beta = context.input(4);
    const Tensor state = context.input(5);
    const Tensor context_len = context.input(7);
    query.expect_rank(3, "[T, H, K]");
    value.expect_rank(3, "[T, H, V]");
    const int64_t tokens = query.dim(0), heads = query.dim(1), key_dim = query.dim(2);
    for (const Tensor* same : {&key, &log_decay}) {
      same->expect_rank(3, "[T, H, K]").expect_dim(0, tokens, "tokens of query");
      same->expect_dim(1, heads, "heads of query").expect_dim(2, key_dim, "key width of query");
    }
    value.expect_dim(0, tokens, "tokens of query").expect_dim(1, heads, "heads of query");
    beta.expect_rank(2, "[T, H]").expect_dim(0, tokens, "tokens of query");
    beta.expect_dim(1, heads, "heads of query");
    if (heads < 1 || key_dim < 1 || value.dim(2) < 1) {
      state.fail(text("shape ", state.shape().str(), " has no heads or no channels"),
                 "pass at least one head of at least one channel");
    }
    const Batch ragged = check_batch(context.input(6), context_len, tokens);

    KdaRecurrence args;
    args.batch =
        check_kda_state(state, context.input(8), heads, key_dim, value.dim(2), ragged.sequences);
    args.batch.tokens = tokens;
    args.batch.query_start = ragged.query_start;
    args.batch.context_len = ragged.context_len;
    args.query = query.f32();
    args.key = key.f32();
    args.value = value.f32();
    args.log_decay = log_decay.f32();
    args.beta = beta.f32();
    args.output = context.output(0, value.shape()).data<float>();
    args.state = context.in_place(state, 1).data<float>();
    run_(args, context.parallel());
  }

 private:
  plain::kda_recurrence_signature* run_ = select_kda_recurrence();
};

const OpRegistration registration({
    "KdaRecurrence",
    {{"query", {DType::f32}},
     {"key", {DType::f32}},
     {"value", {DType::f32}},
     {"log_decay", {DType::f32}},
     {"beta", {DType::f32}},
     {"state", {DType::f32}},
     {"query_start", {DType::i32}},
     {"context_len", {DType::i32}},
     {"state_slot", {DType::i32}}},
    {{"output"}, {"state"}},
    alias<5, 1>,
    make_kernel<KdaRecurrenceOp>,
});

}  // namespace
}  // namespace hybridge
