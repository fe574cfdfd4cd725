"""`linear_packed`, `kda_decode_packed` and `moe_experts_packed`: ops on weights in bf12 rows (`packed_rows`).

Each is its namesake on the unpacked weights. No pass makes them: a target does, where it stores weights so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridge.ops.elementwise import linear_reference
from hybridge.ops.kda import KDA_DECODE, decode_fake, decode_reference
from hybridge.ops.moe import MOE_EXPERTS, experts_fake, experts_reference
from hybridge.ops.packed_rows import unpack_rows
from hybridge.ops.registry import Constraint, FusedOp, register

#: The arguments of each op that are packed in its twin `<op>_packed`.
PACKED_ARGUMENTS = {
    "linear": ("weight",),
    "kda_decode": ("in_weight", "o_weight"),
    "moe_experts": ("gate_up", "down"),
}


def unpack(packed: Tensor) -> Tensor:
    """Packed rows [..., bytes] uint8 -> [..., K] bfloat16, bit for bit what was packed."""
    words = torch.from_numpy(unpack_rows(packed.contiguous().numpy()))
    return words.view(torch.bfloat16)


def linear_packed_reference(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` with a packed weight: x [..., K], weight [N, row_bytes(K)] -> [..., N] in x's dtype."""
    return linear_reference(x, unpack(weight))


def linear_packed_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def decode_packed_reference(
    x: Tensor,
    in_weight: Tensor,
    f_b_weight: Tensor,
    g_b_weight: Tensor | None,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    o_weight: Tensor,
    *state: Tensor,
    lower_bound: float | None,
    norm_eps: float,
) -> Tensor:
    """`kda_decode` with in_weight [rows, row_bytes(D)] and o_weight [D, row_bytes(P)] packed."""
    small = (f_b_weight, g_b_weight, conv_weight, a_log, dt_bias, norm_weight)
    return decode_reference(
        x,
        unpack(in_weight),
        *small,
        unpack(o_weight),
        *state,
        lower_bound=lower_bound,
        norm_eps=norm_eps,
    )


def experts_packed_reference(
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
    """`moe_experts` with gate_up [E, 2I, row_bytes(L)] and down [E, L, row_bytes(I)] packed."""
    return experts_reference(
        x,
        expert_ids,
        expert_weights,
        unpack(gate_up),
        unpack(down),
        activation=activation,
        beta=beta,
        linear_beta=linear_beta,
    )


_ROWS = "last dimension is the length of a packed row"


def _constraints(name: str) -> tuple[Constraint, ...]:
    return tuple(
        Constraint(each, _ROWS, "a row is read by itself") for each in PACKED_ARGUMENTS[name]
    )


LINEAR_PACKED = register(
    FusedOp(
        name="linear_packed",
        signature="(Tensor x, Tensor weight) -> Tensor",
        reference=linear_packed_reference,
        fake=linear_packed_fake,
        constraints=_constraints("linear"),
    )
)

KDA_DECODE_PACKED = register(
    FusedOp(
        name="kda_decode_packed",
        signature=KDA_DECODE.signature,
        reference=decode_packed_reference,
        fake=decode_fake,
        constraints=(*KDA_DECODE.constraints, *_constraints("kda_decode")),
    )
)

MOE_EXPERTS_PACKED = register(
    FusedOp(
        name="moe_experts_packed",
        signature=MOE_EXPERTS.signature,
        reference=experts_packed_reference,
        fake=experts_fake,
        constraints=_constraints("moe_experts"),
    )
)
