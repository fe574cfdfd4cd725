"""Fuse the router of a mixture of experts: scores, biased choice, unbiased weights.

Before:                                                  After:
    scores  = sigmoid(x gate_weight^T)                       ids, weights = moe_route(x, gate_weight, bias,
    ids     = stable descending sort(scores + bias)[:, :k]       top_k=k, renormalize=…, scale=…)
    weights = scores at ids, divided by their sum, scaled
    y       = moe_experts(latent, ids, weights, …)           y = moe_experts(latent, ids, weights, …)

A site is found from the experts' op: its ids and weights, back to one projection. Trials prove order, ties,
that the bias takes part in the choice only, and the renormalisation. The experts are already one op, in the
trace; expert parallelism will put its dispatch and combine between the two ops, which is why they stay apart.

Left alone: scores that someone else reads; a choice by top-k without an order between ties; a bias that leaks into the
weights; groups of experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.ir import region as regions
from hybridge.ir.effects import op_name
from hybridge.ir.evaluate import Sizes
from hybridge.ir.pass_base import ModelShape, Pass, PassContext, Refusal, Rewriter, Site
from hybridge.ir.pattern import Projection, constants, leaves, projection
from hybridge.ir.proof import Trial, Verdict, prove
from hybridge.ir.signature import dtype_of, shape_of
from hybridge.ops.registry import vocabulary

_TOKENS = 4
_TOLERANCE = 1e-5
_EXPERTS = ("hybridge::moe_experts", "hybridge::moe_experts_mxfp4")


@dataclass(frozen=True)
class Roles:
    """Which node is what."""

    logits: Projection
    bias: Node
    ids: Node
    weights: Node
    renormalize: bool
    scale: float


class FuseMoe(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "fuse_moe"

    def expect(self, config: ModelShape, phase: str) -> int:
        return sum(config.is_moe_layer(layer) for layer in range(len(config.layer_kinds)))

    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        for node in list(context.graph.nodes):
            if op_name(node) in _EXPERTS and not _is_routed(node):
                yield _site(context, node)

    def check(self, site: Site, context: PassContext) -> Refusal | None:
        roles, verdict = site.detail
        if not verdict.holds:
            refusal: Refusal = verdict.refusal(site.anchor, "moe_route")
            return refusal
        if dtype_of(roles.ids) != torch.int32 or dtype_of(roles.weights) != torch.float32:
            return Refusal(
                site.anchor.name,
                "int32 ids and fp32 weights",
                f"{roles.ids.name} is {dtype_of(roles.ids)}, {roles.weights.name} is {dtype_of(roles.weights)}",
                "route in fp32 and give the experts int32 ids",
            )
        return None

    def rewrite(self, site: Site, rewriter: Rewriter) -> Mapping[Node, Node]:
        roles: Roles = site.detail[0]
        routed = rewriter.call(
            vocabulary["moe_route"].overload,
            roles.logits.x,
            roles.logits.weight,
            roles.bias,
            top_k=_top_k(roles.ids),
            renormalize=roles.renormalize,
            scale=roles.scale,
        )
        return {roles.ids: rewriter.item(routed, 0), roles.weights: rewriter.item(routed, 1)}


def _is_routed(experts: Node) -> bool:
    """Whether the ids come from the fused router already."""
    ids = experts.args[1]
    source = ids.args[0] if isinstance(ids, Node) and ids.args else None
    return isinstance(source, Node) and op_name(source) == "hybridge::moe_route"


def _top_k(ids: Node) -> int:
    return int((shape_of(ids) or (0, 0))[1])


def _site(context: PassContext, experts: Node) -> Site | Refusal:
    ids, weights = experts.args[1], experts.args[2]
    assert isinstance(ids, Node)
    assert isinstance(weights, Node)
    origins = leaves([ids, weights], regions.is_size, ())
    logits = projection(origins.activations[0]) if origins and origins.activations else None
    # A gate weight that only the projection reads is no leaf; the bias is the one that is left.
    constant = origins.weights if origins else ()
    if origins is None or len(origins.activations) != 1 or logits is None or len(constant) != 1:
        return Refusal(
            experts.name,
            "router operands",
            f"{ids.name} and {weights.name} are not made from one projection and one bias",
            "route by sigmoid(x gate_weight^T) and a bias per expert",
        )
    region = regions.between([logits.node], [ids, weights], context.effects)
    best: tuple[Roles, Verdict] | None = None
    for renormalize in (True, False):
        for scale in dict.fromkeys([1.0, *constants(region.nodes)]):
            roles = Roles(logits, constant[0], ids, weights, renormalize, scale)
            verdict = _prove(context, roles)
            if best is None or verdict.rank > best[1].rank:
                best = (roles, verdict)
            if verdict.holds:
                return Site(experts, region, detail=best)
    return Site(experts, region, detail=best)


def _prove(context: PassContext, roles: Roles) -> Verdict:
    label = f"moe_route {_top_k(roles.ids)} {roles.renormalize} {roles.scale!r}"
    return prove(
        context,
        label,
        [roles.ids, roles.weights],
        [roles.logits.node, roles.bias],
        lambda: _trials(roles),
        tolerance=_TOLERANCE,
    )


# (rule, size of the logits, size of the bias)
_VARIANTS: Sequence[tuple[str, float, float]] = (
    ("experts by descending sigmoid(logit) + bias, weights without bias", 1.0, 0.3),
    ("equal scores go to the lowest expert", 0.0, 0.0),
    ("the bias takes part in the choice only", 1.0, 5.0),
    ("1e-20 is added to the sum of the weights", -40.0, 0.0),
)


def _trials(roles: Roles) -> Iterator[tuple[Trial, Sizes]]:
    tokens, experts = shape_of(roles.logits.node) or (0, 0)
    for rule, spread, biased in _VARIANTS:
        sizes = Sizes()
        count = _TOKENS if sizes.bind(tokens, _TOKENS) else sizes.of(tokens)
        generator = torch.Generator().manual_seed(len(rule))
        logits = torch.randn(count, experts, generator=generator) * abs(spread)
        if spread < 0:
            logits = spread - logits.abs() / 10
        bias = torch.randn(experts, generator=generator) * biased
        ids, weights = vocabulary["moe_route"].reference(
            logits,
            torch.eye(experts),
            bias,
            top_k=_top_k(roles.ids),
            renormalize=roles.renormalize,
            scale=roles.scale,
        )
        given: dict[Node, Tensor] = {
            roles.logits.node: logits,
            roles.bias: bias.reshape(sizes.shape(roles.bias)),
        }
        yield Trial(rule, given, [ids, weights]), sizes
