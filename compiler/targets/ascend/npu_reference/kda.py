"""KDA: the recurrence, the chunked operator, the short convolution."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridge.compiler.targets.ascend.npu_reference.numbers import wide


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    beta: Tensor,
    scale: float,
    actual_seq_lengths: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
) -> Tensor:
    """S = S e^(g + gk); S += beta (v - S k) k'; out = scale S q; S is [Dv, Dk], value first.

    A sequence starts from the state of its last accepted token; each token writes its own state.
    Lengths are counts, not prefix sums. Source: hicann/ops-transformer
    attention/recurrent_gated_delta_rule/README.md.
    """
    output = torch.zeros_like(value)
    group = value.shape[1] // key.shape[1]
    token = 0
    for row, length in enumerate(actual_seq_lengths.tolist()):
        accepted = 1 if num_accepted_tokens is None else int(num_accepted_tokens[row])
        memory = wide(state[int(ssm_state_indices[token + max(accepted - 1, 0)])]).clone()
        for t in range(token, token + length):
            k, q = (wide(x[t]).repeat_interleave(group, 0) for x in (key, query))
            if g is not None:
                memory = memory * wide(g[t]).exp()[:, None, None]
            if gk is not None:
                memory = memory * wide(gk[t]).exp()[:, None, :]
            error = wide(value[t]) - torch.einsum("hvk,hk->hv", memory, k)
            memory = memory + torch.einsum("hv,hk->hvk", wide(beta[t])[:, None] * error, k)
            output[t] = (scale * torch.einsum("hvk,hk->hv", memory, q)).to(output.dtype)
            state[int(ssm_state_indices[t])] = memory.to(state.dtype)
        token += length
    return output


def chunk_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    chunk_size: int,
    safe_gate: bool,
    lower_bound: float,
) -> tuple[Tensor, Tensor]:
    """Chunked KDA with the gate activated inside; layout TND, state value first.

    (attn_out [T, HV, V], final_state [N, HV, V, K]); chunks change rounding only, so this runs
    token by token. cu_seqlens starts with 0 and ends with T. Source: hicann/ops-transformer
    attention/chunk_kda_fwd/README.md.
    """
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != q.shape[0]:
        raise ValueError(f"chunk_kda_fwd: cu_seqlens {starts} must run from 0 to T = {q.shape[0]}")
    rate = wide(a_log).exp()[:, None]
    z = wide(g) + wide(dt_bias).view(g.shape[1:])
    decay = lower_bound * torch.sigmoid(rate * z) if safe_gate else -rate * F.softplus(z)
    final = torch.zeros_like(initial_state)
    output = torch.zeros_like(v)
    for row, (start, stop) in enumerate(pairwise(starts)):
        state = initial_state[row : row + 1].clone()
        one = slice(start, stop)
        output[one] = recurrent_gated_delta_rule(
            q[one],
            k[one],
            v[one],
            state,
            beta=beta[one],
            scale=scale,
            actual_seq_lengths=torch.tensor([stop - start] if stop > start else []),
            ssm_state_indices=torch.zeros(stop - start, dtype=torch.int32),
            gk=decay[one],
        )
        final[row] = state[0]
    return output, final


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str,
    null_block_id: int,
) -> Tensor:
    """Causal depthwise convolution over packed sequences, in place on the states of W - 1 rows.

    weight[0] is the current token's tap, the opposite of torch's order. A sequence whose cache row
    is null_block_id is skipped. Source: hicann/ops-transformer, causal_conv1d_proto.h and
    docs of cann_ops_transformer.causal_conv1d_fn.
    """
    output = torch.zeros_like(x)
    taps = weight.shape[0]
    starts = query_start_loc.tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        own = x[starts[row] : starts[row + 1]]
        if slot == null_block_id or not len(own):
            continue
        history = conv_states[slot] if bool(has_initial_state[row]) else conv_states[slot] * 0
        window = torch.cat([history.to(x.dtype), own])
        result = sum(
            wide(window[taps - 1 - j : taps - 1 - j + len(own)]) * wide(weight[j])
            for j in range(taps)
        )
        assert isinstance(result, Tensor)
        result = F.silu(result) if activation == "silu" else result
        output[starts[row] : starts[row + 1]] = result.to(x.dtype)
        conv_states[slot] = window[len(window) - (taps - 1) :].to(conv_states.dtype)
    return output


REFERENCES: dict[str, Callable[..., Any]] = {
    "npu::npu_recurrent_gated_delta_rule": recurrent_gated_delta_rule,
    "hybridge_ascend::chunk_kda_fwd": chunk_kda_fwd,
    "hybridge_ascend::causal_conv1d": causal_conv1d,
}
