"""Weights into an artifact: referenced where the checkpoint's bytes serve as they are, written anew where not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from hybridge.artifacts.errors import CompileError
from hybridge.artifacts.store import ArtifactWriter
from hybridge.artifacts.weights import Origin
from hybridge.compiler.targets.onnx.emit import WeightSpec
from hybridge.ir.derived import Recipe, apply_recipe
from hybridge.models.checkpoint import Checkpoint
from hybridge.models.config import ModelConfig
from hybridge.models.tensor_names import WeightSource, weight_sources

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
        self.recipes = recipes
        self.sources = {source.name: source for source in weight_sources(config)}

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
        origin = self._origin(weight)
        if self.checkpoint is None or self.policy == "none":
            self.writer.add_absent(weight.name, dtype, weight.shape, origin)
            return
        if self.policy == "reference" and self._reference(self.checkpoint, weight, dtype, origin):
            return
        with self.writer.open_weight(weight.name, dtype, weight.shape, origin) as stream:
            for part in self._parts(self.checkpoint, weight):
                stream.write(raw_bytes(part.to(weight.dtype)))

    def _reference(
        self, checkpoint: Checkpoint, weight: WeightSpec, dtype: str, origin: Origin
    ) -> bool:
        """Refer to the checkpoint's own bytes, if they are the weight as the graph reads it."""
        source = self.sources.get(weight.name)
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

    def _parts(self, checkpoint: Checkpoint, weight: WeightSpec) -> Iterator[Tensor]:
        """The weight's values in order, in pieces: a stack comes member by member."""
        if weight.recipe is not None:
            yield self._derive(checkpoint, weight.recipe)
            return
        source = self._source(weight.name)
        if len(source.tensors) == 1:
            yield checkpoint.materialise(source)
            return
        for name in source.tensors:
            yield checkpoint.tensor(name)

    def _derive(self, checkpoint: Checkpoint, recipe: Recipe) -> Tensor:
        inputs = [
            self._derive(checkpoint, self.recipes[name])
            if name in self.recipes
            else checkpoint.materialise(self._source(name))
            for name in recipe["inputs"]
        ]
        return apply_recipe(recipe, inputs)

    def _source(self, name: str) -> WeightSource:
        source = self.sources.get(name)
        if source is None:
            raise CompileError(
                f"weights: a graph reads {name!r}, which is no parameter of the model",
                "a pass that makes a weight must record its recipe in the graph's derived weights",
            )
        return source

    def _origin(self, weight: WeightSpec) -> Origin:
        if weight.recipe is None:
            source = self._source(weight.name)
            return Origin(tuple(source.tensors), source.transform)
        return Origin(tuple(weight.recipe["inputs"]), str(weight.recipe["transform"]))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The values' bytes, row-major."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
