"""Who shares storage with whom, who writes, and what is written between two nodes.

A traced graph is not functionalised: an op may write to an input, and the order of nodes is the meaning. A pass may
move or merge a read only if nothing writes that storage in between. Everything here is read from torch schemas,
so it covers aten's in-place ops, views, and the fused vocabulary alike.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

#: Ops whose result differs from call to call: never merged, moved or evaluated by a pass.
_RANDOM = torch.Tag.nondeterministic_seeded

# Ops with a dropout -> the argument that turns it off (also when it is left out), and how.
_DROPOUT: dict[str, tuple[str, Any]] = {
    "aten::dropout": ("train", False),
    "aten::scaled_dot_product_attention": ("dropout_p", 0.0),
}

#: Calls that only assert; they compute nothing that a result depends on.
ASSERTIONS = (
    "aten::_assert_tensor_metadata",
    "aten::_assert_async",
    "aten::_assert_scalar",
    "aten::sym_constrain_range_for_size",
    "aten::sym_constrain_range",
    "aten::_async_error",
)


def schema_of(node: Node) -> torch.FunctionSchema | None:
    """The torch schema of a call, or None for a placeholder, an output or a Python function."""
    schema = getattr(node.target, "_schema", None)
    return schema if node.op == "call_function" else None


def op_name(node: Node) -> str:
    """`aten::linear` for an overload, `getitem` for a Python function, the kind for other nodes."""
    schema = schema_of(node)
    if schema is not None:
        return str(schema.name)
    return str(getattr(node.target, "__name__", node.target)) if callable(node.target) else node.op


def arguments_of(node: Node) -> Iterator[tuple[torch.Argument, Any]]:
    """(schema argument, value) of every argument that the call passes."""
    schema = schema_of(node)
    if schema is None:
        return
    for place, argument in enumerate(schema.arguments):
        if place < len(node.args):
            yield argument, node.args[place]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def written_arguments(node: Node) -> list[Node]:
    """The argument nodes that a call writes to, by its schema."""
    written: list[Node] = []
    for argument, value in arguments_of(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.extend(_nodes_in(value))
    return written


def aliased_arguments(node: Node) -> list[Node]:
    """The argument nodes whose storage the result may share (views; what an in-place op returns)."""
    if node.target is operator.getitem:
        return [node.args[0]] if isinstance(node.args[0], Node) else []
    schema = schema_of(node)
    if schema is None or _casts(node):
        return []
    returned = {name for value in schema.returns for name in _alias_names(value.alias_info)}
    shared: list[Node] = []
    for argument, value in arguments_of(node):
        if returned.intersection(_alias_names(argument.alias_info)):
            shared.extend(_nodes_in(value))
    return shared


def _casts(node: Node) -> bool:
    """Whether an `aten::to` has something to cast, and so makes a tensor of its own."""
    if op_name(node) != "aten::to" or not node.args or not isinstance(node.args[0], Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    return (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.dtype != after.dtype
    )


def _alias_names(alias: Any) -> set[str]:
    if alias is None:
        return set()
    return {str(name) for name in alias.before_set | alias.after_set if str(name) != "*"}


def _nodes_in(value: Any) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    if isinstance(value, list | tuple):
        return [item for item in value if isinstance(item, Node)]
    return []


def is_assertion(node: Node) -> bool:
    """Whether a call only asserts something about its argument."""
    return op_name(node) in ASSERTIONS


def is_random(node: Node) -> bool:
    """Whether a call draws random numbers; dropout that drops nothing draws none."""
    return _RANDOM in getattr(node.target, "tags", ()) and not _drops_nothing(node)


def _drops_nothing(node: Node) -> bool:
    name, off = _DROPOUT.get(op_name(node), ("", None))
    given = {argument.name: value for argument, value in arguments_of(node)}
    return bool(name) and given.get(name, off) == off


def has_effect(node: Node) -> bool:
    """Whether removing an unused node could change what the graph does."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return node.op != "get_attr"
    return bool(written_arguments(node)) or is_random(node)


def is_view(node: Node) -> bool:
    """Whether the node computes no new values: its result is (or may be) its argument's storage."""
    return bool(aliased_arguments(node)) and not written_arguments(node)


class Effects:
    """Writes and aliases of one graph; follows rewrites when told of new nodes.

    Args:
        graph: any FX graph of aten calls and vocabulary calls.
    """

    def __init__(self, graph: Graph) -> None:
        self._roots: dict[Node, frozenset[Node]] = {}
        self._writes: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            self.add(node)

    def add(self, node: Node) -> None:
        """Take a new node into account."""
        shared = aliased_arguments(node)
        roots = [self.roots(argument) for argument in shared]
        self._roots[node] = frozenset().union(*roots) if roots else frozenset({node})
        for argument in written_arguments(node):
            for root in self.roots(argument):
                self._writes.setdefault(root, []).append(node)

    def forget(self, node: Node) -> None:
        """Drop an erased node."""
        for argument in written_arguments(node):
            for root in self.roots(argument):
                if node in self._writes.get(root, []):
                    self._writes[root].remove(node)

    def roots(self, node: Node) -> frozenset[Node]:
        """The nodes that own the storage that `node` may share."""
        found = self._roots.get(node)
        if found is None:
            self.add(node)
            found = self._roots[node]
        return found

    def writes_to(self, node: Node) -> list[Node]:
        """Every write to storage that `node` may share, in program order."""
        found = {write for root in self.roots(node) for write in self._writes.get(root, [])}
        return sorted(found)

    def write_between(self, node: Node, first: Node, last: Node) -> Node | None:
        """The first write to `node`'s storage after `first` and before `last`, in program order."""
        for write in self.writes_to(node):
            if first < write < last:
                return write
        return None

    def written_inputs(self, node: Node) -> frozenset[Node]:
        """The storage owners that a call writes to."""
        owners = [self.roots(argument) for argument in written_arguments(node)]
        return frozenset().union(*owners) if owners else frozenset()
