// MoeExperts(x, expert_ids, expert_weights, gate_up, down; activation, beta, linear_beta) ->
// output: the weighted sum of the chosen experts, weights in fp32 or bfloat16 (spec MODELS.md 8.2).
// MoeExpertsPacked: the same with gate_up and down in bf12 rows (math/packed.h).
#include "ops/moe_inputs.h"
#include "ops/weight_inputs.h"

namespace hybridge {
namespace {

template <bool kPacked>
class MoeExpertsOp : public Kernel {
 public:
  explicit MoeExpertsOp(const Attributes& attributes) : activation_(attributes) {}

  void compute(Context& context) const override {
    const Tensor x = context.input(0);
    const Tensor gate_up = context.input(3);
    const Tensor down = context.input(4);
    MoeExperts args;
    args.intermediate = intermediate_width(gate_up, "[E, 2I, L]");
    args.experts = gate_up.dim(0);
    check_expert_tokens(x, context.input(1), context.input(2), args);
    expect_columns(gate_up, args.latent, "columns of x");
    down.expect_rank(3, "[E, L, I]")
        .expect_dim(0, args.experts, "experts of gate_up")
        .expect_dim(1, args.latent, "columns of x");
    expect_columns(down, args.intermediate, "half the rows of gate_up");
    if (down.dtype() != gate_up.dtype()) {
      down.fail(
          text("is ", dtype_name(down.dtype()), " while gate_up is ", dtype_name(gate_up.dtype())),
          "store both in one type");
    }
    activation_.apply(args);
    const WeightFormat format = kPacked             ? WeightFormat::kPacked
                                : gate_up.is_bf16() ? WeightFormat::kBfloat16
                                                    : WeightFormat::kFloat32;
    args.gate_up = {format, gate_up.raw(), nullptr};
    args.down = {format, down.raw(), nullptr};
    args.output = context.output(0, x.shape()).data<float>();
    if (x.elements() == 0) return;  // without elements x has no memory
    run_(args, context.parallel());
  }

 private:
  static void expect_columns(const Tensor& weight, int64_t columns, const char* meaning) {
    if (kPacked) return expect_packed_rows(weight, columns);
    weight.expect_dim(2, columns, meaning);
  }

  ExpertActivation activation_;
  plain::moe_experts_signature* run_ = select_moe_experts();
};

template <bool kPacked>
OpDescription description(const char* name, std::vector<DType> stored) {
  return {
      name,
      {{"x", {DType::f32}},
       {"expert_ids", {DType::i32}},
       {"expert_weights", {DType::f32}},
       {"gate_up", stored},
       {"down", stored}},
      {{"output"}},
      nullptr,
      make_kernel<MoeExpertsOp<kPacked>>,
  };
}

const OpRegistration registration(description<false>("MoeExperts", {DType::f32, DType::bf16}));
const OpRegistration packed_registration(description<true>("MoeExpertsPacked", {DType::u8}));

}  // namespace
}  // namespace hybridge
