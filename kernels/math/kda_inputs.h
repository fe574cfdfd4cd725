// From raw projections to the recurrence's inputs: short convolution, normalisation, decay gate
// (spec MODELS.md 3.1, steps 2 to 6).
#pragma once

#include "math/kda.h"
#include "math/lanes.h"
#include "math/scratch.h"

namespace hybridge {
namespace HYBRIDGE_ISA {

constexpr float kNormEpsilon = 1e-6f;  // a constant of the model family, inside the square root

// The q, k and v channels of one head: where they lie in a row of 3P, and their taps.
struct HeadChannels {
  std::int64_t width = 0;    // channels of each of q, k, v
  std::int64_t stride = 0;   // the same, padded
  std::int64_t history = 0;  // W - 1
  std::int64_t offset[3] = {};
  float* taps = nullptr;  // [3, W, stride]
  float* past = nullptr;  // [3, W - 1, stride], raw, oldest first
};

inline HeadChannels take_head_channels(ScratchArena& arena, const KdaBatch& batch,
                                       const KdaGate& gate, std::int64_t head) {
  HeadChannels channels;
  channels.width = batch.key_dim;
  channels.stride = round_up(batch.key_dim, 16);
  channels.history = gate.conv_width - 1;
  for (int part = 0; part < 3; ++part) {
    channels.offset[part] = (part * batch.heads + head) * batch.key_dim;
  }
  const std::int64_t row = 3 * channels.stride;
  channels.taps = arena.take<float>(static_cast<std::size_t>(gate.conv_width * row));
  channels.past = arena.take<float>(static_cast<std::size_t>(channels.history * row));
  return channels;
}

// [channels, steps] in memory, one head's part of it, to [steps, stride].
inline void channel_rows(const float* from, std::int64_t steps, const HeadChannels& channels,
                         float* to) {
  std::memset(to, 0, sizeof(float) * static_cast<std::size_t>(3 * steps * channels.stride));
  for (int part = 0; part < 3; ++part) {
    const float* source = from + channels.offset[part] * steps;
    for (std::int64_t c = 0; c < channels.width; ++c) {
      for (std::int64_t i = 0; i < steps; ++i) {
        to[(part * steps + i) * channels.stride + c] = source[c * steps + i];
      }
    }
  }
}

inline void load_history(const HeadChannels& channels, const float* conv_state) {
  const std::int64_t floats = 3 * channels.history * channels.stride;
  if (conv_state == nullptr) {
    std::memset(channels.past, 0, sizeof(float) * static_cast<std::size_t>(floats));
  } else {
    channel_rows(conv_state, channels.history, channels, channels.past);
  }
}

// Writes the last W - 1 of (past, then `count` rows of `raw`) as the new convolution state.
inline void store_history(const HeadChannels& channels, const float* raw, std::int64_t raw_stride,
                          std::int64_t count, float* conv_state) {
  const std::int64_t history = channels.history;
  for (int part = 0; part < 3; ++part) {
    float* to = conv_state + channels.offset[part] * history;
    for (std::int64_t i = 0; i < history; ++i) {
      const std::int64_t token = count - history + i;
      const float* row = token >= 0
                             ? raw + token * raw_stride + channels.offset[part]
                             : channels.past + (part * history + history + token) * channels.stride;
      for (std::int64_t c = 0; c < channels.width; ++c) to[c * history + i] = row[c];
    }
  }
}

// Where the raw row of a token lies: in `raw`, row 0 of the sequence, or among the past ones.
inline const float* raw_row(const HeadChannels& channels, int part, const float* raw,
                            std::int64_t raw_stride, std::int64_t token) {
  if (token >= 0) return raw + token * raw_stride + channels.offset[part];
  const std::int64_t past = part * channels.history + channels.history + token;
  return channels.past + past * channels.stride;
}

// The convolution over one vector of channels, `count` tokens long. The last kTaps - 1 raw values
// stay in registers, so that each is loaded once.
template <int kTaps>
inline void convolve_lanes(const HeadChannels& channels, int part, const float* raw,
                           std::int64_t raw_stride, std::int64_t first, int count, std::int64_t c,
                           float* to, std::int64_t to_stride) {
  const std::int64_t here = channels.width - c;
  const float* taps = channels.taps + part * kTaps * channels.stride + c;
  Lanes tap[kTaps], window[kTaps];
#pragma GCC unroll 8
  for (int i = 0; i < kTaps; ++i) tap[i] = Lanes::load(taps + i * channels.stride);
#pragma GCC unroll 8
  for (int i = 1; i < kTaps; ++i) {
    const float* row = raw_row(channels, part, raw, raw_stride, first + i - kTaps);
    window[i] = load_first_or_all(row + c, here);
  }
  const float* row = raw + first * raw_stride + channels.offset[part] + c;
  for (int token = 0; token < count; ++token, row += raw_stride) {
#pragma GCC unroll 8
    for (int i = 1; i < kTaps; ++i) window[i - 1] = window[i];
    window[kTaps - 1] = load_first_or_all(row, here);
    Lanes sum = tap[0] * window[0];
#pragma GCC unroll 8
    for (int i = 1; i < kTaps; ++i) sum = multiply_add(tap[i], window[i], sum);
    // Padding lanes: silu(0) = 0.
    silu(sum).store(to + token * to_stride + c);
  }
}

// The same for any number of taps.
inline void convolve_lanes_any(const HeadChannels& channels, int part, const float* raw,
                               std::int64_t raw_stride, std::int64_t first, int count,
                               std::int64_t c, float* to, std::int64_t to_stride) {
  const std::int64_t here = channels.width - c;
  const std::int64_t taps = channels.history + 1;
  const float* tap = channels.taps + part * taps * channels.stride + c;
  for (int token = 0; token < count; ++token) {
    Lanes sum = Lanes::zero();
    for (std::int64_t i = 0; i < taps; ++i) {
      const float* row =
          raw_row(channels, part, raw, raw_stride, first + token + i - channels.history);
      const Lanes weight = Lanes::load(tap + i * channels.stride);
      sum = multiply_add(weight, load_first_or_all(row + c, here), sum);
    }
    silu(sum).store(to + token * to_stride + c);
  }
}

// Rows [0, count) of `to` = silu of the convolutions that end at tokens first, first + 1, ...
inline void convolve(const HeadChannels& channels, int part, const float* raw,
                     std::int64_t raw_stride, std::int64_t first, int count, float* to,
                     std::int64_t to_stride) {
  for (std::int64_t c = 0; c < channels.width; c += kWidth) {
    if (channels.history == 3) {
      convolve_lanes<4>(channels, part, raw, raw_stride, first, count, c, to, to_stride);
    } else {
      convolve_lanes_any(channels, part, raw, raw_stride, first, count, c, to, to_stride);
    }
  }
}

// row <- row * scale / sqrt(sum of squares + eps)
inline void normalise(float* row, std::int64_t stride, float scale) {
  Lanes squares = Lanes::zero();
  for (std::int64_t c = 0; c < stride; c += kWidth) {
    const Lanes value = Lanes::load(row + c);
    squares = multiply_add(value, value, squares);
  }
  const Lanes factor = Lanes::broadcast(scale / std::sqrt(sum_of(squares) + kNormEpsilon));
  for (std::int64_t c = 0; c < stride; c += kWidth) (Lanes::load(row + c) * factor).store(row + c);
}

// to = log decay of one head from its projection row and bias, both [width]; padding stays 0.
inline void log_decay(const KdaGate& gate, float a_log, const float* projection,
                      const float* dt_bias, std::int64_t width, float* to) {
  const float rate = std::exp(a_log);
  for (std::int64_t c = 0; c < width; c += kWidth) {
    const std::int64_t here = width - c < kWidth ? width - c : kWidth;
    const Lanes z = load_first_or_all(projection + c, here) + load_first_or_all(dt_bias + c, here);
    Lanes decay;
    if (gate.has_lower_bound) {
      decay = Lanes::broadcast(gate.lower_bound) * sigmoid(Lanes::broadcast(rate) * z);
    } else {
      decay = Lanes::broadcast(-rate) * softplus(z);
    }
    if (here == kWidth) {
      decay.store(to + c);
    } else {
      store_first(to + c, decay, here);
    }
  }
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
