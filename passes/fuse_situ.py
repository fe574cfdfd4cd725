"""Fuse the SiTU activation.

Before:                                                  After:
    y = beta tanh(g / beta) sigmoid(g)                       y = situ(g, u, beta=…, linear_beta=…)
        * linear_beta tanh(u / linear_beta)

A site is found from a sigmoid and a tanh of the same tensor, which nothing else in these models has. Trials
prove it near zero, where it is linear, and far out, where each bound shows.

Left alone: a gate whose sigmoid takes the bounded value; another dtype than the gate's; a factor that someone
else reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.ir import region as regions
from hybridge.ir.effects import op_name
from hybridge.ir.evaluate import Sizes
from hybridge.ir.pass_base import Pass, PassContext, Refusal, Rewriter, Site, same_shape
from hybridge.ir.pattern import constants
from hybridge.ir.proof import Trial, Verdict, prove
from hybridge.ir.signature import dtype_of, shape_of
from hybridge.ops.registry import vocabulary

_STEPS = frozenset(f"aten::{name}" for name in ("mul", "div", "tanh", "sigmoid", "to"))
_SIZE = 3
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Roles:
    """Which node is what."""

    gate: Node
    up: Node
    end: Node
    beta: float
    linear_beta: float | None


class FuseSitu(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "fuse_situ"

    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        for node in list(context.graph.nodes):
            if op_name(node) == "aten::sigmoid" and not node._erased:
                found = _site(context, node)
                if found is not None:
                    yield found

    def check(self, site: Site, context: PassContext) -> Refusal | None:
        roles, verdict = site.detail
        if not verdict.holds:
            refusal: Refusal = verdict.refusal(site.anchor, "situ")
            return refusal
        if dtype_of(roles.gate) != dtype_of(roles.end):
            return Refusal(
                site.anchor.name,
                "dtype promotion",
                f"{roles.gate.name} is {dtype_of(roles.gate)}, {roles.end.name} is {dtype_of(roles.end)}",
                f"cast the result to {dtype_of(roles.gate)}",
            )
        return None

    def rewrite(self, site: Site, rewriter: Rewriter) -> Mapping[Node, Node]:
        roles: Roles = site.detail[0]
        result = rewriter.call(
            vocabulary["situ"].overload,
            roles.gate,
            roles.up,
            beta=roles.beta,
            linear_beta=roles.linear_beta,
        )
        return {roles.end: result}


def _site(context: PassContext, sigmoid: Node) -> Site | None:
    """The activation around a sigmoid; None if its argument has no tanh."""
    gate = sigmoid.args[0]
    if not isinstance(gate, Node) or not _has_tanh(gate):
        return None
    best: tuple[Roles, Verdict] | None = None
    for end in regions.forward([sigmoid], limit=4):
        for roles in _roles(context, gate, end):
            verdict = prove(
                context,
                f"situ {roles.beta!r} {roles.linear_beta!r}",
                [end],
                [roles.gate, roles.up],
                lambda roles=roles: _trials(roles),  # type: ignore[misc]
                tolerance=_TOLERANCE,
            )
            if best is None or verdict.rank > best[1].rank:
                best = (roles, verdict)
    if best is None:
        return None
    roles = best[0]
    nodes = regions.cone([roles.end], {roles.gate, roles.up}, context.effects)
    return Site(sigmoid, regions.make_region(nodes, [roles.end]), detail=best)


def _has_tanh(gate: Node) -> bool:
    near = [user for node in (gate, *gate.users) for user in node.users]
    return any(op_name(node) == "aten::tanh" for node in near)


def _roles(context: PassContext, gate: Node, end: Node) -> Iterator[Roles]:
    """Ways to see the end as the activation of the gate and one other tensor of its shape."""
    inside, leaves = {end}, set()
    pending = [end]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node is gate or node in inside:
                continue
            if op_name(node) in _STEPS:
                inside.add(node)
                pending.append(node)
            else:
                leaves.add(node)
    if len(leaves) != 1 or op_name(end) not in _STEPS:
        return
    up = leaves.pop()
    shapes = [shape_of(node) for node in (gate, up, end)]
    if any(shape is None or not same_shape(shape, shapes[0] or ()) for shape in shapes):
        return
    bounds = [abs(value) for value in constants(sorted(inside)) if value]
    for beta in dict.fromkeys(bounds):
        for linear_beta in dict.fromkeys([*bounds, None]):
            yield Roles(gate, up, end, beta, linear_beta)


def _trials(roles: Roles) -> Iterator[tuple[Trial, Sizes]]:
    for rule, magnitude in (
        ("beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)", 2.0),
        ("both factors are bounded", 60.0),
    ):
        sizes = Sizes()
        for place, size in enumerate(shape_of(roles.gate) or ()):
            sizes.bind(size, _SIZE + place)
        generator = torch.Generator().manual_seed(7)
        shape = sizes.shape(roles.gate)
        gate, up = (torch.randn(shape, generator=generator) * magnitude for _ in range(2))
        given: dict[Node, Tensor] = {
            roles.gate: gate.to(dtype_of(roles.gate)),
            roles.up: up.to(dtype_of(roles.up)),
        }
        expected = vocabulary["situ"].reference(
            given[roles.gate], given[roles.up], beta=roles.beta, linear_beta=roles.linear_beta
        )
        yield Trial(rule, given, [expected]), sizes
