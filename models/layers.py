"""The small parts that every block shares: RMSNorm, the gated MLP and its activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridge.models.config import ModelConfig


class RmsNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def projection(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer without bias whose weight is left unset."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)
    return layer.requires_grad_(False)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta) (spec/MODELS.md 8.3)."""
    bounded = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded


class GatedMlp(nn.Module):
    """down(activation(gate x, up x)): the dense layers and the shared experts."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = projection(config.hidden_size, width)
        self.up_proj = projection(config.hidden_size, width)
        self.down_proj = projection(width, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.config.activation == "silu":
            return self.down_proj(torch.nn.functional.silu(gate) * up)
        inner = situ(gate, up, self.config.situ_beta, self.config.situ_linear_beta)
        return self.down_proj(inner)
