"""The router, routing and grouped products, also of MXFP8 rows by MXFP4 weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridge.compiler.targets.ascend.npu_reference.numbers import wide

MX_BLOCK = 32
E4M3_MAX_EXPONENT = 8
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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
    every = active_num in (-1, expert_idx.numel())
    if list(active_expert_range) != [0, expert_num] or not every:
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


def from_mx(values: Tensor, scale: Tensor) -> Tensor:
    """[..., K] elements times 2^(scale - 127) of their block; scale is [..., K / 64, 2]."""
    count = values.shape[-1] // MX_BLOCK
    exponent = scale.flatten(-2)[..., :count].int() - 127
    return torch.ldexp(values.float().unflatten(-1, (-1, MX_BLOCK)), exponent[..., None]).flatten(
        -2
    )


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

    Rows behind the last group are undefined (here zero).

    With antiquant_scale: MXFP8 rows (per_token_scale) times MXFP4 weights, both dequantised.
    Source: torch_npu.npu_grouped_matmul, op-plugin documentation; the MXFP4 form as
    hicann/cann-recipes-infer module/quantization/mxfp4.py calls it.
    """
    if (split_item, group_type, group_list_type) != (3, 0, 1):
        raise NotImplementedError("reference of one output, grouped rows, counts only")
    rows, experts = x[0], weight[0]
    if antiquant_scale is not None:
        assert per_token_scale is not None
        rows = from_mx(rows, per_token_scale[0])
        scales = antiquant_scale[0].transpose(1, 2)
        experts = from_mx(_from_fp4(experts.transpose(1, 2)), scales).transpose(1, 2)
    sizes = group_list.tolist()
    behind = rows.shape[0] - sum(sizes)
    pieces = wide(rows)[: sum(sizes)].split(sizes)
    results = [piece @ wide(expert) for piece, expert in zip(pieces, experts, strict=True)]
    dtype = x[0].dtype if antiquant_scale is None else torch.bfloat16
    return [F.pad(torch.cat(results), (0, 0, 0, behind)).to(dtype)]


REFERENCES: dict[str, Callable[..., Any]] = {
    "npu::npu_moe_gating_top_k": moe_gating_top_k,
    "npu::npu_moe_init_routing_v2": moe_init_routing,
    "npu::npu_moe_finalize_routing": moe_finalize_routing,
    "npu::npu_dynamic_mx_quant": dynamic_mx_quant,
    "npu::npu_grouped_matmul": grouped_matmul,
}
