"""Bodies of `rms_norm`, `situ` and `linear`."""

from __future__ import annotations

from hybridge.compiler.targets.onnx.functions.builder import Expression, computed, concat, op


def rms_norm(x: Expression, weight: Expression, *, eps: Expression) -> tuple[Expression, ...]:
    """The body of `rms_norm`: arguments and results as its reference."""
    values = x.fp32()
    normed = values / op.Sqrt((values * values).mean(-1) + eps)
    return (computed(normed * weight.fp32()).like(x),)


def situ(
    gate: Expression, up: Expression, *, beta: Expression, linear_beta: Expression | None
) -> tuple[Expression, ...]:
    """The body of `situ`: arguments and results as its reference."""
    return (computed(bounded_product(gate.fp32(), up.fp32(), beta, linear_beta)).like(gate),)


def linear(x: Expression, weight: Expression) -> tuple[Expression, ...]:
    """The body of `linear`: arguments and results as its reference."""
    # Gemm and not Transpose: a runtime would fold that into a second copy of the weight.
    flat = op.Gemm(x.fp32().reshape(-1, weight.dim(1)), weight.fp32(), transB=1)
    result = op.Reshape(flat, concat(op.Shape(x, end=-1), weight.dim(0)))
    return (computed(result).like(x),)


def bounded_product(
    gate: Expression, up: Expression, beta: Expression, linear_beta: Expression | None
) -> Expression:
    """SiTU in fp32 (spec/MODELS.md 8.3)."""
    bounded = up if linear_beta is None else op.Tanh(up / linear_beta) * linear_beta
    return op.Tanh(gate / beta) * beta * op.Sigmoid(gate) * bounded


def silu(x: Expression) -> Expression:
    """X sigmoid(x)."""
    return x * op.Sigmoid(x)
