"""Sequences over a device's caches: the inputs of each call, and where its logits belong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridge.compiler.targets.ascend.device.device import CompiledGraph, Device
from hybridge.compiler.targets.ascend.device.loading import DeviceArtifact, DeviceGraph
from hybridge.compiler.targets.ascend.lowerings.context import Bucket

Inputs = dict[str, npt.NDArray[np.int32]]


@dataclass(frozen=True)
class Placed:
    """A graph on the device."""

    graph: DeviceGraph
    run: CompiledGraph


@dataclass(frozen=True)
class Result:
    """What one call gave: `logits[i]` is of the token at `positions[i]` of row `rows[i]`."""

    rows: tuple[int, ...]
    positions: tuple[int, ...]
    logits: npt.NDArray[np.float32]


class Session:
    """Rows of sequences in zeroed caches of their own.

    Args:
        loaded: the artifact. device: where it runs. weights: on the device, by stored name.
        rows: how many sequences; their blocks are dealt in turn, so that none lie in a row.
    """

    def __init__(
        self, loaded: DeviceArtifact, device: Device, weights: Mapping[str, Tensor], rows: int
    ) -> None:
        self.device, self.weights, self.rows = device, weights, rows
        self.lengths = [0] * rows
        self.caches = {
            state.name: device.put(
                torch.zeros([int(n) for n in state.shape], dtype=getattr(torch, state.dtype))
            )
            for state in loaded.artifact.manifest.states
        }

    def step(self, placed: Placed, tokens: Sequence[Sequence[int]]) -> Result:
        """Append tokens to each row (decode: one), and run the graph."""
        bucket = placed.graph.bucket
        inputs, result = self.batch(bucket, tokens)
        logits = self.device.fetch(placed.run(self.arguments(placed.graph, inputs)))
        self.lengths = [n + len(new) for n, new in zip(self.lengths, tokens, strict=True)]
        values = logits[: len(result.positions)].to(torch.float32).numpy()
        return Result(result.rows, result.positions, values)

    def arguments(self, graph: DeviceGraph, inputs: Inputs) -> list[Tensor]:
        """All inputs of a graph, in order."""
        given = {name: self.device.put(torch.from_numpy(value)) for name, value in inputs.items()}
        given |= self.caches
        given |= {name: self.weights[stored] for name, stored in graph.weights.items()}
        return [given[name] for name in graph.inputs]

    def batch(self, bucket: Bucket, tokens: Sequence[Sequence[int]]) -> tuple[Inputs, Result]:
        """The batch's inputs, filled up to the bucket, and which logits it asks for (none yet)."""
        counts = [len(new) for new in tokens] + [0] * (bucket.sequences - self.rows)
        ends = np.cumsum(counts)
        wanted = _wanted(ends[: self.rows], counts[: self.rows], bucket.logits)
        row_of = np.repeat(np.arange(len(counts)), counts)
        offset = np.arange(len(row_of)) - (ends - counts)[row_of]
        context = np.array([*self.lengths, *[0] * (bucket.sequences - self.rows)])
        position = context[row_of] + offset
        table = self._table(bucket)
        slots = table[row_of, position // bucket.block_size] * bucket.block_size
        slots += position % bucket.block_size
        ids = [token for new in tokens for token in new]
        inputs = {
            "token_ids": _filled(ids, bucket.tokens, 0),
            "query_start": np.array([0, *ends]),
            "context_len": context,
            "slot_mapping": _filled(slots, bucket.tokens, -1),
            "block_table": table,
            "state_slot": _filled(range(self.rows), bucket.sequences, -1),
            "logits_index": _filled(wanted, bucket.logits, 0),
        }
        asked = Result(
            tuple(int(row_of[i]) for i in wanted),
            tuple(int(position[i]) for i in wanted),
            np.zeros((0, 0), np.float32),
        )
        return {name: value.astype(np.int32) for name, value in inputs.items()}, asked

    def _table(self, bucket: Bucket) -> npt.NDArray[np.int64]:
        """[B, M] of block ids: row r's column c is block c * rows + r; -1 where there is none."""
        columns = np.arange(bucket.columns) * self.rows
        table = columns + np.arange(self.rows)[:, None]
        table = np.where(table < bucket.blocks, table, -1)
        idle = np.full((bucket.sequences - self.rows, bucket.columns), -1)
        return np.concatenate([table, idle])


def _wanted(ends: npt.NDArray[np.int64], counts: Sequence[int], limit: int) -> list[int]:
    """Packed token numbers to ask logits of: each row's last, then others, evenly spread."""
    last = [int(end) - 1 for end, count in zip(ends, counts, strict=True) if count]
    total = int(ends[-1])
    spread = np.linspace(0, total - 1, num=min(total, limit), dtype=int)
    others = [int(each) for each in spread if each not in last]
    return (last + others)[:limit]


def _filled(values: Sequence[int] | range, size: int, rest: int) -> npt.NDArray[np.int64]:
    found = np.full(size, rest, np.int64)
    found[: len(values)] = values
    return found
