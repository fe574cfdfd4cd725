"""Fuse the SiTU activation.

Before:                                                  After:
    y = beta tanh(g / beta) sigmoid(g)                       y = situ(g, u, beta=…, linear_beta=…)
        * linear_beta tanh(u / linear_beta)

A site is found from whatever may be its sigmoid or tanh, spelt out or not: an expression of two tensors of one
shape, with constants to be the bounds. Trials prove it near zero, where it is linear, and far out, where each bound
shows. What is not proved is a near miss if a tanh and a sigmoid meet in it, which nothing else in these models does.

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
from hybridge.ir.pass_base import ModelShape, Pass, PassContext, Refusal, Rewriter, Site
from hybridge.ir.pattern import constants, is_like, leaves_of, promotion
from hybridge.ir.proof import Trial, Verdict, prove
from hybridge.ir.signature import dtype_of, shape_of
from hybridge.ops.registry import vocabulary

_BOUNDS = frozenset(f"aten::{name}" for name in ("sigmoid", "tanh", "exp", "silu", "log_sigmoid"))
_STEPS = _BOUNDS | frozenset(
    f"aten::{name}" for name in ("mul", "div", "add", "sub", "rsub", "neg", "reciprocal", "to")
)
# Calls from the first bound to the result, all spelt out.
_LONGEST = 16
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

    def expect(self, config: ModelShape, phase: str) -> int:
        layers = range(len(config.layer_kinds)) if config.activation == "situ" else ()
        return sum(config.has_mlp(layer) for layer in layers)

    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        tried: set[Node] = set()
        for node in list(context.graph.nodes):
            if op_name(node) in _BOUNDS and not node._erased and node not in tried:
                found = _site(context, node)
                if found is not None:
                    tried |= set(found.region.nodes)
                    yield found

    def check(self, site: Site, context: PassContext) -> Refusal | None:
        roles, verdict = site.detail
        if not verdict.holds:
            refusal: Refusal = verdict.refusal(site.anchor, "situ")
            return refusal
        return promotion(site.anchor, roles.gate, roles.end) or _one_dtype(site.anchor, roles)

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


def _one_dtype(anchor: Node, roles: Roles) -> Refusal | None:
    """Why kernels cannot take the two halves as they are, or None."""
    gate, up = dtype_of(roles.gate), dtype_of(roles.up)
    if gate == up:
        return None
    return Refusal(
        anchor.name,
        "gate and up have one dtype",
        f"{roles.gate.name} is {gate}, {roles.up.name} is {up}",
        f"cast {roles.up.name} to {gate}",
    )


def _site(context: PassContext, bound: Node) -> Site | None:
    """The activation around a bound; None if there is none, nor a near miss of one."""
    best: tuple[Roles, Verdict] | None = None
    for end in regions.forward([bound], limit=_LONGEST):
        if op_name(end) not in _STEPS:
            break
        for roles in _roles(end):
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
    if best is None or not (best[1].holds or _resembles(best[0])):
        return None
    roles = best[0]
    nodes = regions.cone([roles.end], {roles.gate, roles.up}, context.effects)
    return Site(bound, regions.make_region(nodes, [roles.end]), detail=best)


def _resembles(roles: Roles) -> bool:
    """Whether a tanh and a sigmoid of the gate meet in the result."""
    names = {op_name(node) for node in leaves_of(roles.end, _STEPS, (roles.gate, roles.up)).inside}
    return {"aten::tanh", "aten::sigmoid"} <= names


def _roles(end: Node) -> Iterator[Roles]:
    """Ways to see the end as the activation of two tensors of its shape; what is cast or bounded may be one."""
    inside = leaves_of(end, _STEPS).inside
    casts = tuple(node for node in inside if op_name(node) == "aten::to")
    bounded = [tuple(node.all_input_nodes) for node in inside if op_name(node) in _BOUNDS]
    for stop in dict.fromkeys([(), casts, *bounded]):
        expression = leaves_of(end, _STEPS, stop)
        tensors = expression.leaves
        if len(tensors) != 2 or not all(is_like(node, end) for node in tensors):
            continue
        bounds = dict.fromkeys(abs(value) for value in constants(expression.inside) if value)
        for gate, up in (tensors, tensors[::-1]):
            for beta in bounds:
                for linear_beta in [*bounds, None]:
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
