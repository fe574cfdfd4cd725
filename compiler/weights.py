"""Weights into an artifact: referenced where the checkpoint's bytes serve as they are, written anew where not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from hybridge.artifacts.store import ArtifactWriter
from hybridge.artifacts.weights import Origin
from hybridge.compiler.targets.onnx.emit import WeightSpec
from hybridge.compiler.weight_reader import WeightReader
from hybridge.ir.derived import Recipe
from hybridge.models.checkpoint import Checkpoint
from hybridge.models.config import ModelConfig

WeightsPolicy = Literal["reference", "copy", "none"]
POLICIES: tuple[WeightsPolicy, ...] = ("reference", "copy", "none")


class WeightWriter:
    """Writes weights one after the other; memory holds one parameter, or one expert of a stack.

    Args:
        writer: the artifact under construction.
        config: the model.
        checkpoint: where the weights are; None only with the policy "none".
        policy: "reference", "copy" or "none".
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
            for part in self._parts(self.checkpoint, weight.name):
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

    def _parts(self, checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
        """The weight's values in order, in pieces: a stack comes member by member."""
        sources = self.reader.sources
        if name in self.reader.recipes or len(sources[name].tensors) == 1:
            yield self.reader.value(name)
            return
        for tensor in sources[name].tensors:
            yield checkpoint.tensor(tensor)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The values' bytes, row-major."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
