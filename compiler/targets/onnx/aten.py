"""Translations of aten ops that torch has none for, or one that onnxruntime refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18

op: Any = opset18  # its annotations are per element type: of no help to code that takes any
INT64, BOOL = ir.DataType.INT64, ir.DataType.BOOL


def aten_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """overload -> translation."""
    return {
        torch.ops.aten.sort.stable: stable_sort,
        torch.ops.aten.index.Tensor: index,
        torch.ops.aten.split.Tensor: split,
        torch.ops.aten.split_with_sizes.default: split_with_sizes,
        torch.ops.aten.square.default: lambda x: op.Mul(x, x),
        torch.ops.aten.rsub.Scalar: reversed_subtract,
        torch.ops.aten.to.dtype: cast,
        torch.ops.aten.__and__.Tensor: bitwise_and,
    }


def reversed_subtract(x: Any, other: float, alpha: float = 1) -> Any:
    """other - alpha * x, in the type of x."""
    scaled = x if alpha == 1 else op.Mul(x, op.CastLike(op.Constant(value_float=float(alpha)), x))
    return op.Sub(op.CastLike(op.Constant(value_float=float(other)), x), scaled)


def cast(x: Any, dtype: int, *_layout: Any) -> Any:
    """`x.to(dtype)`."""
    return op.Cast(x, to=dtype)


def bitwise_and(x: Any, other: Any) -> Any:
    """`x & other` of masks or of integers."""
    return op.And(x, other) if x.dtype == BOOL else op.BitwiseAnd(x, other)


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
