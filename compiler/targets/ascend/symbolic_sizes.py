"""Sizes that a graph leaves open: symbols with the names that a bucket's sizes have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from hybridge.artifacts.errors import CompileError

OPEN_SIZES = "open_sizes"  # in the meta of a graph module: its SymbolicSizes
NAMES = ("tokens", "sequences", "columns", "logits")
_SIZE = re.compile(rf"({'|'.join(NAMES)})(?: \+ (\d))?")
# While torch traces, a symbol has some value. It takes part in nothing but a comparison that torch
# cannot decide, which fixes the size and is then an error.
_TRACED_WITH = dict(zip(NAMES, (1009, 101, 107, 103), strict=True))

Size = int | str


class SymbolicSizes:
    """The open sizes of one graph, and the fake tensors that have them.

    Attributes:
        mode: the mode of those tensors.
    """

    def __init__(self) -> None:
        self._env = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self._env)
        self._named = {name: self._symbol(name) for name in NAMES}
        self._texts = {name: str(symbol) for name, symbol in self._named.items()}

    def shape(self, shape: Sequence[Size]) -> tuple[int, ...]:
        """A shape with symbols in place of names; they count as ints, as torch has it.

        Raises:
            ValueError: a text is no name of a size, nor one and a number ("sequences + 1").
        """
        return tuple(size if isinstance(size, int) else self._size(size) for size in shape)

    def _size(self, text: str) -> int:
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no size")
        return self._named[match[1]] + int(match[2] or 0)

    def _symbol(self, name: str) -> int:
        context: StatelessSymbolicContext[..., Any] = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC]
        )
        example = torch.empty(_TRACED_WITH[name])
        fake = self.mode.from_tensor(example, symbolic_context=context, source=ConstantSource(name))
        return fake.shape[0]

    def require_open(self, step: str) -> None:
        """A graph of open sizes assumes nothing about them but that they are no certain number.

        torchair asks whether a view left a shape as it was. It did not; were it equal at some size,
        what it makes of the view (a Reshape) would hold all the same.

        Raises:
            CompileError: something that was called took a size as a number; every such place.
        """
        guards = [guard for guard in self._env.guards if not isinstance(guard.expr, sympy.Ne)]
        fixed = [f"  {self._by_names(str(each.expr))} at {each.sloc}" for each in guards]
        if fixed:
            raise CompileError(
                f"{step}: what is called fixes open sizes:\n" + "\n".join(fixed),
                "give static buckets: --buckets decode=1/16,prefill=1024",
            )

    def texts(self, shape: Sequence[int]) -> list[Size]:
        """The shape with names in place of symbols."""
        return [size if isinstance(size, int) else self._by_names(str(size)) for size in shape]

    def _by_names(self, text: str) -> str:
        for name, symbol in self._texts.items():
            text = re.sub(rf"\b{symbol}\b", name, text)
        return text
