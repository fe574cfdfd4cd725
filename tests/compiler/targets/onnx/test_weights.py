"""Weights on the way into a graph: products, folding, and in which type each is read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from hybridge.compiler.targets.onnx.fold_weights import drop_unread_weights, fold_weights
from hybridge.compiler.targets.onnx.lower_einsum import lower_einsum
from hybridge.compiler.targets.onnx.lower_linear import lower_linear
from hybridge.compiler.targets.onnx.lower_mla_absorb import lower_mla_absorb
from hybridge.compiler.targets.onnx.storage import set_weight_dtypes, weight_dtypes
from hybridge.ir.derived import materialise
from hybridge.ir.signature import mark_weights, weight_name


class Layer(nn.Module):
    """Weights that are looked up, multiplied, cut, permuted and computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(16, 12))
        self.kv_b = nn.Parameter(torch.randn(2, 10, 5))
        self.a_log = nn.Parameter(torch.randn(2))
        self.project = nn.Parameter(torch.randn(12, 12))
        self.norm = nn.Parameter(torch.randn(12))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(ids, self.embed)
        x = torch.nn.functional.linear(x, self.project) * self.norm
        key_up, value_up = self.kv_b.split((6, 4), dim=1)
        latent = torch.einsum("thn,hnc->thc", x.unflatten(1, (2, 6)), key_up)
        output = torch.einsum("thc,hvc->thv", latent, value_up)
        return output * self.a_log.exp().unsqueeze(-1)


IDS = torch.tensor([3, 0, 15])


def lowered(model: nn.Module) -> GraphModule:
    program = torch.export.export(model, (IDS,), strict=False)
    gm = program.graph_module
    mark_weights(gm, program.graph_signature.inputs_to_parameters)
    lower_linear(gm)
    fold_weights(gm)
    lower_mla_absorb(gm)
    lower_einsum(gm)
    fold_weights(gm)
    drop_unread_weights(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def arguments(gm: GraphModule, model: nn.Module) -> list[Tensor]:
    parameters = {name: value.data for name, value in model.named_parameters()}
    recipes = gm.meta["derived_weights"]
    found = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            name = weight_name(node)
            given = IDS if name is None else materialise(name, recipes, parameters.__getitem__)
            found.append(given.to(node.meta["val"].dtype))
    return found


def test_lowering_keeps_the_values():
    model = Layer().requires_grad_(False)
    gm = lowered(model)
    torch.testing.assert_close(gm(*arguments(gm, model))[0], model(IDS))


def test_no_maths_of_weights_alone_is_left():
    gm = lowered(Layer().requires_grad_(False))
    recipes = gm.meta["derived_weights"]
    assert set(recipes) >= {
        "kv_b.slice_1_0_6",
        "kv_b.slice_1_6_10.permute_0_2_1",
        "a_log.exp.reshape_2_1",
    }
    targets = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    assert not {"aten.einsum.default", "aten.exp.default"} & set(targets)
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        assert not inputs or not all(weight_name(item) for item in inputs)


def test_types_follow_the_readers():
    model = Layer().requires_grad_(False)
    model.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    gm = lowered(model)
    stored = {name: torch.bfloat16 for name, _ in model.named_parameters()}
    dtypes = weight_dtypes([gm], stored)
    assert {name for name, dtype in dtypes.items() if dtype is torch.bfloat16} == {
        "embed",
        "project",
    }
    set_weight_dtypes(gm, dtypes)
    gm.recompile()
    torch.testing.assert_close(gm(*arguments(gm, model))[0], model(IDS))


def test_phases_agree_on_the_wider_type():
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Parameter(torch.randn(12, 12))

        def forward(self, ids: Tensor) -> Tensor:
            return ids.float().unsqueeze(1) + self.project[:3]

    graphs = [lowered(m.requires_grad_(False)) for m in (Layer(), Added())]
    dtypes = weight_dtypes(graphs, {"project": torch.bfloat16, "embed": torch.bfloat16})
    assert dtypes["project"] is torch.float32
    assert dtypes["embed"] is torch.bfloat16


@pytest.mark.parametrize("equation", ["thn,hnc->htc", "thn,nhc->thc"])
def test_other_products_are_left_alone(equation: str):
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, 3))

        def forward(self, ids: Tensor) -> Tensor:
            return torch.einsum(equation, ids.float().expand(3, 3, 3), self.weight)

    gm = lowered(Other().requires_grad_(False))
    assert "aten.einsum.default" in [str(node.target) for node in gm.graph.nodes]
