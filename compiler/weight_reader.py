"""A checkpoint's weights as a graph names them: parameters of the model, and those that passes derived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from hybridge.artifacts.errors import CompileError
from hybridge.artifacts.weights import Origin
from hybridge.ir.derived import Recipe, materialise
from hybridge.models.checkpoint import Checkpoint
from hybridge.models.config import ModelConfig
from hybridge.models.tensor_names import WeightSource, weight_sources


@dataclass(frozen=True)
class Rows:
    """A weight that is read piece by piece along its first axis.

    Attributes:
        shape: of the whole weight.
        read: (start, stop) -> rows [stop - start, ...] in the dtype of the checkpoint.
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]


class WeightReader:
    """Reads weights by name; nothing is kept, and a parameter of one tensor is only mapped.

    Args:
        config: the model.
        checkpoint: where the bytes are; None where only origins are asked for.
        recipes: of every derived weight, since one may be made from another.
    """

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint | None, recipes: Mapping[str, Recipe]
    ) -> None:
        self.checkpoint, self.recipes = checkpoint, recipes
        self.sources = {source.name: source for source in weight_sources(config)}

    def source(self, name: str) -> WeightSource:
        """How a parameter comes from the checkpoint.

        Raises:
            CompileError: the model has no such parameter.
        """
        source = self.sources.get(name)
        if source is None:
            raise CompileError(
                f"weights: a graph reads {name!r}, which is no parameter of the model",
                "a pass that makes a weight must record its recipe in the graph's derived weights",
            )
        return source

    def origin(self, name: str) -> Origin:
        """What a weight is made of: a parameter's tensors, or a derived weight's inputs."""
        if name in self.recipes:
            recipe = self.recipes[name]
            return Origin(tuple(recipe["inputs"]), str(recipe["transform"]))
        source = self.source(name)
        return Origin(tuple(source.tensors), source.transform)

    def value(self, name: str) -> Tensor:
        """The whole weight, in the dtype of the checkpoint or of its recipe."""
        checkpoint = self._opened(name)
        return materialise(
            name, self.recipes, lambda each: checkpoint.materialise(self.source(each))
        )

    def parts(self, name: str) -> Iterator[Tensor]:
        """The weight's values in order, in pieces: a stack comes member by member."""
        if name in self.recipes or len(self.source(name).tensors) == 1:
            yield self.value(name)
            return
        checkpoint = self._opened(name)
        for tensor in self.source(name).tensors:
            yield checkpoint.tensor(tensor)

    def rows(self, name: str) -> Rows:
        """The weight in pieces; only a stack of many tensors (experts) is read piece by piece."""
        source = None if name in self.recipes else self.source(name)
        if source is None or source.transform != "stack_experts":
            value = self.value(name)
            return Rows(tuple(value.shape), lambda start, stop: value[start:stop])
        checkpoint, shape = self._opened(name), source.shape
        each = len(source.tensors) // shape[0]

        def read(start: int, stop: int) -> Tensor:
            names = source.tensors[start * each : stop * each]
            part = replace(source, shape=(stop - start, *shape[1:]), tensors=names)
            return checkpoint.materialise(part)

        return Rows(shape, read)

    def _opened(self, name: str) -> Checkpoint:
        if self.checkpoint is None:
            raise CompileError(
                f"weights: {name!r} is wanted, but there is no checkpoint",
                "give a checkpoint folder, or --weights none",
            )
        return self.checkpoint
