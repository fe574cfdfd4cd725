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

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.ir import region as regions
from hybridge.ir.batch import FIRST_BATCH, Batch, batch_shape, batches, bind_sizes
from hybridge.ir.effects import op_name
from hybridge.ir.evaluate import Sizes
from hybridge.ir.layout import Joined, Operand, operands
from hybridge.ir.pass_base import (
    ModelShape,
    Pass,
    PassContext,
    Refusal,
    Rewriter,
    Site,
)
from hybridge.ir.pattern import (
    Leaves,
    assignments,
    constants,
    guards,
    joined_projections,
    leaves,
    projection,
)
from hybridge.ir.proof import MetadataOnly, Trial, Verdict, prove
from hybridge.ir.signature import (
    CONTEXT_LEN,
    DECODE,
    QUERY_START,
    STATE_SLOT,
    is_weight,
    metadata,
    shape_of,
    weight_name,
)
from hybridge.ops.registry import vocabulary
from hybridge.passes.kda_sites import Found, kda_sites, needed_by

_TABLES = (QUERY_START, CONTEXT_LEN, STATE_SLOT)
# The recurrence multiplies rounding errors; what a wrong gate, eps or tap changes is far larger.
_TOLERANCE = 5e-5


@dataclass(frozen=True)
class Roles:
    """Which node is what. `norm_eps` is None where the region has no output norm."""

    found: Found
    operands: Mapping[str, Operand | Joined]
    lower_bound: float | None
    norm_eps: float | None


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
        layer = _projections(roles) if roles.found.decode else None
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
    missing = [name for name in _TABLES if name not in metadata(context.graph)]
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
    layer = _projections(roles) if found.decode else None
    if isinstance(layer, Layer):
        operands_read = [layer.x]
    else:
        operands_read = [node for each in roles.operands.values() for node in each.nodes]
    return (*operands_read, found.conv_state, found.state, *(tables[name] for name in _TABLES))


def _best(
    context: PassContext, found: Found, origins: Leaves, nodes: Sequence[Node]
) -> tuple[Roles, Verdict] | None:
    """The first assignment of roles that is proved, else the one that came furthest."""
    best: tuple[Roles, Verdict] | None = None
    known = [*origins.activations, *origins.weights, found.conv_state, found.state]
    known += metadata(context.graph).values()
    cone = regions.cone([found.end, *found.writes], known, context.effects)
    for chosen in _assignments(found, origins):
        for lower_bound in _bounds(cone):
            for eps in guards(cone) if found.decode else [None]:
                roles = Roles(found, chosen, lower_bound, eps)
                verdict = _prove(context, roles)
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


_PARTS = ("q", "k", "v")


def _assignments(found: Found, origins: Leaves) -> Iterator[dict[str, Operand | Joined]]:
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
        node for node in origins.weights if _has_elements(node, (whole, whole // len(_PARTS)))
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
    if len(filters) == len(_PARTS) and isinstance(qkv, Joined):
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
        if len(parts) == len(_PARTS) and all(part.axes == parts[0].axes for part in parts):
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
    third[axis] //= len(_PARTS)
    roles = {part: lambda node: operands(node, third) for part in _PARTS}
    for chosen in assignments(roles, nodes):
        parts = tuple(chosen[part] for part in _PARTS)
        alike = all(part.axes == parts[0].axes for part in parts)
        if alike and all(map(is_weight, nodes)) == all(is_weight(part.node) for part in parts):
            yield Joined(parts, axis)


def _prove(context: PassContext, roles: Roles) -> Verdict:
    """Whether the region leaves both states, and gives the core (or gated) result, as the op does."""
    found = roles.found
    inputs = metadata(context.graph)
    names = sorted(roles.operands)
    given = [node for name in names for node in roles.operands[name].nodes]
    given += [found.conv_state, found.state, *inputs.values()]
    axes = [roles.operands[name].axes for name in names]
    label = f"kda {found.decode} {roles.lower_bound!r} {roles.norm_eps!r} {names} {axes}"
    return prove(
        context,
        label,
        [found.end],
        given,
        lambda: _trials(context, roles),
        tolerance=_TOLERANCE,
        writes=found.writes,
    )


@dataclass(frozen=True)
class _Sizes:
    """How large a trial's numbers are: q and k, v and the recurrent state, and the gates."""

    rule: str
    keys: float = 1.0
    values: float = 1.0
    gates: float = 1.0


_VARIANTS = (
    _Sizes("convolution, norms, gates and delta rule as in the definition"),
    # Values stay large, so that a wrong length shows in full.
    _Sizes("1e-6 is added inside the root of the L2 norms", keys=1e-3),
    # The output norm hides how long q is, unless its own eps counts.
    _Sizes("1e-6 is added inside the root of the L2 norms", keys=1e-3, values=3e-3),
    _Sizes("eps is added inside the root of the output norm", values=3e-3),
    _Sizes("gates far from zero", gates=12.0),
)


def _trials(context: PassContext, roles: Roles) -> Iterator[tuple[Trial, Sizes]]:
    found = roles.found
    shape = batch_shape(context.graph, context.phase == DECODE, state=found.state)
    for batch in batches(shape):
        # What the numbers are does not depend on the batch: the first one shows it.
        for drawn in _VARIANTS[: None if batch.name == FIRST_BATCH else 1]:
            sizes = Sizes()
            given: dict[Node, Tensor] = bind_sizes(context.graph, batch, sizes)
            tokens, slots = (shape_of(found.end) or ())[0], (shape_of(found.state) or ())[0]
            if not sizes.bind(tokens, batch.tokens) or not sizes.bind(slots, batch.slots):
                continue
            generator = torch.Generator().manual_seed(5)
            values = _draw(roles, sizes, drawn, generator)
            history, memory = (sizes.shape(node) for node in (found.conv_state, found.state))
            states = {
                found.conv_state: torch.randn(history, generator=generator)
                * _channels(history[1], drawn)[:, None],
                found.state: torch.randn(memory, generator=generator) * 0.5 * drawn.values,
            }
            for name, operand in roles.operands.items():
                given |= operand.to_nodes(values[name])
            given |= {node: value.clone() for node, value in states.items()}
            expected = _expected(roles, batch, values, states)
            where = "" if batch.name == FIRST_BATCH else f" on a batch with {batch.name}"
            rows = _active_rows(batch)
            yield Trial(drawn.rule + where, given, [expected], rows, states), sizes


def _channels(count: int, drawn: _Sizes) -> Tensor:
    """[3P]: the size of each channel of q, k and v."""
    third = count // len(_PARTS)
    return torch.tensor([drawn.keys] * (2 * third) + [drawn.values] * third)


def _draw(
    roles: Roles, sizes: Sizes, drawn: _Sizes, generator: torch.Generator
) -> dict[str, Tensor]:
    values = {}
    for name, operand in roles.operands.items():
        wanted = [sizes.of(size) for size in operand.sizes()]
        values[name] = torch.randn(wanted, generator=generator)
        if name == "qkv":
            values[name] *= _channels(wanted[1], drawn)
        elif name in ("gate", "beta", "output_gate"):
            values[name] *= drawn.gates
    return values


def _expected(
    roles: Roles, batch: Batch, values: Mapping[str, Tensor], states: Mapping[Node, Tensor]
) -> Tensor:
    """What the definition gives; updates `states` as it does."""
    tables = batch.inputs()
    core: Tensor = vocabulary["kda_prefill"].reference(
        *(values[name] for name in ("qkv", "gate", "beta", "conv_weight", "a_log", "dt_bias")),
        states[roles.found.conv_state],
        states[roles.found.state],
        *(tables[name] for name in _TABLES),
        lower_bound=roles.lower_bound,
    )
    if roles.norm_eps is None:
        return core
    normed: Tensor = vocabulary["rms_norm"].reference(
        core, values["norm_weight"], eps=roles.norm_eps
    )
    return normed.flatten(1) * torch.sigmoid(values["output_gate"])


def _active_rows(batch: Batch) -> Tensor:
    """[T] bool: tokens of sequences that have a state; the others' results are read by nobody."""
    rows = [batch.active[batch.sequence_of(token)] for token in range(batch.real_tokens)]
    return torch.tensor(rows + [False] * (batch.tokens - batch.real_tokens))


def _emit_prefill(roles: Roles, rewriter: Rewriter) -> Node:
    inputs = metadata(rewriter.context.graph)
    parts = {name: operand.emit(rewriter) for name, operand in roles.operands.items()}
    return rewriter.call(
        vocabulary["kda_prefill"].overload,
        *(parts[name] for name in ("qkv", "gate", "beta", "conv_weight", "a_log", "dt_bias")),
        roles.found.conv_state,
        roles.found.state,
        *(inputs[name] for name in _TABLES),
        lower_bound=roles.lower_bound,
    )


@dataclass(frozen=True)
class Layer:
    """The projections of a decode layer: those of the input, in the op's order, and the second ones."""

    x: Node
    joined: tuple[Node, ...]
    f_b: Node
    g_b: Node | None


def _projections(roles: Roles) -> Layer | Refusal:
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


def _emit_decode(roles: Roles, rewriter: Rewriter) -> Node:
    layer, found = _projections(roles), roles.found
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
