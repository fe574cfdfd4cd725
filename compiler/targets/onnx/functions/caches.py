"""Bodies of `paged_write` and `state_write`."""

from __future__ import annotations

from hybridge.compiler.targets.onnx.functions.batch import write_rows
from hybridge.compiler.targets.onnx.functions.builder import Expression, concat, op


def paged_write(
    cache: Expression, rows: Expression, slot_mapping: Expression
) -> tuple[Expression, ...]:
    """The body of `paged_write`: arguments and results as its reference."""
    shape = op.Shape(cache)
    row_shape = shape.between([2], [2**31])
    flat = op.Reshape(cache, concat(cache.dim(0) * cache.dim(1), row_shape))
    return (op.Reshape(write_rows(flat, rows, slot_mapping.int64()), shape),)


def state_write(
    state: Expression, rows: Expression, state_slot: Expression
) -> tuple[Expression, ...]:
    """The body of `state_write`: arguments and results as its reference."""
    return (write_rows(state, rows, state_slot.int64()),)
