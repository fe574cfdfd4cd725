// MoeExperts(x, expert_ids, expert_weights, gate_up, down; activation, beta, linear_beta) ->
// output: the weighted sum of the chosen experts, weights in fp32 or bfloat16 (spec MODELS.md 8.2).
#include "ops/moe_inputs.h"

namespace hybridge {
namespace {

class MoeExpertsOp : public Kernel {
 public:
  explicit MoeExpertsOp(const Attributes& attributes) : activation_(attributes) {}

  void compute(Context& context) const override {
    const Tensor x = context.input(0);
    const Tensor gate_up = context.input(3);
    const Tensor down = context.input(4);
    MoeExperts args;
    args.intermediate = intermediate_width(gate_up, "[E, 2I, L]");
    args.experts = gate_up.dim(0);
    check_expert_tokens(x, context.input(1), context.input(2), args);
    gate_up.expect_dim(2, args.latent, "columns of x");
    down.expect_rank(3, "[E, L, I]")
        .expect_dim(0, args.experts, "experts of gate_up")
        .expect_dim(1, args.latent, "columns of x")
        .expect_dim(2, args.intermediate, "half the rows of gate_up");
    if (down.dtype() != gate_up.dtype()) {
      down.fail(
          text("is ", dtype_name(down.dtype()), " while gate_up is ", dtype_name(gate_up.dtype())),
          "store both in one type");
    }
    activation_.apply(args);
    const WeightFormat format =
        gate_up.is_bf16() ? WeightFormat::kBfloat16 : WeightFormat::kFloat32;
    args.gate_up = {format, gate_up.raw(), nullptr};
    args.down = {format, down.raw(), nullptr};
    args.output = context.output(0, x.shape()).data<float>();
    run_(args, context.parallel());
  }

 private:
  ExpertActivation activation_;
  plain::moe_experts_signature* run_ = select_moe_experts();
};

const OpRegistration registration({
    "MoeExperts",
    {{"x", {DType::f32}},
     {"expert_ids", {DType::i32}},
     {"expert_weights", {DType::f32}},
     {"gate_up", {DType::f32, DType::bf16}},
     {"down", {DType::f32, DType::bf16}}},
    {{"output"}},
    nullptr,
    make_kernel<MoeExpertsOp>,
});

}  // namespace
}  // namespace hybridge
