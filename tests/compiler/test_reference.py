"""The eager model as the measure of what rounded activations may do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridge.compiler.reference import golden_case, rounding_effect
from hybridge.models.layers import Linear
from hybridge.models.mla import HeadProduct
from hybridge.models.model import HybridModel
from hybridge.models.moe import Experts
from hybridge.models.presets import preset, scale


def test_every_product_meets_rounded_activations_and_the_model_stays_as_it_was() -> None:
    torch.manual_seed(0)
    model = HybridModel(scale(preset("kimi-k3.1-tiny"), layers=4)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    case = golden_case(model, prompt=7, decoded=1)
    met: dict[type[nn.Module], bool] = {}

    def look(module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        x = inputs[0]
        rounded = torch.equal(x, x.to(torch.bfloat16).to(x.dtype))
        met[type(module)] = met.get(type(module), True) and rounded

    for module in model.modules():
        if isinstance(module, Linear | Experts | HeadProduct):
            module.register_forward_hook(look)
    assert rounding_effect(model, case) > 0
    assert met == dict.fromkeys((Linear, Experts, HeadProduct), True)
    met.clear()
    again = golden_case(model, prompt=7, decoded=1)
    assert torch.equal(torch.from_numpy(again.logits), torch.from_numpy(case.logits))
    assert not any(met.values())
