"""What a device check asks of a device: the whole of it, so that another can stand in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, fx

#: A compiled graph: inputs in the order of its placeholders, on the device; caches are written in place.
CompiledGraph = Callable[[Sequence[Tensor]], Tensor]


class Device(Protocol):
    """Somewhere to put tensors, compile lowered graphs and run them."""

    def name(self) -> str:
        """What the device calls itself."""
        ...

    def put(self, value: Tensor, layout: str = "ND") -> Tensor:
        """A tensor on the device, from one on the CPU in ND; "FRACTAL_NZ" is the device's own layout."""
        ...

    def compile(self, name: str, graph: fx.GraphModule) -> CompiledGraph:
        """Compile a graph, at the latest when it is first called.

        Raises:
            CompileError: the device refuses it.
        """
        ...

    def fetch(self, value: Tensor) -> Tensor:
        """The values on the CPU, when they are there."""
        ...

    def synchronize(self) -> None:
        """Wait until everything issued is done."""
        ...
