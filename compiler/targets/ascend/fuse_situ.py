"""Recognise SiTU where it is spelled out, so that it becomes one operator.

    mul(mul(mul(tanh(div(g, b)), b), sigmoid(g)), mul(tanh(div(u, l)), l))  ->  situ(g, u, b, l)
    mul(mul(mul(tanh(div(g, b)), b), sigmoid(g)), u)                        ->  situ(g, u, b, None)

On a copy of the graph, for this target: the CPU's compiler fuses elementwise work by itself. A site
whose intermediates have other users is left alone.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hybridge.ir.effects import op_name


@dataclass(frozen=True)
class _Site:
    gate: fx.Node
    up: fx.Node
    beta: float
    linear_beta: float | None


def fuse_situ(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph with every spelled-out SiTU as one `hybridge.situ`."""
    graph = copy.deepcopy(graph_module.graph)
    for node in list(graph.nodes):
        site = _match(node)
        if site is None:
            continue
        with graph.inserting_before(node):
            fused = graph.call_function(
                torch.ops.hybridge.situ.default,
                (site.gate, site.up),
                {"beta": site.beta, "linear_beta": site.linear_beta},
            )
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
    graph.eliminate_dead_code()
    return fx.GraphModule(graph_module, graph)


def _match(node: fx.Node) -> _Site | None:
    operands = _operands(node, "mul")
    if operands is None:
        return None
    for left, right in (operands, operands[::-1]):
        gated = _gated(left)
        if gated is None or not isinstance(right, fx.Node) or len(left.users) > 1:
            continue
        gate, beta = gated
        bounded = _bounded(right)
        if bounded is not None and len(right.users) == 1:
            return _Site(gate, bounded[0], beta, bounded[1])
        return _Site(gate, right, beta, None)
    return None


def _gated(node: Any) -> tuple[fx.Node, float] | None:
    """(g, b) of mul(b tanh(g / b), sigmoid(g))."""
    operands = _operands(node, "mul")
    if operands is None:
        return None
    for left, right in (operands, operands[::-1]):
        bounded, sigmoid = _bounded(left), _operands(right, "sigmoid")
        if bounded is None or sigmoid is None or sigmoid[0] is not bounded[0]:
            continue
        if len(left.users) == 1 and len(right.users) == 1:
            return bounded
    return None


def _bounded(node: Any) -> tuple[fx.Node, float] | None:
    """(x, b) of mul(tanh(div(x, b)), b)."""
    operands = _operands(node, "mul")
    if operands is None:
        return None
    for tanh, bound in (operands, operands[::-1]):
        inner = _operands(tanh, "tanh")
        ratio = _operands(inner[0], "div") if inner is not None else None
        if ratio is None or not isinstance(bound, int | float) or ratio[1] != bound:
            continue
        if isinstance(ratio[0], fx.Node) and len(tanh.users) == 1:
            return ratio[0], float(bound)
    return None


def _operands(node: Any, name: str) -> tuple[Any, ...] | None:
    """The arguments of a call of `aten::name`, else None."""
    if not isinstance(node, fx.Node) or op_name(node) != f"aten::{name}":
        return None
    return tuple(node.args)
