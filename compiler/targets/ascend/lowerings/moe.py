"""The router and the routed experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridge.compiler.targets.ascend.lowerings.context import Context
from hybridge.compiler.targets.ascend.lowerings.elementwise import gated
from hybridge.compiler.targets.ascend.own_operators import ASCEND_950

FLOAT4_E2M1, FLOAT8_E8M0, FLOAT8_E4M3 = 296, 293, 292  # torch_npu's numbers for these dtypes
BFLOAT16 = 15  # torch's ScalarType number, as output_dtype wants it
EVERY_ROW = -1  # of active_num: the operator's own documentation in the wheel
MX_QUANTISED = 4  # dispatch's quant_mode for MXFP8 rows


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


@dataclass(frozen=True)
class _Routed:
    """Rows by expert.

    Attributes:
        rows: [R, H]; MXFP8 where `scales` says so, as they came over from other devices.
        counts: rows an expert of this device.
        scales: of MXFP8 rows, in pairs [R, H / 64, 2], or None.
        back: takes [R, H] to [T, H], summed by the experts' weights.
        ways: the operators there and back.
    """

    rows: Tensor
    counts: Tensor
    scales: Tensor | None
    back: Callable[[Tensor], Tensor]
    ways: tuple[str, str]


def _route(
    ctx: Context, x: Tensor, ids: Tensor, weights: Tensor, experts: int, mxfp8: bool
) -> _Routed:
    """To the experts of this device, or of all that share them; `experts` is those of one device."""
    if ctx.parallel.devices > 1:
        return _route_over_devices(ctx, x, ids, weights, experts, mxfp8)
    ctx.require("MoeInitRoutingV3", experts=experts)
    rows, went, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        ids,
        active_num=EVERY_ROW if ctx.bucket.dynamic else ids.shape[0] * ids.shape[1],
        expert_num=experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, experts],
        quant_mode=-1,
        row_idx_type=0,
    )

    def back(result: Tensor) -> Tensor:
        return torch.ops.npu.npu_moe_finalize_routing(  # type: ignore[no-any-return]
            result, None, None, None, weights.to(result.dtype), went, None, 2
        )

    ways = ("npu_moe_init_routing_v2", "npu_moe_finalize_routing")
    return _Routed(rows, counts, None, back, ways)


def _route_over_devices(
    ctx: Context, x: Tensor, ids: Tensor, weights: Tensor, local: int, mxfp8: bool
) -> _Routed:
    """Dispatch and combine: rows travel to the devices that hold their experts, and back."""
    devices, experts = ctx.parallel.devices, local * ctx.parallel.devices
    ctx.require(
        "MoeDistributeDispatchV2",
        hidden_size=x.shape[1],
        tokens_a_device=x.shape[0],
        choices_a_token=ids.shape[1],
        experts=experts,
        devices=devices,
    )
    place: tuple[Any, ...] = (ctx.parallel.group, devices, ctx.parallel.rank, experts)
    rows, scales, whence, counts, received, _, _ = torch.ops.npu.npu_moe_distribute_dispatch_v2(
        x,
        ids,
        *place,
        shared_expert_num=0,
        quant_mode=MX_QUANTISED if mxfp8 else 0,
        y_dtype=FLOAT8_E4M3 if mxfp8 else None,
    )

    def back(result: Tensor) -> Tensor:
        return torch.ops.npu.npu_moe_distribute_combine_v2(  # type: ignore[no-any-return]
            result, ids, whence, received, weights.float(), *place, shared_expert_num=0
        )

    pairs = scales.unflatten(-1, (-1, 2)) if mxfp8 else None
    ways = ("npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2")
    return _Routed(rows, counts, pairs, back, ways)


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
    experts = gate_up.shape[0]
    routed = _route(ctx, x.to(ctx.dtype), expert_ids, expert_weights, experts, mxfp8=False)
    inner = torch.ops.npu.npu_grouped_matmul(
        [routed.rows], [_by_inputs(ctx, gate_up)], group_list=routed.counts, **_GROUPED
    )[0]
    hidden = gated(ctx, inner, activation, beta, linear_beta)
    result = torch.ops.npu.npu_grouped_matmul(
        [hidden], [_by_inputs(ctx, down)], group_list=routed.counts, **_GROUPED
    )[0]
    ctx.became(f"{routed.ways[0]} + npu_grouped_matmul + {routed.ways[1]}")
    return routed.back(result)


def _by_inputs(ctx: Context, weight: Tensor) -> Tensor:
    """[E, inputs, outputs], laid so once: where it lies in FRACTAL_NZ it lies in this order."""
    return weight.to(ctx.dtype).transpose(1, 2).contiguous()


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
    routed = _route(ctx, x.to(ctx.dtype), expert_ids, expert_weights, experts, mxfp8=True)
    quantised = (routed.rows, routed.scales)
    if routed.scales is None:
        quantised = torch.ops.npu.npu_dynamic_mx_quant(routed.rows, dst_type=FLOAT8_E4M3)
    inner = _mx_matmul(quantised, gate_up_packed, gate_up_scale, routed.counts)
    hidden = gated(ctx, inner, activation, beta, linear_beta)
    quantised = torch.ops.npu.npu_dynamic_mx_quant(hidden, dst_type=FLOAT8_E4M3)
    result = _mx_matmul(quantised, down_packed, down_scale, routed.counts)
    ctx.became(
        f"{routed.ways[0]} + npu_dynamic_mx_quant + npu_grouped_matmul (MXFP8 x MXFP4)"
        f" + {routed.ways[1]}"
    )
    return routed.back(result)


def _mx_matmul(quantised: Any, packed: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
    """(MXFP8 rows, their scales) times MXFP4 weights [E, N, K/2] with scales [E, N, K/32]."""
    rows, row_scale = quantised
    pairs = scale.unflatten(-1, (-1, 2)).transpose(1, 2)
    return torch.ops.npu.npu_grouped_matmul(  # type: ignore[no-any-return]
        [rows],
        [packed.transpose(1, 2)],
        antiquant_scale=[pairs],
        per_token_scale=[row_scale],
        group_list=counts,
        output_dtype=BFLOAT16,
        weight_dtype=FLOAT4_E2M1,
        per_token_scale_dtype=FLOAT8_E8M0,
        **_GROUPED,
    )[0]
