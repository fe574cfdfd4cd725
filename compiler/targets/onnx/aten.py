"""Translations of aten ops that torch's own do not have, or write in a way that onnxruntime refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import opset18 as op

INT64 = 7  # onnx.TensorProto.INT64


def aten_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """overload -> translation."""
    return {
        torch.ops.aten.sort.stable: stable_sort,
        torch.ops.aten.index.Tensor: index,
        torch.ops.aten.split.Tensor: split,
        torch.ops.aten.split_with_sizes.default: split_with_sizes,
    }


def stable_sort(
    x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Any:
    """A TopK of everything: among equal values it gives the lowest index first (tested)."""
    size = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]), axis=0)
    return op.TopK(x, size, axis=dim, largest=int(descending), sorted=1)


def index(x: Any, indices: Sequence[Any]) -> Any:
    """`x[i]`, `x[:, i]` or `x[i, j]`; torch's own hands int32 indices to GatherND, which takes int64.

    Raises:
        NotImplementedError: several indices that are not the first, or a mask.
    """
    given = [place for place, item in enumerate(indices) if item is not None]
    if len(given) == 1:
        return op.Gather(x, indices[given[0]], axis=given[0])
    if given != list(range(len(given))):
        raise NotImplementedError("indices with an axis left out in front of them")
    wide = [op.Cast(item, to=INT64) for item in indices if item is not None]
    shape = op.Shape(wide[0])
    for item in wide[1:]:
        shape = op.Shape(op.Expand(item, shape))
    last = op.Constant(value_ints=[-1])
    columns = [op.Unsqueeze(op.Expand(item, shape), last) for item in wide]
    return op.GatherND(x, op.Concat(*columns, axis=-1))


def split(x: Any, split_size: int, dim: int = 0) -> Any:
    """Pieces of `split_size`; the last may be shorter. The size of `dim` must be static."""
    full, rest = divmod(x.shape[dim], split_size)
    return split_with_sizes(x, [split_size] * full + [rest] * (rest > 0), dim)


def split_with_sizes(x: Any, split_sizes: Sequence[int], dim: int = 0) -> Any:
    """Pieces of the given sizes; torch's own makes a sequence, one more copy a piece."""
    stops = list(itertools.accumulate(split_sizes))
    axis = op.Constant(value_ints=[dim])
    return [
        op.Slice(x, op.Constant(value_ints=[stop - size]), op.Constant(value_ints=[stop]), axis)
        for size, stop in zip(split_sizes, stops, strict=True)
    ]
