"""Reading a published checkpoint: safetensors only, headers first, tensors when asked for.

A checkpoint is a folder with `model.safetensors`, or shards and `model.safetensors.index.json`.
Nothing is unpickled; a folder of .bin or .pt files is refused.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from hybridge.artifacts.errors import CheckpointError
from hybridge.models.config import ModelConfig
from hybridge.models.safetensors_file import TensorRegion, read_header
from hybridge.models.tensor_names import (
    PublishedTensor,
    Storage,
    WeightSource,
    is_skipped,
    plain_name,
    published_tensors,
    weight_sources,
)

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
MAX_INDEX_BYTES: Final = 512 << 20
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLED_REMEDY: Final = (
    "pickle files can run code when they are read and are never opened: convert the weights to"
    " safetensors"
)
_SHOWN: Final = 4
_DTYPES: Final = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_ALLOWED: Final[dict[Storage, tuple[str, ...]]] = {
    "weight": ("BF16", "F32"),
    "float32": ("F32", "BF16"),
    "uint8": ("U8",),
}


class Checkpoint:
    """An open checkpoint. Tensors are known by their plain names: without `language_model.`.

    Use `Checkpoint.open`. A name may be given with or without the prefix.

    Attributes:
        folder: where the checkpoint lies.
        regions: place, dtype and shape of every tensor, by plain name.
    """

    def __init__(self, folder: Path, regions: Mapping[str, TensorRegion]) -> None:
        self.folder = folder
        self.regions = regions

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Open a checkpoint folder; reads and checks all headers, and no weight.

        Raises:
            CheckpointError: there are no safetensors, a header or the index is damaged, the index
                names a file outside the folder, or a tensor is in no file or in two.
        """
        root = Path(folder)
        if not root.is_dir():
            remedy = "give the folder that holds config.json"
            if root.suffix in _PICKLED:
                remedy = _PICKLED_REMEDY
            raise CheckpointError(f"{root}: is not a checkpoint folder", remedy)
        index = root / INDEX_FILE
        if index.exists():
            return cls(root, _sharded_regions(root, index))
        file = _single_file(root)
        return cls(root, _merge({file: read_header(file)}))

    def region(self, name: str) -> TensorRegion:
        """Where a tensor's bytes lie, so that they can be referred to in place.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        region = self.regions.get(plain_name(name))
        if region is None:
            raise CheckpointError(
                f"{self.folder}: has no tensor '{name}'",
                "do config.json and the safetensors files belong to one model?",
            )
        return region

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, mapped from its file: pages are read when touched, writes never reach the file.

        Raises:
            CheckpointError: no such tensor, a dtype that is not supported, or a file that changed.
        """
        region = self.region(name)
        dtype = _DTYPES.get(region.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{region.file}: tensor '{name}' has the unsupported dtype {region.dtype}",
                "convert the checkpoint to bfloat16, float32 or MXFP4 experts",
            )
        if region.length == 0:
            return torch.empty(region.shape, dtype=dtype)
        return _map_region(region, dtype).reshape(region.shape)

    def weight_dtype(self, source: WeightSource) -> torch.dtype:
        """The dtype in which the checkpoint holds a parameter."""
        return _DTYPES[self.region(source.tensors[0]).dtype]

    def check(self, config: ModelConfig) -> None:
        """Compare the tensors with those that a config asks for.

        Vision tensors and MTP layers are skipped. A_log may have any shape with enough values, and
        a convolution may lack its middle dimension.

        Raises:
            CheckpointError: one error that counts and shows all that is missing, unexpected, of the
                wrong shape or of the wrong dtype.
        """
        problems = _Problems()
        expected: set[str] = set()
        for tensor in published_tensors(config):
            name = plain_name(tensor.name)
            expected.add(name)
            region = self.regions.get(name)
            if region is None:
                problems.add("missing", tensor.name)
            else:
                _check_tensor(problems, tensor, region, config)
        for name in self.regions:
            if name not in expected and not is_skipped(name, config):
                problems.add("unexpected", name)
        for source in weight_sources(config):
            self._check_mixed_dtypes(problems, source)
        problems.raise_if_any(self.folder)

    def materialise(
        self,
        source: WeightSource,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A parameter of the model, made from its tensors one after the other.

        Args:
            source: the recipe, from `weight_sources`.
            out: contiguous buffer of the parameter's shape, to be filled and returned; its dtype
                decides.
            dtype: dtype of the result where there is no buffer; None keeps the checkpoint's.

        Returns:
            The parameter. Without a buffer and where nothing needs to be moved or converted it is
            mapped from the file.

        Raises:
            CheckpointError: a tensor is missing or has too few values.
        """
        if out is None:
            target = dtype or self.weight_dtype(source)
            if len(source.tensors) == 1:
                front = self._parts(source, source.numel)
                return next(front).to(target).reshape(source.shape)
            out = torch.empty(source.shape, dtype=target)
        if tuple(out.shape) != source.shape or not out.is_contiguous():
            raise CheckpointError(
                f"buffer for '{source.name}' has shape {tuple(out.shape)}, not {source.shape}",
                "give a contiguous buffer of the parameter's shape",
            )
        flat, size = out.view(-1), source.numel // len(source.tensors)
        for index, part in enumerate(self._parts(source, size)):
            flat[index * size : (index + 1) * size].copy_(part)
        return out

    def _parts(self, source: WeightSource, size: int) -> Iterator[torch.Tensor]:
        """The front of each tensor of a recipe, flat."""
        for name in source.tensors:
            part = self.tensor(name).reshape(-1)
            # Only a padded A_log may be longer than what is taken of it.
            exact = source.transform != "slice_flat"
            if part.numel() < size or (exact and part.numel() > size):
                raise CheckpointError(
                    f"{self.folder}: tensor '{name}' has {part.numel()} values, but parameter "
                    f"'{source.name}' takes {size}",
                    "do config.json and the safetensors files belong to one model?",
                )
            yield part[:size]

    def _check_mixed_dtypes(self, problems: _Problems, source: WeightSource) -> None:
        if len(source.tensors) == 1:
            return
        present = (self.regions.get(name) for name in source.tensors)
        dtypes = {region.dtype for region in present if region is not None}
        if len(dtypes) > 1:
            problems.add("of mixed dtype", f"{source.name} ({', '.join(sorted(dtypes))})")


def load_state(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """All parameters of the eager model.

    Args:
        checkpoint: an open checkpoint.
        config: its config; the checkpoint is checked against it.
        dtype: dtype of the floating-point weights; None keeps each as shipped. With a dtype, what
            is always computed in float32 (decay rates, convolutions, router biases) becomes
            float32; packed MXFP4 experts stay packed.

    Returns:
        Parameters by name; those that needed no change are mapped from the files.

    Raises:
        CheckpointError: the checkpoint does not fit the config.
    """
    checkpoint.check(config)
    wanted = {"weight": dtype, "float32": dtype and torch.float32, "uint8": None}
    return {
        source.name: checkpoint.materialise(source, dtype=wanted[source.storage])
        for source in weight_sources(config)
    }


class _Problems:
    """What is wrong with a checkpoint, by kind: the first few of each, and how many."""

    def __init__(self) -> None:
        self.kinds: dict[str, list[str]] = {}

    def add(self, kind: str, text: str) -> None:
        self.kinds.setdefault(kind, []).append(text)

    def raise_if_any(self, folder: Path) -> None:
        if not self.kinds:
            return
        lines = [f"{folder}: the tensors are not those that config.json asks for"]
        for kind, found in self.kinds.items():
            lines.append(f"  {len(found)} {kind}: {', '.join(found[:_SHOWN])}{_more(found)}")
        raise CheckpointError(
            "\n".join(lines),
            "do config.json and the safetensors files belong to one model, all shards of it?",
        )


def _more(found: Sequence[str]) -> str:
    return f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""


def _check_tensor(
    problems: _Problems, tensor: PublishedTensor, region: TensorRegion, config: ModelConfig
) -> None:
    if not _shape_fits(tensor, region.shape, config):
        problems.add(
            "of wrong shape",
            f"{tensor.name} (is {list(region.shape)}, must be {list(tensor.shape)})",
        )
    allowed = _ALLOWED[tensor.storage]
    if region.dtype not in allowed:
        problems.add(
            "of wrong dtype", f"{tensor.name} (is {region.dtype}, must be {' or '.join(allowed)})"
        )


def _shape_fits(tensor: PublishedTensor, shape: tuple[int, ...], config: ModelConfig) -> bool:
    if shape == tensor.shape:
        return True
    if tensor.role == "decay_rate":
        # Padded to 128, plain, or [1, 1, H, 1]: flattening and cutting covers all.
        return math.prod(shape) >= config.kda.num_heads and sum(n > 1 for n in shape) <= 1
    return tensor.role == "conv" and shape == (tensor.shape[0], tensor.shape[2])


def _single_file(root: Path) -> Path:
    file = root / SINGLE_FILE
    if file.exists():
        return file
    pickled = sorted(f.name for f in root.iterdir() if f.suffix in _PICKLED)
    if pickled:
        raise CheckpointError(
            f"{root}: holds pickled weights ({', '.join(pickled[:3])}) and no {SINGLE_FILE}",
            _PICKLED_REMEDY,
        )
    raise CheckpointError(
        f"{root}: has neither {SINGLE_FILE} nor {INDEX_FILE}",
        "give the folder of a checkpoint in the published format",
    )


def _sharded_regions(root: Path, index: Path) -> dict[str, TensorRegion]:
    weight_map = _read_index(index)
    headers = {root / name: read_header(root / name) for name in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in headers[root / shard]:
            raise CheckpointError(
                f"{index}: says that '{name}' is in {shard}, but it is not",
                "the index and the shards are of different downloads: fetch both again",
            )
    return _merge(headers)


def _read_index(index: Path) -> dict[str, str]:
    remedy = "fetch the index file again"
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{index}: is larger than 512 MiB", remedy)
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: cannot be read as JSON ({error})", remedy) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map", remedy)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_file_name(shard):
            raise CheckpointError(
                f"{index}: puts '{name}' into {shard!r:.200}, which is no file name of this folder",
                "shards must be .safetensors files beside the index; do not use this checkpoint",
            )
    return weight_map


def _is_plain_file_name(name: str) -> bool:
    """A name within the folder: no separator, no drive, no way up; links are the owner's choice."""
    return name.endswith(".safetensors") and not set(name) & set("/\\:\0")


def _merge(headers: Mapping[Path, Mapping[str, TensorRegion]]) -> dict[str, TensorRegion]:
    """All tensors by plain name; one that two files (or two spellings) hold is refused."""
    regions: dict[str, TensorRegion] = {}
    for file, header in headers.items():
        for name, region in header.items():
            plain = plain_name(name)
            other = regions.setdefault(plain, region)
            if other is not region:
                raise CheckpointError(
                    f"{file}: tensor '{name}' is also in {other.file.name}",
                    "a tensor must be given once: remove one of the two files",
                )
    return regions


def _map_region(region: TensorRegion, dtype: torch.dtype) -> torch.Tensor:
    """A tensor's values, flat, in memory mapped from its file; only this region is mapped."""
    start = region.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    lead = region.offset - start
    try:
        with region.file.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size < region.offset + region.length:
                raise CheckpointError(
                    f"{region.file}: is shorter than when it was opened",
                    "do not change a checkpoint while it is read",
                )
            # Private, because torch wants writable memory and the file must never change.
            mapped = mmap.mmap(
                stream.fileno(), lead + region.length, access=mmap.ACCESS_COPY, offset=start
            )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{region.file}: cannot be mapped ({error})", "is the file still there, and readable?"
        ) from error
    if lead % dtype.itemsize == 0:
        return torch.frombuffer(mapped, dtype=dtype, offset=lead)
    # The format allows tensors that are not aligned; such bytes are copied to where they are.
    return torch.frombuffer(bytearray(mapped[lead:]), dtype=dtype)
