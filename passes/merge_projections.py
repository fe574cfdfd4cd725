"""Project a KDA layer's input once in prefill, by the very weight that decode has.

Before:                                                  After:
    q, k, v = x Wq^T, x Wk^T, x Wv^T                         all  = x [Wq|Wk|Wv|Wfa|Wb|Wg]^T
    low, beta, gate = x Wfa^T, x Wb^T, x Wg^T                qkv, low, beta, gate = columns of all
    core = kda_prefill([q|k|v], f_b(low), beta, …)           core = kda_prefill(qkv, f_b(low), beta, …)

`kda_decode` needs the six weights joined; prefill reading the same joined weight means that they are stored
(and, mapped, held) once instead of twice. One product replaces six, and taking columns costs what joining q,
k and v did.

Left alone: a layer whose projections have other inputs or a bias; one with more projections of its input than
a KDA layer has; one whose joined q, k, v someone else reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from hybridge.ir.effects import op_name
from hybridge.ir.pass_base import ModelShape, Pass, PassContext, Refusal, Rewriter, Site
from hybridge.ir.pattern import Projection, joined_projections, projection
from hybridge.ir.region import cone, make_region
from hybridge.ir.signature import DECODE, shape_of
from hybridge.passes.kda_operands import joined_weight

aten = torch.ops.aten


@dataclass(frozen=True)
class Layer:
    """The values that are columns of one product, in order, with the projections that make them up."""

    x: Node
    values: tuple[Node, ...]
    parts: tuple[Projection, ...]


class MergeProjections(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "merge_projections"
    needs: ClassVar[tuple[str, ...]] = ("fuse_kda",)

    def expect(self, config: ModelShape, phase: str) -> int:
        return 0 if phase == DECODE else config.layer_kinds.count("kda")

    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        for node in list(context.graph.nodes):
            if op_name(node) == "hybridge::kda_prefill" and joined_projections(node.args[0]):
                yield _site(node)

    def check(self, site: Site, context: PassContext) -> Refusal | None:
        return None

    def rewrite(self, site: Site, rewriter: Rewriter) -> Mapping[Node, Node]:
        layer: Layer = site.detail
        weight = joined_weight([part.weight for part in layer.parts], rewriter)
        every = rewriter.call(aten.linear.default, layer.x, weight)
        replacements, start = {}, 0
        for value in layer.values:
            width = (shape_of(value) or ())[-1]
            columns = rewriter.call(aten.slice.Tensor, every, -1, start, start + width)
            replacements[value] = columns
            start += width
        return replacements


def _site(prefill: Node) -> Site | Refusal:
    """The projections around a fused prefill, if all are of one input."""
    qkv = prefill.args[0]
    assert isinstance(qkv, Node)
    gate, beta = (projection(node) for node in prefill.args[1:3])  # type: ignore[arg-type]
    joined = joined_projections(qkv)
    low = projection(gate.x) if gate is not None else None
    x = joined[0].x
    if (
        len(joined) != 3
        or low is None
        or beta is None
        or any(p.x is not x for p in (*joined, low, beta))
    ):
        return _refusal(prefill, "one input", f"its projections are not six products of {x.name}")
    known = {id(part.node) for part in (*joined, low, beta)}
    others = [projection(user) for user in x.users]
    rest = [
        each for each in others if each is not None and id(each.node) not in known and each.x is x
    ]
    if len(rest) != 1:
        names = ", ".join(each.node.name for each in rest) or "nothing"
        reason = f"{names} besides q, k, v, decay gate and beta projects {x.name}; one output gate should"
        return _refusal(prefill, "one output gate", reason)
    parts = (*joined, low, beta, rest[0])
    values = (qkv, low.node, beta.node, rest[0].node)
    nodes = cone(values, {x, *(part.weight for part in parts)})
    return Site(prefill, make_region(nodes, values), detail=Layer(x, values, parts))


def _refusal(prefill: Node, rule: str, reason: str) -> Refusal:
    return Refusal(prefill.name, rule, reason, "project the layer's input by its six weights only")
