"""A device for tests: this machine's CPU with `npu_reference` in place of the NPU's operators.

It shows that an artifact's graphs, weights and golden values fit together; nothing about a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from hybridge.compiler.targets.ascend.device.device import CompiledGraph


class FakeNpu:
    """See `device.Device`; keeps count of what was asked of it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.layouts: list[str] = []
        self.compiled: list[str] = []
        self.calls = 0

    def name(self) -> str:
        return self._name

    def put(self, value: Tensor, layout: str = "ND") -> Tensor:
        self.layouts.append(layout)
        return value.clone()

    def compile(self, name: str, graph: fx.GraphModule) -> CompiledGraph:
        self.compiled.append(name)

        @torch.no_grad()
        def run(inputs: Sequence[Tensor]) -> Tensor:
            self.calls += 1
            return graph(*inputs)[0]

        return run

    def fetch(self, value: Tensor) -> Tensor:
        return value

    def synchronize(self) -> None:
        pass
