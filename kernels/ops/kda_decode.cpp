// KdaDecode(x, in_weight, f_b_weight, g_b_weight, conv_weight, a_log, dt_bias, norm_weight,
// o_weight, conv_state, state, context_len, state_slot; lower_bound, norm_eps,
// bf16_activations = 0) -> output, conv_state, state: a whole KDA layer for one token a sequence
// (spec MODELS.md 3.1).
// KdaDecodePacked: the same with in_weight and o_weight in bf12 rows (math/packed.h).
#include "ops/kda_inputs.h"
#include "ops/weight_inputs.h"

namespace hybridge {
namespace {

template <bool kPacked>
class KdaDecodeOp : public Kernel {
 public:
  explicit KdaDecodeOp(const Attributes& attributes)
      : lower_bound_(attributes.find_float("lower_bound")),
        norm_eps_(attributes.get_float("norm_eps")),
        round_x_(attributes.find_int("bf16_activations").value_or(0) != 0) {}

  void compute(Context& context) const override {
    const Tensor x = context.input(0);
    const Tensor conv_state = context.input(9);
    const Tensor state = context.input(10);
    const Tensor context_len = context.input(11);
    const int64_t head_width = square_head_width(state);
    const int64_t heads = state.dim(1), width = heads * head_width;
    x.expect_rank(2, "[B, D]");
    const int64_t batch = x.dim(0);
    context_len.expect_rank(1, "[B]").expect_dim(0, batch, "rows of x");
    for (int64_t b = 0; b < batch; ++b) {
      if (context_len.i32()[b] >= 0) continue;
      context_len.fail(text(context_len.i32()[b], " at index ", b), "a length is at least 0");
    }

    KdaDecode args;
    args.batch = check_kda_state(state, context.input(12), heads, head_width, head_width, batch);
    args.batch.tokens = batch;
    args.batch.context_len = context_len.i32();
    args.gate = check_kda_gate(context.input(4), context.input(5), context.input(6), conv_state,
                               state, width, lower_bound_);
    args.hidden = x.dim(1);
    args.x = x.f32();
    args.norm_eps = norm_eps_;
    args.round_x = round_x_;
    check_weights(context, heads, head_width, args);
    args.output = context.output(0, x.shape()).data<float>();
    args.conv_state = context.in_place(conv_state, 1).data<float>();
    args.state = context.in_place(state, 2).data<float>();
    run_(args, context.parallel());
  }

 private:
  static void check_weights(Context& context, int64_t heads, int64_t head_width, KdaDecode& args) {
    const Tensor in_weight = context.input(1);
    const Tensor f_b_weight = context.input(2);
    const Tensor g_b_weight = context.input(3);
    const Tensor norm_weight = context.input(7);
    const Tensor o_weight = context.input(8);
    const int64_t width = heads * head_width;
    f_b_weight.expect_rank(2, "[P, rank]").expect_dim(0, width, "heads * head width");
    args.rank = f_b_weight.dim(1);
    if (g_b_weight) {
      g_b_weight.expect_rank(2, "[P, rank]").expect_dim(0, width, "heads * head width");
      args.gate_rank = g_b_weight.dim(1);
      args.g_b_weight = weight_matrix(g_b_weight);
      if (args.gate_rank < 1) g_b_weight.fail("has rank 0", "leave it out for a full-rank gate");
    }
    const int64_t gate_rows = g_b_weight ? args.gate_rank : width;
    in_weight.expect_rank(2, "[3P + rank + H + gate, D]")
        .expect_dim(0, 3 * width + args.rank + heads + gate_rows,
                    g_b_weight ? "rows q|k|v|f_a|b|g_a" : "rows q|k|v|f_a|b|g");
    expect_columns(in_weight, args.hidden, "columns of x");
    norm_weight.expect_rank(1, "[V]").expect_dim(0, head_width, "value width of a head");
    o_weight.expect_rank(2, "[D, P]").expect_dim(0, args.hidden, "columns of x");
    expect_columns(o_weight, width, "heads * head width");
    args.in_weight = weight_matrix(in_weight);
    args.f_b_weight = weight_matrix(f_b_weight);
    args.o_weight = weight_matrix(o_weight);
    args.norm_weight = norm_weight.f32();
  }

  static void expect_columns(const Tensor& weight, int64_t columns, const char* meaning) {
    if (kPacked) return expect_packed_rows(weight, columns);
    weight.expect_dim(1, columns, meaning);
  }

  std::optional<float> lower_bound_;
  float norm_eps_;
  bool round_x_;
  plain::kda_decode_signature* run_ = select_kda_decode();
};

// `stored`: the types of the weights that reading takes the time of.
template <bool kPacked>
OpDescription description(const char* name, std::vector<DType> stored) {
  return {
      name,
      {{"x", {DType::f32}},
       {"in_weight", stored},
       {"f_b_weight", {DType::f32, DType::bf16}},
       {"g_b_weight", {DType::f32, DType::bf16}, true},
       {"conv_weight", {DType::f32}},
       {"a_log", {DType::f32}},
       {"dt_bias", {DType::f32}},
       {"norm_weight", {DType::f32}},
       {"o_weight", stored},
       {"conv_state", {DType::f32}},
       {"state", {DType::f32}},
       {"context_len", {DType::i32}},
       {"state_slot", {DType::i32}}},
      {{"output"}, {"conv_state"}, {"state"}},
      alias<9, 1, 10, 2>,
      make_kernel<KdaDecodeOp<kPacked>>,
  };
}

const OpRegistration registration(description<false>("KdaDecode", {DType::f32, DType::bf16}));
const OpRegistration packed_registration(description<true>("KdaDecodePacked", {DType::u8}));

}  // namespace
}  // namespace hybridge
