"""A per-head product with a weight becomes a batched matrix product.

    einsum("thn,hnc->thc", x, weight)    ->    permute(bmm(permute(x), weight))
    einsum("thc,hvc->thv", x, weight)    ->    permute(bmm(permute(x), permute(weight)))

onnxruntime's Einsum would permute the weight at every call; here that is maths of weights alone, which
`fold_weights` does once. Left alone: other equations, and operands that are both computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from hybridge.compiler.targets.onnx.fold_weights import of_weights_alone
from hybridge.ir.pass_base import fake_result


@dataclass(frozen=True)
class HeadProduct:
    """x [a, b, k] times weight [b, k, n], whose rows are summed, or weight [b, n, k] -> [a, b, n]."""

    x: Node
    weight: Node
    sums_rows: bool


def head_product(node: Node) -> HeadProduct | None:
    """What an einsum multiplies head by head, or None."""
    if node.target is not torch.ops.aten.einsum.default:
        return None
    given: Any = node.args[1]
    operands, _, result = str(node.args[0]).replace(" ", "").partition("->")
    left, _, right = operands.partition(",")
    if len(left) != 3 or len(right) != 3 or len(result) != 3 or result[:2] != left[:2]:
        return None
    batch, summed, kept = left[1], left[2], result[2]
    if right not in (batch + summed + kept, batch + kept + summed) or len({*left, kept}) != 4:
        return None
    return HeadProduct(given[0], given[1], sums_rows=right[1] == summed)


def lower_einsum(gm: GraphModule) -> int:
    """Rewrite `gm` in place.

    Returns:
        How many products were lowered.
    """
    weights_alone = of_weights_alone(gm.graph)
    count = 0
    for node in list(gm.graph.nodes):
        product = head_product(node)
        if product is not None and product.weight in weights_alone:
            _lower(node, product, gm.graph)
            count += 1
    return count


def _lower(node: Node, product: HeadProduct, graph: Graph) -> None:
    permute, bmm = torch.ops.aten.permute.default, torch.ops.aten.bmm.default
    weight = product.weight
    with graph.inserting_before(node):
        if not product.sums_rows:
            weight = _call(graph, permute, weight, [0, 2, 1])
        by_head = _call(graph, permute, product.x, [1, 0, 2])
        result = _call(graph, bmm, by_head, weight)
        output = _call(graph, permute, result, [1, 0, 2])
    node.replace_all_uses_with(output)
    graph.erase_node(node)


def _call(graph: Graph, target: torch._ops.OpOverload, *args: object) -> Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta["val"] = fake_result(node)
    return node
