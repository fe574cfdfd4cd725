"""Attention Residuals in two stages: what is frozen within a block is weighed once, for all its query sites.

Before, at each site:                                    After, once per set of frozen sources:
    values = stack(frozen sources, live prefix)              statistics = attn_res_prepare(
    scores = (rms_norm(values) * query).sum(-1)                  stack(frozen), queries of all its sites, eps=…)
    h      = (softmax(scores, 0) * values).sum(0)         and at each site:
                                                             h = attn_res_update(live, query, statistics, site=…, eps=…)

A site is found from a stack of equal tensors that a softmax follows; trials prove that what follows is the mix. Sites
with the same frozen sources form one batch, wherever they are in the graph: a boundary layer's attention site joins the
block before it because its sources say so. Norm and projection weight of a site become one derived weight.

Left alone: a site whose scores or softmax someone else reads; a source that is written between the batch and the site;
weights that are not constants; a mix that normalises its values or scales its scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.ir import region as regions
from hybridge.ir.effects import op_name
from hybridge.ir.evaluate import Sizes
from hybridge.ir.pass_base import (
    ModelShape,
    Pass,
    PassContext,
    Refusal,
    Rewriter,
    Site,
    hazard,
    same_shape,
)
from hybridge.ir.proof import Trial, Verdict, prove
from hybridge.ir.region import Region
from hybridge.ir.signature import is_weight, shape_of, weight_name
from hybridge.ops.registry import vocabulary

SOFTMAXES = ("aten::softmax", "aten::_softmax", "aten::exp")
_TOKENS = 3
_TOLERANCE = 2e-5
# An eps outside of this range is no guard of a root.
_EPS_RANGE = (1e-12, 1e-2)

aten = torch.ops.aten


@dataclass
class Batch:
    """The sites of one set of frozen sources; the statistics appear when the first site is rewritten."""

    frozen: tuple[Node, ...]
    eps: float
    mixes: list[Mix] = field(default_factory=list)
    statistics: tuple[Node, ...] = ()
    point: Node | None = None


@dataclass(frozen=True)
class Mix:
    """One site: `end` is the mix of `sources` by the product of `weights`."""

    sources: tuple[Node, ...]
    weights: tuple[Node, ...]
    end: Node
    eps: float
    live: int = -1

    @property
    def live_source(self) -> Node:
        return self.sources[self.live]

    @property
    def frozen(self) -> tuple[Node, ...]:
        return self.sources[:-1] if self.live == -1 else self.sources[1:]


class FuseAttnRes(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "fuse_attn_res"

    def expect(self, config: ModelShape, phase: str) -> int:
        # Two sites a layer and the output's, less layer 0's attention, which has one source.
        return 0 if config.attn_res_block_size is None else 2 * len(config.layer_kinds)

    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        found = [_mix(context, node) for node in context.graph.nodes if _is_stack(node)]
        sites = [site for site in found if isinstance(site, Site)]
        good = [site for site in sites if site.detail[1].holds and not hazard(site, context)]
        batches = _group(good)
        for site in found:
            if isinstance(site, Refusal):
                yield site
            elif site is not None:
                yield _in_batch(site, batches.get(site.anchor))

    def check(self, site: Site, context: PassContext) -> Refusal | None:
        verdict: Verdict = site.detail[1]
        if verdict.holds:
            return None
        return verdict.refusal(site.anchor, "attn_res_prepare and _update")

    def rewrite(self, site: Site, rewriter: Rewriter) -> Mapping[Node, Node]:
        mix, _, batch = site.detail
        if not batch.statistics:
            _prepare(batch, rewriter)
        place = next(i for i, each in enumerate(batch.mixes) if each.end is mix.end)
        live = mix.sources[0] if batch.mixes[place].live == 0 else mix.sources[-1]
        result = rewriter.call(
            vocabulary["attn_res_update"].overload,
            live,
            _query(mix, rewriter),
            *batch.statistics,
            site=place,
            eps=batch.eps,
        )
        return {mix.end: result}


def _is_stack(node: Node) -> bool:
    """A stack of at least two equal [T, D] tensors."""
    if op_name(node) not in ("aten::stack", "aten::cat") or node.op != "call_function":
        return False
    parts, shape = node.args[0], shape_of(node)
    return (
        isinstance(parts, list | tuple) and len(parts) > 1 and shape is not None and len(shape) == 3
    )


def _mix(context: PassContext, stack: Node) -> Site | Refusal | None:
    """The site that starts at a stack; None if no softmax follows."""
    softmax = _softmax_after(stack)
    sources = _sources(stack)
    if softmax is None or sources is None:
        return None
    best: tuple[Mix, Verdict] | None = None
    for end in _ends(softmax, sources[0]):
        region = regions.between([stack], [end], context.effects)
        weights = _weights(region, set(sources))
        if weights is None:
            continue
        for eps in _epsilons(region):
            mix = Mix(sources, weights, end, eps)
            verdict = _prove(context, mix)
            if best is None or verdict.rank > best[1].rank:
                best = (mix, verdict)
        if best is not None and best[1].holds:
            break
    if best is None:
        return Refusal(
            stack.name,
            "mix operands",
            f"between {stack.name} and a result like its sources there are not only constant weights of their width",
            "weigh the sources by softmax((rms_norm(source) * query).sum(-1))",
        )
    return Site(stack, regions.between([stack], [best[0].end], context.effects), detail=best)


def _softmax_after(stack: Node) -> Node | None:
    for node in regions.forward([stack], limit=14):
        if op_name(node) in SOFTMAXES:
            return node
        if op_name(node) in ("aten::linear", "aten::sort") and node is not stack:
            # A scoring by linear is one column; anything wider is another layer's maths.
            shape = shape_of(node)
            if shape is None or shape[-1] != 1:
                return None
    return None


def _sources(stack: Node) -> tuple[Node, ...] | None:
    """The stacked [T, D] tensors; a cat of [1, T, D] views counts as a stack of what they view."""
    parts = [part for part in stack.args[0] if isinstance(part, Node)]  # type: ignore[union-attr]
    axis = stack.args[1] if len(stack.args) > 1 else stack.kwargs.get("dim", 0)
    if axis not in (0, -3):
        return None
    if op_name(stack) == "aten::cat":
        parts = [part.args[0] for part in parts if op_name(part) == "aten::unsqueeze"]  # type: ignore[misc]
    shapes = [shape_of(part) for part in parts]
    count = (shape_of(stack) or (0,))[0]
    if len(parts) != count or any(shape is None or len(shape) != 2 for shape in shapes):
        return None
    return tuple(parts)


def _ends(softmax: Node, source: Node) -> Iterator[Node]:
    """Tensors like a source, soon after the softmax."""
    wanted = shape_of(source) or ()
    for node in regions.forward([softmax], limit=10):
        shape = shape_of(node)
        if shape is not None and same_shape(shape, wanted):
            yield node


def _weights(region: Region, sources: set[Node]) -> tuple[Node, ...] | None:
    """The constants that the region reads, directly or computed; None if it reads anything else."""
    found: dict[Node, None] = {}
    pending = [node for node in region.inputs if node not in sources]
    while pending:
        node = pending.pop()
        if is_weight(node):
            found[node] = None
        elif node.op == "call_function":
            pending += [each for each in node.all_input_nodes if each not in sources]
        else:
            return None
    return tuple(sorted(found)) or None


def _epsilons(region: Region) -> Iterator[float]:
    """The small constants of the region: one of them guards the root."""
    low, high = _EPS_RANGE
    values: dict[float, None] = {}
    for node in region.nodes:
        for value in [*node.args, *node.kwargs.values()]:
            if isinstance(value, float) and low <= value <= high:
                values[value] = None
    yield from values or {0.0: None}


def _prove(context: PassContext, mix: Mix) -> Verdict:
    label = f"attn_res {mix.eps!r} {len(mix.sources)}"
    given = [*mix.sources, *mix.weights]
    return prove(context, label, [mix.end], given, lambda: _trials(mix), tolerance=_TOLERANCE)


# (rule, size of the sources, size of the query)
_VARIANTS = (
    ("h is sum_i softmax_i(query . rms_norm(v_i)) v_i, the values raw", 1.0, 1.0),
    ("eps is inside the root of the mean square", 3e-3, 1.0),
    ("scores far apart", 30.0, 20.0),
)


def _trials(mix: Mix) -> Iterator[tuple[Trial, Sizes]]:
    tokens, width = shape_of(mix.sources[0]) or (0, 0)
    prepare, update = (vocabulary[f"attn_res_{part}"].reference for part in ("prepare", "update"))
    for rule, magnitude, sharpness in _VARIANTS:
        sizes = Sizes()
        count = _TOKENS if sizes.bind(tokens, _TOKENS) else int(sizes.of(tokens))
        generator = torch.Generator().manual_seed(len(rule))
        values = [torch.randn(count, width, generator=generator) * magnitude for _ in mix.sources]
        query = torch.ones(width)
        given: dict[Node, Tensor] = dict(zip(mix.sources, values, strict=True))
        for weight in mix.weights:
            drawn = torch.randn(width, generator=generator) * (sharpness / width**0.5) ** 0.5
            query = query * drawn
            given[weight] = drawn.reshape(sizes.shape(weight))
        statistics = prepare(torch.stack(values[:-1]), query.unsqueeze(0), eps=mix.eps)
        expected = update(values[-1], query, *statistics, site=0, eps=mix.eps)
        yield Trial(rule, given, [expected]), sizes


def _group(sites: Sequence[Site]) -> dict[Node, Batch]:
    """Site -> its batch: the sites with the same frozen sources, the live one being the last (or first)."""
    groupings = []
    for live in (-1, 0):
        batches: dict[tuple[tuple[Node, ...], float], Batch] = {}
        where: dict[Node, Batch] = {}
        for site in sites:
            found: Mix = site.detail[0]
            mix = Mix(found.sources, found.weights, found.end, found.eps, live)
            batch = batches.setdefault((mix.frozen, mix.eps), Batch(mix.frozen, mix.eps))
            batch.mixes.append(mix)
            where[site.anchor] = batch
        groupings.append((len(batches), where))
    return min(groupings, key=lambda pair: pair[0])[1]


def _in_batch(site: Site, batch: Batch | None) -> Site:
    """The site with its batch, which may have read the frozen sources already, for sites before this one."""
    mix: Mix = site.detail[0]
    detail = (*site.detail, batch)
    if batch is None or batch.point is None:
        return Site(site.anchor, site.region, mix.sources, detail=detail)
    earlier = dict.fromkeys(batch.frozen, batch.point)
    return Site(site.anchor, site.region, (*mix.sources, *batch.statistics), earlier, detail)


def _prepare(batch: Batch, rewriter: Rewriter) -> None:
    """Stage one, at the first site of the batch."""
    sources = rewriter.call(aten.stack.default, list(batch.frozen))
    batch.point = sources
    queries = [_query(mix, rewriter) for mix in batch.mixes]
    names = [weight_name(query) for query in queries]
    stacked = rewriter.derived_weight(
        f"{names[0]}_batch", {"transform": "stack", "inputs": names}, queries
    )
    prepared = rewriter.call(
        vocabulary["attn_res_prepare"].overload, sources, stacked, eps=batch.eps
    )
    batch.statistics = tuple(rewriter.item(prepared, place) for place in range(3))


def _query(mix: Mix, rewriter: Rewriter) -> Node:
    """norm weight * projection weight of a site, [D]."""
    width = (shape_of(mix.sources[0]) or ())[-1]
    names = [weight_name(weight) for weight in mix.weights]
    recipe = {"transform": "product", "inputs": names, "shape": [width]}
    # Beside the weight, not below it: torch's exporter cannot hold a name below a parameter's own.
    name = str(names[0]).removesuffix(".weight") + ".query"
    return rewriter.derived_weight(name, recipe, mix.weights)
