// MoeExpertsMxfp4(x, expert_ids, expert_weights, gate_up_packed, gate_up_scale, down_packed,
// down_scale; activation, beta, linear_beta) -> output: MoeExperts with MXFP4 weights, used as they
// are stored (spec MODELS.md 8.2, 11.2).
#include "ops/moe_inputs.h"

namespace hybridge {
namespace {

constexpr int64_t kMxfp4Block = 32;  // elements that share a scale

class MoeExpertsMxfp4Op : public Kernel {
 public:
  explicit MoeExpertsMxfp4Op(const Attributes& attributes) : activation_(attributes) {}

  void compute(Context& context) const override {
    const Tensor x = context.input(0);
    const Tensor gate_up = context.input(3);
    const Tensor down = context.input(5);
    MoeExperts args;
    args.intermediate = intermediate_width(gate_up, "[E, 2I, L / 2]");
    args.experts = gate_up.dim(0);
    check_expert_tokens(x, context.input(1), context.input(2), args);
    args.gate_up = check_packed(gate_up, context.input(4), args.experts, 2 * args.intermediate,
                                args.latent, "[E, 2I, L / 2]", "[E, 2I, L / 32]");
    args.down = check_packed(down, context.input(6), args.experts, args.latent, args.intermediate,
                             "[E, L, I / 2]", "[E, L, I / 32]");
    activation_.apply(args);
    args.output = context.output(0, x.shape()).data<float>();
    if (x.elements() == 0) return;  // without elements x has no memory
    run_(args, context.parallel());
  }

 private:
  static ExpertWeights check_packed(const Tensor& packed, const Tensor& scale, int64_t experts,
                                    int64_t rows, int64_t columns, const char* packed_layout,
                                    const char* scale_layout) {
    if (columns % kMxfp4Block != 0) {
      packed.fail(text("its rows have ", columns, " elements, no multiple of ", kMxfp4Block),
                  "MXFP4 scales 32 elements at once; use unquantised experts");
    }
    packed.expect_rank(3, packed_layout)
        .expect_dim(0, experts, "experts")
        .expect_dim(1, rows, "rows")
        .expect_dim(2, columns / 2, "two elements a byte");
    scale.expect_rank(3, scale_layout)
        .expect_dim(0, experts, "experts")
        .expect_dim(1, rows, "rows")
        .expect_dim(2, columns / kMxfp4Block, "one scale for 32 elements");
    return {WeightFormat::kMxfp4, packed.raw(), scale.data<uint8_t>()};
  }

  ExpertActivation activation_;
  plain::moe_experts_signature* run_ = select_moe_experts();
};

const OpRegistration registration({
    "MoeExpertsMxfp4",
    {{"x", {DType::f32}},
     {"expert_ids", {DType::i32}},
     {"expert_weights", {DType::f32}},
     {"gate_up_packed", {DType::u8}},
     {"gate_up_scale", {DType::u8}},
     {"down_packed", {DType::u8}},
     {"down_scale", {DType::u8}}},
    {{"output"}},
    nullptr,
    make_kernel<MoeExpertsMxfp4Op>,
});

}  // namespace
}  // namespace hybridge
