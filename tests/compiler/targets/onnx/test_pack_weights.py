"""Which weights are packed, and why the others are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from hybridge.compiler.targets.onnx.lower_linear import lower_linear
from hybridge.compiler.targets.onnx.pack_weights import choose_packed, set_packed
from hybridge.compiler.targets.onnx.storage import set_weight_dtypes, weight_dtypes
from hybridge.ir.signature import mark_weights, weight_name
from hybridge.ops.packed import unpack
from hybridge.ops.packed_rows import pack_rows

IDS = torch.tensor([3, 0, 15])


class Layers(nn.Module):
    """Products of all kinds, a lookup, and a pair of expert weights."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"embed": (16, 256), "up": (512, 256), "down": (256, 512), "narrow": (40, 128)}
        shapes |= {"odd": (256, 40), "tied": (16, 256), "gate_up": (3, 512, 256)}
        shapes |= {"expert_down": (3, 256, 256)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape).bfloat16().float() / shape[-1]))

    def forward(self, ids: Tensor) -> Tensor:
        linear = torch.nn.functional.linear
        x = torch.nn.functional.embedding(ids, self.embed)
        x = x + torch.nn.functional.embedding(ids, self.tied)
        x = linear(linear(x, self.up), self.down)
        x = x + linear(linear(x[:, :128], self.narrow), self.odd)
        expert_ids = ids.to(torch.int32).unsqueeze(1) % 3
        x = x + torch.ops.hybridge.moe_experts(
            x, expert_ids, torch.ones(3, 1), self.gate_up, self.expert_down,
            activation="silu", beta=1.0, linear_beta=None,
        )  # fmt: skip
        return linear(x, self.tied)


def lowered(model: nn.Module) -> GraphModule:
    program = torch.export.export(model, (IDS,), strict=False)
    gm = program.graph_module
    mark_weights(gm, program.graph_signature.inputs_to_parameters)
    lower_linear(gm)
    return gm


@pytest.fixture
def model() -> nn.Module:
    return Layers().requires_grad_(False)


def dtypes_of(model: nn.Module, gm: GraphModule) -> dict[str, torch.dtype]:
    return weight_dtypes([gm], {name: torch.bfloat16 for name, _ in model.named_parameters()})


def choose(model: nn.Module, gm: GraphModule, misfit: str = "") -> dict[str, str | None]:
    asked = []

    def check(name, shape, recipes):
        asked.append(name)
        return "does not fit" if name == misfit else None

    reasons = choose_packed([gm], dtypes_of(model, gm), check)
    assert set(asked) == {"up", "down", "gate_up", "expert_down"}, "others need no look at values"
    return reasons


def test_products_are_packed_and_near_misses_say_why(model):
    reasons = choose(model, lowered(model))
    assert {name for name, reason in reasons.items() if reason is None} == {
        "up", "down", "gate_up", "expert_down",
    }  # fmt: skip
    assert "embedding reads it, which takes no packed rows" in reasons["embed"]
    assert "reads it, which takes no packed rows" in reasons["tied"]
    assert reasons["narrow"] == "its rows of 128 columns are too short to gain"
    assert reasons["odd"] == "its rows have 40 columns, no multiple of 128 up to 65536"


@pytest.mark.parametrize(
    ("misfit", "other"), [("gate_up", "expert_down"), ("expert_down", "gate_up")]
)
def test_a_reader_takes_all_its_weights_packed_or_none(model, misfit, other):
    reasons = choose(model, lowered(model), misfit)
    assert reasons[misfit] == "does not fit"
    assert "reads it beside" in str(reasons[other])
    assert reasons["up"] is None


def test_packing_keeps_the_values(model):
    gm = lowered(model)
    reasons = choose(model, gm)
    packed = frozenset(name for name, reason in reasons.items() if reason is None)
    set_weight_dtypes(gm, dtypes_of(model, gm))
    set_packed(gm, packed)
    gm.graph.lint()
    gm.recompile()
    arguments = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            name = weight_name(node)
            value = IDS if name is None else model.get_parameter(name).to(torch.bfloat16)
            if name in packed:
                bits = value.view(torch.uint16)
                value = torch.from_numpy(pack_rows(bits.numpy()))
                assert value.shape == node.meta["val"].shape
                assert torch.equal(unpack(value).view(torch.uint16), bits)
            arguments.append(value.to(node.meta["val"].dtype) if name else value)
    torch.testing.assert_close(gm(*arguments)[0], model(IDS))
