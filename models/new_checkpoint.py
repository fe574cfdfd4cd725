"""Writing a random checkpoint in the published format: names, shapes, sharding, config.json.

A tensor's values depend on the seed and its name alone. They come from the raw bits of a fixed
generator by integer sums and single roundings, without a transcendental function, so that one seed
gives the same bytes on every machine. Weights stream to disk in pieces: memory stays small.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np
import torch

from hybridge.artifacts.errors import CheckpointError, UsageError
from hybridge.models import mxfp4
from hybridge.models.checkpoint import INDEX_FILE, SINGLE_FILE
from hybridge.models.config import CONFIG_FILE, ModelConfig
from hybridge.models.tensor_names import (
    PublishedTensor,
    Role,
    dtype_name,
    published_tensors,
)

DEFAULT_SHARD_BYTES: Final = 2 << 30
_PIECE: Final = 1 << 20  # elements made at a time
_HEADER_ALIGNMENT: Final = 64
_FORMAT_NAMES: Final = {"float32": "F32", "bfloat16": "BF16", "uint8": "U8"}
_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "uint8": 1}
# The sum of four uniform 16-bit integers: nearly normal, of this mean and standard deviation.
_SUM_MEAN: Final = -2.0
_SUM_DEVIATION: Final = math.sqrt(4 * (65536**2 - 1) / 12)


class _Scale(NamedTuple):
    """Mean and standard deviation; None: 1 / sqrt(fan-in), the last dimension."""

    mean: float
    deviation: float | None


# Chosen so that activations keep their size through the layers and logits are of the order of 1.
# The selection bias of the router is small against the spread of its scores: routing varies.
_NORMAL: Final[dict[Role, _Scale]] = {
    "embedding": _Scale(0.0, 1.0),
    "projection": _Scale(0.0, None),
    "norm": _Scale(1.0, 0.1),
    "norm_bias": _Scale(0.0, 0.1),
    "conv": _Scale(0.0, None),
    "router": _Scale(0.0, None),
    "router_bias": _Scale(0.0, 0.02),
    "residual_query": _Scale(0.0, None),
    "expert": _Scale(0.0, None),
    "expert_packed": _Scale(0.0, None),
    "expert_scale": _Scale(0.0, None),
}
# A = exp(A_log) in 1..16 multiplies the softplus; inside the bounded gate's sigmoid it stays near
# 1, or the gate would be shut for good.
_SOFTPLUS_DECAY_RATE: Final = (0.0, math.log(16.0))
_BOUNDED_DECAY_RATE: Final = (-0.5, 0.5)
# Inverse softplus of the time steps 0.001 .. 0.1 with which such layers are initialised.
_DECAY_BIAS: Final = (-6.9, -2.25)


@dataclass
class _Shard:
    """Tensors of one file, and their bytes."""

    tensors: list[PublishedTensor] = field(default_factory=list)
    size: int = 0


def write_checkpoint(
    config: ModelConfig,
    folder: str | Path,
    seed: int = 0,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Write a random-weight checkpoint.

    The folder appears only when it is complete.

    Args:
        config: the model.
        folder: must not exist, or be empty.
        seed: the same seed and config give the same bytes.
        shard_bytes: a file holds at most this many bytes of tensors (or one larger tensor).
        progress: called with a line of text after each file.

    Raises:
        UsageError: the folder is not empty, the disk is too small, or shard_bytes is not positive.
        CheckpointError: the folder cannot be written.
    """
    target = Path(folder).absolute()
    shards = _plan(config, shard_bytes)
    _check_target(target, sum(shard.size for shard in shards))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _write_all(config, scratch, seed, shards, progress or _quiet)
            scratch.chmod(0o777 & ~_umask())
            scratch.replace(target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(
            f"{target}: cannot be written ({error.strerror or error})",
            "is there space, and may this user write there?",
        ) from error


def checkpoint_bytes(config: ModelConfig) -> int:
    """Bytes of all tensors of a checkpoint of this config."""
    return sum(_size(tensor, config) for tensor in published_tensors(config))


def random_tensor(tensor: PublishedTensor, config: ModelConfig, seed: int) -> torch.Tensor:
    """One tensor as `write_checkpoint` writes it."""
    pieces = list(_pieces(tensor, config, seed))
    return torch.cat([piece.reshape(-1) for piece in pieces]).reshape(tensor.shape)


def _quiet(message: str) -> None:
    """Progress that nobody asked for."""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _check_target(target: Path, size: int) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target}: exists and is not empty", "give a new folder, or remove it")
    parent = next(p for p in target.parents if p.exists())
    free = shutil.disk_usage(parent).free
    if size > free:
        raise UsageError(
            f"the checkpoint takes {size / 2**30:.1f} GiB, but {parent} has {free / 2**30:.1f} GiB",
            "use fewer layers or experts, a smaller hidden size, or MXFP4",
        )


def _plan(config: ModelConfig, shard_bytes: int) -> list[_Shard]:
    """Distribute the tensors over files, in layer order."""
    if shard_bytes < 1:
        raise UsageError(f"shard_bytes is {shard_bytes}", "it must be positive")
    shards = [_Shard()]
    for tensor in published_tensors(config):
        size = _size(tensor, config)
        if shards[-1].tensors and shards[-1].size + size > shard_bytes:
            shards.append(_Shard())
        shards[-1].tensors.append(tensor)
        shards[-1].size += size
    for shard in shards:
        # Largest item first, so that every tensor is aligned to its items.
        shard.tensors.sort(key=lambda t: (-_item_bytes(t, config), t.name))
    return shards


def _item_bytes(tensor: PublishedTensor, config: ModelConfig) -> int:
    return _ITEM_BYTES[dtype_name(config, tensor.storage)]


def _size(tensor: PublishedTensor, config: ModelConfig) -> int:
    return math.prod(tensor.shape) * _item_bytes(tensor, config)


def _write_all(
    config: ModelConfig,
    folder: Path,
    seed: int,
    shards: Sequence[_Shard],
    progress: Callable[[str], None],
) -> None:
    total = sum(shard.size for shard in shards)
    done = 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = _shard_name(number, len(shards))
        with (folder / name).open("xb") as stream:
            stream.write(_header(shard, config))
            _write_tensors(stream, shard.tensors, config, seed)
        weight_map |= {tensor.name: name for tensor in shard.tensors}
        done += shard.size
        progress(f"{name}: {done / 2**20:.1f} of {total / 2**20:.1f} MiB")
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / INDEX_FILE, index, sort_keys=True)
    _write_json(folder / CONFIG_FILE, config.to_published(), sort_keys=False)


def _shard_name(number: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def _write_json(file: Path, values: object, *, sort_keys: bool) -> None:
    text = json.dumps(values, indent=2, sort_keys=sort_keys, allow_nan=False)
    file.write_text(text + "\n", encoding="utf-8")


def _header(shard: _Shard, config: ModelConfig) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard.tensors:
        end = offset + _size(tensor, config)
        entries[tensor.name] = {
            "dtype": _FORMAT_NAMES[dtype_name(config, tensor.storage)],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Spaces after the JSON, which the format allows, align the data.
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _write_tensors(
    stream: BinaryIO, tensors: Iterable[PublishedTensor], config: ModelConfig, seed: int
) -> None:
    for tensor in tensors:
        for piece in _pieces(tensor, config, seed):
            stream.write(piece.contiguous().view(torch.uint8).numpy().data)


def _pieces(tensor: PublishedTensor, config: ModelConfig, seed: int) -> Iterator[torch.Tensor]:
    """A tensor's values in order, some at a time, in the dtype of the file."""
    if tensor.storage == "uint8":
        yield from _mxfp4_pieces(tensor, config, seed)
        return
    dtype = torch.bfloat16 if dtype_name(config, tensor.storage) == "bfloat16" else torch.float32
    count = math.prod(tensor.shape)
    if tensor.role == "decay_rate":
        yield _decay_rates(tensor, config, seed)
    elif tensor.role == "decay_bias":
        yield _uniform(_bits(tensor.name, seed), count, _DECAY_BIAS)
    else:
        mean, deviation = _NORMAL[tensor.role]
        deviation = tensor.shape[-1] ** -0.5 if deviation is None else deviation
        bits = _bits(tensor.name, seed)
        for start in range(0, count, _PIECE):
            yield _normal(bits, min(_PIECE, count - start), mean, deviation).to(dtype)


def _mxfp4_pieces(
    tensor: PublishedTensor, config: ModelConfig, seed: int
) -> Iterator[torch.Tensor]:
    """The packed values or the scales of one expert matrix; both come from the same weights."""
    assert config.quantization is not None
    base, _, kind = tensor.name.rpartition("_")
    rows = tensor.shape[0]
    columns = tensor.shape[1] * (2 if kind == "packed" else config.quantization.group_size)
    step = max(1, _PIECE // columns)
    bits = _bits(base, seed)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        weights = _normal(bits, count * columns, 0.0, columns**-0.5).reshape(count, columns)
        packed, scale = mxfp4.encode(weights)
        yield packed if kind == "packed" else scale


def _decay_rates(tensor: PublishedTensor, config: ModelConfig, seed: int) -> torch.Tensor:
    """A_log: one value a head, zeros where the published tensor is longer."""
    bounded = config.kda.gate_lower_bound is not None
    limits = _BOUNDED_DECAY_RATE if bounded else _SOFTPLUS_DECAY_RATE
    values = torch.zeros(math.prod(tensor.shape))
    heads = config.kda.num_heads
    values[:heads] = _uniform(_bits(tensor.name, seed), heads, limits)
    return values


def _bits(name: str, seed: int) -> np.random.PCG64:
    """The generator of one tensor. NumPy promises its raw stream for every version (NEP 19)."""
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.PCG64(int.from_bytes(key[:16], "little"))


def _normal(bits: np.random.PCG64, count: int, mean: float, deviation: float) -> torch.Tensor:
    """Nearly normal float32: sums of four 16-bit integers, scaled with one rounding each way."""
    quarters = bits.random_raw(count).astype("<u8", copy=False).view("<i2").reshape(count, 4)
    sums = quarters[:, 0].astype(np.int32)
    for column in range(1, 4):
        sums += quarters[:, column]
    scale = deviation / _SUM_DEVIATION
    values = sums.astype(np.float64) * scale + (mean - _SUM_MEAN * scale)
    return torch.from_numpy(values.astype(np.float32))


def _uniform(bits: np.random.PCG64, count: int, limits: tuple[float, float]) -> torch.Tensor:
    low, high = limits
    fractions = (bits.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy((low + fractions * (high - low)).astype(np.float32))
