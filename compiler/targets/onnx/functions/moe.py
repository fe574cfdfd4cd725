"""Bodies of `moe_route`, `moe_experts` and `moe_experts_mxfp4`; only chosen experts are read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hybridge.compiler.targets.onnx.functions.builder import Expression, loop, many, op
from hybridge.compiler.targets.onnx.functions.elementwise import bounded_product, silu
from hybridge.ops.moe import E2M1_MAGNITUDES, E8M0_NAN, RENORMALISE_EPS

# The magnitudes of E2M1 with bit 3 as the sign (spec/MODELS.md 11.2).
_E2M1 = np.array([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)], np.float32)


def moe_route(
    x: Expression,
    gate_weight: Expression,
    bias: Expression,
    *,
    top_k: Expression,
    renormalize: Expression,
    scale: Expression,
) -> tuple[Expression, ...]:
    """The body of `moe_route`: arguments and results as its reference."""
    scores = op.Sigmoid(x.fp32() @ gate_weight.fp32().transpose(1, 0))
    # TopK gives the lowest index first among equal scores (tested against the reference).
    _, chosen = many("TopK", 2, scores + bias.fp32(), top_k.unsqueeze(0))
    weights = op.GatherElements(scores, chosen, axis=-1)
    total = weights.sum(-1, keep=True) + RENORMALISE_EPS
    divisor = op.Where(renormalize > 0, total, 1.0)
    return chosen.int32(), weights / divisor * scale


def moe_experts(
    x: Expression,
    expert_ids: Expression,
    expert_weights: Expression,
    gate_up: Expression,
    down: Expression,
    *,
    activation: str,
    beta: Expression,
    linear_beta: Expression | None,
) -> tuple[Expression, ...]:
    """The body of `moe_experts`: arguments and results as its reference."""

    def weights_of(expert: Expression) -> tuple[Expression, Expression]:
        return gate_up.take(expert).fp32(), down.take(expert).fp32()

    activate = activation_of(activation, beta, linear_beta)
    return (grouped(x, expert_ids, expert_weights, weights_of, activate),)


def moe_experts_mxfp4(
    x: Expression,
    expert_ids: Expression,
    expert_weights: Expression,
    gate_up_packed: Expression,
    gate_up_scale: Expression,
    down_packed: Expression,
    down_scale: Expression,
    *,
    activation: str,
    beta: Expression,
    linear_beta: Expression | None,
) -> tuple[Expression, ...]:
    """The body of `moe_experts_mxfp4`: arguments and results as its reference."""

    def weights_of(expert: Expression) -> tuple[Expression, Expression]:
        return (
            _decode_mxfp4(gate_up_packed.take(expert), gate_up_scale.take(expert)),
            _decode_mxfp4(down_packed.take(expert), down_scale.take(expert)),
        )

    activate = activation_of(activation, beta, linear_beta)
    return (grouped(x, expert_ids, expert_weights, weights_of, activate),)


def activation_of(
    name: str, beta: Expression, linear_beta: Expression | None
) -> Callable[[Expression, Expression], Expression]:
    """(gate, up) -> hidden, of this name."""
    if name == "silu":
        return lambda gate, up: silu(gate) * up
    return lambda gate, up: bounded_product(gate, up, beta, linear_beta)


def grouped(
    x: Expression,
    expert_ids: Expression,
    expert_weights: Expression,
    weights_of: Callable[[Expression], tuple[Expression, Expression]],
    activate: Callable[[Expression, Expression], Expression],
) -> Expression:
    """For each chosen expert: gather its tokens, run them, add the weighted results."""
    values, ids = x.fp32(), expert_ids.int64()
    chosen = op.Unique(ids, sorted=1)

    def expert(index: Expression, output: Expression) -> list[Expression]:
        gate_up, down = weights_of(chosen.take(index))
        pairs = op.NonZero(ids.equals(chosen.take(index)))
        tokens = pairs.take(0)
        inner = values.take(tokens) @ gate_up.transpose(1, 0)
        half = inner.dim(1) / 2
        hidden = activate(
            inner.between([0], half, axis=1), inner.between(half, inner.dim(1), axis=1)
        )
        weight = op.GatherND(expert_weights.fp32(), pairs.transpose(1, 0)).unsqueeze(-1)
        result = (hidden @ down.transpose(1, 0)) * weight
        return [op.ScatterND(output, tokens.unsqueeze(-1), result, reduction="add")]

    return loop(chosen.dim(0), [op.ConstantOfShape(op.Shape(values))], expert)[0]


def _decode_mxfp4(packed: Expression, scale: Expression) -> Expression:
    """Packed [R, K / 2], scale [R, K / 32] uint8 -> [R, K] fp32 (spec/MODELS.md 11.2)."""
    low = op.BitwiseAnd(packed, np.array(15, np.uint8))
    high = op.BitShift(packed, np.array(4, np.uint8), direction="RIGHT")
    codes = op.Concat(low.unsqueeze(-1), high.unsqueeze(-1), axis=-1).int32()
    values = op.Gather(_E2M1, codes).reshape(packed.dim(0), -1, 32)
    power = op.Pow(2.0, scale.fp32() - 127.0)
    factor = op.Where(op.Equal(scale.fp32(), float(E8M0_NAN)), float("nan"), power)
    return (values * factor.unsqueeze(-1)).reshape(packed.dim(0), -1)
