// Linear(x, weight; bf16_activations = 0) -> out: x [..., K] times the transpose of weight [N, K].
// LinearPacked: the same with the weight in bf12 rows (math/packed.h).
#include "math/linear.h"

#include "framework/op.h"
#include "ops/weight_inputs.h"

namespace hybridge {
namespace {

template <bool kPacked>
class Linear : public Kernel {
 public:
  explicit Linear(const Attributes& attributes)
      : round_x_(attributes.find_int("bf16_activations").value_or(0) != 0) {}

  void compute(Context& context) const override {
    const Tensor x = context.input(0);
    const Tensor weight = context.input(1);
    if (x.rank() == 0) x.expect_rank(2, "[..., K]");
    const size_t last = x.rank() - 1;
    const int64_t inputs = x.dim(last);
    if (kPacked) {
      weight.expect_rank(2, "[N, packed row bytes]");
      expect_packed_rows(weight, inputs);
    } else {
      weight.expect_rank(2, "[N, K]");
      x.expect_dim(last, weight.dim(1), "inputs of weight");
    }

    Shape shape = x.shape();
    shape[last] = weight.dim(0);
    const Tensor out = context.output(0, shape);
    const int64_t rows = x.shape().elements_before(last);
    run_({x.f32(), weight_matrix(weight), out.data<float>(), rows, inputs, weight.dim(0), round_x_},
         context.parallel());
  }

 private:
  bool round_x_;
  plain::linear_signature* run_ = select_linear();
};

const OpRegistration registration({
    "Linear",
    {{"x", {DType::f32}}, {"weight", {DType::f32, DType::bf16}}},
    {{"out", DType::f32}},
    nullptr,
    make_kernel<Linear<false>>,
});

const OpRegistration packed_registration({
    "LinearPacked",
    {{"x", {DType::f32}}, {"weight", {DType::u8}}},
    {{"out", DType::f32}},
    nullptr,
    make_kernel<Linear<true>>,
});

}  // namespace
}  // namespace hybridge
