"""A small builder of ONNX function bodies: plain Python that reads like the op's reference.

A body is ordinary code over `Expression`s, run once for each variant of an op. Expressions have the
operators that a body needs; every other ONNX op is an attribute of `op` (`op.Softmax(x, axis=-1)`).
Nodes go to the innermost `Builder` that is open, so a value of an outer graph can be used in a
subgraph. Numbers and lists become constants.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

OPSET = 18  # the version torch's exporter emits; a function must import what its model imports

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
Kind = tuple[ir.DataType, int]  # element type, rank

_OPEN: ContextVar[Builder] = ContextVar("open builder")


@dataclass(frozen=True, eq=False)
class Expression:
    """A value in a body under construction.

    Args:
        value: the ONNX value.
        is_fp32: known to be fp32, so that a cast to it is left out.
    """

    value: ir.Value
    is_fp32: bool = False

    def __add__(self, other: Any) -> Expression:
        return op.Add(self, other)

    def __sub__(self, other: Any) -> Expression:
        return op.Sub(self, other)

    def __mul__(self, other: Any) -> Expression:
        return op.Mul(self, other)

    def __truediv__(self, other: Any) -> Expression:
        return op.Div(self, other)

    def __matmul__(self, other: Expression) -> Expression:
        return op.MatMul(self, other)

    def __neg__(self) -> Expression:
        return op.Neg(self)

    def __lt__(self, other: Any) -> Expression:
        return op.Less(self, other)

    def __le__(self, other: Any) -> Expression:
        return op.LessOrEqual(self, other)

    def __gt__(self, other: Any) -> Expression:
        return op.Greater(self, other)

    def __ge__(self, other: Any) -> Expression:
        return op.GreaterOrEqual(self, other)

    def __and__(self, other: Any) -> Expression:
        return op.And(self, other)

    def equals(self, other: Any) -> Expression:
        """Elementwise equality; `==` stays identity."""
        return op.Equal(self, other)

    def fp32(self) -> Expression:
        """Cast to fp32."""
        return self if self.is_fp32 else Expression(op.Cast(self, to=FLOAT).value, is_fp32=True)

    def int64(self) -> Expression:
        """Cast to int64."""
        return op.Cast(self, to=ir.DataType.INT64)

    def int32(self) -> Expression:
        """Cast to int32."""
        return op.Cast(self, to=ir.DataType.INT32)

    def like(self, other: Expression) -> Expression:
        """Cast to the type of `other`."""
        same = self.is_fp32 and other.is_fp32
        return self if same else op.CastLike(self, other)

    def dim(self, axis: int) -> Expression:
        """The size of `axis`, a 1-D tensor of one int64."""
        return op.Gather(op.Shape(self), [axis], axis=0)

    def take(self, indices: Any, axis: int = 0) -> Expression:
        """The slices of `axis` at `indices` (Gather)."""
        return op.Gather(self, indices, axis=axis)

    def unsqueeze(self, *axes: int) -> Expression:
        """Insert axes of size 1, counted in the result."""
        return op.Unsqueeze(self, list(axes))

    def squeeze(self, *axes: int) -> Expression:
        """Drop axes of size 1."""
        return op.Squeeze(self, list(axes))

    def scalar(self) -> Expression:
        """One element as a 0-d tensor."""
        return op.Reshape(self, np.zeros(0, np.int64))

    def transpose(self, *order: int) -> Expression:
        """Permute the axes."""
        return op.Transpose(self, perm=list(order))

    def reshape(self, *sizes: Any) -> Expression:
        """A size is an int (0 copies, -1 infers) or a 1-D expression."""
        return op.Reshape(self, concat(*sizes))

    def between(self, start: Any, stop: Any, axis: int = 0) -> Expression:
        """The slice `start` to `stop` of `axis`; bounds are 1-D."""
        return op.Slice(self, start, stop, [axis])

    def sum(self, axis: int, *, keep: bool = False) -> Expression:
        """The sum over `axis`."""
        return op.ReduceSum(self, [axis], keepdims=int(keep))

    def mean(self, axis: int) -> Expression:
        """Over `axis`, which stays with size 1."""
        return op.ReduceMean(self, [axis], keepdims=1)


class Builder:
    """Collects the nodes of one graph.

    Args:
        names: numbers for value names; a subgraph continues its outer graph's.
    """

    def __init__(self, names: Iterator[int] | None = None) -> None:
        self.names = names if names is not None else itertools.count()
        self._nodes: list[ir.Node] = []
        self._constants: dict[str, Expression] = {}

    @contextmanager
    def opened(self) -> Iterator[Builder]:
        """Nodes made inside go to this builder."""
        token = _OPEN.set(self)
        try:
            yield self
        finally:
            _OPEN.reset(token)

    def fresh(self, stem: str) -> Expression:
        """A value with a name that is new in the whole function."""
        return Expression(ir.Value(name=f"{stem.lower()}_{next(self.names)}"))

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Sequence[ir.Attr],
        count: int,
    ) -> tuple[Expression, ...]:
        """Append a node of `count` outputs."""
        results = tuple(self.fresh(op_type) for _ in range(count))
        outputs = [result.value for result in results]
        self._nodes.append(ir.Node("", op_type, inputs, attributes, outputs=outputs, name=""))
        return results

    def constant(self, array: np.ndarray[Any, Any]) -> Expression:
        """A constant; equal ones of a graph are one node."""
        key = f"{array.dtype} {array.tolist()}"
        if key not in self._constants:
            value = ir.Attr("value", ir.AttributeType.TENSOR, ir.tensor(array))
            self._constants[key] = self.add("Constant", [], [value], 1)[0]
        return self._constants[key]

    def graph(
        self, name: str, inputs: Sequence[Expression], outputs: Sequence[Expression]
    ) -> ir.Graph:
        """Close the builder: its nodes as a graph."""
        # Identity: an output may be an input, or a value of the outer graph, or given twice.
        with self.opened():
            results = [op.Identity(item).value for item in outputs]
        arguments = [item.value for item in inputs]
        return ir.Graph(arguments, results, nodes=self._nodes, opset_imports={"": OPSET}, name=name)


class _Operators:
    """`op.Name(*inputs, **attributes)` adds a node of one output to the open builder."""

    def __getattr__(self, op_type: str) -> Callable[..., Expression]:
        return lambda *inputs, **attributes: many(op_type, 1, *inputs, **attributes)[0]


op = _Operators()


def many(op_type: str, outputs: int, *inputs: Any, **attributes: Any) -> tuple[Expression, ...]:
    """Add a node of several outputs to the open builder."""
    values = [None if item is None else _expression(item).value for item in inputs]
    converted = ir.convenience.convert_attributes(attributes)
    return _OPEN.get().add(op_type, values, converted, outputs)


def computed(value: Expression) -> Expression:
    """Mark the result of fp32 maths."""
    return Expression(value.value, is_fp32=True)


def attribute(name: str, kind: type) -> Expression:
    """The op's own attribute `name` (float or int) as a scalar."""
    if kind is float:
        reference = ir.RefAttr("value_float", name, ir.AttributeType.FLOAT)
    else:
        reference = ir.RefAttr("value_int", name, ir.AttributeType.INT)
    return _OPEN.get().add("Constant", [], [reference], 1)[0]


def concat(*sizes: Any) -> Expression:
    """Join ints and 1-D expressions to one 1-D int64 tensor."""
    parts = [_expression([item] if isinstance(item, int) else item) for item in sizes]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)


def arange(stop: Expression) -> Expression:
    """0 .. stop - 1, int64; `stop` has one element."""
    return op.Range(0, stop.scalar(), 1)


def scan(
    step: Callable[..., tuple[list[Expression], list[Expression]]],
    carried: Sequence[Expression],
    scanned: Sequence[Expression],
    results: Sequence[Kind],
) -> tuple[Expression, ...]:
    """Walk axis 0 of `scanned`.

    Args:
        step: (*carried, *slices) -> (new carried, outputs of this step).
        carried: initial values of what a step hands to the next.
        scanned: what is walked, one slice a step.
        results: type and rank of what a step returns, carried values first (onnxruntime's Scan must
            know them before it runs).

    Returns:
        The last carried values, then each output stacked over the steps.
    """
    inner = Builder(_OPEN.get().names)
    arguments = [inner.fresh("step") for _ in range(len(carried) + len(scanned))]
    with inner.opened():
        handed_on, outputs = step(*arguments)
    body = inner.graph("scan_body", arguments, [*handed_on, *outputs])
    for value, kind in zip(body.outputs, results, strict=True):
        value.type, value.shape = ir.TensorType(kind[0]), ir.Shape([None] * kind[1])
    inputs = (*carried, *scanned)
    return many("Scan", len(results), *inputs, body=body, num_scan_inputs=len(scanned))


def loop(
    count: Expression, carried: Sequence[Expression], step: Callable[..., list[Expression]]
) -> tuple[Expression, ...]:
    """Run `step` (index, *carried) -> new carried, `count` times.

    Returns:
        The last carried values.
    """
    inner = Builder(_OPEN.get().names)
    arguments = [inner.fresh("step") for _ in range(2 + len(carried))]
    index, condition, *values = arguments
    # onnxruntime's Loop insists on the declared rank of these two.
    for scalar, kind in ((index, ir.DataType.INT64), (condition, ir.DataType.BOOL)):
        scalar.value.type, scalar.value.shape = ir.TensorType(kind), ir.Shape([])
    with inner.opened():
        results = step(index, *values)
    body = inner.graph("loop_body", arguments, [condition, *results])
    return many("Loop", len(carried), count.scalar(), np.array(True), *carried, body=body)


def _expression(item: Any) -> Expression:
    if isinstance(item, Expression):
        return item
    if isinstance(item, float):
        return _OPEN.get().constant(np.array(item, np.float32))
    if isinstance(item, np.ndarray):
        return _OPEN.get().constant(item)
    return _OPEN.get().constant(np.array(item, np.int64))
