"""A small builder of ONNX function bodies: plain Python that reads like the op's reference.

A body is written once and run once for each variant of an op. `Expression` gives the operators that a body needs; every
other ONNX op is a method of `Builder` (`b.Softmax(x, axis=-1)`). A Python number or list becomes a constant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

OPSET = 18  # what torch's exporter emits; a function must import the same version as the model

Operand = "Expression | int | float | list[int] | None"


@dataclass(frozen=True, eq=False)
class Expression:
    """A value in a body under construction."""

    builder: Builder
    value: ir.Value

    def __add__(self, other: Any) -> Expression:
        return self.builder.Add(self, other)

    def __sub__(self, other: Any) -> Expression:
        return self.builder.Sub(self, other)

    def __mul__(self, other: Any) -> Expression:
        return self.builder.Mul(self, other)

    def __truediv__(self, other: Any) -> Expression:
        return self.builder.Div(self, other)

    def __matmul__(self, other: Expression) -> Expression:
        return self.builder.MatMul(self, other)

    def __neg__(self) -> Expression:
        return self.builder.Neg(self)

    def __lt__(self, other: Any) -> Expression:
        return self.builder.Less(self, other)

    def __ge__(self, other: Any) -> Expression:
        return self.builder.GreaterOrEqual(self, other)

    def __gt__(self, other: Any) -> Expression:
        return self.builder.Greater(self, other)

    def __and__(self, other: Any) -> Expression:
        return self.builder.And(self, other)

    def equals(self, other: Any) -> Expression:
        return self.builder.Equal(self, other)

    def float(self) -> Expression:
        return self.builder.Cast(self, to=ir.DataType.FLOAT)

    def int64(self) -> Expression:
        return self.builder.Cast(self, to=ir.DataType.INT64)

    def int32(self) -> Expression:
        return self.builder.Cast(self, to=ir.DataType.INT32)

    def like(self, other: Expression) -> Expression:
        """Cast to the type of `other`."""
        return self.builder.CastLike(self, other)

    def dim(self, axis: int) -> Expression:
        """The size of `axis` as a 1-D int64 tensor of one element."""
        return self.builder.Shape(self, start=axis, end=axis + 1)

    def take(self, indices: Any, axis: int = 0) -> Expression:
        return self.builder.Gather(self, indices, axis=axis)

    def unsqueeze(self, *axes: int) -> Expression:
        return self.builder.Unsqueeze(self, list(axes))

    def squeeze(self, *axes: int) -> Expression:
        return self.builder.Squeeze(self, list(axes))

    def transpose(self, *order: int) -> Expression:
        return self.builder.Transpose(self, perm=list(order))

    def reshape(self, *sizes: Any) -> Expression:
        """Reshape; a size is an int (0 copies, -1 infers) or a 1-D expression."""
        return self.builder.Reshape(self, self.builder.concat(*sizes))

    def sum(self, axis: int, keep: bool = False) -> Expression:
        return self.builder.ReduceSum(self, [axis], keepdims=int(keep))

    def mean(self, axis: int) -> Expression:
        """Mean over `axis`, which stays with size 1."""
        return self.builder.ReduceMean(self, [axis], keepdims=1)

    def between(self, start: Any, stop: Any, axis: int) -> Expression:
        """The slice `start` to `stop` of `axis`."""
        return self.builder.Slice(self, start, stop, [axis])


class Builder:
    """Collects the nodes of one body (or of one subgraph of it)."""

    def __init__(self, names: Iterator[int] | None = None) -> None:
        self.nodes: list[ir.Node] = []
        self._names = names if names is not None else itertools.count()
        self._constants: dict[tuple[str, str], Expression] = {}

    def input(self, name: str) -> Expression:
        return Expression(self, ir.Value(name=name))

    def fresh(self, stem: str) -> ir.Value:
        return ir.Value(name=f"{stem.lower()}_{next(self._names)}")

    def many(
        self, op_type: str, outputs: int, *inputs: Any, **attributes: Any
    ) -> tuple[Expression, ...]:
        """Add a node of several outputs."""
        values = [None if item is None else self._expression(item, inputs).value for item in inputs]
        results = [self.fresh(op_type) for _ in range(outputs)]
        self.nodes.append(
            ir.node(op_type, values, attributes, outputs=results, name=f"{results[0].name}_node")
        )
        return tuple(Expression(self, value) for value in results)

    def __getattr__(self, op_type: str) -> Callable[..., Expression]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        return lambda *inputs, **attributes: self.many(op_type, 1, *inputs, **attributes)[0]

    def attribute(self, name: str, kind: type) -> Expression:
        """The value of the op's own attribute `name`, as a scalar."""
        of, field = (
            (ir.AttributeType.FLOAT, "value_float")
            if kind is float
            else (ir.AttributeType.INT, "value_int")
        )
        result = self.fresh(name)
        self.nodes.append(
            ir.Node(
                "",
                "Constant",
                [],
                [ir.RefAttr(field, name, of)],
                outputs=[result],
                name=f"{result.name}_node",
            )
        )
        return Expression(self, result)

    def constant(self, array: np.ndarray[Any, Any]) -> Expression:
        key = (str(array.dtype), repr(array.tolist()))
        if key not in self._constants:
            result = self.fresh("constant")
            self.nodes.append(
                ir.node(
                    "Constant",
                    [],
                    {"value": ir.tensor(array)},
                    outputs=[result],
                    name=f"{result.name}_node",
                )
            )
            self._constants[key] = Expression(self, result)
        return self._constants[key]

    def concat(self, *sizes: Any) -> Expression:
        """Join ints and 1-D expressions to one 1-D int64 tensor."""
        parts = [self.constant(np.array([s], np.int64)) if isinstance(s, int) else s for s in sizes]
        return parts[0] if len(parts) == 1 else self.Concat(*parts, axis=0)

    def arange(self, stop: Expression) -> Expression:
        """0 .. stop - 1, int64; `stop` has one element."""
        return self.Range(0, stop.reshape(), 1) if False else self._range(stop)

    def _range(self, stop: Expression) -> Expression:
        scalar = self.Squeeze(stop)
        return self.Range(np.int64(0), scalar, np.int64(1))

    def scan(
        self,
        step: Callable[..., tuple[list[Expression], list[Expression]]],
        carried: Sequence[Expression],
        scanned: Sequence[Expression],
        outputs: int,
    ) -> tuple[Expression, ...]:
        """Scan over axis 0 of `scanned`.

        Args:
            step: (inner builder, *carried, *slices) -> (new carried, outputs of this step).
            carried: initial values of what a step hands to the next.
            scanned: what is walked, a slice a step.
            outputs: how many values a step puts out.

        Returns:
            The final carried values, then each step's outputs stacked.
        """
        inner = Builder(self._names)
        arguments = [
            Expression(inner, inner.fresh("step")) for _ in range(len(carried) + len(scanned))
        ]
        new_carried, results = step(inner, *arguments)
        body = inner.graph("scan_body", arguments, [*new_carried, *results])
        return self.many(
            "Scan",
            len(carried) + outputs,
            *carried,
            *scanned,
            body=body,
            num_scan_inputs=len(scanned),
        )

    def loop(
        self,
        count: Expression,
        carried: Sequence[Expression],
        step: Callable[..., list[Expression]],
    ) -> tuple[Expression, ...]:
        """Run `step` (inner builder, index, *carried) -> new carried, `count` times.

        Returns:
            The final carried values.
        """
        inner = Builder(self._names)
        arguments = [Expression(inner, inner.fresh("step")) for _ in range(2 + len(carried))]
        index, condition, *values = arguments
        kept = inner.Identity(condition)
        body = inner.graph("loop_body", arguments, [kept, *step(inner, index, *values)])
        return self.many("Loop", len(carried), count.reshape(), None, *carried, body=body)

    def graph(
        self, name: str, inputs: Sequence[Expression], outputs: Sequence[Expression]
    ) -> ir.Graph:
        return ir.Graph(
            [item.value for item in inputs],
            [self.Identity(item).value for item in outputs],
            nodes=self.nodes,
            opset_imports={"": OPSET},
            name=name,
        )

    def _expression(self, item: Any, siblings: Sequence[Any]) -> Expression:
        if isinstance(item, Expression):
            return item
        if isinstance(item, float):
            return self.constant(np.array(item, np.float32))
        if isinstance(item, np.ndarray | np.generic):
            return self.constant(np.asarray(item))
        return self.constant(np.array(item, np.int64))
