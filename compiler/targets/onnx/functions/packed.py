"""Bodies of the ops on packed weights: unpack (`hybridge.ops.packed_rows`), then the body of the op itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridge.compiler.targets.onnx.functions import elementwise, kda, moe
from hybridge.compiler.targets.onnx.functions.builder import Expression, computed, op
from hybridge.ops.packed_rows import MOST_EXCEPTIONS


def linear_packed(x: Expression, weight: Expression) -> tuple[Expression, ...]:
    """The body of `linear_packed`: arguments and results as its reference."""
    return elementwise.linear(x, unpack(weight))


def kda_decode_packed(
    x: Expression, in_weight: Expression, *, o_weight: Expression, **others: Any
) -> tuple[Expression, ...]:
    """The body of `kda_decode_packed`: arguments and results as its reference."""
    return kda.kda_decode(x, unpack(in_weight), o_weight=unpack(o_weight), **others)


def moe_experts_packed(
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
    """The body of `moe_experts_packed`: arguments and results as its reference."""

    def weights_of(expert: Expression) -> tuple[Expression, Expression]:
        return unpack(gate_up.take(expert)), unpack(down.take(expert))

    activate = moe.activation_of(activation, beta, linear_beta)
    return (moe.grouped(x, expert_ids, expert_weights, weights_of, activate),)


def unpack(packed: Expression) -> Expression:
    """Packed rows [R, bytes] uint8 -> [R, K] fp32."""
    blocks_end = packed.dim(1) - 64
    blocks = packed.between([0], blocks_end, axis=1).reshape(packed.dim(0), -1, 192)
    pairs = blocks.between([0], [64], axis=2)
    nibbles = op.Concat(_shifted(pairs, 4), _low(pairs, 15), axis=-1)
    high = blocks.between([64], [192], axis=2)
    trailer = packed.between(blocks_end, packed.dim(1), axis=1)
    code = _low(_shifted(high, 3), 15)
    base = trailer.between([0], [1], axis=1).unsqueeze(-1)
    mantissa = _low(high, 7).fp32() * 16.0 + nibbles.fp32()
    exponent = op.Where(code.fp32() > 0.0, base.fp32() + code.fp32(), 0.0)
    # Code 0 has no mantissa: its value is a zero.
    values = _value(_shifted(high, 7), exponent, mantissa).reshape(packed.dim(0), -1)
    return _add_exceptions(values, trailer)


def _add_exceptions(values: Expression, trailer: Expression) -> Expression:
    """An exception's place holds a zero; an entry that is not used adds one."""
    entries = trailer.between([4], [64], axis=1).reshape(0, -1, 4)
    parts = [entries.between([i], [i + 1], axis=2).squeeze(2) for i in range(4)]
    count = trailer.between([1], [2], axis=1).fp32()
    used = count > np.arange(MOST_EXCEPTIONS, dtype=np.float32)
    column = parts[0].int64() + parts[1].int64() * 256
    exponent = _low(parts[3], 127).fp32() * 2.0 + _shifted(parts[2], 7).fp32()
    value = _value(_shifted(parts[3], 7), exponent, _low(parts[2], 127).fp32())
    return computed(
        op.ScatterElements(
            values,
            op.Where(used, column, 0),
            op.Where(used, value, 0.0),
            axis=1,
            reduction="add",
        )
    )


def _value(sign: Expression, exponent: Expression, mantissa: Expression) -> Expression:
    """Of a bfloat16: sign bit (uint8), exponent field and mantissa (fp32)."""
    normal = (mantissa / 128.0 + 1.0) * op.Pow(2.0, exponent - 127.0)
    # In two factors: 2^-133 alone is subnormal, and may be flushed.
    subnormal = mantissa * 2.0**-7 * 2.0**-126
    special = op.Where(mantissa > 0.0, float("nan"), float("inf"))
    magnitude = op.Where(exponent > 0.0, normal, subnormal)
    finite = op.Where(op.Equal(exponent, 255.0), special, magnitude)
    return finite * (sign.fp32() * -2.0 + 1.0)


def _low(value: Expression, mask: int) -> Expression:
    return op.BitwiseAnd(value, np.array(mask, np.uint8))


def _shifted(value: Expression, bits: int) -> Expression:
    return op.BitShift(value, np.array(bits, np.uint8), direction="RIGHT")
