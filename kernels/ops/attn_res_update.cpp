// AttnResUpdate(prefix, query, numerator, logit_max, exp_sum; site, eps) -> output: merges the live
// prefix into the statistics of one site of its block (spec MODELS.md 6.3, phase 2).
#include "ops/attn_res_inputs.h"

namespace hybridge {
namespace {

class AttnResUpdateOp : public Kernel {
 public:
  explicit AttnResUpdateOp(const Attributes& attributes) : site_(attributes) {}

  void compute(Context& context) const override {
    const Tensor prefix = context.input(0);
    AttnResUpdate args = check_attn_res_update(site_, prefix, context.input(1), context.input(2),
                                               context.input(3), context.input(4));
    args.output = context.output(0, prefix.shape()).data<float>();
    run_(args, context.parallel());
  }

 private:
  AttnResSite site_;
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
    alias<0, 0>,
});

}  // namespace
}  // namespace hybridge
