#include "math/kda.h"

#include "math/kda_chunk.h"
#include "math/kda_inputs.h"
#include "math/linear.h"
#include "math/tiles.h"

namespace hybridge {
namespace HYBRIDGE_ISA {
namespace {

std::size_t floats_of(std::int64_t count) {
  return sizeof(float) * static_cast<std::size_t>(count);
}

// One sequence's share of a batch.
struct Sequence {
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t slot = -1;
  bool fresh = false;  // no token came before: zero state, zero history

  bool idle() const { return slot < 0 || count == 0; }
};

Sequence sequence_at(const KdaBatch& batch, std::int64_t b) {
  Sequence sequence;
  sequence.first = batch.query_start[b];
  sequence.count = batch.query_start[b + 1] - sequence.first;
  sequence.slot = batch.state_slot[b];
  sequence.fresh = batch.context_len[b] == 0;
  return sequence;
}

// Outputs of padding tokens and of sequences without a state are zero.
void clear_idle_rows(const KdaBatch& batch, float* output) {
  const std::int64_t row = batch.heads * batch.value_dim;
  for (std::int64_t b = 0; b < batch.sequences; ++b) {
    const Sequence sequence = sequence_at(batch, b);
    if (sequence.slot < 0) {
      std::memset(output + sequence.first * row, 0, floats_of(sequence.count * row));
    }
  }
  const std::int64_t used = batch.query_start[batch.sequences];
  std::memset(output + used * row, 0, floats_of((batch.tokens - used) * row));
}

// Runs `fill(first token, count)` and the recurrence over one head of one sequence, 16 tokens at a
// time.
template <typename Fill>
void run_head(const KdaBatch& batch, const Sequence& sequence, std::int64_t head,
              const KdaScratch& s, float* states, float* output, Fill&& fill) {
  float* state = states + (sequence.slot * batch.heads + head) * batch.key_dim * batch.value_dim;
  load_state(s, sequence.fresh ? nullptr : state);
  clear_kda_rows(s);
  for (std::int64_t done = 0; done < sequence.count; done += kChunk) {
    const std::int64_t left = sequence.count - done;
    const int count = static_cast<int>(left < kChunk ? left : kChunk);
    fill(done, count);
    run_rows(s, count);
    for (int i = 0; i < count; ++i) {
      const std::int64_t token = sequence.first + done + i;
      std::memcpy(output + (token * batch.heads + head) * batch.value_dim,
                  s.output + i * s.value_stride, floats_of(batch.value_dim));
    }
  }
  store_state(s, state);
}

// A head's part of a row lies far from that of the next row, where no hardware prefetcher looks.
void fetch_rows(const float* row, std::int64_t stride, std::int64_t count, std::int64_t width) {
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t c = 0; c < width; c += 16) prefetch_far(row + i * stride + c);
  }
}

void copy_rows(const float* from, std::int64_t from_stride, std::int64_t count, std::int64_t width,
               float* to, std::int64_t to_stride) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, floats_of(width));
  }
}

std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

void recurrence_of_head(const KdaRecurrence& args, const Sequence& sequence, std::int64_t head,
                        const KdaScratch& s) {
  const KdaBatch& batch = args.batch;
  const std::int64_t key_dim = batch.key_dim, value_dim = batch.value_dim;
  const std::int64_t key_step = batch.heads * key_dim, value_step = batch.heads * value_dim;
  const auto fill = [&](std::int64_t first, int count) {
    const std::int64_t at = (sequence.first + first) * batch.heads + head;
    const std::int64_t next = at + kChunk * batch.heads;
    const std::int64_t more = smaller(kChunk, sequence.count - first - kChunk);
    const float* const from[] = {args.query, args.key, args.log_decay};
    float* const to[] = {s.query, s.key, s.log_decay};
    for (int i = 0; i < 3; ++i) {
      copy_rows(from[i] + at * key_dim, key_step, count, key_dim, to[i], s.key_stride);
      fetch_rows(from[i] + next * key_dim, key_step, more, key_dim);
    }
    copy_rows(args.value + at * value_dim, value_step, count, value_dim, s.value, s.value_stride);
    fetch_rows(args.value + next * value_dim, value_step, more, value_dim);
    for (int i = 0; i < count; ++i) s.beta[i] = args.beta[at + i * batch.heads];
  };
  run_head(batch, sequence, head, s, args.state, args.output, fill);
}

void prefill_of_head(const KdaPrefill& args, const Sequence& sequence, std::int64_t head,
                     const KdaScratch& s, const HeadChannels& channels) {
  const KdaBatch& batch = args.batch;
  const std::int64_t width = batch.heads * batch.key_dim;
  const float* raw = args.qkv + sequence.first * 3 * width;
  float* conv_state = args.conv_state + sequence.slot * 3 * width * channels.history;
  channel_rows(args.gate.conv_weight, args.gate.conv_width, channels, channels.taps);
  load_history(channels, sequence.fresh ? nullptr : conv_state);
  const float query_scale = 1.0f / std::sqrt(static_cast<float>(batch.key_dim));
  const auto fill = [&](std::int64_t first, int count) {
    convolve(channels, 0, raw, 3 * width, first, count, s.query, s.key_stride);
    convolve(channels, 1, raw, 3 * width, first, count, s.key, s.key_stride);
    convolve(channels, 2, raw, 3 * width, first, count, s.value, s.value_stride);
    const std::int64_t at = sequence.first + first;
    const float* decay = args.decay + at * width + head * batch.key_dim;
    const std::int64_t next = first + kChunk;
    const std::int64_t more = smaller(kChunk, sequence.count - next);
    for (std::int64_t offset : channels.offset) {
      fetch_rows(raw + next * 3 * width + offset, 3 * width, more, batch.key_dim);
    }
    fetch_rows(decay + kChunk * width, width, more, batch.key_dim);
    for (int i = 0; i < count; ++i) {
      normalise(s.query + i * s.key_stride, s.key_stride, query_scale);
      normalise(s.key + i * s.key_stride, s.key_stride, 1.0f);
      log_decay(args.gate, args.gate.a_log[head], decay + i * width,
                args.gate.dt_bias + head * batch.key_dim, batch.key_dim,
                s.log_decay + i * s.key_stride);
      s.beta[i] = sigmoid_of(args.beta[(at + i) * batch.heads + head]);
    }
  };
  run_head(batch, sequence, head, s, args.state, args.output, fill);
  store_history(channels, raw, 3 * width, sequence.count, conv_state);
}

// ---- Decode ----------------------------------------------------------------------------------

// Where the parts of one row of in_weight's product begin.
struct DecodeColumns {
  std::int64_t width, decay, beta, gate, total;
};

DecodeColumns decode_columns(const KdaDecode& args) {
  DecodeColumns columns;
  columns.width = args.batch.heads * args.batch.key_dim;
  columns.decay = 3 * columns.width;
  columns.beta = columns.decay + args.rank;
  columns.gate = columns.beta + args.batch.heads;
  columns.total = columns.gate + (args.gate_rank > 0 ? args.gate_rank : columns.width);
  return columns;
}

// Rows [head * K, (head + 1) * K) of a low-rank weight times one token's low-rank vector.
void expand_head(const WeightMatrix& weight, std::int64_t rank, std::int64_t head,
                 std::int64_t width, const float* x, float* to) {
  const std::int64_t first = head * width * rank;
  const auto store = [&](std::int64_t row, int, float sum) { to[row] = sum; };
  if (weight.is_bf16) {
    const auto* rows = static_cast<const std::uint16_t*>(weight.data) + first;
    matrix_times_tokens<1>(rows, width, rank, x, rank, store);
  } else {
    const auto* rows = static_cast<const float*>(weight.data) + first;
    matrix_times_tokens<1>(rows, width, rank, x, rank, store);
  }
}

// o <- o / rms(o) * norm_weight * sigmoid(gate)
void normalise_and_gate(const float* norm_weight, float eps, const float* gate, std::int64_t width,
                        float* o) {
  Lanes squares = Lanes::zero();
  for (std::int64_t c = 0; c < width; c += kWidth) {
    const Lanes value = load_first_or_all(o + c, width - c);
    squares = multiply_add(value, value, squares);
  }
  const float mean = sum_of(squares) / static_cast<float>(width);
  const Lanes factor = Lanes::broadcast(1.0f / std::sqrt(mean + eps));
  for (std::int64_t c = 0; c < width; c += kWidth) {
    const std::int64_t here = width - c;
    const Lanes normed = load_first_or_all(o + c, here) * factor;
    const Lanes weighted = normed * load_first_or_all(norm_weight + c, here);
    store_first_or_all(o + c, weighted * sigmoid(load_first_or_all(gate + c, here)), here);
  }
}

// One token of one head: from its raw projections to the gated output o [V].
void decode_head(const KdaDecode& args, const Sequence& sequence, std::int64_t head,
                 const float* projected, float* o) {
  const KdaBatch& batch = args.batch;
  const DecodeColumns columns = decode_columns(args);
  const std::int64_t width = batch.key_dim;

  ScratchArena measure;
  take_kda_scratch(measure, width, batch.value_dim);
  take_head_channels(measure, batch, args.gate, head);
  ScratchArena arena(scratch_bytes(ScratchSlot::kTask, measure.used()));
  const KdaScratch s = take_kda_scratch(arena, width, batch.value_dim);
  const HeadChannels channels = take_head_channels(arena, batch, args.gate, head);

  float* conv_state = args.conv_state + sequence.slot * 3 * columns.width * channels.history;
  channel_rows(args.gate.conv_weight, args.gate.conv_width, channels, channels.taps);
  load_history(channels, sequence.fresh ? nullptr : conv_state);
  clear_kda_rows(s);
  convolve(channels, 0, projected, 0, 0, 1, s.query, s.key_stride);
  convolve(channels, 1, projected, 0, 0, 1, s.key, s.key_stride);
  convolve(channels, 2, projected, 0, 0, 1, s.value, s.value_stride);
  store_history(channels, projected, 0, 1, conv_state);
  normalise(s.query, s.key_stride, 1.0f / std::sqrt(static_cast<float>(width)));
  normalise(s.key, s.key_stride, 1.0f);

  float* const expanded = s.final_rows;
  expand_head(args.f_b_weight, args.rank, head, width, projected + columns.decay, expanded);
  log_decay(args.gate, args.gate.a_log[head], expanded, args.gate.dt_bias + head * width, width,
            s.log_decay);
  for (std::int64_t c = 0; c < s.key_stride; c += kWidth) {
    exponential(Lanes::load(s.log_decay + c)).store(s.exponent + c);
  }

  KdaToken token = {};
  token.query = s.query;
  token.key = s.key;
  token.decay = s.exponent;
  token.value = s.value;
  token.beta = sigmoid_of(projected[columns.beta + head]);
  token.decayed_query = s.lead_rows;
  token.decayed_key = s.inverse_rows;
  prepare_step(token, s.key_stride);
  const std::int64_t state_floats = width * batch.value_dim;
  float* state = args.state + (sequence.slot * batch.heads + head) * state_floats;
  if (sequence.fresh) std::memset(state, 0, floats_of(state_floats));
  kda_step(token, width, batch.value_dim, state, batch.value_dim, o);

  const float* gate = projected + columns.gate + head * width;
  if (args.gate_rank > 0) {
    expand_head(args.g_b_weight, args.gate_rank, head, width, projected + columns.gate, expanded);
    gate = expanded;
  }
  normalise_and_gate(args.norm_weight, args.norm_eps, gate, batch.value_dim, o);
}

// out [B, outputs] = x [B, inputs] times the weight's rows.
void project(const KdaDecode& args, const WeightMatrix& weight, const float* x, std::int64_t inputs,
             std::int64_t outputs, float* out, const Parallel& parallel) {
  linear({x, weight, out, args.batch.sequences, inputs, outputs, args.round_x}, parallel);
}

Sequence decode_sequence(const KdaBatch& batch, std::int64_t b) {
  Sequence sequence;
  sequence.first = b;
  sequence.count = 1;
  sequence.slot = batch.state_slot[b];
  sequence.fresh = batch.context_len[b] == 0;
  return sequence;
}

}  // namespace

void kda_recurrence(const KdaRecurrence& args, const Parallel& parallel) {
  const KdaBatch& batch = args.batch;
  if (batch.tokens == 0) return;
  clear_idle_rows(batch, args.output);
  const auto tasks = static_cast<std::size_t>(batch.sequences * batch.heads);
  parallel_for(parallel, tasks, [&](std::size_t task) {
    const std::int64_t index = static_cast<std::int64_t>(task);
    const Sequence sequence = sequence_at(batch, index / batch.heads);
    if (sequence.idle()) return;
    ScratchArena measure;
    take_kda_scratch(measure, batch.key_dim, batch.value_dim);
    ScratchArena arena(scratch_bytes(ScratchSlot::kTask, measure.used()));
    const KdaScratch s = take_kda_scratch(arena, batch.key_dim, batch.value_dim);
    recurrence_of_head(args, sequence, index % batch.heads, s);
  });
}

void kda_prefill(const KdaPrefill& args, const Parallel& parallel) {
  const KdaBatch& batch = args.batch;
  if (batch.tokens == 0) return;
  clear_idle_rows(batch, args.output);
  const auto tasks = static_cast<std::size_t>(batch.sequences * batch.heads);
  parallel_for(parallel, tasks, [&](std::size_t task) {
    const std::int64_t index = static_cast<std::int64_t>(task);
    const std::int64_t head = index % batch.heads;
    const Sequence sequence = sequence_at(batch, index / batch.heads);
    if (sequence.idle()) return;
    ScratchArena measure;
    take_kda_scratch(measure, batch.key_dim, batch.value_dim);
    take_head_channels(measure, batch, args.gate, head);
    ScratchArena arena(scratch_bytes(ScratchSlot::kTask, measure.used()));
    const KdaScratch s = take_kda_scratch(arena, batch.key_dim, batch.value_dim);
    const HeadChannels channels = take_head_channels(arena, batch, args.gate, head);
    prefill_of_head(args, sequence, head, s, channels);
  });
}

void kda_decode(const KdaDecode& args, const Parallel& parallel) {
  const KdaBatch& batch = args.batch;
  const DecodeColumns columns = decode_columns(args);
  ScratchArena measure;
  measure.take<float>(static_cast<std::size_t>(batch.sequences * columns.total));
  measure.take<float>(static_cast<std::size_t>(batch.sequences * columns.width));
  ScratchArena arena(scratch_bytes(ScratchSlot::kOperator, measure.used()));
  float* projected = arena.take<float>(static_cast<std::size_t>(batch.sequences * columns.total));
  float* heads = arena.take<float>(static_cast<std::size_t>(batch.sequences * columns.width));

  project(args, args.in_weight, args.x, args.hidden, columns.total, projected, parallel);
  const auto tasks = static_cast<std::size_t>(batch.sequences * batch.heads);
  parallel_for(parallel, tasks, [&](std::size_t task) {
    const std::int64_t index = static_cast<std::int64_t>(task);
    const std::int64_t b = index / batch.heads;
    const std::int64_t head = index % batch.heads;
    const Sequence sequence = decode_sequence(batch, b);
    float* o = heads + b * columns.width + head * batch.value_dim;
    if (sequence.idle()) {
      std::memset(o, 0, floats_of(batch.value_dim));
      return;
    }
    decode_head(args, sequence, head, projected + b * columns.total, o);
  });
  project(args, args.o_weight, heads, columns.width, args.hidden, args.output, parallel);
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
