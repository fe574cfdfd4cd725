// MlaExpandValue(latent, kv_b_weight; value_dim, bf16_activations = 0) -> out: what absorbed
// attention gives, latent [T, H, C], as values [T, H, value_dim], made by the last value_dim rows
// of each head of kv_b_weight [H * (nope + value), C].
#include "framework/op.h"
#include "math/mla_absorb.h"
#include "ops/kv_b_weight.h"

namespace hybridge {
namespace {

class MlaExpandValue : public Kernel {
 public:
  explicit MlaExpandValue(const Attributes& attributes)
      : value_dim_(attributes.get_int_at_least("value_dim", 1)),
        round_x_(attributes.find_int("bf16_activations").value_or(0) != 0) {}

  void compute(Context& context) const override {
    const Tensor latent = context.input(0);
    const Tensor weight = context.input(1);
    latent.expect_rank(3, "[T, H, C]");
    const int64_t rows = check_kv_b_rows(weight, latent, value_dim_, "attribute value_dim");
    latent.expect_dim(2, weight.dim(1), "columns of kv_b_weight");

    const int64_t tokens = latent.dim(0), heads = latent.dim(1);
    const Tensor out = context.output(0, {tokens, heads, value_dim_});
    run_({latent.f32(), weight.raw(), weight.is_bf16(), out.data<float>(), tokens, heads, rows,
          weight.dim(1), rows - value_dim_, value_dim_, round_x_},
         context.parallel());
  }

 private:
  int64_t value_dim_;
  bool round_x_;
  plain::mla_expand_value_signature* run_ = select_mla_expand_value();
};

const OpRegistration registration({
    "MlaExpandValue",
    {{"latent", {DType::f32}}, {"kv_b_weight", {DType::f32, DType::bf16}}},
    {{"out", DType::f32}},
    nullptr,
    make_kernel<MlaExpandValue>,
});

}  // namespace
}  // namespace hybridge
