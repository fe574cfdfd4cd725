// AttnResAddUpdateNorm(prefix, delta, query, numerator, logit_max, exp_sum, norm_weight; site, eps,
// norm_eps) -> new_prefix, output: prefix + delta, and AttnResUpdateNorm of it, in one walk over
// the tokens.
#include "ops/attn_res_inputs.h"

namespace hybridge {
namespace {

class AttnResAddUpdateNormOp : public Kernel {
 public:
  explicit AttnResAddUpdateNormOp(const Attributes& attributes)
      : site_(attributes), norm_eps_(attributes.get_positive_float("norm_eps")) {}

  void compute(Context& context) const override {
    const Tensor prefix = context.input(0);
    const Tensor delta = context.input(1);
    AttnResUpdate args = check_attn_res_update(site_, prefix, context.input(2), context.input(3),
                                               context.input(4), context.input(5));
    delta.expect_rank(2, "[T, D]")
        .expect_dim(0, args.tokens, "tokens of prefix")
        .expect_dim(1, args.hidden, "columns of prefix");
    add_attn_res_norm(context.input(6), norm_eps_, args);
    args.delta = delta.f32();
    args.new_prefix = context.output(0, prefix.shape()).data<float>();
    args.output = context.output(1, prefix.shape()).data<float>();
    run_(args, context.parallel());
  }

 private:
  AttnResSite site_;
  float norm_eps_;
  plain::attn_res_update_signature* run_ = select_attn_res_update();
};

const OpRegistration registration({
    "AttnResAddUpdateNorm",
    {{"prefix", {DType::f32}},
     {"delta", {DType::f32}},
     {"query", {DType::f32}},
     {"numerator", {DType::f32}},
     {"logit_max", {DType::f32}},
     {"exp_sum", {DType::f32}},
     {"norm_weight", {DType::f32, DType::bf16}}},
    {{"new_prefix"}, {"output"}},
    nullptr,
    make_kernel<AttnResAddUpdateNormOp>,
    alias<0, 0, 1, 1>,
});

}  // namespace
}  // namespace hybridge
