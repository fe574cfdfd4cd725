"""The two ways to write MLA over latent rows, and how to get from either to the absorbed op.

Absorbed: the query already lies in the space of the rows, scores = query . row, values = row[:latent].
Expanded: keys and values are made from the rows by a weight (`kv_b_proj`), and attention is ordinary:

    key   = [row[:latent] key_up^T | row[latent:]]           query' = [query[:nope] key_up | query[nope:]]
    value = row[:latent] value_up^T                          out    = attention(query', rows) value_up^T

which is the same function, because both products are linear in the row (spec/MODELS.md 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.ir.layout import Operand, operands
from hybridge.ir.pass_base import Rewriter, same_size
from hybridge.ir.signature import is_weight, shape_of, weight_name

aten = torch.ops.aten

# Calls between a weight and its use as keys or values: views, a split, casts.
_LONGEST_VIEW = 16


@dataclass(frozen=True)
class Drawn:
    """Values of a trial: the op's query, what the region's nodes hold, and the weight on the op's result."""

    query: Tensor
    given: Mapping[Node, Tensor]
    value_up: Tensor | None = None

    def finish(self, mixed: Tensor) -> Tensor:
        """What the region gives where the op gives `mixed` [T, H, latent]."""
        if self.value_up is None:
            return mixed
        return torch.einsum("thc,hvc->thv", mixed, self.value_up)


@dataclass(frozen=True)
class Absorbed:
    """The region reads the op's own query [T, H, row]."""

    query: Operand
    value_dim: int

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.query.node,)

    @property
    def heads(self) -> int:
        return int(self.query.sizes()[1])

    @property
    def tokens(self) -> object:
        return self.query.sizes()[0]

    @property
    def label(self) -> str:
        return f"absorbed {self.query.axes}"

    def draw(self, tokens: int, row: int, size: float, generator: torch.Generator) -> Drawn:
        """A query whose products with random rows are of the given size."""
        query = torch.randn(tokens, self.heads, row, generator=generator) * (size / row**0.5)
        return Drawn(query, {self.query.node: self.query.to_node(query)})

    def emit(self, rewriter: Rewriter) -> Node:
        """The op's query."""
        return self.query.emit(rewriter)

    def emit_result(self, mixed: Node, rewriter: Rewriter) -> Node:
        """The region's result from the op's."""
        return mixed


@dataclass(frozen=True)
class Expanded:
    """The region expands the rows by constant weights.

    Args:
        queries: [T, H, nope + rope], or the two parts [T, H, nope] and [T, H, rope].
        weights: one for keys and values, or one each.
        nope, value, latent: rows of a head for its keys, for its values, and the columns.
        by_head: whether one weight has a head's keys and values together, head after head; else all keys come first.
    """

    queries: tuple[Operand, ...]
    weights: tuple[Node, ...]
    nope: int
    value: int
    latent: int
    by_head: bool

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*(query.node for query in self.queries), *self.weights)

    @property
    def heads(self) -> int:
        return int(self.queries[0].sizes()[1])

    @property
    def tokens(self) -> object:
        return self.queries[0].sizes()[0]

    @property
    def value_dim(self) -> int:
        return self.latent

    @property
    def label(self) -> str:
        axes = [query.axes for query in self.queries]
        return f"expanded {axes} {self.nope} {self.value} {self.by_head}"

    def draw(self, tokens: int, row: int, size: float, generator: torch.Generator) -> Drawn:
        """Queries and weights whose scores on random rows are of the given size."""
        parts = [self.nope, row - self.latent]
        plain, rope = (
            torch.randn(tokens, self.heads, part, generator=generator) * (size / row**0.5)
            for part in parts
        )
        key_up, value_up = (
            torch.randn(self.heads, rows, self.latent, generator=generator) / self.nope**0.5
            for rows in (self.nope, self.value)
        )
        given = self._hold(key_up, value_up)
        values = [plain, rope] if len(self.queries) == 2 else [torch.cat([plain, rope], -1)]
        for query, value in zip(self.queries, values, strict=True):
            given[query.node] = query.to_node(value)
        absorbed = torch.einsum("thn,hnc->thc", plain, key_up)
        return Drawn(torch.cat([absorbed, rope], dim=-1), given, value_up)

    def _hold(self, key_up: Tensor, value_up: Tensor) -> dict[Node, Tensor]:
        """The weights' values."""
        if len(self.weights) == 2:
            values = [key_up, value_up]
        elif self.by_head:
            values = [torch.cat([key_up, value_up], dim=1)]
        else:
            values = [torch.cat([key_up.flatten(0, 1), value_up.flatten(0, 1)])]
        shapes = [shape_of(weight) or () for weight in self.weights]
        pairs = zip(self.weights, values, shapes, strict=True)
        return {weight: value.reshape(shape) for weight, value, shape in pairs}

    def emit(self, rewriter: Rewriter) -> Node:
        """The absorbed query [T, H, latent + rope]."""
        parts = [query.emit(rewriter) for query in self.queries]
        if len(parts) == 1:
            bounds = [(0, self.nope), (self.nope, self.queries[0].sizes()[2])]
            parts = [
                rewriter.call(aten.slice.Tensor, parts[0], 2, start, stop)
                for start, stop in bounds
                if start < stop
            ]
        key_up = self._weight("key_up", rewriter)
        absorbed = rewriter.call(aten.einsum.default, "thn,hnc->thc", [parts[0], key_up])
        if len(parts) == 1:
            return absorbed
        return rewriter.call(aten.cat.default, [absorbed, parts[1]], -1)

    def emit_result(self, mixed: Node, rewriter: Rewriter) -> Node:
        """[T, H, value] from the op's [T, H, latent]."""
        value_up = self._weight("value_up", rewriter)
        return rewriter.call(aten.einsum.default, "thc,hvc->thv", [mixed, value_up])

    def _weight(self, which: str, rewriter: Rewriter) -> Node:
        """[H, nope or value, latent], derived from the weights at compile time."""
        keys = which == "key_up"
        rows = self.nope if keys else self.value
        shape = [self.heads, rows, self.latent]
        if len(self.weights) == 2:
            weight = self.weights[0 if keys else 1]
            if list(shape_of(weight) or ()) == shape:
                return weight
            return _derive(weight, which, {"transform": "reshape", "shape": shape}, rewriter)
        weight, split = self.weights[0], self.nope
        if self.by_head:
            shape[1] = self.nope + self.value
            weight = _derive(weight, "heads", {"transform": "reshape", "shape": shape}, rewriter)
            recipe = _slice(1, split, keys, self.nope + self.value)
            return _derive(weight, which, recipe, rewriter)
        recipe = _slice(0, self.heads * split, keys, (shape_of(weight) or (0,))[0])
        part = _derive(weight, f"{which}_rows", recipe, rewriter)
        return _derive(part, which, {"transform": "reshape", "shape": shape}, rewriter)


def _slice(axis: int, split: int, first: bool, stop: int) -> dict[str, object]:
    start, stop = (0, split) if first else (split, stop)
    return {"transform": "slice", "axis": axis, "start": start, "stop": stop}


def _derive(weight: Node, what: str, recipe: Mapping[str, object], rewriter: Rewriter) -> Node:
    source = str(weight_name(weight))
    name = f"{source.removesuffix('.weight').removesuffix('.heads')}.{what}"
    return rewriter.derived_weight(name, {**recipe, "inputs": [source]}, [weight])


def forms(
    floats: Sequence[Node], end: Node, row: int
) -> Iterator[tuple[Absorbed | Expanded, Operand]]:
    """Ways to see a region's floating inputs as one form's, with the view of its result as [T, H, width].

    Args:
        floats: inputs of the region beside the rows and the metadata.
        end: the region's result. row: columns of a row.
    """
    weights: dict[Node, None] = {}
    queries = []
    for node in floats:
        constant = _constants(node)
        weights |= dict.fromkeys(constant)
        if not constant:
            queries.append(node)
    if not weights and len(queries) == 1:
        yield from _absorbed(queries[0], end, row)
    elif weights and 1 <= len(queries) <= 2 and len(weights) <= 2:
        yield from _expanded(queries, tuple(sorted(weights)), end, row)


def _constants(node: Node) -> tuple[Node, ...]:
    """The weights that a node is made from; none if it depends on anything else as well."""
    found: dict[Node, None] = {}
    pending, seen = [node], {node}
    while pending:
        each = pending.pop()
        if is_weight(each):
            found[each] = None
        elif each.op != "call_function" or len(seen) > _LONGEST_VIEW:
            return ()
        for argument in each.all_input_nodes:
            if argument not in seen:
                seen.add(argument)
                pending.append(argument)
    return tuple(found)


def _absorbed(query: Node, end: Node, row: int) -> Iterator[tuple[Absorbed, Operand]]:
    for operand in operands(query, (None, None, row)):
        tokens, heads, _ = operand.sizes()
        if not isinstance(heads, int):
            continue
        for view in _views(end, tokens, heads, None):
            width = view.sizes()[2]
            if isinstance(width, int) and width <= row:
                yield Absorbed(operand, width), view


def _views(end: Node, tokens: object, heads: object, width: object) -> Iterator[Operand]:
    """Ways to see the end itself as [T, H, width]."""
    return (view for view in operands(end, (tokens, heads, width)) if view.node is end)


def _expanded(
    queries: Sequence[Node], weights: tuple[Node, ...], end: Node, row: int
) -> Iterator[tuple[Expanded, Operand]]:
    latents = {(shape_of(weight) or (0,))[-1] for weight in weights}
    if len(latents) != 1:
        return
    latent = latents.pop()
    rope = row - latent
    if rope < 0 or (len(queries) == 2 and not rope):
        return
    for parts in _query_parts(queries, rope):
        tokens, heads, width = parts[0].sizes()
        nope = width - (rope if len(parts) == 1 else 0)
        if nope <= 0:
            continue
        for ordered in [weights] if len(weights) == 1 else [weights, weights[::-1]]:
            value = _value_rows(ordered, heads, nope)
            if value is None:
                continue
            for view in _views(end, tokens, heads, value):
                for by_head in (True, False)[: 2 if len(weights) == 1 else 1]:
                    yield Expanded(parts, ordered, nope, value, latent, by_head), view


def _query_parts(queries: Sequence[Node], rope: int) -> Iterator[tuple[Operand, ...]]:
    """[T, H, nope + rope] as one operand, or as the plain part and the rope part."""
    for plain in queries:
        others = [node for node in queries if node is not plain]
        for first in operands(plain, (None, None, None)):
            tokens, heads, width = first.sizes()
            if not (isinstance(heads, int) and isinstance(width, int)):
                continue
            if not others:
                yield (first,)
            for second in operands(others[0], (tokens, heads, rope)) if others else ():
                yield first, second


def _value_rows(weights: tuple[Node, ...], heads: int, nope: int) -> int | None:
    """Rows of a head's values, or None if the weights do not have the rows for these heads."""
    counts = []
    for weight in weights:
        rows = (shape_of(weight) or ())[:-1]
        total = rows[0] if len(rows) == 1 else rows[0] * rows[1] if len(rows) == 2 else 0
        if total % heads or (len(rows) == 2 and not same_size(rows[0], heads)):
            return None
        counts.append(total // heads)
    value = counts[0] - nope if len(counts) == 1 else counts[1]
    whole = len(counts) == 1 or counts[0] == nope
    return value if whole and value > 0 else None
