// Situ(gate, up; beta, linear_beta?) -> out, element by element; without linear_beta, `up` is used
// as it is.
#include "math/situ.h"

#include "framework/op.h"

namespace hybridge {
namespace {

class Situ : public Kernel {
 public:
  explicit Situ(const Attributes& attributes) : beta_(attributes.get_positive_float("beta")) {
    if (attributes.find_float("linear_beta")) {
      linear_beta_ = attributes.get_positive_float("linear_beta");
    }
  }

  void compute(Context& context) const override {
    const Tensor gate = context.input(0);
    const Tensor up = context.input(1);
    up.expect_rank(gate.rank(), "the shape of gate");
    for (size_t axis = 0; axis < gate.rank(); ++axis) {
      up.expect_dim(axis, gate.dim(axis), "dimension of gate");
    }
    const Tensor out = context.output(0, gate.shape());
    run_({gate.f32(), up.f32(), out.data<float>(), gate.elements(), beta_, linear_beta_},
         context.parallel());
  }

 private:
  float beta_;
  float linear_beta_ = 0;
  plain::situ_signature* run_ = select_situ();
};

const OpRegistration registration({
    "Situ",
    {{"gate", {DType::f32}}, {"up", {DType::f32}}},
    {{"out", DType::f32}},
    nullptr,
    make_kernel<Situ>,
    alias<0, 0>,
});

}  // namespace
}  // namespace hybridge
