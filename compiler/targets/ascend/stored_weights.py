"""The bytes of an Ascend artifact's weights: as the lowered graphs read them, laid out as planned.

What the graphs only ever read through casts, transpositions and the like is stored with these done;
a weight that `assign_nz_layout` puts into FRACTAL_NZ is stored in that layout; MXFP4 stays packed.
Graphs that read a weight in the same form share its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridge.artifacts.store import ArtifactWriter
from hybridge.artifacts.weights import Origin
from hybridge.compiler.targets.ascend import nz
from hybridge.compiler.targets.ascend.prepared_weights import (
    PreparedWeight,
    apply_steps,
    by_rows,
    describe_steps,
)
from hybridge.compiler.weight_reader import Rows, WeightReader
from hybridge.compiler.weights import WeightsPolicy
from hybridge.passes.assign_nz_layout import FRACTAL_NZ, Layout

# A weight is written in pieces of about this many bytes.
PIECE_BYTES = 64 << 20
_STORAGE = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@dataclass(frozen=True)
class StoredWeight:
    """One weight of the artifact.

    Attributes:
        name: in weights.json; the graphs' input, with the graph's name where another graph reads
            that input in another form.
        weight: how it is made.
        layout: how it lies in memory, and why.
    """

    name: str
    weight: PreparedWeight
    layout: Layout

    @property
    def dtype(self) -> str:
        """The name of its element type."""
        return str(self.weight.dtype).removeprefix("torch.")

    @property
    def block_bytes(self) -> int:
        """In FRACTAL_NZ, the bytes of a block's row: C0 elements."""
        return self.layout.stored[-1] * self.weight.dtype.itemsize


WeightNames = Mapping[str, Mapping[str, str]]


def stored_weights(
    graphs: Mapping[str, Sequence[tuple[PreparedWeight, Layout]]],
) -> tuple[tuple[StoredWeight, ...], WeightNames]:
    """What has to be stored for some graphs.

    Args:
        graphs: graph -> its weights, each with its layout.

    Returns:
        The weights, and graph -> input -> the stored weight's name.
    """
    forms: dict[tuple[Any, ...], StoredWeight] = {}
    taken: set[str] = set()
    names: dict[str, dict[str, str]] = {}
    for graph, weights in graphs.items():
        names[graph] = {}
        for weight, layout in weights:
            form = (weight, layout.layout)
            if form not in forms:
                name = weight.name if weight.name not in taken else f"{weight.name}.{graph}"
                taken.add(name)
                forms[form] = StoredWeight(name, weight, layout)
            names[graph][weight.name] = forms[form].name
    return tuple(forms.values()), names


def write_weights(
    writer: ArtifactWriter,
    reader: WeightReader,
    weights: Sequence[StoredWeight],
    policy: WeightsPolicy,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Put the weights into an artifact; memory holds a piece, or one matrix that has to be rearranged.

    Args:
        writer: the artifact. reader: of the checkpoint. weights: in the order to write.
        policy: "copy"; "reference" refers to the checkpoint where its bytes serve as they are;
            "none" records names, shapes and origins only.
        progress: told of every weight.
    """
    for stored in weights:
        progress(stored.name)
        origin = _origin(reader, stored)
        shape = stored.layout.stored
        if policy == "none" or reader.checkpoint is None:
            writer.add_absent(stored.name, stored.dtype, shape, origin)
        elif policy == "reference" and _is_as_published(reader, stored):
            _refer(writer, reader, stored, origin)
        else:
            with writer.open_weight(stored.name, stored.dtype, shape, origin) as stream:
                for piece in pieces(reader, stored):
                    stream.write(piece)


def _origin(reader: WeightReader, stored: StoredWeight) -> Origin:
    """The tensors it comes from, and everything done to them."""
    weight = stored.weight
    origin = reader.origin(weight.source)
    tensors = [*origin.tensors]
    if weight.scale_source:
        tensors += reader.origin(weight.scale_source).tensors
    done = [origin.transform, *describe_steps(weight)]
    done += [FRACTAL_NZ] if stored.layout.layout == FRACTAL_NZ else []
    return Origin(tuple(tensors), ", ".join(done))


def _is_as_published(reader: WeightReader, stored: StoredWeight) -> bool:
    """Whether one tensor of the checkpoint has just these bytes."""
    weight, checkpoint = stored.weight, reader.checkpoint
    source = reader.sources.get(weight.source)
    if source is None or source.transform != "as_is" or checkpoint is None:
        return False
    plain = not weight.steps and stored.layout.layout != FRACTAL_NZ
    return plain and checkpoint.weight_dtype(source) == weight.dtype


def _refer(
    writer: ArtifactWriter, reader: WeightReader, stored: StoredWeight, origin: Origin
) -> None:
    assert reader.checkpoint is not None
    folder = reader.checkpoint.folder
    region = reader.checkpoint.region(origin.tensors[0])
    writer.add_reference(
        stored.name,
        stored.dtype,
        stored.layout.stored,
        checkpoint=folder,
        file=region.file.relative_to(folder).as_posix(),
        offset=region.offset,
        origin=origin,
    )


def pieces(reader: WeightReader, stored: StoredWeight) -> Iterator[NDArray[Any]]:
    """The weight's bytes in order, as it lies in the artifact."""
    weight = stored.weight
    laid_out = stored.layout.layout == FRACTAL_NZ
    values = reader.rows(weight.source)
    scales = reader.rows(weight.scale_source) if weight.scale_source else None
    stack = len(weight.shape) > 2
    rows = by_rows(weight, len(values.shape))
    if rows is not None and (stack or not laid_out):
        part_of, first = rows
        for start, stop in _spans(weight):
            part = bits(_part(part_of, values, scales, first + start, first + stop))
            yield nz.encode(part, stored.block_bytes) if laid_out else part
        return
    whole = bits(_part(weight, values, scales, 0, values.shape[0]))
    if laid_out and not stack:
        yield from _strips(whole, stored.block_bytes)
    else:
        yield nz.encode(whole, stored.block_bytes) if laid_out else whole


def _part(
    weight: PreparedWeight, values: Rows, scales: Rows | None, start: int, stop: int
) -> Tensor:
    scale = scales.read(start, stop) if scales is not None else None
    return apply_steps(weight, values.read(start, stop), scale)


def _spans(weight: PreparedWeight) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) of the first axis, about `PIECE_BYTES` at a time."""
    rows = weight.shape[0]
    row = max(1, prod(weight.shape[1:]) * weight.dtype.itemsize)
    step = max(1, PIECE_BYTES // row)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _strips(matrix: NDArray[Any], block_bytes: int) -> Iterator[NDArray[Any]]:
    """A matrix in FRACTAL_NZ, some column strips at a time: they follow each other in the layout."""
    width = nz.block_columns(matrix.itemsize, block_bytes)
    step = width * max(1, PIECE_BYTES // max(1, len(matrix) * width * matrix.itemsize))
    for start in range(0, matrix.shape[1], step):
        yield nz.encode(matrix[:, start : start + step], block_bytes)


def bits(tensor: Tensor) -> NDArray[Any]:
    """The values as numpy, those that numpy lacks (bf16, fp8) as unsigned integers of their size."""
    tensor = tensor.detach().contiguous()
    array: NDArray[Any] = tensor.view(_STORAGE[tensor.dtype.itemsize]).numpy()
    return array


def from_bits(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """The inverse of `bits`; the tensor owns its memory."""
    copy = torch.from_numpy(np.array(array).view(f"u{array.itemsize}"))
    return copy.view(dtype)


def read_stored(array: NDArray[Any], shape: Sequence[int], layout: str, dtype: str) -> Tensor:
    """A weight as a graph reads it (ND), from its bytes in the artifact.

    Args:
        array: as the artifact has it, in the stored shape. shape: as the graph reads it.
        layout: "FRACTAL_NZ" or "ND". dtype: the name of its element type.

    Raises:
        CompileError: the stored shape is not that of such a weight.
    """
    if layout == FRACTAL_NZ:
        array = nz.decode(array, shape, array.shape[-1] * array.itemsize)
    return from_bits(array.reshape(tuple(shape)), getattr(torch, dtype))
