// AttnResUpdate(prefix, query, numerator, logit_max, exp_sum; eps) -> output: merges the live
// prefix into one site's statistics (spec MODELS.md 6.3, phase 2).
#include "framework/op.h"
#include "math/attn_res.h"

namespace hybridge {
namespace {

class AttnResUpdateOp : public Kernel {
 public:
  explicit AttnResUpdateOp(const Attributes& attributes) : eps_(attributes.get_float("eps")) {}

  void compute(Context& context) const override {
    const Tensor prefix = context.input(0);
    const Tensor query = context.input(1);
    const Tensor numerator = context.input(2);
    const Tensor logit_max = context.input(3);
    const Tensor exp_sum = context.input(4);
    prefix.expect_rank(2, "[T, D]");
    query.expect_rank(1, "[D]").expect_dim(0, prefix.dim(1), "columns of prefix");
    numerator.expect_rank(2, "[T, D]")
        .expect_dim(0, prefix.dim(0), "tokens of prefix")
        .expect_dim(1, prefix.dim(1), "columns of prefix");
    logit_max.expect_rank(1, "[T]").expect_dim(0, prefix.dim(0), "tokens of prefix");
    exp_sum.expect_rank(1, "[T]").expect_dim(0, prefix.dim(0), "tokens of prefix");
    AttnResUpdate args;
    args.tokens = prefix.dim(0);
    args.hidden = prefix.dim(1);
    args.eps = eps_;
    args.prefix = prefix.f32();
    args.query = query.f32();
    args.numerator = numerator.f32();
    args.logit_max = logit_max.f32();
    args.exp_sum = exp_sum.f32();
    args.output = context.output(0, prefix.shape()).data<float>();
    run_(args, context.parallel());
  }

 private:
  float eps_;
  plain::attn_res_update_signature* run_ = select_attn_res_update();
};

const OpRegistration registration({
    "AttnResUpdate",
    {{"prefix", {DType::f32}},
     {"query", {DType::f32}},
     {"numerator", {DType::f32}},
     {"logit_max", {DType::f32}},
     {"exp_sum", {DType::f32}}},
    {{"output"}},
    nullptr,
    make_kernel<AttnResUpdateOp>,
});

}  // namespace
}  // namespace hybridge
