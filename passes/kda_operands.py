"""Which node plays which role in a KDA layer: the operands of the fused op, and what they are projected from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from hybridge.ir import region as regions
from hybridge.ir.layout import Joined, Operand, operands
from hybridge.ir.pass_base import Refusal, Rewriter
from hybridge.ir.pattern import Leaves, assignments, joined_projections, projection
from hybridge.ir.signature import (
    CONTEXT_LEN,
    QUERY_START,
    STATE_SLOT,
    is_weight,
    shape_of,
    weight_name,
)
from hybridge.passes.kda_sites import Found, needed_by

TABLES = (QUERY_START, CONTEXT_LEN, STATE_SLOT)


@dataclass(frozen=True)
class Roles:
    """Which node is what. `norm_eps` is None where the region has no output norm."""

    found: Found
    operands: Mapping[str, Operand | Joined]
    lower_bound: float | None
    norm_eps: float | None


PARTS = ("q", "k", "v")


def kda_assignments(found: Found, origins: Leaves) -> Iterator[dict[str, Operand | Joined]]:
    """Ways to see the leaves as the op's operands, by shape."""
    slots_state, slots_conv = shape_of(found.state) or (), shape_of(found.conv_state) or ()
    heads, key_dim, value_dim = slots_state[1:]
    projected, taps = slots_conv[1], slots_conv[2] + 1
    tokens = (shape_of(found.end) or ())[0]
    activations = {
        "gate": lambda node: operands(node, (tokens, heads * key_dim)),
        "beta": lambda node: operands(node, (tokens, heads)),
    }
    weights = {
        "a_log": lambda node: operands(node, (heads,)),
        "dt_bias": lambda node: operands(node, (heads * key_dim,)),
    }
    if found.decode:
        activations["output_gate"] = lambda node: operands(node, (tokens, heads * value_dim))
        weights["norm_weight"] = lambda node: operands(node, (value_dim,))
    convolved = needed_by(found.conv_writes, origins.activations)
    rest = [node for node in origins.activations if node not in convolved]
    whole = projected * taps
    filters = [
        node for node in origins.weights if _has_elements(node, (whole, whole // len(PARTS)))
    ]
    others = [node for node in origins.weights if node not in filters]
    for qkv in _whole_or_parts(convolved, (tokens, projected), axis=1):
        for conv_weight in _filters(qkv, filters, (projected, taps)):
            for first in assignments(activations, rest):
                for second in assignments(weights, others):
                    yield {"qkv": qkv, **first, "conv_weight": conv_weight, **second}


def _has_elements(weight: Node, counts: Sequence[int]) -> bool:
    return math.prod(shape_of(weight) or ()) in counts


def _filters(
    qkv: Operand | Joined, filters: Sequence[Node], sizes: Sequence[Any]
) -> Iterator[Operand | Joined]:
    """The convolution's weight, the filters in the order of the projections that they meet."""
    if len(filters) == len(PARTS) and isinstance(qkv, Joined):
        met = {}
        for weight in filters:
            for node in regions.forward([weight], limit=8):
                found = needed_by([node], qkv.nodes)
                if found:
                    met[found[0]] = weight
                    break
        filters = [met[node] for node in qkv.nodes if node in met]
        chosen = [next(operands(weight, (sizes[0] // 3, sizes[1])), None) for weight in filters]
        parts = tuple(each for each in chosen if each is not None)
        if len(parts) == len(PARTS) and all(part.axes == parts[0].axes for part in parts):
            yield Joined(parts, 0)
        return
    yield from _whole_or_parts(filters, sizes, axis=0)


def _whole_or_parts(
    nodes: Sequence[Node], sizes: Sequence[Any], axis: int
) -> Iterator[Operand | Joined]:
    """One node that is the operand, or three that are its q, k and v in some order."""
    if len(nodes) == 1:
        yield from operands(nodes[0], sizes)
    third = [*sizes]
    third[axis] //= len(PARTS)
    roles = {part: lambda node: operands(node, third) for part in PARTS}
    for chosen in assignments(roles, nodes):
        parts = tuple(chosen[part] for part in PARTS)
        alike = all(part.axes == parts[0].axes for part in parts)
        if alike and all(map(is_weight, nodes)) == all(is_weight(part.node) for part in parts):
            yield Joined(parts, axis)


@dataclass(frozen=True)
class Layer:
    """The projections of a decode layer: those of the input, in the op's order, and the second ones."""

    x: Node
    joined: tuple[Node, ...]
    f_b: Node
    g_b: Node | None


def decode_layer(roles: Roles) -> Layer | Refusal:
    """The layer's input and weights, or why they cannot be one product."""
    anchor = roles.found.writes[-1].name
    qkv = [each for node in roles.operands["qkv"].nodes for each in joined_projections(node)]
    gate, beta, output = (
        projection(roles.operands[name].nodes[0]) for name in ("gate", "beta", "output_gate")
    )
    if not qkv or gate is None or beta is None or output is None:
        return Refusal(
            anchor,
            "plain projections",
            "q, k, v, gates and beta are not products with constant weights",
            "project the layer's input by weights without bias",
        )
    low = projection(gate.x)
    if low is None:
        return Refusal(
            anchor,
            "low-rank decay gate",
            f"{gate.x.name}, which the decay gate {gate.node.name} projects, is not itself a projection",
            "compute the decay gate as f_b(f_a(x))",
        )
    x = qkv[0].x
    first = output if output.x is x else projection(output.x)
    every = [*qkv, low, beta, *([first] if first else [])]
    stray = next((each for each in every if each.x is not x), None)
    if first is None or stray is not None:
        node = output.node if stray is None else stray.node
        return Refusal(
            anchor,
            "one input",
            f"{node.name} projects something else than {x.name}",
            f"project {x.name} by every weight of the layer",
        )
    second = None if first is output else output.weight
    return Layer(x, tuple(each.weight for each in every), gate.weight, second)


def joined_weight(weights: Sequence[Node], rewriter: Rewriter) -> Node:
    """The rows of a layer's weights in one, named after the first; the same in both phases."""
    names = [str(weight_name(weight)) for weight in weights]
    return rewriter.derived_weight(
        f"{names[0].removesuffix('.weight')}.kda_in.weight",
        {"transform": "concat", "inputs": names, "axis": 0},
        weights,
    )
