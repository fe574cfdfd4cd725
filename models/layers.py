"""The small parts that every block shares: RMSNorm, the gated MLP and its activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridge.models.config import ModelConfig


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter that a checkpoint fills; inference only."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x [..., inputs] times weight [outputs, inputs] transposed, without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = weight(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


class Embedding(nn.Module):
    """Rows of weight [count, size] at ids [T]."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = weight(count, size)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, self.weight)


class LayerNorm(nn.Module):
    """Mean-subtracted norm with weight and bias over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = weight(size), weight(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class RmsNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = weight(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta) (spec/MODELS.md 8.3)."""
    bounded = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded


class GatedMlp(nn.Module):
    """down(activation(gate x, up x)): the dense layers and the shared experts."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = Linear(config.hidden_size, width)
        self.up_proj = Linear(config.hidden_size, width)
        self.down_proj = Linear(width, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.config.activation == "silu":
            return self.down_proj(torch.nn.functional.silu(gate) * up)
        inner = situ(gate, up, self.config.situ_beta, self.config.situ_linear_beta)
        return self.down_proj(inner)
