"""Weights into an artifact: referenced where the checkpoint's bytes serve as they are, written anew where not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridge.artifacts.store import ArtifactWriter
from hybridge.artifacts.weights import Origin
from hybridge.compiler.targets.onnx.emit import WeightSpec
from hybridge.compiler.targets.onnx.pack_weights import ValueCheck
from hybridge.compiler.weight_reader import WeightReader
from hybridge.ir.derived import Recipe
from hybridge.models.checkpoint import Checkpoint
from hybridge.models.config import ModelConfig
from hybridge.ops.packed_rows import MOST_EXCEPTIONS, most_exceptions, pack_rows

WeightsPolicy = Literal["reference", "copy", "packed", "none"]
POLICIES: tuple[WeightsPolicy, ...] = ("reference", "copy", "packed", "none")


class WeightWriter:
    """Writes weights one after the other; memory holds one parameter, or one expert of a stack.

    Args:
        writer: the artifact under construction.
        config: the model.
        checkpoint: where the weights are; None only with the policy "none".
        policy: "reference", "copy", "packed" (as "copy"; the specs say which weights) or "none".
        recipes: of every derived weight, since one may be made from another.
    """

    def __init__(
        self,
        writer: ArtifactWriter,
        config: ModelConfig,
        checkpoint: Checkpoint | None,
        policy: WeightsPolicy,
        recipes: Mapping[str, Recipe],
    ) -> None:
        self.writer, self.checkpoint, self.policy = writer, checkpoint, policy
        self.reader = WeightReader(config, checkpoint, recipes)

    def write(
        self, wanted: Iterable[WeightSpec], progress: Callable[[str], None] = lambda _: None
    ) -> None:
        """Put every wanted weight into the artifact.

        Raises:
            CompileError: a graph reads a weight that neither the model nor a pass defines.
        """
        for weight in wanted:
            progress(weight.name)
            self._write_one(weight)

    def _write_one(self, weight: WeightSpec) -> None:
        dtype = str(weight.dtype).removeprefix("torch.")
        origin = self.reader.origin(weight.name)
        if self.checkpoint is None or self.policy == "none":
            self.writer.add_absent(weight.name, dtype, weight.shape, origin)
            return
        if self.policy == "reference" and self._reference(self.checkpoint, weight, dtype, origin):
            return
        with self.writer.open_weight(weight.name, dtype, weight.shape, origin) as stream:
            for part in self.reader.parts(weight.name):
                if weight.packed:
                    stream.write(pack_rows(bf16_bits(part)))
                else:
                    stream.write(raw_bytes(part.to(weight.dtype)))

    def _reference(
        self, checkpoint: Checkpoint, weight: WeightSpec, dtype: str, origin: Origin
    ) -> bool:
        """Refer to the checkpoint's own bytes, if they are the weight as the graph reads it."""
        source = self.reader.sources.get(weight.name)
        if source is None or source.transform != "as_is":
            return False
        if checkpoint.weight_dtype(source) != weight.dtype:
            return False
        region = checkpoint.region(source.tensors[0])
        self.writer.add_reference(
            weight.name,
            dtype,
            weight.shape,
            checkpoint=checkpoint.folder,
            file=region.file.relative_to(checkpoint.folder).as_posix(),
            offset=region.offset,
            origin=origin,
        )
        return True


def packing_check(config: ModelConfig, checkpoint: Checkpoint) -> ValueCheck:
    """Whether the values of a bf16 weight fit packed rows; reads them once."""

    def check(name: str, shape: tuple[int, ...], recipes: Mapping[str, Recipe]) -> str | None:
        parts = WeightReader(config, checkpoint, recipes).parts(name)
        worst = max((most_exceptions(bf16_bits(part)) for part in parts), default=0)
        if worst <= MOST_EXCEPTIONS:
            return None
        return f"a row has {worst} weights outside 15 consecutive exponents, more than {MOST_EXCEPTIONS}"

    return check


def bf16_bits(tensor: Tensor) -> npt.NDArray[np.uint16]:
    """The bits of the values, rounded to bf16 if they are wider."""
    return tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The values' bytes, row-major."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
