// RmsNorm(x, weight; eps) -> out: x / sqrt(mean(x^2) + eps) * weight over the last dimension.
#include "math/rms_norm.h"

#include "framework/op.h"

namespace hybridge {
namespace {

class RmsNorm : public Kernel {
 public:
  explicit RmsNorm(const Attributes& attributes) : eps_(attributes.get_positive_float("eps")) {}

  void compute(Context& context) const override {
    const Tensor x = context.input(0);
    const Tensor weight = context.input(1);
    if (x.rank() == 0) x.expect_rank(2, "[..., D]");
    weight.expect_rank(1, "[D]");
    const size_t last = x.rank() - 1;
    weight.expect_dim(0, x.dim(last), "last dimension of x");

    const Tensor out = context.output(0, x.shape());
    run_({x.f32(), weight.raw(), weight.is_bf16(), out.data<float>(),
          x.shape().elements_before(last), x.dim(last), eps_},
         context.parallel());
  }

 private:
  float eps_;
  plain::rms_norm_signature* run_ = select_rms_norm();
};

const OpRegistration registration({
    "RmsNorm",
    {{"x", {DType::f32}}, {"weight", {DType::f32, DType::bf16}}},
    {{"out", DType::f32}},
    nullptr,
    make_kernel<RmsNorm>,
    alias<0, 0>,
});

}  // namespace
}  // namespace hybridge
