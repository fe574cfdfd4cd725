"""Our translations of aten ops, exported by torch and run in onnxruntime, equal torch."""

from __future__ import annotations

from collections.abc import Callable

import onnxruntime
import pytest
import torch
from torch import Tensor

from hybridge.compiler.targets.onnx.translations import translation_table


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.function(x, i)


def exported(function: Callable[..., Tensor], x: Tensor, i: Tensor) -> onnxruntime.InferenceSession:
    program = torch.onnx.export(
        torch.export.export(Module(function), (x, i)),
        custom_translation_table=translation_table(),
        optimize=False,
        opset_version=18,
        verbose=False,
    )
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString())


FUNCTIONS = {
    "index-first": lambda x, i: x[i],
    "index-matrix": lambda x, i: x[i.view(2, 2)],
    "index-second": lambda x, i: x[:, i],
    "index-two": lambda x, i: x[i, i + 1],
    "index-two-broadcast": lambda x, i: x[i.unsqueeze(1), i],
    "split": lambda x, i: x.split(2)[1] + x.split(4)[1],
    "split-sizes": lambda x, i: x.split((1, 3, 2))[1],
    "chunk": lambda x, i: torch.cat([x.chunk(3, dim=-1)[2], x.chunk(3, dim=-1)[0]]),
    "square": lambda x, i: x.square(),
    "reversed-subtract": lambda x, i: 2 - i,
    "reversed-subtract-scaled": lambda x, i: torch.rsub(x, 0.5, alpha=3),
    "cast": lambda x, i: x.to(torch.int32),
    "and-masks": lambda x, i: (x > 0) & (x < 1),
    "and-integers": lambda x, i: x.int() & 3,
    "sort-descending": lambda x, i: torch.sort(x, dim=-1, descending=True, stable=True).indices,
    "sort-ascending": lambda x, i: torch.sort(x, dim=0, stable=True).indices,
    "sort-values": lambda x, i: torch.sort(x, dim=1, descending=True, stable=True).values,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_translation_equals_torch(name: str):
    generator = torch.Generator().manual_seed(0)
    # Few values: a sort of them is mostly ties.
    x = torch.randint(-1, 2, (6, 9), generator=generator).float()
    i = torch.tensor([3, 0, -1, 3], dtype=torch.int32)
    expected = FUNCTIONS[name](x, i)
    (found,) = exported(FUNCTIONS[name], x, i).run(None, {"x": x.numpy(), "i": i.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=0)


@pytest.mark.parametrize("size", [3, 3000])
def test_sort_keeps_the_lowest_index_first_at_any_size(size: int):
    def order(x: Tensor, i: Tensor) -> Tensor:
        falling = torch.sort(x, dim=-1, descending=True, stable=True).indices[i]
        return falling + torch.sort(x, dim=-1, descending=False, stable=True).indices

    x = torch.randint(0, 3, (4, size), generator=torch.Generator().manual_seed(1)).float()
    x[0] = -0.0 * x[0]
    i = torch.arange(4, dtype=torch.int32)
    (found,) = exported(order, x, i).run(None, {"x": x.numpy(), "i": i.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), order(x, i))
