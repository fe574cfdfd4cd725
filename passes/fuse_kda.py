"""Fuse a KDA layer: FlashKDA in prefill, MegaKDA in decode.

Before, prefill:                                         After:
    taps of the short convolution, SiLU                      core = kda_prefill(qkv, gate, beta, conv_weight, a_log,
    L2 norms, decay gate, sigmoid of beta                        dt_bias, conv_state!, state!, …, lower_bound=…)
    state_write(conv_state, …)
    core = kda_recurrence(…, state!, …)
Before, decode:                                          After:
    projections, the same for one token,                     out = kda_decode(x, [q|k|v|f_a|b|g] weights, f_b, g_b,
    state_write(conv_state, …), state_write(state, …)            conv_weight, …, o_weight, conv_state!, state!, …)
    output norm, output gate, o_proj

A site is found from the convolution's state: the reads of `conv_state` that lead to a write of a recurrent
state. Trials prove the maths, the zero state of a sequence that starts, and both states afterwards; each
state is written exactly once. q, k and v may have one convolution or one each: three filters become one derived
weight. In decode the projections must be products of one input; their weights are joined at compile time.

Left alone: a state that someone else reads or writes in between; an intermediate with another user; projections of
different inputs, or with a bias; a gate that is neither softplus nor bounded; an inner norm with another eps; histories
of q, k and v that are inputs of their own, because the op has one and a graph keeps its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch.fx import Node

from hybridge.ir import region as regions
from hybridge.ir.effects import op_name
from hybridge.ir.pass_base import ModelShape, Pass, PassContext, Refusal, Rewriter, Site
from hybridge.ir.pattern import Leaves, constants, guards, leaves
from hybridge.ir.proof import MetadataOnly, Verdict
from hybridge.ir.signature import CONTEXT_LEN, STATE_SLOT, metadata
from hybridge.ops.registry import vocabulary
from hybridge.passes.kda_operands import (
    TABLES,
    Layer,
    Roles,
    decode_layer,
    joined_weight,
    kda_assignments,
)
from hybridge.passes.kda_sites import Found, kda_sites
from hybridge.passes.kda_trials import prove_kda


class FuseKda(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "fuse_kda"

    def expect(self, config: ModelShape, phase: str) -> int:
        return config.layer_kinds.count("kda")

    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        decided = MetadataOnly(context)
        for found in list(kda_sites(context)):
            yield found if isinstance(found, Refusal) else _site(context, found, decided)

    def check(self, site: Site, context: PassContext) -> Refusal | None:
        roles, verdict = site.detail
        op = "kda_decode" if roles.found.decode else "kda_prefill"
        if not verdict.holds:
            refusal: Refusal = verdict.refusal(site.anchor, op)
            return refusal
        layer = decode_layer(roles) if roles.found.decode else None
        return layer if isinstance(layer, Refusal) else None

    def rewrite(self, site: Site, rewriter: Rewriter) -> Mapping[Node, Node]:
        roles: Roles = site.detail[0]
        if roles.found.decode:
            return {site.region.outputs[0]: _emit_decode(roles, rewriter)}
        return {roles.found.end: _emit_prefill(roles, rewriter)}


def _site(context: PassContext, found: Found, decided: MetadataOnly) -> Site | Refusal:
    anchor = found.writes[-1]
    ends = [*found.writes, found.output.node if found.output else found.end]
    nodes = regions.between(found.reads, ends, context.effects).nodes
    output = found.output.node if found.output else found.end
    region = regions.make_region(nodes, [output])
    missing = [name for name in TABLES if name not in metadata(context.graph)]
    if missing:
        reason = f"the graph has no input {missing[0]}"
        return Refusal(anchor.name, "batch metadata", reason, f"give the graph {missing[0]}")
    inner = [node for node in region.nodes if not found.decode or node is not output]
    inputs = regions.make_region(inner, [found.end]).inputs
    stop = {found.conv_state, found.state}
    origins = leaves([node for node in inputs if not regions.is_size(node)], decided, stop)
    best = _best(context, found, origins, nodes) if origins is not None else None
    if best is None:
        return Refusal(
            anchor.name,
            "kda operands",
            f"around {anchor.name} there are not the projections q|k|v, gate and beta, and one constant each for the "
            "convolution, A_log and dt_bias"
            + (", the output gate and norm" if found.decode else ""),
            "compute the layer from plain projections of its input and constant weights",
        )
    return Site(anchor, region, _reads(context, best[0]), detail=best)


def _reads(context: PassContext, roles: Roles) -> tuple[Node, ...]:
    """What the op reads: in decode the input of the layer's projections, which lie before the region."""
    found, tables = roles.found, metadata(context.graph)
    layer = decode_layer(roles) if found.decode else None
    if isinstance(layer, Layer):
        operands_read = [layer.x]
    else:
        operands_read = [node for each in roles.operands.values() for node in each.nodes]
    return (*operands_read, found.conv_state, found.state, *(tables[name] for name in TABLES))


def _best(
    context: PassContext, found: Found, origins: Leaves, nodes: Sequence[Node]
) -> tuple[Roles, Verdict] | None:
    """The first assignment of roles that is proved, else the one that came furthest."""
    best: tuple[Roles, Verdict] | None = None
    known = [*origins.activations, *origins.weights, found.conv_state, found.state]
    known += metadata(context.graph).values()
    cone = regions.cone([found.end, *found.writes], known, context.effects)
    for chosen in kda_assignments(found, origins):
        for lower_bound in _bounds(cone):
            for eps in guards(cone) if found.decode else [None]:
                roles = Roles(found, chosen, lower_bound, eps)
                verdict = prove_kda(context, roles)
                if verdict.holds:
                    return roles, verdict
                if best is None or verdict.rank > best[1].rank:
                    best = (roles, verdict)
    return best


def _bounds(nodes: Sequence[Node]) -> list[float | None]:
    """Variant A has no bound; variant B's is one of the constants, as a negative number."""
    if any(op_name(node) in ("aten::softplus", "aten::log1p") for node in nodes):
        return [None]
    found = {-abs(value): None for value in constants(nodes) if abs(value) > 1 and value < 1e9}
    return [*found, None]


def _emit_prefill(roles: Roles, rewriter: Rewriter) -> Node:
    inputs = metadata(rewriter.context.graph)
    parts = {name: operand.emit(rewriter) for name, operand in roles.operands.items()}
    return rewriter.call(
        vocabulary["kda_prefill"].overload,
        *(parts[name] for name in ("qkv", "gate", "beta", "conv_weight", "a_log", "dt_bias")),
        roles.found.conv_state,
        roles.found.state,
        *(inputs[name] for name in TABLES),
        lower_bound=roles.lower_bound,
    )


def _emit_decode(roles: Roles, rewriter: Rewriter) -> Node:
    layer, found = decode_layer(roles), roles.found
    assert isinstance(layer, Layer)
    assert found.output is not None
    inputs = metadata(rewriter.context.graph)
    joined = joined_weight(layer.joined, rewriter)
    parts: dict[str, Any] = {
        name: roles.operands[name].emit(rewriter)
        for name in ("conv_weight", "a_log", "dt_bias", "norm_weight")
    }
    return rewriter.call(
        vocabulary["kda_decode"].overload,
        layer.x,
        joined,
        layer.f_b,
        layer.g_b,
        *parts.values(),
        found.output.weight,
        found.conv_state,
        found.state,
        inputs[CONTEXT_LEN],
        inputs[STATE_SLOT],
        lower_bound=roles.lower_bound,
        norm_eps=roles.norm_eps,
    )
