"""Run part of a graph on small concrete inputs.

This is how a pass proves that a region computes what a fused op is defined to compute: the region, with every
attribute and constant it has, runs beside the op's reference on inputs chosen to tell wrong variants apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from hybridge.ir.effects import is_assertion
from hybridge.ir.region import is_size
from hybridge.ir.signature import value_of


class NotEvaluable(Exception):
    """A node cannot be run here: an unknown size, a failing op."""


class Sizes:
    """Concrete values for a graph's symbolic sizes."""

    def __init__(self) -> None:
        self._values: dict[sympy.Symbol, int] = {}

    def bind(self, size: Any, value: int) -> bool:
        """Make `size` equal `value`; False if that contradicts what is bound or cannot be solved."""
        if isinstance(size, int):
            return size == value
        expression = size.node.expr.subs(self._values)
        if expression.is_number:
            return int(expression) == value
        symbols = list(expression.free_symbols)
        if len(symbols) != 1:
            return False
        rest = expression - symbols[0]
        # Most sizes are a symbol plus a number (B + 1), which needs no solver.
        simple = rest.is_Integer
        solution = [value - rest] if simple else sympy.solve(expression - value, symbols[0])
        if len(solution) != 1 or not solution[0].is_integer or solution[0] < 0:
            return False
        self._values[symbols[0]] = int(solution[0])
        return True

    def of(self, size: Any) -> int:
        """The concrete value of a size.

        Raises:
            NotEvaluable: a symbol in it is not bound.
        """
        if isinstance(size, int | bool):
            return int(size)
        node = size.node.expr
        value = self._values.get(node)
        if value is not None:
            return value
        found = node.subs(self._values)
        if not found.is_number:
            raise NotEvaluable(f"the size {node} is not determined by the batch")
        return int(found)

    def shape(self, node: Node) -> tuple[int, ...]:
        """The concrete shape of a tensor node."""
        return tuple(self.of(size) for size in value_of(node).shape)


def run(nodes: Iterable[Node], given: Mapping[Node, Tensor], sizes: Sizes) -> dict[Node, Any]:
    """Run `nodes` (in program order) from `given`; returns the values of all of them.

    In-place ops write to the given tensors, so hand in copies of what must stay.

    Raises:
        NotEvaluable: an argument is neither given nor computed, or an op fails on these inputs.
    """
    values: dict[Node, Any] = dict(given)

    def lookup(node: Node) -> Any:
        if node in values:
            return values[node]
        if is_size(node):
            number = value_of(node)
            return sizes.of(number) if isinstance(number, torch.SymInt) else number
        raise NotEvaluable(f"{node.name} is not part of the region")

    for node in nodes:
        if node in values or is_assertion(node) or is_size(node):
            continue
        if node.op != "call_function":
            raise NotEvaluable(f"{node.name} is an input without a value")
        args = map_arg(node.args, lookup)
        kwargs = {key: map_arg(value, lookup) for key, value in node.kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        try:
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise NotEvaluable(f"{node.name} fails on a small batch: {reason}") from error
    return values
