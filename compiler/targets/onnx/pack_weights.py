"""Weights whose every reader takes packed rows are stored so, and their readers become the packed ops.

    linear(x, weight)                      ->    linear_packed(x, weight as uint8 rows)
    kda_decode(x, in_weight, …, o_weight)  ->    kda_decode_packed(…), both weights or none
    moe_experts(…, gate_up, down)          ->    moe_experts_packed(…), both or none

Left alone: vectors, and weights of other types than bf16. Left alone, with a reason: lookups and other readers, rows
too short to gain, and weights of which some row does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from hybridge.compiler.targets.onnx.storage import DTypes, weight_nodes
from hybridge.ir.derived import Recipe
from hybridge.ir.signature import weight_name
from hybridge.ops import find, vocabulary
from hybridge.ops.packed import PACKED_ARGUMENTS
from hybridge.ops.packed_rows import BLOCK, MOST_COLUMNS, row_bytes

#: (name, shape in bf16, recipes of derived weights) -> why the values cannot be packed, or None.
ValueCheck = Callable[[str, tuple[int, ...], Mapping[str, Recipe]], str | None]

# A packed row must be at most so many of 20 parts of one in bf16; less is not worth the unpacking.
_WORTH_OF_20 = 18


def choose_packed(
    graphs: Sequence[GraphModule], dtypes: DTypes, check_values: ValueCheck
) -> dict[str, str | None]:
    """Decide which weights to pack, for all phases at once.

    Args:
        graphs: the phases' graphs, as `lower_linear` leaves them.
        dtypes: of each weight, from `weight_dtypes`.
        check_values: looks at a weight's values; asked last, of those that all else allows.

    Returns:
        bf16 matrix -> why it stays so; None is packed.
    """
    nodes: dict[str, list[Node]] = {}
    recipes: dict[str, Recipe] = {}
    for gm in graphs:
        recipes |= gm.meta.get("derived_weights", {})
        for node in weight_nodes(gm.graph):
            is_matrix = node.meta["val"].dim() > 1
            if is_matrix and dtypes[str(weight_name(node))] is torch.bfloat16:
                nodes.setdefault(str(weight_name(node)), []).append(node)
    reasons = {name: _refusal(found) for name, found in nodes.items()}
    _keep_together(nodes, reasons)
    for name, reason in reasons.items():
        if reason is None:
            shape = tuple(nodes[name][0].meta["val"].shape)
            reasons[name] = check_values(name, shape, recipes)
    _keep_together(nodes, reasons)
    return reasons


def set_packed(gm: GraphModule, packed: frozenset[str]) -> None:
    """Give the packed weights of `gm` their new shape and their readers the packed op, in place."""
    for node in weight_nodes(gm.graph):
        if weight_name(node) not in packed:
            continue
        value = node.meta["val"]
        shape = (*value.shape[:-1], row_bytes(value.shape[-1]))
        node.meta["val"] = value.new_empty(shape, dtype=torch.uint8)
        for user in node.users:
            op = find(user.target)
            if op is not None and op.name in PACKED_ARGUMENTS:
                user.target = vocabulary[f"{op.name}_packed"].overload


def _refusal(nodes: Sequence[Node]) -> str | None:
    """What of the readers and the shape speaks against packing."""
    for node in nodes:
        for user in node.users:
            if not _takes_packed(user, node):
                return f"{user.name} reads it, which takes no packed rows"
    columns = nodes[0].meta["val"].shape[-1]
    if columns % BLOCK or columns > MOST_COLUMNS:
        return f"its rows have {columns} columns, no multiple of {BLOCK} up to {MOST_COLUMNS}"
    if 20 * row_bytes(columns) > _WORTH_OF_20 * 2 * columns:
        return f"its rows of {columns} columns are too short to gain"
    return None


def _takes_packed(user: Node, weight: Node) -> bool:
    given = [value for value in (*user.args, *user.kwargs.values()) if value is weight]
    packed = [value for _, value in _weights_of(user) if value is weight]
    return bool(packed) and len(packed) == len(given)


def _weights_of(user: Node) -> list[tuple[str, object]]:
    """(argument, value) of those that the packed twin of a node's op has packed."""
    op = find(user.target)
    if op is None:
        return []
    names = PACKED_ARGUMENTS.get(op.name, ())
    return [
        (name, value)
        for name, value in zip(op.tensor_arguments, user.args, strict=False)
        if name in names
    ]


def _keep_together(nodes: Mapping[str, Sequence[Node]], reasons: dict[str, str | None]) -> None:
    """A reader takes all its weights packed or none: spread refusals until nothing changes."""
    before = -1
    while before != (before := sum(reason is not None for reason in reasons.values())):
        for name, found in nodes.items():
            if reasons[name] is None:
                reasons[name] = _refused_companion(found, reasons)


def _refused_companion(nodes: Sequence[Node], reasons: Mapping[str, str | None]) -> str | None:
    for node in nodes:
        for user in node.users:
            for argument, value in _weights_of(user):
                other = weight_name(value) if isinstance(value, Node) else None
                if other is None or reasons.get(other, "") is not None:
                    return f"{user.name} reads it beside {argument}, which is not packed"
    return None
