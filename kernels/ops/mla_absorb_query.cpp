// MlaAbsorbQuery(query, kv_b_weight; bf16_activations = 0) -> out: query [T, H, nope] without its
// rope part, in the space of the latent rows, [T, H, C]. kv_b_weight [H * (nope + value), C].
#include "framework/op.h"
#include "math/mla_absorb.h"
#include "ops/kv_b_weight.h"

namespace hybridge {
namespace {

class MlaAbsorbQuery : public Kernel {
 public:
  explicit MlaAbsorbQuery(const Attributes& attributes)
      : round_x_(attributes.find_int("bf16_activations").value_or(0) != 0) {}

  void compute(Context& context) const override {
    const Tensor query = context.input(0);
    const Tensor weight = context.input(1);
    query.expect_rank(3, "[T, H, nope]");
    const int64_t nope = query.dim(2);
    const int64_t rows = check_kv_b_rows(weight, query, nope, "last dimension of query");

    const int64_t tokens = query.dim(0), heads = query.dim(1), columns = weight.dim(1);
    const Tensor out = context.output(0, {tokens, heads, columns});
    run_({query.f32(), weight.raw(), weight.is_bf16(), out.data<float>(), tokens, heads, rows,
          columns, 0, nope, round_x_},
         context.parallel());
  }

 private:
  bool round_x_;
  plain::mla_absorb_query_signature* run_ = select_mla_absorb_query();
};

const OpRegistration registration({
    "MlaAbsorbQuery",
    {{"query", {DType::f32}}, {"kv_b_weight", {DType::f32, DType::bf16}}},
    {{"out", DType::f32}},
    nullptr,
    make_kernel<MlaAbsorbQuery>,
});

}  // namespace
}  // namespace hybridge
