"""Small packed batches that tell right masks and gathers from wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from hybridge.ir.evaluate import Sizes
from hybridge.ir.signature import (
    BLOCK_TABLE,
    CONTEXT_LEN,
    LOGITS_INDEX,
    QUERY_START,
    SLOT_MAPPING,
    STATE_SLOT,
    TOKEN_IDS,
    is_weight,
    metadata,
    shape_of,
    value_of,
    weight_name,
)

#: The simplest batch: what fails on it does not depend on how sequences are packed.
FIRST_BATCH = "one sequence"
LONG_BATCH = "long and short"
#: Batches on which more than one kind of values is worth its time.
VARIED_BATCHES = (FIRST_BATCH, LONG_BATCH)


@dataclass(frozen=True)
class Batch:
    """One ragged batch.

    Args:
        name: what the batch is there to show.
        lengths: new tokens of each sequence. contexts: tokens cached before, of each sequence.
        tokens: packed tokens, those past sum(lengths) are padding.
        active: whether each sequence has a state slot.
        block: rows of a cache block. columns: width of the block table. blocks: blocks of a cache.
        slots: recurrent-state slots.
    """

    name: str
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    tokens: int
    active: tuple[bool, ...]
    block: int
    columns: int
    blocks: int
    slots: int

    @property
    def real_tokens(self) -> int:
        return sum(self.lengths)

    def sequence_of(self, token: int) -> int:
        """The row of the sequence that a (not padding) token belongs to."""
        for row, length in enumerate(self.lengths):
            if token < length:
                return row
            token -= length
        raise IndexError(token)

    def position_of(self, token: int) -> int:
        """The position of a (not padding) token in its sequence."""
        row = self.sequence_of(token)
        return self.contexts[row] + token - sum(self.lengths[:row])

    def tables(self) -> Tensor:
        """[B, columns] block ids in a scrambled order; columns past a sequence's end name other sequences' blocks."""
        order = [(7 * place + 3) % self.blocks for place in range(self.blocks)]
        if len(set(order)) != self.blocks:
            order = list(reversed(range(self.blocks)))
        table = torch.zeros(len(self.lengths), self.columns, dtype=torch.int32)
        used = 0
        for row, (length, context) in enumerate(zip(self.lengths, self.contexts, strict=True)):
            needed = -(-(length + context) // self.block)
            for column in range(self.columns):
                inside = column < needed
                table[row, column] = order[
                    used + column if inside else (column + row) % self.blocks
                ]
            used += needed
        return table

    def inputs(self) -> dict[str, Tensor]:
        """The integer inputs of the graph signature."""
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        table = self.tables()
        slots = torch.full((self.tokens,), -1)
        for token in range(self.real_tokens):
            row, position = self.sequence_of(token), self.position_of(token)
            block = int(table[row, position // self.block])
            slots[token] = block * self.block + position % self.block
        states = [self.slots - 1 - row if on else -1 for row, on in enumerate(self.active)]
        ends = [int(end) - 1 for row, end in enumerate(starts[1:]) if self.lengths[row]]
        values = {
            TOKEN_IDS: torch.arange(self.tokens) % 3,
            QUERY_START: starts,
            CONTEXT_LEN: torch.tensor(self.contexts),
            SLOT_MAPPING: slots,
            BLOCK_TABLE: table,
            STATE_SLOT: torch.tensor(states),
            LOGITS_INDEX: torch.tensor(ends),
        }
        return {name: value.to(torch.int32) for name, value in values.items()}


@dataclass(frozen=True)
class BatchShape:
    """What a graph fixes of a batch; None is free.

    Args:
        decode: one token a sequence, as many tokens as sequences.
    """

    tokens: int | None
    sequences: int | None
    columns: int | None
    block: int
    blocks: int | None
    slots: int | None
    decode: bool


def batch_shape(
    graph: Graph,
    decode: bool | None = None,
    *,
    cache: Node | None = None,
    state: Node | None = None,
) -> BatchShape:
    """What this graph fixes, from the recorded shapes of its inputs.

    Args:
        graph: one phase's graph.
        decode: whether it has one token a sequence; None reads that off the sizes.
        cache: a paged cache, for the block size. state: a recurrent state, for the slots.
    """
    inputs = metadata(graph)

    def size(name: str, axis: int, less: int = 0) -> int | None:
        shape = shape_of(inputs[name]) if name in inputs else None
        value = shape[axis] if shape else None
        return value - less if isinstance(value, int) else None

    def first(node: Node | None, axis: int) -> int | None:
        shape = shape_of(node) if node is not None else None
        return shape[axis] if shape and isinstance(shape[axis], int) else None

    sequences = size(CONTEXT_LEN, 0) or size(QUERY_START, 0, 1)
    return BatchShape(
        tokens=size(TOKEN_IDS, 0) or size(SLOT_MAPPING, 0),
        sequences=sequences,
        columns=size(BLOCK_TABLE, 1),
        block=first(cache, 1) or 4,
        blocks=first(cache, 0),
        slots=first(state, 0),
        decode=_same_size(inputs, sequences) if decode is None else decode,
    )


def _same_size(inputs: dict[str, Node], sequences: int | None) -> bool:
    """Whether the graph has as many tokens as sequences by construction."""
    tokens = next((inputs[name] for name in (TOKEN_IDS, SLOT_MAPPING) if name in inputs), None)
    rows = inputs.get(CONTEXT_LEN)
    if tokens is None or rows is None:
        return False
    left, right = shape_of(tokens), shape_of(rows)
    if left is None or right is None:
        return False
    if isinstance(left[0], int) or isinstance(right[0], int):
        return isinstance(left[0], int) and left[0] == sequences
    return bool(left[0].node.expr == right[0].node.expr)


def batches(shape: BatchShape, reach: int = 0) -> Iterator[Batch]:
    """Batches that fit a graph, simplest first.

    Args:
        shape: what the graph fixes.
        reach: how many cached tokens at least one sequence should see (more than a top-k, say).
    """
    block, far = shape.block, reach + 3
    if shape.decode:
        yield _fit(shape, FIRST_BATCH, (1,), (8,), (True,))
        yield _fit(shape, "first token", (1, 1), (0, 1), (True, True))
        yield _fit(shape, "block edges", (1, 1, 1), (block - 1, block, 2 * block), (True,) * 3)
        yield _fit(shape, LONG_BATCH, (1, 1, 1), (far, 0, far - 2), (True,) * 3)
        yield _fit(shape, "inactive row", (1, 1, 1), (3, 0, 5), (True, False, True))
        return
    yield _fit(shape, FIRST_BATCH, (5,), (0,), (True,))
    yield _fit(shape, "continued sequence", (3,), (4,), (True,))
    yield _fit(shape, "ragged", (3, 0, 1, 4), (5, 2, 0, 0), (True,) * 4)
    yield _fit(shape, "block edges", (2, 1, 2), (block - 1, block, 2 * block - 1), (True,) * 3)
    yield _fit(shape, LONG_BATCH, (2, 2), (far, 0), (True,) * 2)
    yield _fit(shape, "padded tail", (2, 3), (0, 3), (True,) * 2, padding=3)
    yield _fit(shape, "inactive row", (2, 2, 1), (3, 0, 5), (True, False, True))


def _fit(
    shape: BatchShape,
    name: str,
    lengths: tuple[int, ...],
    contexts: tuple[int, ...],
    active: tuple[bool, ...],
    padding: int = 0,
) -> Batch:
    """Fill or cut a batch to the sizes that the graph fixes."""
    rows = shape.sequences or len(lengths)
    fill = 1 if shape.decode else 0
    lengths = (*lengths, *(fill,) * rows)[:rows]
    contexts = (*contexts, *(0,) * rows)[:rows]
    active = (*active, *(True,) * rows)[:rows]
    if shape.tokens is not None:
        lengths = _cut(lengths, shape.tokens)
    capacity = shape.columns * shape.block if shape.columns else None
    if capacity is not None:
        lengths = tuple(min(length, capacity) for length in lengths)
        pairs = zip(contexts, lengths, strict=True)
        contexts = tuple(min(context, capacity - length) for context, length in pairs)
    totals = [length + context for length, context in zip(lengths, contexts, strict=True)]
    needed = sum(-(-total // shape.block) for total in totals)
    return Batch(
        name=name,
        lengths=lengths,
        contexts=contexts,
        tokens=shape.tokens or (rows if shape.decode else sum(lengths) + padding),
        active=active,
        block=shape.block,
        columns=shape.columns or -(-max([*totals, 1]) // shape.block) + 1,
        blocks=shape.blocks or needed + 2,
        slots=shape.slots or rows + 1,
    )


def _cut(lengths: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    left, kept = tokens, []
    for length in lengths:
        kept.append(min(length, left))
        left -= kept[-1]
    return tuple(kept)


def bind_sizes(graph: Graph, batch: Batch, sizes: Sizes) -> dict[Node, Tensor]:
    """Bind the sizes that a batch decides; returns the values of the metadata inputs.

    Raises:
        ValueError: the graph fixes a size that the batch does not have.
    """
    nodes, values = metadata(graph), batch.inputs()
    given: dict[Node, Tensor] = {}
    for name, node in nodes.items():
        value = values[name]
        for size, actual in zip(shape_of(node) or (), value.shape, strict=True):
            if not sizes.bind(size, actual) and name != LOGITS_INDEX:
                raise ValueError(f"{name} has size {size}, the batch gives {actual}")
        if name != LOGITS_INDEX:
            given[node] = value.clone()
    return given


def example_values(gm: GraphModule) -> dict[str, Tensor]:
    """A value for every input of a graph: a ragged (or inactive-row) batch, random caches and weights.

    Returns:
        Input name -> value; weights by their own name.
    """
    graph = gm.graph
    caches = [node for node in graph.nodes if node.op == "placeholder" and not is_weight(node)]
    paged = next((n for n in caches if str(n.target).endswith("cache") or "cache_" in n.name), None)
    shape = batch_shape(graph, cache=paged)
    batch = list(batches(shape))[2]
    sizes = Sizes()
    found = {str(node.target): value for node, value in bind_sizes(graph, batch, sizes).items()}
    generator = torch.Generator().manual_seed(0)
    for node in graph.nodes:
        if node.op == "placeholder" and str(node.target) not in found:
            name = weight_name(node) or str(node.target)
            found[name] = _example(node, batch, sizes, generator)
    return found


def _example(node: Node, batch: Batch, sizes: Sizes, generator: torch.Generator) -> Tensor:
    """A value of the recorded shape and dtype; sizes that no metadata decides fit the batch."""
    if str(node.target) == LOGITS_INDEX:
        value = batch.inputs()[LOGITS_INDEX]
        sizes.bind((shape_of(node) or ())[0], len(value))
        return value
    fake = value_of(node)
    shape = list(fake.shape)
    if shape and not is_weight(node):
        sizes.bind(shape[0], max(batch.blocks, batch.slots))
    concrete = [sizes.of(size) for size in shape]
    if not fake.dtype.is_floating_point:
        # Packed weights and scales: bytes in the middle keep their powers of two finite.
        drawn = torch.randint(118, 126, concrete, generator=generator)
        return drawn.to(fake.dtype)
    width = concrete[-1] if len(concrete) > 1 else 1
    spread = float(width) ** -0.5 if is_weight(node) and len(concrete) > 1 else 1.0
    return (torch.randn(concrete, generator=generator) * spread).to(fake.dtype)
