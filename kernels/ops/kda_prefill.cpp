// KdaPrefill(qkv, gate, beta, conv_weight, a_log, dt_bias, conv_state, state, query_start,
// context_len, state_slot; lower_bound) -> output, conv_state, state: convolution, normalisation,
// gate and chunked recurrence of a KDA layer (spec MODELS.md 3.1 steps 2 to 7).
#include "ops/kda_inputs.h"

namespace hybridge {
namespace {

class KdaPrefillOp : public Kernel {
 public:
  explicit KdaPrefillOp(const Attributes& attributes)
      : lower_bound_(attributes.find_float("lower_bound")) {}

  void compute(Context& context) const override {
    const Tensor qkv = context.input(0);
    const Tensor decay = context.input(1);
    const Tensor beta = context.input(2);
    const Tensor conv_state = context.input(6);
    const Tensor state = context.input(7);
    const int64_t head_width = square_head_width(state);
    const int64_t heads = state.dim(1), width = heads * head_width;
    qkv.expect_rank(2, "[T, 3P]").expect_dim(1, 3 * width, "three times heads * head width");
    const int64_t tokens = qkv.dim(0);
    decay.expect_rank(2, "[T, P]").expect_dim(0, tokens, "tokens of qkv");
    decay.expect_dim(1, width, "heads * head width");
    beta.expect_rank(2, "[T, H]").expect_dim(0, tokens, "tokens of qkv");
    beta.expect_dim(1, heads, "heads");
    const Batch ragged = check_batch(context.input(8), context.input(9), tokens);

    KdaPrefill args;
    args.batch =
        check_kda_state(state, context.input(10), heads, head_width, head_width, ragged.sequences);
    args.batch.tokens = tokens;
    args.batch.query_start = ragged.query_start;
    args.batch.context_len = ragged.context_len;
    args.gate = check_kda_gate(context.input(3), context.input(4), context.input(5), conv_state,
                               state, width, lower_bound_);
    args.qkv = qkv.f32();
    args.decay = decay.f32();
    args.beta = beta.f32();
    args.output = context.output(0, {tokens, heads, head_width}).data<float>();
    args.conv_state = context.in_place(conv_state, 1).data<float>();
    args.state = context.in_place(state, 2).data<float>();
    run_(args, context.parallel());
  }

 private:
  std::optional<float> lower_bound_;
  plain::kda_prefill_signature* run_ = select_kda_prefill();
};

const OpRegistration registration({
    "KdaPrefill",
    {{"qkv", {DType::f32}},
     {"gate", {DType::f32}},
     {"beta", {DType::f32}},
     {"conv_weight", {DType::f32}},
     {"a_log", {DType::f32}},
     {"dt_bias", {DType::f32}},
     {"conv_state", {DType::f32}},
     {"state", {DType::f32}},
     {"query_start", {DType::i32}},
     {"context_len", {DType::i32}},
     {"state_slot", {DType::i32}}},
    {{"output"}, {"conv_state"}, {"state"}},
    alias<6, 1, 7, 2>,
    make_kernel<KdaPrefillOp>,
});

}  // namespace
}  // namespace hybridge
