"""A graph as deterministic, readable text: for dumps, for hashes and for telling equal regions apart."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from hybridge.ir.effects import op_name, written_arguments
from hybridge.ir.signature import weight_name

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "bool",
}


class Names:
    """Gives symbols names by first appearance, so that text does not depend on the process."""

    def __init__(self) -> None:
        self._symbols: dict[str, str] = {}

    def size(self, size: Any) -> str:
        """A dimension: a number, or an expression over s0, s1, …"""
        if isinstance(size, int):
            return str(size)
        expression = size.node.expr
        renamed = {
            symbol: type(symbol)(self._symbol(str(symbol)), integer=True)
            for symbol in sorted(expression.free_symbols, key=str)
        }
        return str(expression.xreplace(renamed)).replace(" ", "")

    def _symbol(self, name: str) -> str:
        return self._symbols.setdefault(name, f"s{len(self._symbols)}")

    def value(self, value: Any) -> str:
        """A fake value: `f32[s0, 64]`, a size, or a tuple of these."""
        if isinstance(value, torch.Tensor):
            sizes = ", ".join(self.size(size) for size in value.shape)
            return f"{_DTYPES.get(value.dtype, str(value.dtype))}[{sizes}]"
        if isinstance(value, torch.SymInt):
            return f"sym {self.size(value)}"
        if isinstance(value, list | tuple):
            return "(" + ", ".join(self.value(item) for item in value) + ")"
        return "-" if value is None else type(value).__name__


def argument_text(value: Any, name: Callable[[Node], str]) -> str:
    """One argument of a call; devices are left out, they say where a graph was traced."""
    if isinstance(value, Node):
        return name(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(argument_text(item, name) for item in value) + "]"
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return "slice(" + ", ".join(argument_text(part, name) for part in parts) + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}={argument_text(v, name)}" for k, v in value.items()) + "}"
    return repr(value)


def node_text(node: Node, name: Callable[[Node], str], names: Names) -> str:
    """One line: `%linear = aten::linear(%x, %w) : f32[s0, 64]`, with `! writes %cache` if it writes."""
    if node.op == "output":
        return f"return {argument_text(node.args[0], name)}"
    result = f"{name(node)} = "
    typed = f" : {names.value(node.meta.get('val'))}"
    if node.op == "placeholder":
        weight = weight_name(node)
        return f"{result}input {node.target}" + (f" = weight {weight}" if weight else "") + typed
    if node.op == "get_attr":
        return f"{result}weight {node.target}{typed}"
    given = [argument_text(value, name) for value in node.args]
    given += [
        f"{key}={argument_text(value, name)}"
        for key, value in sorted(node.kwargs.items())
        if key != "device"
    ]
    written = ", ".join(name(argument) for argument in written_arguments(node))
    overload = getattr(node.target, "_overloadname", "default")
    suffix = "" if overload in ("default", "") else f".{overload}"
    effect = f"  ! writes {written}" if written else ""
    return f"{result}{op_name(node)}{suffix}({', '.join(given)}){typed}{effect}"


def graph_text(graph: Graph) -> str:
    """The whole graph, one node a line, in program order, with the nodes' own names."""
    names = Names()
    lines = [node_text(node, lambda each: f"%{each.name}", names) for node in graph.nodes]
    return "\n".join(lines) + "\n"


def module_text(gm: GraphModule) -> str:
    """`graph_text` and the weights that passes derived."""
    derived = gm.meta.get("derived_weights", {})
    lines = [f"derived {name} = {recipe}" for name, recipe in sorted(derived.items())]
    return graph_text(gm.graph) + "".join(line + "\n" for line in lines)


def region_text(nodes: Iterable[Node], labels: Mapping[Node, str] | None = None) -> str:
    """Some nodes in program order, renumbered: equal text means equal computation on equal inputs.

    Args:
        nodes: the region.
        labels: names for some of its inputs, where it matters which is which.
    """
    labels = labels or {}
    numbers: dict[Node, str] = {}
    names = Names()

    def number(node: Node) -> str:
        if node not in numbers:
            numbers[node] = f"%{len(numbers)}"
            label = labels.get(node, "")
            outside.append(f"{numbers[node]} {label} {names.value(node.meta.get('val'))}")
        return numbers[node]

    lines: list[str] = []
    outside: list[str] = []
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            number(node)
            continue
        for argument in node.all_input_nodes:
            number(argument)
        numbers[node] = f"%{len(numbers)}"
        lines.append(node_text(node, number, names))
    return "\n".join([*outside, *lines])


def text_hash(text: str) -> str:
    """sha256 of a graph's text."""
    return hashlib.sha256(text.encode()).hexdigest()
