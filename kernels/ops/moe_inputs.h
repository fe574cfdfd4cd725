// Attributes and checks that the two expert operators share.
#pragma once

#include <optional>
#include <string>

#include "framework/op.h"
#include "math/moe.h"

namespace hybridge {

// The activation of a node: attributes activation, beta, linear_beta (absent: up is used as it is);
// and bf16_activations (absent: 0), whether left sides may be rounded to bfloat16.
class ExpertActivation {
 public:
  explicit ExpertActivation(const Attributes& attributes)
      : kind_(parse(attributes.get_string("activation"))),
        round_x_(attributes.find_int("bf16_activations").value_or(0) != 0) {
    if (kind_ == Activation::kSilu) return;
    beta_ = attributes.get_positive_float("beta");
    if (attributes.find_float("linear_beta")) {
      linear_beta_ = attributes.get_positive_float("linear_beta");
    }
  }

  void apply(MoeExperts& args) const {
    args.activation = kind_;
    args.round_x = round_x_;
    args.beta = beta_;
    args.has_linear_beta = linear_beta_.has_value();
    args.linear_beta = linear_beta_.value_or(1.0f);
  }

 private:
  static Activation parse(const std::string& name) {
    if (name == "silu") return Activation::kSilu;
    if (name == "situ") return Activation::kSitu;
    throw OpError("attribute activation", text("'", name, "' is unknown"), "use situ or silu");
  }

  Activation kind_;
  bool round_x_;
  float beta_ = 1.0f;
  std::optional<float> linear_beta_;
};

// The tokens and their experts. `experts` and `intermediate` are already known; raises OpError.
inline void check_expert_tokens(const Tensor& x, const Tensor& expert_ids,
                                const Tensor& expert_weights, MoeExperts& args) {
  x.expect_rank(2, "[T, L]");
  expert_ids.expect_rank(2, "[T, k]").expect_dim(0, x.dim(0), "tokens of x");
  expert_weights.expect_rank(2, "[T, k]").expect_dim(0, x.dim(0), "tokens of x");
  expert_weights.expect_dim(1, expert_ids.dim(1), "experts a token in expert_ids");
  for (int64_t i = 0; i < expert_ids.elements(); ++i) {
    const int32_t id = expert_ids.i32()[i];
    if (id >= 0 && id < args.experts) continue;
    expert_ids.fail(text(id, " at index ", i, " is not one of the ", args.experts, " experts"),
                    "pass ids that the router gave for these experts");
  }
  args.tokens = x.dim(0);
  args.latent = x.dim(1);
  args.top_k = expert_ids.dim(1);
  args.x = x.f32();
  args.expert_ids = expert_ids.i32();
  args.expert_weights = expert_weights.f32();
}

// Half the rows of gate_up, which holds gate and up one after the other.
inline int64_t intermediate_width(const Tensor& gate_up, const char* layout) {
  gate_up.expect_rank(3, layout);
  if (gate_up.dim(1) % 2 != 0) {
    gate_up.fail(text("has ", gate_up.dim(1), " rows an expert, an odd number"),
                 "pass the gate's rows, then as many up rows");
  }
  return gate_up.dim(1) / 2;
}

}  // namespace hybridge
