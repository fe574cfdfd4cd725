"""Bodies of `kda_recurrence`, `kda_prefill` and `kda_decode`.

The recurrence steps all sequences of a batch at once: step s holds token s of each, and a sequence
that has no such token keeps its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridge.compiler.targets.onnx.functions.batch import TokenRows, token_rows, write_rows
from hybridge.compiler.targets.onnx.functions.builder import (
    FLOAT,
    Expression,
    arange,
    computed,
    op,
    scan,
)
from hybridge.compiler.targets.onnx.functions.elementwise import silu
from hybridge.ops.kda import L2_NORM_EPS


@dataclass(frozen=True)
class _Sequences:
    """A batch of sequences with recurrent state.

    Args:
        rows: where each packed token belongs.
        start, length: [B] int64, first packed token and number of tokens.
        slot: [B] int64, clamped into the state, for reading.
        continued: [B] bool, the slot holds the state of earlier tokens.
        write_slot: [B] int64, the slot; -1 where nothing is to be written.
    """

    rows: TokenRows
    start: Expression
    length: Expression
    slot: Expression
    continued: Expression
    write_slot: Expression

    @property
    def token_active(self) -> Expression:
        """[T] bool: the token is no padding and its sequence has a slot."""
        return self.rows.valid & (self.write_slot.take(self.rows.sequence) >= 0)


def _sequences(
    query_start: Expression, context_len: Expression, state_slot: Expression, tokens: Expression
) -> _Sequences:
    starts = query_start.int64()
    start = starts.between([0], [-1])
    length = starts.between([1], starts.dim(0)) - start
    slot = state_slot.int64()
    return _Sequences(
        rows=token_rows(query_start, tokens),
        start=start,
        length=length,
        slot=op.Max(slot, 0),
        continued=context_len.int64() > 0,
        write_slot=op.Where(length > 0, slot, -1),
    )


def kda_recurrence(
    query: Expression,
    key: Expression,
    value: Expression,
    log_decay: Expression,
    beta: Expression,
    state: Expression,
    query_start: Expression,
    context_len: Expression,
    state_slot: Expression,
) -> tuple[Expression, ...]:
    """The body of `kda_recurrence`: arguments and results as its reference."""
    batch = _sequences(query_start, context_len, state_slot, query.dim(0))
    output, new_state = _recurrence(query, key, value, log_decay, beta, state, batch)
    return computed(output).like(value), new_state


def _recurrence(
    query: Expression,
    key: Expression,
    value: Expression,
    log_decay: Expression,
    beta: Expression,
    state: Expression,
    batch: _Sequences,
) -> tuple[Expression, Expression]:
    """The gated delta rule (spec/MODELS.md 3.1 step 7): output [T, H, V] fp32 and the new state."""
    # At least one step, so that a batch without tokens is no special case.
    steps = arange(op.Max(op.ReduceMax(batch.length, keepdims=1), 1))
    active = (steps.unsqueeze(1) < batch.length.unsqueeze(0)) & (batch.write_slot >= 0)
    source = op.Min(batch.start + steps.unsqueeze(1), query.dim(0) - 1)
    per_step = [
        item.fp32().take(source) for item in (query, key, value, op.Exp(log_decay.fp32()), beta)
    ]
    start = op.Where(batch.continued.unsqueeze(1, 2, 3), state.take(batch.slot).fp32(), 0.0)

    def step(
        memory: Expression,
        q: Expression,
        k: Expression,
        v: Expression,
        decay: Expression,
        strength: Expression,
        live: Expression,
    ) -> tuple[list[Expression], list[Expression]]:
        decayed = memory * decay.unsqueeze(-1)
        predicted = (k.unsqueeze(-2) @ decayed).squeeze(-2)
        change = (v - predicted) * strength.unsqueeze(-1)
        updated = decayed + k.unsqueeze(-1) * change.unsqueeze(-2)
        read = (q.unsqueeze(-2) @ updated).squeeze(-2)
        return [op.Where(live.unsqueeze(1, 2, 3), updated, memory)], [read]

    memory, outputs = scan(step, [start], [*per_step, active], [(FLOAT, 4), (FLOAT, 3)])
    flat = outputs.reshape(-1, value.dim(1), value.dim(2))
    place = batch.rows.offset * batch.start.dim(0) + batch.rows.sequence
    found = flat.take(op.Where(batch.token_active, place, 0))
    output = op.Where(batch.token_active.unsqueeze(1, 2), found, 0.0)
    return output, write_rows(state, memory, batch.write_slot)


def kda_prefill(
    qkv: Expression,
    gate: Expression,
    beta: Expression,
    conv_weight: Expression,
    a_log: Expression,
    dt_bias: Expression,
    conv_state: Expression,
    state: Expression,
    query_start: Expression,
    context_len: Expression,
    state_slot: Expression,
    *,
    lower_bound: Expression | None,
) -> tuple[Expression, ...]:
    """The body of `kda_prefill`: arguments and results as its reference."""
    batch = _sequences(query_start, context_len, state_slot, qkv.dim(0))
    mixed, new_conv_state = _convolution(qkv.fp32(), conv_weight.fp32(), conv_state, batch)
    heads = a_log.dim(0)
    query, key, value = (part.reshape(0, heads, -1) for part in _thirds(mixed))
    scale = op.Reciprocal(op.Sqrt(query.dim(2).fp32()))
    output, new_state = _recurrence(
        _l2_normalise(query) * scale,
        _l2_normalise(key),
        value,
        _log_decay(gate, a_log, dt_bias, lower_bound),
        op.Sigmoid(beta.fp32()),
        state,
        batch,
    )
    return computed(output).like(qkv), new_conv_state, new_state


def kda_decode(
    x: Expression,
    in_weight: Expression,
    f_b_weight: Expression,
    g_b_weight: Expression | None,
    conv_weight: Expression,
    a_log: Expression,
    dt_bias: Expression,
    norm_weight: Expression,
    o_weight: Expression,
    conv_state: Expression,
    state: Expression,
    context_len: Expression,
    state_slot: Expression,
    *,
    lower_bound: Expression | None,
    norm_eps: Expression,
) -> tuple[Expression, ...]:
    """The body of `kda_decode`: arguments and results as its reference."""
    projected = conv_weight.dim(0)
    low_end = projected + f_b_weight.dim(1)
    beta_end = low_end + a_log.dim(0)
    parts = _project(x.fp32(), in_weight)
    gate = parts.between(beta_end, parts.dim(1), axis=1)
    core, new_conv_state, new_state = kda_prefill(
        parts.between([0], projected, axis=1),
        _project(parts.between(projected, low_end, axis=1), f_b_weight),
        parts.between(low_end, beta_end, axis=1),
        conv_weight,
        a_log,
        dt_bias,
        conv_state,
        state,
        arange(x.dim(0) + 1),
        context_len,
        state_slot,
        lower_bound=lower_bound,
    )
    output_gate = gate if g_b_weight is None else _project(gate, g_b_weight)
    normed = core / op.Sqrt((core * core).mean(-1) + norm_eps) * norm_weight.fp32()
    gated = normed.reshape(x.dim(0), -1) * op.Sigmoid(output_gate)
    active = (state_slot.int64() >= 0).unsqueeze(-1)
    result = op.Where(active, _project(gated, o_weight), 0.0)
    return computed(result).like(x), new_conv_state, new_state


def _project(x: Expression, weight: Expression) -> Expression:
    return x @ weight.fp32().transpose(1, 0)


def _thirds(x: Expression) -> tuple[Expression, Expression, Expression]:
    third = x.dim(1) / 3
    return (
        x.between([0], third, axis=1),
        x.between(third, third * 2, axis=1),
        x.between(third * 2, x.dim(1), axis=1),
    )


def _l2_normalise(x: Expression) -> Expression:
    return x / op.Sqrt((x * x).sum(-1, keep=True) + L2_NORM_EPS)


def _log_decay(
    gate: Expression, a_log: Expression, dt_bias: Expression, lower_bound: Expression | None
) -> Expression:
    z = (gate.fp32() + dt_bias.fp32()).reshape(0, a_log.dim(0), -1)
    rate = op.Exp(a_log.fp32()).unsqueeze(-1)
    if lower_bound is None:
        return -(rate * op.Softplus(z))
    return op.Sigmoid(rate * z) * lower_bound


def _convolution(
    raw: Expression, weight: Expression, conv_state: Expression, batch: _Sequences
) -> tuple[Expression, Expression]:
    """Causal depthwise convolution with SiLU, and the new window of each sequence.

    Every sequence's line is its history (W - 1 raw rows, zeros when it is new) followed by its
    tokens. `pool` holds all tokens, then all histories; a place on a line is an index into it.

    Args:
        raw: [T, C].
        weight: [C, W].
        conv_state: [slots, C, W - 1].
        batch: the sequences.

    Returns:
        [T, C] and the new conv_state.
    """
    reach = weight.dim(1) - 1
    history = conv_state.take(batch.slot).fp32().transpose(0, 2, 1)
    history = op.Where(batch.continued.unsqueeze(1, 2), history, 0.0)
    pool = op.Concat(raw, history.reshape(-1, raw.dim(1)), axis=0)

    def on_line(sequence: Expression, start: Expression, offset: Expression) -> Expression:
        """Index into the pool of a line's place `offset`; negative ones are history."""
        remembered = raw.dim(0) + (sequence + 1) * reach + offset
        return op.Where(offset >= 0, start + offset, remembered)

    rows = batch.rows
    taps = arange(weight.dim(1)) - reach
    own = rows.sequence.unsqueeze(1)
    window = on_line(own, batch.start.take(own), rows.offset.unsqueeze(1) + taps.unsqueeze(0))
    # A padding token's place may lie past the pool; its result is dropped by the recurrence.
    window = op.Min(window, pool.dim(0) - 1)
    mixed = silu((pool.take(window) * weight.transpose(1, 0)).sum(1))

    every = arange(batch.start.dim(0)).unsqueeze(1)
    newest = batch.length.unsqueeze(1) + (arange(reach) - reach).unsqueeze(0)
    kept = pool.take(on_line(every, batch.start.unsqueeze(1), newest))
    return mixed, write_rows(conv_state, kept.transpose(0, 2, 1), batch.write_slot)
