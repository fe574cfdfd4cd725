// MoeRoute(x, gate_weight, bias; top_k, renormalize, scale) -> expert_ids, expert_weights: sigmoid
// router whose bias decides the choice only (spec MODELS.md 8.1).
#include "framework/op.h"
#include "math/moe.h"

namespace hybridge {
namespace {

class MoeRouteOp : public Kernel {
 public:
  explicit MoeRouteOp(const Attributes& attributes)
      : top_k_(attributes.get_int_at_least("top_k", 1)),
        renormalize_(attributes.get_int("renormalize") != 0),
        scale_(attributes.get_float("scale")) {}

  void compute(Context& context) const override {
    const Tensor x = context.input(0);
    const Tensor gate_weight = context.input(1);
    const Tensor bias = context.input(2);
    x.expect_rank(2, "[T, D]");
    gate_weight.expect_rank(2, "[E, D]").expect_dim(1, x.dim(1), "columns of x");
    bias.expect_rank(1, "[E]").expect_dim(0, gate_weight.dim(0), "rows of gate_weight");
    if (top_k_ > gate_weight.dim(0)) {
      throw OpError("attribute top_k",
                    text(top_k_, " is more than the ", gate_weight.dim(0), " experts"),
                    "choose at most as many experts as there are");
    }
    MoeRoute args;
    args.tokens = x.dim(0);
    args.hidden = x.dim(1);
    args.experts = gate_weight.dim(0);
    args.top_k = top_k_;
    args.renormalize = renormalize_;
    args.scale = scale_;
    args.x = x.f32();
    args.gate_weight = {gate_weight.raw(), gate_weight.is_bf16()};
    args.bias = bias.f32();
    args.expert_ids = context.output(0, {args.tokens, top_k_}).data<int32_t>();
    args.expert_weights = context.output(1, {args.tokens, top_k_}).data<float>();
    run_(args, context.parallel());
  }

 private:
  int64_t top_k_;
  bool renormalize_;
  float scale_;
  plain::moe_route_signature* run_ = select_moe_route();
};

const OpRegistration registration({
    "MoeRoute",
    {{"x", {DType::f32}}, {"gate_weight", {DType::f32, DType::bf16}}, {"bias", {DType::f32}}},
    {{"expert_ids", DType::i32}, {"expert_weights"}},
    nullptr,
    make_kernel<MoeRouteOp>,
});

}  // namespace
}  // namespace hybridge
