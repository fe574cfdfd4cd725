"""KDA: the short convolution, the chunked operator and the recurrent one."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridge.compiler.targets.ascend.lowerings.context import (
    Context,
    continues,
    device_slots,
    matmul,
    sequence_of,
    where_continuing,
)
from hybridge.compiler.targets.ascend.npu_reference.numbers import L2_EPS
from hybridge.compiler.targets.ascend.own_operators import ASCEND_950

CHUNK = 64
# In fp32 exp(-1000) is 0: a decay that forgets the whole state.
FORGET = -1000.0


def l2_normalise(x: Tensor) -> Tensor:
    """X / sqrt(sum x^2 + 1e-6) over the last dimension, in fp32."""
    values = x.float()  # values * values: `square` becomes the slow Pow
    return values * torch.rsqrt((values * values).sum(-1, keepdim=True) + L2_EPS)


def log_decay(gate: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """[T, H, K] fp32 natural-log decay from the raw gate [T, P] (spec/MODELS.md 3.1 step 6)."""
    z = (gate.float() + dt_bias.float()).unflatten(-1, (a_log.shape[0], -1))
    rate = a_log.float().exp().unsqueeze(-1)
    if lower_bound is None:
        return -rate * F.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)


def _history(ctx: Context, conv_state: Tensor, context_len: Tensor, slots: Tensor) -> Tensor:
    """[B, W - 1, C] the raw outputs before this call; zeros for a sequence that starts now."""
    return where_continuing(ctx, context_len, conv_state.index_select(0, slots))


def _fused_convolution(
    ctx: Context,
    qkv: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    state_slot: Tensor,
) -> Tensor:
    """CausalConv1d; its tap 0 is the current token, the checkpoint's is the last."""
    ctx.require("CausalConv1d", taps=weight.shape[1])
    seeded = ctx.once("seeded", lambda: (context_len > 0).to(torch.int32))
    return torch.ops.hybridge_ascend.causal_conv1d(  # type: ignore[no-any-return]
        qkv,
        weight.t().flip(0).to(qkv.dtype).contiguous(),
        conv_state,
        query_start.to(torch.int32),
        device_slots(ctx, state_slot),
        seeded,
        "silu",
        0,
    )


def _window(ctx: Context, tokens: int, taps: int, query_start: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of [tokens | history] that each tap of each token reads, and that become the state.

    ([W, T], [B, W - 1]): row t is token t, row T + b (W - 1) + j is history row j of sequence b.
    """

    def make() -> tuple[Tensor, Tensor]:
        keep = taps - 1
        token = torch.arange(tokens, device=query_start.device)
        owner = sequence_of(ctx, tokens, query_start)
        offset = token - query_start.index_select(0, owner)
        back = torch.arange(keep, -1, -1, device=query_start.device).unsqueeze(1)
        cached = tokens + owner * keep + keep + offset - back
        reads = torch.where(offset >= back, token - back, cached)
        starts = query_start[:-1].unsqueeze(1)
        lengths = (query_start[1:] - query_start[:-1]).unsqueeze(1)
        place = lengths - keep + torch.arange(keep, device=query_start.device)
        row = torch.arange(starts.shape[0], device=query_start.device).unsqueeze(1)
        kept = torch.where(place >= 0, starts + place, tokens + row * keep + keep + place)
        return reads.long(), kept.long()

    return ctx.once(("window", taps), make)  # type: ignore[no-any-return]


def _spelled_convolution(
    ctx: Context,
    qkv: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    state_slot: Tensor,
) -> Tensor:
    """The convolution by gathers, where no operator takes four taps."""
    slots = device_slots(ctx, state_slot)
    reads, kept = _window(ctx, qkv.shape[0], weight.shape[1], query_start)
    history = _history(ctx, conv_state, context_len, slots).to(qkv.dtype)
    rows = torch.cat([qkv, history.flatten(0, 1)])
    mixed = rows.index_select(0, reads[0]) * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        mixed = mixed + rows.index_select(0, reads[tap]) * weight[:, tap]
    new = rows.index_select(0, kept.flatten()).view(conv_state.shape[0:0] + history.shape)
    _write_state(ctx, "conv_state", conv_state, new, slots)
    return F.silu(mixed).to(qkv.dtype)


def _write_state(ctx: Context, argument: str, state: Tensor, rows: Tensor, slots: Tensor) -> None:
    written = torch.ops.npu.npu_scatter_nd_update_(state, slots.unsqueeze(-1), rows.to(state.dtype))
    ctx.values[ctx.argument(argument)] = written


def lower_kda_prefill(
    ctx: Context,
    qkv: Tensor,
    gate: Tensor,
    beta: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    conv_state: Tensor,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    state_slot: Tensor,
    *,
    lower_bound: float | None,
) -> Tensor:
    """Convolution, then ChunkKdaFwd with the gate activated inside it.

    Padding tokens make one more sequence at the end, with a state that is thrown away, since the
    operator's prefix sums must end with T.
    """
    heads, sequences = a_log.shape[0], context_len.shape[0]
    on_950 = ctx.soc == ASCEND_950
    convolve = _fused_convolution if on_950 else _spelled_convolution
    metadata = query_start, context_len, state_slot
    mixed = convolve(ctx, qkv.to(ctx.dtype), conv_weight, conv_state, *metadata)
    query, key, value = (part.unflatten(-1, (heads, -1)) for part in mixed.chunk(3, -1))
    ctx.require(
        "ChunkKdaFwd",
        heads=heads,
        key_dimension=query.shape[-1],
        value_dimension=value.shape[-1],
        chunk_size=CHUNK,
        sequences=ctx.bucket.sequences + 1,
    )
    if lower_bound is not None:
        ctx.require("ChunkKdaFwd", gate_lower_bound=lower_bound)
    slots = device_slots(ctx, state_slot)
    output, final = torch.ops.hybridge_ascend.chunk_kda_fwd(
        l2_normalise(query).to(ctx.dtype),
        l2_normalise(key).to(ctx.dtype),
        value.contiguous(),
        gate.float().unflatten(-1, (heads, -1)),
        torch.sigmoid(beta.float()),
        a_log.float(),
        dt_bias.float(),
        _initial_states(ctx, state, context_len, slots),
        ctx.once("chunk_starts", lambda: _with_tail(query_start, qkv.shape[0])),
        float(query.shape[-1]) ** -0.5,
        CHUNK,
        lower_bound is not None,
        lower_bound or 0.0,
    )
    _write_state(ctx, "state", state, final[:sequences], slots)
    ctx.became(f"{'CausalConv1d' if on_950 else 'gathers'} + ChunkKdaFwd")
    return output  # type: ignore[no-any-return]


def _initial_states(ctx: Context, state: Tensor, context_len: Tensor, slots: Tensor) -> Tensor:
    """[B + 1, H, V, K]: each sequence's state, zero where it starts, and the padding's."""
    rows = where_continuing(ctx, context_len, state.index_select(0, slots))
    return F.pad(rows, (0, 0, 0, 0, 0, 0, 0, 1))


def _with_tail(query_start: Tensor, tokens: int) -> Tensor:
    end = torch.full((1,), tokens, dtype=torch.int64, device=query_start.device)
    return torch.cat([query_start.to(torch.int64), end])


def lower_kda_decode(
    ctx: Context,
    x: Tensor,
    in_weight: Tensor,
    f_b_weight: Tensor,
    g_b_weight: Tensor | None,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    o_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    context_len: Tensor,
    state_slot: Tensor,
    *,
    lower_bound: float | None,
    norm_eps: float,
) -> Tensor:
    """Projections, convolution, npu_recurrent_gated_delta_rule with gk, output norm and gate."""
    batch, heads = x.shape[0], a_log.shape[0]
    sizes = (conv_weight.shape[0], f_b_weight.shape[1], heads)
    parts = matmul(ctx, x, in_weight)
    ends = list(itertools.accumulate(sizes))
    qkv, low, beta, output_gate = parts.tensor_split(ends, -1)
    if g_b_weight is not None:
        output_gate = matmul(ctx, output_gate, g_b_weight)
    slots = device_slots(ctx, state_slot)
    mixed = _decode_convolution(ctx, qkv, conv_weight, conv_state, context_len, state_slot)
    query, key, value = (part.unflatten(-1, (heads, -1)) for part in mixed.chunk(3, -1))
    ctx.require(
        "RecurrentGatedDeltaRule",
        heads=heads,
        key_dimension=query.shape[-1],
        value_dimension=value.shape[-1],
        tokens_a_sequence=1,
    )
    decay = log_decay(matmul(ctx, low, f_b_weight), a_log, dt_bias, lower_bound)
    # A sequence without context starts from nothing, whatever its row holds.
    decay = torch.where(continues(ctx, context_len, 3), decay, FORGET)
    core = torch.ops.npu.npu_recurrent_gated_delta_rule(
        l2_normalise(query).to(ctx.dtype),
        l2_normalise(key).to(ctx.dtype),
        value.contiguous(),
        state,
        beta=torch.sigmoid(beta.float()).to(ctx.dtype),
        scale=float(query.shape[-1]) ** -0.5,
        actual_seq_lengths=ctx.once("ones", lambda: torch.ones_like(slots)),
        ssm_state_indices=slots,
        gk=decay,
    )
    normed = torch.ops.npu.npu_rms_norm(core, norm_weight.to(core.dtype), norm_eps)[0]
    gated = normed.reshape(batch, -1) * torch.sigmoid(output_gate)
    convolution = "CausalConv1d" if ctx.soc == ASCEND_950 else "gathers"
    ctx.became(f"{convolution} + npu_recurrent_gated_delta_rule + npu_rms_norm")
    return matmul(ctx, gated, o_weight)


def _decode_convolution(
    ctx: Context,
    qkv: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    context_len: Tensor,
    state_slot: Tensor,
) -> Tensor:
    """One token a row: sequences of length one, since the operator takes any length."""
    if ctx.soc == ASCEND_950:
        starts = ctx.once("one each", lambda: _one_each(context_len))
        return _fused_convolution(ctx, qkv, weight, conv_state, starts, context_len, state_slot)
    slots = device_slots(ctx, state_slot)
    history = _history(ctx, conv_state, context_len, slots).to(qkv.dtype)
    window = torch.cat([history, qkv.unsqueeze(1)], 1)
    _write_state(ctx, "conv_state", conv_state, window[:, 1:].contiguous(), slots)
    return F.silu((window * weight.t().to(qkv.dtype)).sum(1))


def _one_each(context_len: Tensor) -> Tensor:
    """Prefix sums of B sequences of one token."""
    count = context_len.shape[0] + 1
    return torch.arange(count, dtype=torch.int32, device=context_len.device)
