"""What the drawn calls of fuzz_calls.py consist of: sizes, numbers, ragged batches, block tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridge.ops.packed_rows import pack_rows, row_bytes

from .harness import BFLOAT16, bf16, i32

F32 = np.dtype(np.float32)
EDGES = (1, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65)  # around every vector and tile
# Zeros, infinities and NaN of both signs, subnormal, the smallest and the largest numbers.
SPECIAL = np.float32(
    [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-40, 1.1754944e-38, 3.4e38, -3.4e38]
)
# What may stand in a table where no operator may look.
UNREAD = (-1, -7, 2**31 - 1, -(2**31))


@dataclass(frozen=True)
class Ragged:
    """Sequences: tokens in this call and before it, and all tokens with the padding."""

    counts: list[int]
    contexts: list[int]
    tokens: int

    @property
    def lengths(self) -> list[int]:
        """Positions that the call reads of each sequence."""
        pairs = zip(self.counts, self.contexts, strict=True)
        return [count + context if count else 0 for count, context in pairs]

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            "query_start": i32(np.cumsum([0, *self.counts])),
            "context_len": i32(self.contexts),
        }


class Draws:
    """A source of everything that a call consists of.

    Attributes:
        degenerate: whether a size that operators may refuse to be 0 was drawn as 0.
        undefined: whether a score may be NaN, which operators may refuse.
    """

    def __init__(self, rng: np.random.Generator, *, plain: bool = False) -> None:
        self.rng = rng
        self.degenerate = self.undefined = False
        self._plain = plain or self.chance(0.5)  # ordinary numbers only

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def integer(self, least: int, most: int) -> int:
        """Both included."""
        return int(self.rng.integers(least, most + 1))

    def count(self, most: int = 40) -> int:
        """Of tokens, rows, ...: 0 and 1 more often than their share."""
        if self.chance(0.3):
            return self.integer(0, 1)
        return self.size(most) if self.chance(0.3) else self.integer(0, most)

    def size(self, most: int = 70) -> int:
        """At least 1, often beside a power of two."""
        edges = [edge for edge in EDGES if edge <= most]
        return int(self.rng.choice(edges)) if self.chance(0.5) else self.integer(1, most)

    def many(self, most: int, large: int) -> int:
        """As `size`, and now and then so many that several tasks share them."""
        return self.integer(large // 4, large) if self.chance(0.03) else self.size(most)

    def inner(self, most: int = 70) -> int:
        """As `size`, and now and then 0."""
        if self.chance(0.02):
            self.degenerate = True
            return 0
        return self.size(most)

    def dtype(self) -> np.dtype:
        return BFLOAT16 if self.chance(0.5) else F32

    def array(self, *shape: int, dtype: np.dtype = F32) -> np.ndarray:
        """Numbers of one kind: ordinary, tied, of any scale, any bits, some of them special."""
        values = self.rng.standard_normal(shape, np.float32)
        kind = 0 if self._plain else self.integer(0, 9)
        if kind == 4:  # sums that are exact, so that ties are ties
            values = self.rng.integers(-2, 3, shape).astype(np.float32)
        elif kind == 5:
            values = np.full(shape, self.rng.choice(SPECIAL), np.float32)
        elif kind == 6:
            with np.errstate(over="ignore"):
                values = np.ldexp(values, self.integer(-149, 126))
        elif kind == 7:
            values = self.rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
        elif kind > 7:
            chosen = self.rng.random(shape) < self.rng.choice([0.01, 0.2])
            values = np.where(chosen, self.rng.choice(SPECIAL, shape), values)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(values, np.float32).astype(dtype)

    def bytes(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, 256, shape, np.uint8)

    def packed(self, *shape: int) -> np.ndarray:
        """Packed rows of shape[-1] columns; often damaged, in the exceptions or everywhere."""
        if self.chance(0.3):
            return self.bytes(*shape[:-1], row_bytes(shape[-1]))
        scales = np.ldexp(np.float32(1), self.rng.integers(-40, 40, (*shape[:-1], 1)))
        values = self.rng.standard_normal(shape, np.float32) * scales
        rows = pack_rows(bf16(values).view(np.uint16))
        if self.chance(0.4):
            rows[..., -64:] = self._trailers(rows.shape[:-1], shape[-1])
        return rows

    def _trailers(self, rows: tuple[int, ...], columns: int) -> np.ndarray:
        """Any number of exceptions, in columns in and just beyond the row."""
        trailers = self.bytes(*rows, 64)
        entries = trailers[..., 4:].view(np.uint16)
        entries[..., ::2] = self.rng.integers(columns - 9, columns + 3, (*rows, 15))
        return trailers

    def slots(self, count: int, slots: int) -> np.ndarray:
        """`count` slot numbers, each -1 or used once."""
        numbers = [*self.rng.permutation(slots)[:count], *[-1] * count][:count]
        numbers = self.rng.permutation(i32(numbers))
        numbers[self.rng.random(count) < 0.2] = -1
        return numbers

    def ragged(self, most_tokens: int = 24, most_context: int = 130) -> Ragged:
        sequences = self.integer(0, 4)
        counts = [self.count(most_tokens) for _ in range(sequences)]
        contexts = [self.count(most_context) for _ in range(sequences)]
        if sequences and self.chance(0.05):  # a long one, which many tasks share
            counts, contexts = [self.integer(1, 2)], [self.integer(500, 1500)]
        padding = self.integer(0, 3) if self.chance(0.5) else 0
        return Ragged(counts, contexts, sum(counts) + padding)

    def paged(self, ragged: Ragged) -> tuple[int, int, np.ndarray]:
        """Blocks, rows in a block, and a table: ids in any order, sometimes shared."""
        block = int(self.rng.choice([1, 2, 3, 7, 8, 16, 64, 130]))
        needed = [-(-length // block) for length in ragged.lengths]
        total = sum(needed)
        shared = total > 0 and self.chance(0.3)
        blocks = self.integer(1, total) if shared else total + self.integer(0, 2)
        ids = self.rng.integers(0, blocks, total) if shared else self.rng.permutation(blocks)
        width = max([*needed, 0]) + self.integer(0, 2)
        table = self.rng.choice(i32(UNREAD), (len(needed), width))
        first = 0
        for row, count in enumerate(needed):
            table[row, :count] = ids[first : first + count]
            first += count
        return blocks, block, table
