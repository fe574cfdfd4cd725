// AttnResUpdateNorm(prefix, query, numerator, logit_max, exp_sum, norm_weight; site, eps, norm_eps)
// -> output: AttnResUpdate and the RMS norm of its result.
#include "ops/attn_res_inputs.h"

namespace hybridge {
namespace {

class AttnResUpdateNormOp : public Kernel {
 public:
  explicit AttnResUpdateNormOp(const Attributes& attributes)
      : site_(attributes), norm_eps_(attributes.get_positive_float("norm_eps")) {}

  void compute(Context& context) const override {
    const Tensor prefix = context.input(0);
    AttnResUpdate args = check_attn_res_update(site_, prefix, context.input(1), context.input(2),
                                               context.input(3), context.input(4));
    add_attn_res_norm(context.input(5), norm_eps_, args);
    args.output = context.output(0, prefix.shape()).data<float>();
    run_(args, context.parallel());
  }

 private:
  AttnResSite site_;
  float norm_eps_;
  plain::attn_res_update_signature* run_ = select_attn_res_update();
};

const OpRegistration registration({
    "AttnResUpdateNorm",
    {{"prefix", {DType::f32}},
     {"query", {DType::f32}},
     {"numerator", {DType::f32}},
     {"logit_max", {DType::f32}},
     {"exp_sum", {DType::f32}},
     {"norm_weight", {DType::f32, DType::bf16}}},
    {{"output"}},
    nullptr,
    make_kernel<AttnResUpdateNormOp>,
    alias<0, 0>,
});

}  // namespace
}  // namespace hybridge
