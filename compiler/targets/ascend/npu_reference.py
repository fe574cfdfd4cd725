"""What each npu operator computes, in plain torch on the CPU: a table operator -> function.

Written from the operators' documentation (the source of each is in its docstring), to run a lowered
graph without a device. They check the wiring: argument order, prefix sums against lengths, layouts,
null slots. They say nothing about a device's rounding or speed. Names and argument order are those
of the operators' schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6
MX_BLOCK = 32
E4M3_MAX_EXPONENT = 8


def wide(x: Tensor) -> Tensor:
    """At least fp32: what accumulates."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(x / rms(x) * gamma, 1 / rms(x)) over the last dimension.

    Source: torch_npu.npu_rms_norm, op-plugin documentation.
    """
    rstd = torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + epsilon)
    return (wide(x) * rstd * wide(gamma)).to(x.dtype), rstd


def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """(rms_norm(x1 + x2), 1 / rms, x1 + x2). Source: torch_npu.npu_add_rms_norm, op-plugin."""
    total = x1 + x2
    return *rms_norm(total, gamma, epsilon), total


def scatter_nd_update_(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Write updates[i] to x[indices[i, 0]], in place; of two writes to one row, one wins.

    Source: torch_npu.npu_scatter_nd_update_, op-plugin documentation.
    """
    rows = indices[..., 0].long()
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= x.shape[0]):
        raise IndexError(f"npu_scatter_nd_update_: rows {rows.tolist()} of {x.shape[0]}")
    x[rows] = updates.to(x.dtype)
    return x


def _queries(ends: Tensor, key_lengths: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(sequence, first token, one past its last token, keys) from prefix sums without the 0."""
    start = 0
    for row, (stop, keys) in enumerate(zip(ends.tolist(), key_lengths.tolist(), strict=True)):
        if stop < start:
            raise ValueError(f"TND wants prefix sums of the query lengths, got {ends.tolist()}")
        yield row, start, stop, keys
        start = stop


def _paged(cache: Tensor, table_row: Tensor, length: int) -> Tensor:
    """The first `length` rows [length, D] of a PA_BSND cache [blocks, block, 1, D]."""
    blocks = table_row[: -(-length // cache.shape[1])].long()
    return cache[blocks].flatten(0, 2)[:length]


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Top sparse_count keys by sum_h weights[t, h] relu(query[t, h] . key[s]), causal.

    TND queries with prefix sums, PA_BSND keys with lengths; [T, 1, sparse_count], best first, -1
    behind. Source: hicann/ops-transformer attention/lightning_indexer/README.md.
    """
    if (layout_query, layout_key, sparse_mode) != ("TND", "PA_BSND", 3):
        raise NotImplementedError("reference of TND queries, PA_BSND keys, rightDownCausal only")
    chosen = query.new_full((query.shape[0], 1, sparse_count), -1, dtype=torch.int32)
    for row, start, stop, length in _queries(actual_seq_lengths_query, actual_seq_lengths_key):
        keys = wide(_paged(key, block_table[row], length))
        products = torch.einsum("thd,sd->ths", wide(query[start:stop]), keys).relu()
        scores = torch.einsum("ths,th->ts", products, wide(weights[start:stop]))
        for token in range(start, stop):
            seen = length - (stop - token) + 1
            order = scores[token - start, :seen].sort(stable=True, descending=True).indices
            kept = order[:sparse_count].int()
            chosen[token, 0, : len(kept)] = kept
    return chosen, query.new_empty(0)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    scores = scale * (wide(query) @ wide(keys).T)
    return (scores.softmax(-1) @ wide(values)).to(query.dtype)


def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 0,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Absorbed MLA over the selected rows; the value is the key's latent part.

    A row of sparse_indices ends at its first -1. Source: torch_npu.npu_sparse_flash_attention,
    op-plugin documentation; hicann/ops-transformer attention/sparse_flash_attention.
    """
    if (layout_query, layout_kv, attention_mode) != ("TND", "PA_BSND", 2) or sparse_mode != 3:
        raise NotImplementedError("reference of TND, PA_BSND, MLA-absorb only")
    output = torch.zeros_like(query)
    for row, start, stop, length in _queries(actual_seq_lengths_query, actual_seq_lengths_kv):
        latent = _paged(key, block_table[row], length)
        keys = torch.cat([latent, _paged(key_rope, block_table[row], length)], -1)
        for token in range(start, stop):
            picks = sparse_indices[token, 0]
            ends = (picks < 0).nonzero()
            picks = picks[: int(ends[0])] if len(ends) else picks
            picks = picks[picks <= length - (stop - token)].long()
            if len(picks):
                full = torch.cat([query[token], query_rope[token]], -1)
                output[token] = _attend(full, keys[picks], latent[picks], scale_value)
    return output, query.new_empty(0), query.new_empty(0)


def paged_mla_attention(
    query: Tensor,
    key: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    query_ends: Tensor,
    key_lengths: Tensor,
    block_table: Tensor,
    mask: Tensor,
    scale: float,
) -> Tensor:
    """Dense causal absorbed MLA; the value is the key's latent part.

    Source: torch_npu.npu_fused_infer_attention_score, op-plugin documentation (TND, block_table,
    query_rope and key_rope, sparse_mode 3 with the compressed 2048 x 2048 mask).
    """
    output = torch.zeros_like(query)
    for row, start, stop, length in _queries(query_ends, key_lengths):
        latent = _paged(key, block_table[row], length)
        keys = torch.cat([latent, _paged(key_rope, block_table[row], length)], -1)
        for token in range(start, stop):
            seen = length - (stop - token) + 1
            full = torch.cat([query[token], query_rope[token]], -1)
            output[token] = _attend(full, keys[:seen], latent[:seen], scale)
    return output


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


def block_attn_res_prepare(
    block_res: Tensor, valid_blocks: Tensor, pseudo_query: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax statistics of S queries over the first valid_blocks of [T, N, D] frozen blocks.

    (numerator [S, T, D], logit_max [S, T], exp_sum [S, T]). Source: hicann/ops-transformer
    attention/block_attn_res_prepare/README.md.
    """
    blocks = wide(block_res)[:, : int(valid_blocks[0])]
    keys = blocks * torch.rsqrt(blocks.square().mean(-1, keepdim=True) + eps)
    logits = torch.einsum("sd,tnd->stn", wide(pseudo_query), keys)
    top = logits.amax(-1)
    weights = (logits - top[..., None]).exp()
    return torch.einsum("stn,tnd->std", weights, blocks), top, weights.sum(-1)


def block_attn_res_update(
    partial_block: Tensor,
    delta: Tensor,
    pseudo_query: Tensor,
    numerator: Tensor,
    logit_max: Tensor,
    exp_sum: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(partial + delta, the mix of it with the frozen statistics), the second in delta's dtype.

    Source: hicann/ops-transformer attention/block_attn_res_update/README.md.
    """
    merged = wide(partial_block) + wide(delta)
    rms = torch.sqrt(merged.square().mean(-1) + eps)
    score = (merged * wide(pseudo_query)).sum(-1) / rms
    top = torch.maximum(logit_max, score)
    frozen, live = (logit_max - top).exp(), (score - top).exp()
    total = exp_sum * frozen + live
    mix = numerator * (frozen / total)[:, None] + merged * (live / total)[:, None]
    return merged.to(partial_block.dtype), mix.to(delta.dtype)


def situ_glu(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU of the two halves of the last dimension, the gate in front.

    linear_beta <= 0 leaves the up half as it is. Source: CANN operator specification SituGlu.
    """
    gate, up = wide(x).chunk(2, -1)
    bounded = linear_beta * torch.tanh(up / linear_beta) if linear_beta > 0 else up
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded).to(x.dtype)


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half. Source: torch_npu.npu_swiglu."""
    gate, up = wide(x).chunk(2, dim)
    return (F.silu(gate) * up).to(x.dtype)


def moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    renorm: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sigmoid routing: chosen by score + bias, weighed by the score over the chosen scores' sum.

    It always divides by the sum. The documented formula can be read as weighing with the bias; what
    calls the operator (cann-recipes-infer, vllm-ascend) takes the weights as without, and so does
    this. Source: hicann/ops-transformer moe/moe_gating_top_k/docs/aclnnMoeGatingTopK.md.
    """
    if (norm_type, renorm, k_group, group_count) != (1, 0, 1, 1):
        raise NotImplementedError("reference of sigmoid routing with one group only")
    scores = torch.sigmoid(wide(x))
    biased = scores if bias is None else scores + wide(bias)
    chosen = biased.sort(stable=True, dim=-1, descending=True).indices[:, :k]
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return weights.to(x.dtype), chosen.int(), x.new_zeros(x.shape, dtype=torch.float32)


def moe_init_routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    expert_num: int,
    active_num: int = -1,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort (token, choice) pairs by expert: rows, where each pair went, tokens an expert.

    Source: torch_npu.npu_moe_init_routing_v2, op-plugin documentation (drop-less, counts, gather
    indices, no quantisation).
    """
    if (expert_tokens_num_type, expert_tokens_num_flag, quant_mode, row_idx_type) != (
        1,
        True,
        -1,
        0,
    ):
        raise NotImplementedError("reference of counts, gather indices and no quantisation only")
    if list(active_expert_range) != [0, expert_num] or active_num != expert_idx.numel():
        raise NotImplementedError("reference of one rank that has every expert only")
    flat = expert_idx.flatten().long()
    order = flat.argsort(stable=True)
    went = torch.empty_like(order)
    went[order] = torch.arange(len(order), device=order.device)
    counts = torch.bincount(flat, minlength=expert_num)
    rows = x[order // expert_idx.shape[1]]
    return rows, went.int(), counts, x.new_empty(len(order), dtype=torch.float32)


def moe_finalize_routing(
    expanded: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor,
    went: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int = 0,
    k: int = 1,
) -> Tensor:
    """sum_j scales[t, j] expanded[went[t * k + j]] (drop_pad_mode 2: pairs of a token together).

    Source: torch_npu.npu_moe_finalize_routing, op-plugin documentation.
    """
    if drop_pad_mode != 2:
        raise NotImplementedError("reference of drop_pad_mode 2 only")
    rows = wide(expanded)[went.long()].view(*scales.shape, -1)
    return (rows * wide(scales)[..., None]).sum(1).to(expanded.dtype)


def dynamic_mx_quant(
    x: Tensor, *, axis: int = -1, dst_type: int = 292, block_size: int = 32, **_: Any
) -> tuple[Tensor, Tensor]:
    """MXFP8: e4m3 elements, one e8m0 scale an each 32, scales in pairs [..., K / 64, 2].

    scale_alg 0: exponent floor(log2 amax) - 8. Source: torch_npu.npu_dynamic_mx_quant, op-plugin
    documentation; spec of OCP MX v1.0.
    """
    blocks = wide(x).unflatten(-1, (-1, MX_BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(amax).exponent - 1 - E4M3_MAX_EXPONENT
    exponent = torch.where(amax > 0, exponent, -127).clamp(-127, 127)
    scaled = torch.ldexp(blocks, -exponent).clamp(-448, 448)
    scale = (exponent + 127).to(torch.uint8).squeeze(-1)
    if scale.shape[-1] % 2:
        scale = F.pad(scale, (0, 1))
    return scaled.flatten(-2).to(torch.float8_e4m3fn), scale.unflatten(-1, (-1, 2))


def _from_mx(values: Tensor, scale: Tensor) -> Tensor:
    """[..., K] elements times 2^(scale - 127) of their block; scale is [..., K / 64, 2]."""
    count = values.shape[-1] // MX_BLOCK
    exponent = scale.flatten(-2)[..., :count].int() - 127
    return torch.ldexp(values.float().unflatten(-1, (-1, MX_BLOCK)), exponent[..., None]).flatten(
        -2
    )


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _from_fp4(packed: Tensor) -> Tensor:
    """[..., K / 2] bytes, the low nibble first, to [..., K]."""
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)])
    return table[nibbles.long()]


def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor,
    antiquant_scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    **_: Any,
) -> list[Tensor]:
    """Rows of x in groups, each times its own [K, N] of weight [E, K, N]; sizes are counts.

    With antiquant_scale: MXFP8 rows (per_token_scale) times MXFP4 weights, both dequantised.
    Source: torch_npu.npu_grouped_matmul, op-plugin documentation; the MXFP4 form as
    hicann/cann-recipes-infer module/quantization/mxfp4.py calls it.
    """
    if (split_item, group_type, group_list_type) != (3, 0, 1):
        raise NotImplementedError("reference of one output, grouped rows, counts only")
    rows, experts = x[0], weight[0]
    if antiquant_scale is not None:
        assert per_token_scale is not None
        rows = _from_mx(rows, per_token_scale[0])
        scales = antiquant_scale[0].transpose(1, 2)
        experts = _from_mx(_from_fp4(experts.transpose(1, 2)), scales).transpose(1, 2)
    pieces = wide(rows).split(group_list.tolist())
    results = [piece @ wide(expert) for piece, expert in zip(pieces, experts, strict=True)]
    dtype = x[0].dtype if antiquant_scale is None else torch.bfloat16
    return [torch.cat(results).to(dtype)]


REFERENCES: dict[str, Callable[..., Any]] = {
    "npu::npu_rms_norm": rms_norm,
    "npu::npu_add_rms_norm": add_rms_norm,
    "npu::npu_scatter_nd_update_": scatter_nd_update_,
    "npu::npu_lightning_indexer": lightning_indexer,
    "npu::npu_sparse_flash_attention": sparse_flash_attention,
    "npu::npu_recurrent_gated_delta_rule": recurrent_gated_delta_rule,
    "npu::npu_swiglu": swiglu,
    "npu::npu_moe_gating_top_k": moe_gating_top_k,
    "npu::npu_moe_init_routing_v2": moe_init_routing,
    "npu::npu_moe_finalize_routing": moe_finalize_routing,
    "npu::npu_dynamic_mx_quant": dynamic_mx_quant,
    "npu::npu_grouped_matmul": grouped_matmul,
    "hybridge_ascend::paged_mla_attention": paged_mla_attention,
    "hybridge_ascend::chunk_kda_fwd": chunk_kda_fwd,
    "hybridge_ascend::causal_conv1d": causal_conv1d,
    "hybridge_ascend::block_attn_res_prepare": block_attn_res_prepare,
    "hybridge_ascend::block_attn_res_update": block_attn_res_update,
    "hybridge_ascend::situ_glu": situ_glu,
}
