// Checks and views that the three KDA operators share.
#pragma once

#include <optional>

#include "framework/batch.h"
#include "framework/op.h"
#include "math/kda.h"

namespace hybridge {

// The state [slots, H, K, V] and who uses it. Raises OpError.
inline KdaBatch check_kda_state(const Tensor& state, const Tensor& state_slot, int64_t heads,
                                int64_t key_dim, int64_t value_dim, int64_t sequences) {
  state.expect_rank(4, "[slots, H, K, V]")
      .expect_dim(1, heads, "heads")
      .expect_dim(2, key_dim, "key width of a head")
      .expect_dim(3, value_dim, "value width of a head");
  state_slot.expect_rank(1, "[B]").expect_dim(0, sequences, "sequences");
  check_slots(state_slot, state.dim(0), "state slots");
  KdaBatch batch;
  batch.sequences = sequences;
  batch.heads = heads;
  batch.key_dim = key_dim;
  batch.value_dim = value_dim;
  batch.state_slot = state_slot.i32();
  return batch;
}

// The convolution [3P, W], its state [slots, 3P, W - 1], A_log [H] and dt_bias [P]. Raises OpError.
inline KdaGate check_kda_gate(const Tensor& conv_weight, const Tensor& a_log, const Tensor& dt_bias,
                              const Tensor& conv_state, const Tensor& state, int64_t width,
                              std::optional<float> lower_bound) {
  conv_weight.expect_rank(2, "[3P, W]").expect_dim(0, 3 * width, "three times heads * head width");
  if (conv_weight.dim(1) < 1) conv_weight.fail("has no taps", "pass at least one tap a channel");
  a_log.expect_rank(1, "[H]").expect_dim(0, state.dim(1), "heads");
  dt_bias.expect_rank(1, "[P]").expect_dim(0, width, "heads * head width");
  conv_state.expect_rank(3, "[slots, 3P, W - 1]")
      .expect_dim(0, state.dim(0), "slots of state")
      .expect_dim(1, 3 * width, "three times heads * head width")
      .expect_dim(2, conv_weight.dim(1) - 1, "taps of conv_weight less one");
  KdaGate gate;
  gate.conv_width = conv_weight.dim(1);
  gate.conv_weight = conv_weight.f32();
  gate.a_log = a_log.f32();
  gate.dt_bias = dt_bias.f32();
  gate.has_lower_bound = lower_bound.has_value();
  gate.lower_bound = lower_bound.value_or(0.0f);
  return gate;
}

// The head width of a model whose keys and values are equally wide: what q|k|v in one row means.
inline int64_t square_head_width(const Tensor& state) {
  state.expect_rank(4, "[slots, H, K, V]");
  if (state.dim(1) < 1 || state.dim(2) < 1) {
    state.fail(text("shape ", state.shape().str(), " has no heads or no channels"),
               "pass at least one head of at least one channel");
  }
  state.expect_dim(3, state.dim(2), "key width of a head, here equal to the value width");
  return state.dim(2);
}

}  // namespace hybridge
