"""Which products by head read kv_b as it is stored, and which are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from hybridge.compiler.targets.onnx.fold_weights import drop_unread_weights, fold_weights
from hybridge.compiler.targets.onnx.lower_einsum import lower_einsum
from hybridge.compiler.targets.onnx.lower_mla_absorb import lower_mla_absorb
from hybridge.compiler.targets.onnx.storage import weight_dtypes, weight_nodes
from hybridge.ir.signature import weight_name
from hybridge.passes.fuse_sparse_flash_attention import FuseSparseFlashAttention
from plain_maths import ExpandedAttention, apply, attention_inputs, calls, evaluate, export

TOKENS, HEADS, NOPE_ROWS, VALUE_ROWS, COLUMNS = 3, 2, 6, 4, 5
OPS = ["mla_absorb_query", "mla_expand_value"]
Cut = Callable[[Tensor], tuple[Tensor, Tensor]]


class Products(nn.Module):
    """The two products with weights that `cut` makes of kv_b."""

    def __init__(self, cut: Cut, *shape: int) -> None:
        super().__init__()
        self.kv_b = nn.Parameter(torch.randn(shape))
        self.cut = cut

    def forward(self, query: Tensor) -> Tensor:
        key_up, value_up = self.cut(self.kv_b)
        latent = torch.einsum("thn,hnc->thc", query, key_up)
        return torch.einsum("thc,hvc->thv", latent, value_up)


def by_head(kv_b: Tensor) -> Tensor:
    return kv_b.unflatten(0, (HEADS, -1))


def keys_then_values(kv_b: Tensor) -> tuple[Tensor, Tensor]:
    first, second = by_head(kv_b).split((NOPE_ROWS, VALUE_ROWS), dim=1)
    return first, second


def values_then_keys(kv_b: Tensor) -> tuple[Tensor, Tensor]:
    second, first = by_head(kv_b).split((VALUE_ROWS, NOPE_ROWS), dim=1)
    return first, second


def all_keys_then_all_values(kv_b: Tensor) -> tuple[Tensor, Tensor]:
    rows = (HEADS * NOPE_ROWS, HEADS * VALUE_ROWS)
    first, second = (by_head(part) for part in kv_b.split(rows))
    return first, second


def with_a_gap(kv_b: Tensor) -> tuple[Tensor, Tensor]:
    first, _, second = by_head(kv_b).split((NOPE_ROWS, 3, VALUE_ROWS), dim=1)
    return first, second


def from_the_middle(kv_b: Tensor) -> tuple[Tensor, Tensor]:
    _, first, second, _ = by_head(kv_b).split((1, NOPE_ROWS, VALUE_ROWS, 1), dim=1)
    return first, second


def three_axes(kv_b: Tensor) -> tuple[Tensor, Tensor]:
    first, second = kv_b.split((NOPE_ROWS, VALUE_ROWS), dim=1)
    return first, second


def cut_columns(kv_b: Tensor) -> tuple[Tensor, Tensor]:
    return keys_then_values(kv_b.split((COLUMNS, 1), dim=1)[0])


ROWS = HEADS * (NOPE_ROWS + VALUE_ROWS)
LOWERED: dict[Cut, tuple[int, ...]] = {
    keys_then_values: (ROWS, COLUMNS),
    with_a_gap: (ROWS + 3 * HEADS, COLUMNS),
    all_keys_then_all_values: (ROWS, COLUMNS),
    cut_columns: (ROWS, COLUMNS + 1),
}
LEFT_ALONE: dict[Cut, tuple[int, ...]] = {
    values_then_keys: (ROWS, COLUMNS),
    from_the_middle: (ROWS + 2 * HEADS, COLUMNS),
    three_axes: (HEADS, NOPE_ROWS + VALUE_ROWS, COLUMNS),
}


def traced(model: nn.Module) -> tuple[GraphModule, dict[str, Tensor]]:
    """The graph with weights marked and its inputs."""
    inputs = {"query": torch.randn(TOKENS, HEADS, NOPE_ROWS)}
    return export(model.requires_grad_(False), "decode", inputs), inputs


def lower(gm: GraphModule) -> int:
    """The steps of `emit_onnx` around the lowering; returns how many products it lowered."""
    fold_weights(gm)
    count = lower_mla_absorb(gm)
    assert lower_mla_absorb(gm) == 0
    lower_einsum(gm)
    fold_weights(gm)
    drop_unread_weights(gm)
    gm.graph.lint()
    gm.recompile()
    return count


def read_weights(gm: GraphModule) -> set[str]:
    return {str(weight_name(node)) for node in weight_nodes(gm.graph)}


@pytest.mark.parametrize("cut", LOWERED, ids=lambda cut: cut.__name__)
def test_the_first_and_the_last_rows_of_each_head_are_read_in_place(cut: Cut) -> None:
    gm, inputs = traced(Products(cut, *LOWERED[cut]))
    before = evaluate(gm, inputs)
    assert lower(gm) == 2
    assert calls(gm) == OPS
    assert all(len(node.meta["val"].shape) == 2 for node in weight_nodes(gm.graph))
    torch.testing.assert_close(evaluate(gm, inputs)[0], before[0])


@pytest.mark.parametrize("cut", [keys_then_values, with_a_gap], ids=lambda cut: cut.__name__)
def test_no_weight_is_made_anew_and_bf16_stays(cut: Cut) -> None:
    gm, _ = traced(Products(cut, *LOWERED[cut]))
    lower(gm)
    assert read_weights(gm) == {"kv_b"}
    assert weight_dtypes([gm], {"kv_b": torch.bfloat16}) == {"kv_b": torch.bfloat16}


@pytest.mark.parametrize("cut", LEFT_ALONE, ids=lambda cut: cut.__name__)
def test_other_rows_are_left_alone(cut: Cut) -> None:
    gm, inputs = traced(Products(cut, *LEFT_ALONE[cut]))
    before = evaluate(gm, inputs)
    assert lower(gm) == 0
    assert calls(gm) == []
    torch.testing.assert_close(evaluate(gm, inputs)[0], before[0])


@pytest.mark.parametrize("equation", ["thn,hnc->htc", "thn,nhc->thc"])
def test_other_equations_are_left_alone(equation: str) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kv_b = nn.Parameter(torch.randn(9, 3))

        def forward(self, query: Tensor) -> Tensor:
            return torch.einsum(equation, query, self.kv_b.unflatten(0, (3, 3)))

    inputs = {"query": torch.randn(3, 3, 3)}
    gm = export(Other().requires_grad_(False), "decode", inputs)
    assert lower(gm) == 0


def test_products_of_what_is_computed_are_left_alone() -> None:
    class Computed(nn.Module):
        def forward(self, query: Tensor) -> Tensor:
            return torch.einsum("thn,hnc->thc", query, query.sum(0).unsqueeze(-1))

    gm, _ = traced(Computed())
    assert lower(gm) == 0


def test_one_product_alone_is_lowered_beside_another_reader() -> None:
    class Shared(Products):
        def forward(self, query: Tensor) -> Tensor:
            key_up, _ = self.cut(self.kv_b)
            latent = torch.einsum("thn,hnc->thc", query, key_up)
            return latent + self.kv_b[0] + key_up.exp().sum()

    gm, inputs = traced(Shared(keys_then_values, ROWS, COLUMNS))
    before = evaluate(gm, inputs)
    assert lower(gm) == 1
    assert weight_dtypes([gm], {"kv_b": torch.bfloat16})["kv_b"] is torch.float32
    torch.testing.assert_close(evaluate(gm, inputs)[0], before[0])


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("form", "weights"),
    [
        ("one weight", {"kv_b"}),
        ("parts", {"kv_b"}),
        ("keys first", {"kv_b.key_up_rows", "kv_b.value_up_rows"}),
        # The values' weight has three axes.
        ("two weights", {"key", "value.permute_0_2_1"}),
    ],
)
def test_expanded_attention_reads_its_weight_in_place(
    form: str, weights: set[str], phase: str
) -> None:
    inputs = attention_inputs(phase, sparse=True, expanded=True)
    gm = export(ExpandedAttention(phase, form=form), phase, inputs)
    apply(FuseSparseFlashAttention(), gm, phase)
    before = evaluate(gm, inputs)
    count = 1 if form == "two weights" else 2
    assert lower(gm) == count
    assert [name for name in calls(gm) if name in OPS] == OPS[:count]
    assert read_weights(gm) == weights
    torch.testing.assert_close(evaluate(gm, inputs)[0], before[0], rtol=1e-5, atol=1e-5)
