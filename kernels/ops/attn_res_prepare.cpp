// AttnResPrepare(sources, queries; eps) -> numerator, logit_max, exp_sum: the frozen sources of a
// block against all its query sites (spec MODELS.md 6.3, phase 1).
#include "framework/op.h"
#include "math/attn_res.h"

namespace hybridge {
namespace {

class AttnResPrepareOp : public Kernel {
 public:
  explicit AttnResPrepareOp(const Attributes& attributes) : eps_(attributes.get_float("eps")) {}

  void compute(Context& context) const override {
    const Tensor sources = context.input(0);
    const Tensor queries = context.input(1);
    sources.expect_rank(3, "[n, T, D]");
    queries.expect_rank(2, "[S, D]").expect_dim(1, sources.dim(2), "columns of sources");
    if (sources.dim(0) < 1) {
      sources.fail("has no source", "an empty softmax has no value; pass at least one");
    }
    AttnResPrepare args;
    args.sources = sources.dim(0);
    args.tokens = sources.dim(1);
    args.hidden = sources.dim(2);
    args.sites = queries.dim(0);
    args.eps = eps_;
    args.values = sources.f32();
    args.queries = queries.f32();
    args.numerator = context.output(0, {args.sites, args.tokens, args.hidden}).data<float>();
    args.logit_max = context.output(1, {args.sites, args.tokens}).data<float>();
    args.exp_sum = context.output(2, {args.sites, args.tokens}).data<float>();
    run_(args, context.parallel());
  }

 private:
  float eps_;
  plain::attn_res_prepare_signature* run_ = select_attn_res_prepare();
};

const OpRegistration registration({
    "AttnResPrepare",
    {{"sources", {DType::f32}}, {"queries", {DType::f32}}},
    {{"numerator"}, {"logit_max"}, {"exp_sum"}},
    nullptr,
    make_kernel<AttnResPrepareOp>,
});

}  // namespace
}  // namespace hybridge
