"""Bytes of intermediates that a graph moves, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import hybridge.ops
from hybridge.ir.cost import bytes_moved
from plain_maths import export

assert hybridge.ops is not None
ROW = 8 * 4  # bytes of a row of x
X = torch.ones(5, 8)


class Wrapped(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.ones(6, 8))
        self.register_buffer("places", torch.tensor([0, 3]))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def graph_of(function: Callable[..., Any]) -> GraphModule:
    return export(Wrapped(function), "prefill", {"x": X})


@pytest.mark.parametrize(
    ("function", "moved"),
    [
        # An input is no intermediate; a result is written, then read.
        (lambda m, x: x + 1, 5 * ROW),
        (lambda m, x: (x + 1) * 2, 5 * ROW + 2 * 5 * ROW),
        # A view is free; its reader reads what it shows.
        (lambda m, x: (x + 1)[:, :4] * 2, 5 * ROW + 2 * 5 * ROW // 2),
        # A weight is no intermediate, seen through a view either.
        (lambda m, x: x @ m.weight.t(), 5 * 6 * 4),
        # A cast makes a tensor of its own.
        (lambda m, x: (x + 1).to(torch.float64), 5 * ROW + 5 * ROW + 5 * 2 * ROW),
        # A gather reads what it returns.
        (lambda m, x: (x + 1).index_select(0, m.places), 5 * ROW + 2 * 2 * ROW),
    ],
)
def test_intermediates_are_counted_where_they_are_read_and_written(
    function: Callable[..., Any], moved: int
) -> None:
    assert bytes_moved(graph_of(function).graph) == moved


def test_stage_two_reads_the_statistics_of_one_site() -> None:
    def function(module: Wrapped, x: Tensor) -> Tensor:
        statistics = torch.ops.hybridge.attn_res_prepare(x.unsqueeze(0), module.weight, eps=1e-5)
        return torch.ops.hybridge.attn_res_update(
            x, module.weight[0], *statistics, site=2, eps=1e-5
        )

    site = 5 * ROW + 2 * 5 * 4
    assert bytes_moved(graph_of(function).graph) == 6 * site + site + 5 * ROW
