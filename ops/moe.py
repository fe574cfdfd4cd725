"""`moe_route`, `moe_experts` and `moe_experts_mxfp4`: the router and the grouped latent experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridge.ops.elementwise import situ_reference
from hybridge.ops.registry import Constraint, FusedOp, register
from hybridge.ops.sequences import wide

# Keeps the renormalisation finite when every chosen score underflows (MODELS.md 8.1).
RENORMALISE_EPS = 1e-20

#: E2M1: bit 3 is the sign, the other three choose the magnitude (MODELS.md 11.2).
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: E8M0: the one scale that is no power of two (OCP MX v1.0, 5.4.1).
E8M0_NAN = 255


def route_reference(
    x: Tensor, gate_weight: Tensor, bias: Tensor, *, top_k: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose experts by sigmoid score + bias; weigh them by the score alone (spec/MODELS.md 8.1).

    Args:
        x: [T, D]. gate_weight: [E, D]. bias: [E], for the choice only.
        top_k: experts a token. renormalize: divide the weights by their sum. scale: multiplies them.

    Returns:
        expert_ids [T, top_k] int32 by descending biased score (ties: lowest id), expert_weights [T, top_k] fp32.
    """
    scores = torch.sigmoid(wide(x) @ wide(gate_weight).T)
    order = torch.sort(scores + wide(bias), dim=-1, descending=True, stable=True).indices
    chosen = order[:, :top_k]
    weights = scores.gather(-1, chosen)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + RENORMALISE_EPS)
    return chosen.to(torch.int32), weights * scale


def route_fake(
    x: Tensor, gate_weight: Tensor, bias: Tensor, *, top_k: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], top_k)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=dtype)


def _activate(gate_up: Tensor, activation: str, beta: float, linear_beta: float | None) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return situ_reference(gate, up, beta=beta, linear_beta=linear_beta)


def experts_reference(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: str,
    beta: float,
    linear_beta: float | None,
    round_hidden: Callable[[Tensor], Tensor] = lambda hidden: hidden,
) -> Tensor:
    """The weighted sum of the chosen experts (spec/MODELS.md 8.2).

    Args:
        x: [T, L]. expert_ids: [T, k] int32. expert_weights: [T, k].
        gate_up: [E, 2I, L], w1's rows then w3's. down: [E, L, I].
        activation: "situ" (with beta and linear_beta) or "silu".
        round_hidden: no argument of the op: what rounding to apply to the intermediate activations.

    Returns:
        [T, L] fp32: sum_j weight_j * down_j(activation(w1_j x, w3_j x)), summed in fp32.
    """
    values = wide(x)
    output = torch.zeros_like(values)
    for expert in expert_ids.unique().tolist():
        tokens, places = (expert_ids == expert).nonzero(as_tuple=True)
        inner = values[tokens] @ gate_up[expert].to(values.dtype).T
        hidden = round_hidden(_activate(inner, activation, beta, linear_beta))
        result = hidden @ down[expert].to(values.dtype).T
        weights = expert_weights[tokens, places].to(values.dtype).unsqueeze(-1)
        output.index_add_(0, tokens, result * weights)
    return output


def experts_fake(x: Tensor, *_rest: Tensor, **_attributes: object) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Expand MXFP4 to fp32: E2M1(nibble) * 2^(scale - 127) (spec/MODELS.md 11.2).

    Args:
        packed: [..., K / 2] uint8; the low nibble is the even element.
        scale: [..., K / 32] uint8, one an each 32 consecutive elements; 255 is NaN.

    Returns:
        [..., K] fp32, exact but where 2^(scale - 127) * 6 leaves the range of fp32.
    """
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    table = torch.tensor([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)])
    values = table[nibbles.long()].unflatten(-1, (-1, 32))
    # Through fp64: 2^-127 is subnormal in fp32, where exp2 may flush it.
    power = torch.exp2(scale.to(torch.float64) - 127.0).to(torch.float32)
    power = power.masked_fill(scale == E8M0_NAN, float("nan"))
    decoded: Tensor = (values * power.unsqueeze(-1)).flatten(-2)
    return decoded


def experts_mxfp4_reference(
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
    round_hidden: Callable[[Tensor], Tensor] = lambda hidden: hidden,
) -> Tensor:
    """`moe_experts` with its weights in MXFP4.

    Args:
        x, expert_ids, expert_weights, activation, beta, linear_beta, round_hidden: as `moe_experts`.
        gate_up_packed: [E, 2I, L/2] uint8. gate_up_scale: [E, 2I, L/32] uint8.
        down_packed: [E, L, I/2] uint8. down_scale: [E, L, I/32] uint8.

    Returns:
        [T, L] fp32.
    """
    chosen, local = expert_ids.unique(return_inverse=True)
    kept = chosen.long()
    return experts_reference(
        x,
        local,
        expert_weights,
        decode_mxfp4(gate_up_packed[kept], gate_up_scale[kept]),
        decode_mxfp4(down_packed[kept], down_scale[kept]),
        activation=activation,
        beta=beta,
        linear_beta=linear_beta,
        round_hidden=round_hidden,
    )


MOE_ROUTE = register(
    FusedOp(
        name="moe_route",
        signature=(
            "(Tensor x, Tensor gate_weight, Tensor bias, *, int top_k, bool renormalize, float scale)"
            " -> (Tensor, Tensor)"
        ),
        reference=route_reference,
        fake=route_fake,
    )
)

_ATTRIBUTES = "*, str activation, float beta, float? linear_beta) -> Tensor"

MOE_EXPERTS = register(
    FusedOp(
        name="moe_experts",
        signature=(
            "(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down, "
            + _ATTRIBUTES
        ),
        reference=experts_reference,
        fake=experts_fake,
    )
)

MOE_EXPERTS_MXFP4 = register(
    FusedOp(
        name="moe_experts_mxfp4",
        signature=(
            "(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up_packed, "
            "Tensor gate_up_scale, Tensor down_packed, Tensor down_scale, " + _ATTRIBUTES
        ),
        reference=experts_mxfp4_reference,
        fake=experts_fake,
        constraints=(
            Constraint(
                "x", "last dimension is a multiple of 32", "MXFP4 scales 32 elements at once"
            ),
        ),
    )
)
