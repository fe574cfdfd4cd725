"""The KDA ops: the bare recurrence, FlashKDA (`kda_prefill`) and MegaKDA (`kda_decode`)."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from hybridge.ops.registry import Constraint, FusedOp, register
from hybridge.ops.sequences import spans, wide

# Added inside the square root; a constant of the kernel, not rms_norm_eps (MODELS.md 3.1 step 3).
L2_NORM_EPS = 1e-6


def recurrence_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    state_slot: Tensor,
) -> Tensor:
    """The gated delta rule over packed sequences (spec/MODELS.md 3.1 step 7).

    Args:
        query: [T, H, K], normalised and scaled. key: [T, H, K], normalised. value: [T, H, V].
        log_decay: [T, H, K], natural logarithm of the decay, <= 0.
        beta: [T, H], the write strength.
        state: [slots, H, K, V] fp32, updated in place.
        query_start: [B + 1]. context_len: [B]; 0 starts from a zero state whatever the slot holds.
        state_slot: [B]; a row with -1 is inactive: its tokens give 0 and no state changes.

    Returns:
        [T, H, V] in value's dtype; padding tokens give 0.
    """
    output = torch.zeros_like(value)
    for span in spans(query_start, context_len):
        slot = int(state_slot[span.row])
        if slot < 0:
            continue
        memory = wide(state[slot]) if span.context else torch.zeros_like(wide(state[slot]))
        for token in range(span.start, span.stop):
            memory = memory * wide(log_decay[token]).exp().unsqueeze(-1)
            predicted = torch.einsum("hkv,hk->hv", memory, wide(key[token]))
            change = wide(beta[token]).unsqueeze(-1) * (wide(value[token]) - predicted)
            memory = memory + wide(key[token]).unsqueeze(-1) * change.unsqueeze(-2)
            read = torch.einsum("hkv,hk->hv", memory, wide(query[token]))
            output[token] = read.to(output.dtype)
        state[slot] = memory.to(state.dtype)
    return output


def recurrence_fake(query: Tensor, key: Tensor, value: Tensor, *_rest: Tensor) -> Tensor:
    return torch.empty_like(value)


def log_decay(gate: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """The decay gate's activation (spec/MODELS.md 3.1 step 6).

    Args:
        gate: [T, H * K]. a_log: [H]. dt_bias: [H * K].
        lower_bound: L of variant B, `L * sigmoid(exp(a_log) * z)`; None is variant A, `-exp(a_log) * softplus(z)`.

    Returns:
        [T, H, K] natural-log decay.
    """
    z = (wide(gate) + wide(dt_bias)).unflatten(-1, (a_log.shape[0], -1))
    rate = wide(a_log).exp().unsqueeze(-1)
    if lower_bound is None:
        return -rate * functional.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


def short_convolution(raw: Tensor, history: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution of one sequence, then SiLU (spec/MODELS.md 3.1 step 2).

    Args:
        raw: [T, C] projection outputs. history: [C, W - 1], the raw outputs before them, newest last.
        weight: [C, W]; tap W - 1 is the current token.

    Returns:
        [T, C].
    """
    window = torch.cat([history.to(raw.dtype), raw.T], dim=-1)
    taps = window.unfold(-1, weight.shape[-1], 1)
    return functional.silu(torch.einsum("ctw,cw->tc", taps, weight.to(raw.dtype)))


def prefill_reference(
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
    """FlashKDA: everything between the projections and the output norm (spec/MODELS.md 3.1 steps 2-7).

    Args:
        qkv: [T, 3P] raw projections, q|k|v. gate: [T, P] without dt_bias. beta: [T, H] before the sigmoid.
        conv_weight: [3P, W]. a_log: [H]. dt_bias: [P].
        conv_state: [slots, 3P, W - 1] and state: [slots, H, K, V] fp32, updated in place.
        query_start: [B + 1]. context_len: [B]. state_slot: [B], -1 is inactive.
        lower_bound: see `log_decay`.

    Returns:
        [T, H, V] in qkv's dtype.
    """
    heads, taps = a_log.shape[0], conv_weight.shape[-1]
    mixed = torch.zeros_like(wide(qkv))
    for span in spans(query_start, context_len):
        slot = int(state_slot[span.row])
        if slot < 0:
            continue
        own = wide(qkv[span.start : span.stop])
        history = conv_state[slot] if span.context else torch.zeros_like(conv_state[slot])
        mixed[span.start : span.stop] = short_convolution(own, history, conv_weight)
        window = torch.cat([history.to(own.dtype), own.T], dim=-1)
        conv_state[slot] = window[:, window.shape[-1] - (taps - 1) :].to(conv_state.dtype)
    query, key, value = (part.unflatten(-1, (heads, -1)) for part in mixed.chunk(3, dim=-1))
    scale = float(query.shape[-1]) ** -0.5
    output = recurrence_reference(
        l2_normalise(query) * scale,
        l2_normalise(key),
        value,
        log_decay(gate, a_log, dt_bias, lower_bound),
        torch.sigmoid(wide(beta)),
        state,
        query_start,
        context_len,
        state_slot,
    )
    return output.to(qkv.dtype)


def prefill_fake(
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
    return qkv.new_empty((qkv.shape[0], state.shape[1], state.shape[3]))


def decode_reference(
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
    """MegaKDA: a whole KDA layer for one token a row (spec/MODELS.md 3.1).

    Args:
        x: [B, D], the normed layer input.
        in_weight: [3P + rank + H + G, D], rows q|k|v|f_a|b|g; g is full rank (G = P) when g_b_weight is None,
            else g_a (G = rank).
        f_b_weight: [P, rank]. g_b_weight: [P, rank] or None.
        conv_weight: [3P, W]. a_log: [H]. dt_bias: [P]. norm_weight: [V]. o_weight: [D, P].
        conv_state: [slots, 3P, W - 1] and state: [slots, H, K, V] fp32, updated in place.
        context_len: [B]. state_slot: [B], -1 is inactive.
        lower_bound: see `log_decay`. norm_eps: of the output norm.

    Returns:
        [B, D] in x's dtype; an inactive row gives 0.
    """
    batch, projected, rank = x.shape[0], conv_weight.shape[0], f_b_weight.shape[1]
    heads = a_log.shape[0]
    parts = wide(x) @ wide(in_weight).T
    qkv, low, beta, gate = parts.tensor_split(
        (projected, projected + rank, projected + rank + heads), dim=-1
    )
    output_gate = gate if g_b_weight is None else gate @ wide(g_b_weight).T
    core = prefill_reference(
        qkv,
        low @ wide(f_b_weight).T,
        beta,
        conv_weight,
        a_log,
        dt_bias,
        conv_state,
        state,
        torch.arange(batch + 1),
        context_len,
        state_slot,
        lower_bound=lower_bound,
    )
    scale = torch.rsqrt(core.square().mean(-1, keepdim=True) + norm_eps)
    normed = (core * scale * wide(norm_weight)).flatten(1)
    result = (normed * torch.sigmoid(output_gate)) @ wide(o_weight).T
    return torch.where((state_slot >= 0).unsqueeze(-1), result, 0.0).to(x.dtype)


def decode_fake(x: Tensor, *_rest: Tensor, lower_bound: float | None, norm_eps: float) -> Tensor:
    return torch.empty_like(x)


_FP32_STATE = Constraint("state", "fp32", "rounding errors of the recurrence add up over tokens")
_ONE_SLOT = Constraint("state_slot", "a slot appears once", "two sequences would share a state")

KDA_RECURRENCE = register(
    FusedOp(
        name="kda_recurrence",
        signature=(
            "(Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor beta, "
            "Tensor(a!) state, Tensor query_start, Tensor context_len, Tensor state_slot) -> Tensor"
        ),
        reference=recurrence_reference,
        fake=recurrence_fake,
        constraints=(_FP32_STATE, _ONE_SLOT),
    )
)

KDA_PREFILL = register(
    FusedOp(
        name="kda_prefill",
        signature=(
            "(Tensor qkv, Tensor gate, Tensor beta, Tensor conv_weight, Tensor a_log, Tensor dt_bias, "
            "Tensor(a!) conv_state, Tensor(b!) state, Tensor query_start, Tensor context_len, "
            "Tensor state_slot, *, float? lower_bound) -> Tensor"
        ),
        reference=prefill_reference,
        fake=prefill_fake,
        constraints=(_FP32_STATE, _ONE_SLOT),
    )
)

KDA_DECODE = register(
    FusedOp(
        name="kda_decode",
        signature=(
            "(Tensor x, Tensor in_weight, Tensor f_b_weight, Tensor? g_b_weight, Tensor conv_weight, "
            "Tensor a_log, Tensor dt_bias, Tensor norm_weight, Tensor o_weight, Tensor(a!) conv_state, "
            "Tensor(b!) state, Tensor context_len, Tensor state_slot, *, float? lower_bound, "
            "float norm_eps) -> Tensor"
        ),
        reference=decode_reference,
        fake=decode_fake,
        constraints=(_FP32_STATE, _ONE_SLOT),
    )
)
