"""The router and the routed experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridge.compiler.targets.ascend.lowerings.context import Context
from hybridge.compiler.targets.ascend.lowerings.elementwise import gated
from hybridge.compiler.targets.ascend.own_operators import ASCEND_950


def lower_moe_route(
    ctx: Context,
    x: Tensor,
    gate_weight: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """fp32 logits, then npu_moe_gating_top_k, which always renormalises; else its maths."""
    logits = F.linear(x.float(), gate_weight.float())
    if renormalize:
        ctx.require("MoeGatingTopK", experts=gate_weight.shape[0])
        ctx.became("npu_moe_gating_top_k")
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits, top_k, bias=bias.float(), norm_type=1, routed_scaling_factor=scale
        )
        return ids, weights
    ctx.became("sigmoid + topk")
    scores = torch.sigmoid(logits)
    ids = torch.topk(scores + bias.float(), top_k, dim=-1).indices
    return ids.to(torch.int32), scores.gather(1, ids) * scale


def _dispatch(ctx: Context, x: Tensor, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sorted by expert, where each pair went, and how many rows each expert has."""
    ctx.require("MoeInitRoutingV3", experts=experts)
    rows, went, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        ids,
        active_num=ids.shape[0] * ids.shape[1],
        expert_num=experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, experts],
        quant_mode=-1,
        row_idx_type=0,
    )
    return rows, went, counts


def _combine(rows: Tensor, weights: Tensor, went: Tensor) -> Tensor:
    return torch.ops.npu.npu_moe_finalize_routing(  # type: ignore[no-any-return]
        rows, None, None, None, weights.to(rows.dtype), went, None, 2
    )


_GROUPED: dict[str, Any] = {"split_item": 3, "group_type": 0, "group_list_type": 1}


def lower_moe_experts(
    ctx: Context,
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: str,
    beta: float,
    linear_beta: float | None,
) -> Tensor:
    """init_routing, grouped matmul, activation, grouped matmul, finalize_routing."""
    ctx.require("GroupedMatmul", inner_axis=max(gate_up.shape[1:]))
    rows, went, counts = _dispatch(ctx, x.to(ctx.dtype), expert_ids, gate_up.shape[0])
    inner = torch.ops.npu.npu_grouped_matmul(
        [rows], [gate_up.to(ctx.dtype).transpose(1, 2)], group_list=counts, **_GROUPED
    )[0]
    hidden = gated(ctx, inner, activation, beta, linear_beta)
    result = torch.ops.npu.npu_grouped_matmul(
        [hidden], [down.to(ctx.dtype).transpose(1, 2)], group_list=counts, **_GROUPED
    )[0]
    ctx.became("npu_moe_init_routing_v2 + npu_grouped_matmul + npu_moe_finalize_routing")
    return _combine(result, expert_weights, went)


FLOAT4_E2M1, FLOAT8_E8M0, FLOAT8_E4M3 = 296, 293, 292  # torch_npu's numbers for these dtypes
BFLOAT16 = 15  # torch's ScalarType number, as output_dtype wants it


def lower_moe_experts_mxfp4(
    ctx: Context,
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    *,
    activation: str,
    beta: float,
    linear_beta: float | None,
) -> Tensor:
    """950: MXFP4 weights by MXFP8 rows. A3 has no FP4; there the weights are decoded when read."""
    if ctx.soc != ASCEND_950:
        return lower_moe_experts(
            *(ctx, x, expert_ids, expert_weights, gate_up_packed, down_packed),
            activation=activation,
            beta=beta,
            linear_beta=linear_beta,
        )
    experts, width = gate_up_packed.shape[0], x.shape[-1]
    ctx.require("GroupedMatmul", experts_in_MXFP4=experts)
    for axis in (width, down_packed.shape[-1] * 2):
        ctx.require("GroupedMatmul", MXFP4_inner_axis=axis)
    rows, went, counts = _dispatch(ctx, x.to(ctx.dtype), expert_ids, experts)
    inner = _mx_matmul(rows, gate_up_packed, gate_up_scale, counts)
    hidden = gated(ctx, inner, activation, beta, linear_beta)
    result = _mx_matmul(hidden, down_packed, down_scale, counts)
    ctx.became(
        "npu_moe_init_routing_v2 + npu_dynamic_mx_quant + npu_grouped_matmul (MXFP8 x MXFP4)"
        " + npu_moe_finalize_routing"
    )
    return _combine(result, expert_weights, went)


def _mx_matmul(rows: Tensor, packed: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
    """Rows quantised to MXFP8 times MXFP4 weights [E, N, K/2] with scales [E, N, K/32]."""
    quantised, row_scale = torch.ops.npu.npu_dynamic_mx_quant(rows, dst_type=FLOAT8_E4M3)
    pairs = scale.unflatten(-1, (-1, 2)).transpose(1, 2)
    return torch.ops.npu.npu_grouped_matmul(  # type: ignore[no-any-return]
        [quantised],
        [packed.transpose(1, 2)],
        antiquant_scale=[pairs],
        per_token_scale=[row_scale],
        group_list=counts,
        output_dtype=BFLOAT16,
        weight_dtype=FLOAT4_E2M1,
        per_token_scale_dtype=FLOAT8_E8M0,
        **_GROUPED,
    )[0]
