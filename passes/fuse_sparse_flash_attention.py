"""Fuse absorbed MLA over the paged latent cache: over selected positions, or dense and causal.

Before:                                                  After:
    rows   = latent_cache[block_table …]                     out = sparse_flash_attention(
    scores = scale * (query . rows)                              query, latent_cache, positions, query_start,
    scores = -inf where not selected                             context_len, block_table, scale=…, value_dim=…)
    out    = softmax(scores) rows[..., :value_dim]           (without positions: mla_attention)

The site is found from the softmax after a read of a paged cache; its end is the [T, H, value_dim] tensor
after it. Trials prove that the region is the op (see `hybridge.ir.proof`), in either form: rows gathered by
position, or all rows of all sequences under a mask. The latent gather, the score matrix and its mask
disappear.

Left alone: a softmax or a score that someone else reads; a write to the cache between the read and the
result; a mask that is not exactly the selection (or, dense, the causal limit of the batch); positions that
are not known to be what `lightning_indexer` gives, where the form depends on that; a scale that is not one
constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.ir import region as regions
from hybridge.ir.batch import (
    FIRST_BATCH,
    VARIED_BATCHES,
    Batch,
    batch_shape,
    batches,
    bind_sizes,
)
from hybridge.ir.effects import op_name
from hybridge.ir.evaluate import Sizes
from hybridge.ir.layout import Operand, sources
from hybridge.ir.pass_base import (
    ModelShape,
    Pass,
    PassContext,
    Refusal,
    Rewriter,
    Site,
    same_size,
)
from hybridge.ir.proof import MetadataOnly, Trial, Verdict, prove
from hybridge.ir.signature import (
    BLOCK_TABLE,
    CONTEXT_LEN,
    DECODE,
    QUERY_START,
    dtype_of,
    is_integer,
    metadata,
    shape_of,
)
from hybridge.ops.registry import vocabulary
from hybridge.ops.sequences import sequence_rows
from hybridge.passes.attention_forms import Absorbed, Drawn, Expanded, forms
from hybridge.passes.fuse_lightning_indexer import indexed_positions
from hybridge.passes.paged_reads import CacheRead, cache_reads, cache_values, real_rows

SOFTMAXES = (
    "aten::softmax",
    "aten::_softmax",
    "aten::_safe_softmax",
    "aten::exp",
    "aten::scaled_dot_product_attention",
)
SORTS = ("aten::sort", "aten::argsort", "aten::topk")
_TABLES = (QUERY_START, CONTEXT_LEN, BLOCK_TABLE)
# Softmax sums in another order than the reference; a wrong scale or mask shows at 1e-2 and more.
_TOLERANCE = 2e-5


@dataclass(frozen=True)
class Roles:
    """Which node is what.

    Args:
        positions: None for dense attention.
        indexed: whether the positions are known to be what the indexer gives: ascending, distinct, causal.
    """

    cache: Node
    form: Absorbed | Expanded
    positions: Node | None
    indexed: bool
    end: Node
    end_view: Operand
    scale: float

    @property
    def op(self) -> str:
        return "mla_attention" if self.positions is None else "sparse_flash_attention"


class FuseSparseFlashAttention(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "fuse_sparse_flash_attention"

    def expect(self, config: ModelShape, phase: str) -> int:
        return config.layer_kinds.count("dsa") + config.layer_kinds.count("mla")

    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        decided = MetadataOnly(context)
        indexed = indexed_positions(context, decided)
        for read in list(cache_reads(context, SOFTMAXES, SORTS)):
            yield _site(context, read, decided, indexed)

    def check(self, site: Site, context: PassContext) -> Refusal | None:
        roles, verdict = site.detail
        if not verdict.holds:
            refusal: Refusal = verdict.refusal(site.anchor, roles.op)
            return refusal
        return None

    def rewrite(self, site: Site, rewriter: Rewriter) -> Mapping[Node, Node]:
        roles: Roles = site.detail[0]
        inputs = metadata(rewriter.context.graph)
        tables = [inputs[name] for name in _TABLES]
        chosen = [] if roles.positions is None else [_as_int32(roles.positions, rewriter)]
        result = rewriter.call(
            vocabulary[roles.op].overload,
            roles.form.emit(rewriter),
            roles.cache,
            *chosen,
            *tables,
            scale=roles.scale,
            value_dim=roles.form.value_dim,
        )
        result = roles.form.emit_result(result, rewriter)
        return {roles.end: _as_end(result, roles, rewriter)}


def _as_int32(positions: Node, rewriter: Rewriter) -> Node:
    if dtype_of(positions) == torch.int32:
        return positions
    return rewriter.call(torch.ops.aten.to.dtype, positions, torch.int32)


def _as_end(result: Node, roles: Roles, rewriter: Rewriter) -> Node:
    """Give a [T, H, width] result the axes of the region's own result."""
    shape = shape_of(roles.end) or ()
    axes = roles.end_view.axes
    rest = [axis for axis in range(len(shape)) if axis not in axes]
    for _ in rest:
        result = rewriter.call(torch.ops.aten.unsqueeze.default, result, -1)
    order = [*axes, *rest]
    if order != sorted(order):
        inverse = [order.index(axis) for axis in range(len(shape))]
        result = rewriter.call(torch.ops.aten.permute.default, result, inverse)
    if dtype_of(result) != dtype_of(roles.end):
        result = rewriter.call(torch.ops.aten.to.dtype, result, dtype_of(roles.end))
    return result


def _site(
    context: PassContext, read: CacheRead, decided: MetadataOnly, indexed: set[Node]
) -> Site | Refusal:
    """The largest region that is proved; else the nearest miss."""
    missing = [name for name in _TABLES if name not in metadata(context.graph)]
    if missing:
        reason = f"the graph has no input {missing[0]}"
        return Refusal(read.anchor.name, "batch metadata", reason, f"give the graph {missing[0]}")
    best: tuple[Roles, Verdict] | None = None
    for end in _ends(read):
        for roles in _roles(context, read, end, decided, indexed):
            verdict = _prove(context, roles)
            if best is None or verdict.rank > best[1].rank:
                best = (roles, verdict)
            if verdict.holds:
                break
    if best is None:
        return Refusal(
            read.anchor.name,
            "attention operands",
            f"between {read.reads[0].name} and the value product after {read.anchor.name} there is not one query "
            "[T, H, D] beside the rows of the cache",
            "score rows as scale * (query . row) with the absorbed query, or keys and values made from the rows by "
            "one kv_b weight (or one each for keys and values)",
        )
    region = regions.between(read.reads, [best[0].end], context.effects)
    return Site(read.anchor, region, _reads(context, best[0]), detail=best)


def _reads(context: PassContext, roles: Roles) -> tuple[Node, ...]:
    chosen = [] if roles.positions is None else [roles.positions]
    tables = metadata(context.graph)
    return (*roles.form.nodes, roles.cache, *chosen, *(tables[name] for name in _TABLES))


def _ends(read: CacheRead) -> list[Node]:
    """Floating tensors after the softmax that may be [T, H, width], nearest first."""
    found = []
    for node in regions.forward([read.anchor], limit=24):
        shape = shape_of(node)
        if shape is None or is_integer(node):
            continue
        wide = [size for size in shape if not same_size(size, 1)]
        if 1 <= len(wide) <= 3:
            found.append(node)
    return found


def _roles(
    context: PassContext,
    read: CacheRead,
    end: Node,
    decided: MetadataOnly,
    indexed: set[Node],
) -> Iterator[Roles]:
    """Every way to see the region's inputs as a query and positions; the trials decide."""
    region = regions.between(read.reads, [end], context.effects)
    floats: list[Node] = []
    integers: list[Node] = []
    for node in region.inputs:
        if node is read.cache or decided(node) or regions.is_size(node):
            continue
        # A float mask made from positions counts with the integers.
        (integers if _is_selection(node) else floats).append(node)
    row = (shape_of(read.cache) or ())[3]
    for form, view in forms(floats, end, row):
        for positions in _positions(integers, form.tokens, decided, indexed):
            known = positions is not None and any(n in indexed for n in _casts(positions))
            for scale in _scales(region, read.anchor):
                yield Roles(read.cache, form, positions, known, end, view, scale)


def _is_selection(node: Node) -> bool:
    """Whether a node is integers, or was made from nothing but integers."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        if is_integer(current) or regions.is_size(current):
            continue
        if current.op != "call_function" or op_name(current).startswith("hybridge::"):
            return False
        for each in current.all_input_nodes:
            if each not in seen:
                seen.add(each)
                pending.append(each)
    return True


def _positions(
    selections: list[Node], tokens: object, decided: MetadataOnly, indexed: set[Node]
) -> Iterator[Node | None]:
    """[T, k] integers that all selections come from: what the indexer gives first, else the nearest."""
    if not selections:
        yield None
        return
    found: set[Node] = set()
    pending = list(selections)
    while pending:
        node = pending.pop()
        if node in found or decided(node) or not (is_integer(node) or _is_selection(node)):
            continue
        found.add(node)
        if node not in indexed and not op_name(node).startswith("hybridge::"):
            pending += node.all_input_nodes
    fitting = [node for node in sorted(found, reverse=True) if _is_positions(node, tokens)]
    known = [node for node in fitting if node in indexed]
    yield from known or fitting


def _is_positions(node: Node, tokens: object) -> bool:
    shape = shape_of(node)
    return (
        shape is not None
        and len(shape) == 2
        and same_size(shape[0], tokens)
        and isinstance(shape[1], int)
        and dtype_of(node) in (torch.int32, torch.int64)
    )


def _casts(node: Node) -> Iterator[Node]:
    """The node, and what it only casts or copies."""
    for each in sources(node):
        yield each
        if op_name(each) in ("aten::to", "aten::_to_copy") and isinstance(each.args[0], Node):
            yield from _casts(each.args[0])


def _scales(region: regions.Region, anchor: Node) -> Iterator[float]:
    """Scales that the constants before the softmax can make: their product, its factors, none."""
    factors = []
    for node in region.nodes:
        if not (node < anchor or node is anchor):
            break
        factors += _factors(node)
    product = math.prod(factors)
    yield from dict.fromkeys([product, *factors, 1.0])


def _factors(node: Node) -> list[float]:
    name = op_name(node)
    if name == "aten::scaled_dot_product_attention":
        given = node.kwargs.get("scale")
        width = (shape_of(node.args[0]) or (1,))[-1]  # type: ignore[arg-type]
        return [float(given) if given is not None else float(width) ** -0.5]  # type: ignore[arg-type]
    constant = next((arg for arg in node.args[:2] if isinstance(arg, int | float)), None)
    if constant is None or not constant:
        return []
    if name in ("aten::mul", "aten::mul_"):
        return [float(constant)]
    return [1.0 / float(constant)] if name in ("aten::div", "aten::div_") else []


def _prove(context: PassContext, roles: Roles) -> Verdict:
    """Whether the region up to `roles.end` is the op on every kind of batch."""
    inputs = metadata(context.graph)
    given = [*roles.form.nodes, roles.cache, *inputs.values()]
    if roles.positions is not None:
        given.insert(0, roles.positions)
    label = (
        f"{roles.op} {roles.scale!r} {roles.form.value_dim} {roles.form.label} "
        f"{roles.end_view.axes} {roles.indexed}"
    )
    return prove(
        context,
        label,
        [roles.end],
        given,
        lambda: _trials(context, roles),
        view=lambda _, value: roles.end_view.from_node(value),
        tolerance=_TOLERANCE,
    )


def _trials(context: PassContext, roles: Roles) -> Iterator[tuple[Trial, Sizes]]:
    shape = batch_shape(context.graph, context.phase == DECODE, cache=roles.cache)
    kept = 0 if roles.positions is None else (shape_of(roles.positions) or (0, 0))[1]
    for batch in batches(shape, reach=kept):
        for rule, magnitude, selection in _variants(batch, roles):
            sizes = Sizes()
            given: dict[Node, Tensor] = bind_sizes(context.graph, batch, sizes)
            blocks, *_, row = shape_of(roles.cache) or ()
            fits = sizes.bind(roles.form.tokens, batch.tokens)
            if not fits or not sizes.bind(blocks, batch.blocks):
                continue
            generator = torch.Generator().manual_seed(len(rule))
            drawn = roles.form.draw(batch.tokens, row, magnitude / roles.scale, generator)
            rows = cache_values(batch, row, 1, whole=False)
            arguments = [drawn.query, rows]
            if roles.positions is not None:
                positions = _choose(batch, kept, selection)
                given[roles.positions] = positions.to(dtype_of(roles.positions))
                arguments.append(positions)
            tables = batch.inputs()
            expected = vocabulary[roles.op].reference(
                *arguments,
                *(tables[name] for name in _TABLES),
                scale=roles.scale,
                value_dim=roles.form.value_dim,
            )
            given |= drawn.given
            given[roles.cache] = rows.clone()
            chosen = given[roles.positions] if roles.positions is not None else None
            guesses = _Guesses(drawn, rows, chosen, batch, roles)
            counted = _counted(batch, roles, given)
            outputs = [drawn.finish(expected)]
            yield Trial(rule, given, outputs, counted, suspects=guesses.suspects), sizes


# What is often wrong with attention: (the rule, what the mistake changes).
_MISTAKES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("a token sees its own position", {"reach": 0}),
    ("a token sees no position after its own", {"reach": 10**6}),
    ("scores are scaled by one constant", {"scale": 1.0}),
    ("the softmax is over the selected rows only", {"everything": True}),
)


@dataclass(frozen=True)
class _Guesses:
    """The values of a trial, for telling which mistake a failing region makes."""

    drawn: Drawn
    rows: Tensor
    positions: Tensor | None
    batch: Batch
    roles: Roles

    def suspects(self) -> Iterator[tuple[str, list[Tensor]]]:
        for rule, change in _MISTAKES:
            yield rule, [self.drawn.finish(self._attend(**change))]

    def _attend(
        self, reach: int = 1, scale: float | None = None, everything: bool = False
    ) -> Tensor:
        used = self.roles.scale if scale is None else scale
        query, width = self.drawn.query, self.roles.form.value_dim
        result = query.new_zeros(*query.shape[:2], width)
        table = self.batch.tables()
        for token in range(self.batch.real_tokens):
            row = self.batch.sequence_of(token)
            length = self.batch.contexts[row] + self.batch.lengths[row]
            rows = sequence_rows(self.rows, table[row], length)
            if self.positions is None or everything:
                rows = rows[: self.batch.position_of(token) + reach]
            else:
                chosen = self.positions[token]
                rows = rows[chosen[chosen >= 0].long()]
            weights = torch.softmax(used * (query[token] @ rows.T), dim=-1)
            result[token] = weights @ rows[:, :width]
        return result


def _variants(batch: Batch, roles: Roles) -> Iterator[tuple[str, float, str]]:
    """(rule, size of the scores, kind of selection)."""
    where = "" if batch.name == FIRST_BATCH else f" on a batch with {batch.name}"
    yield f"out is softmax(scale * query . rows) rows{where}", 1.0, "causal"
    if batch.name in VARIED_BATCHES:
        yield f"scores far apart{where}", 40.0, "causal"
    if roles.positions is not None and not roles.indexed:
        yield f"selected positions that are not ascending or causal{where}", 1.0, "any"


def _choose(batch: Batch, kept: int, selection: str) -> Tensor:
    """[T, kept] positions: ascending, causal, then -1; or, "any", repeated, with gaps, not causal."""
    generator = torch.Generator().manual_seed(kept)
    chosen = torch.full((batch.tokens, kept), -1, dtype=torch.int32)
    for token in range(batch.real_tokens):
        row = batch.sequence_of(token)
        last = batch.position_of(token) + 1
        if selection == "any":
            last = batch.contexts[row] + batch.lengths[row]
            drawn = torch.randint(-1, last, (kept,), generator=generator)
            chosen[token] = drawn.to(torch.int32)
            continue
        # Half of what fits, so that selected and unselected rows both exist.
        count = min(kept, last, max(1, (last + 1) // 2 if token % 2 else last))
        picked = torch.randperm(last, generator=generator)[:count].sort().values
        chosen[token, :count] = picked.to(torch.int32)
    return chosen


def _counted(batch: Batch, roles: Roles, given: Mapping[Node, Tensor]) -> Tensor:
    """Rows to compare: real tokens that select something (an empty softmax has no value)."""
    rows = real_rows(batch)
    if roles.positions is None:
        return rows
    return rows & (given[roles.positions] >= 0).any(1)
