"""The (latent) mixture of experts; the experts' data-dependent dispatch is the op (spec/MODELS.md 8)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridge.models.config import MXFP4_GROUP, ModelConfig
from hybridge.models.layers import GatedMlp, Linear, RmsNorm, weight
from hybridge.ops.moe import RENORMALISE_EPS


class Router(nn.Module):
    """Sigmoid scores; the bias takes part in the choice only (spec/MODELS.md 8.1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.moe = config.moe
        experts = self.moe.num_experts
        self.weight = weight(experts, config.hidden_size)
        self.e_score_correction_bias = weight(experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> expert ids [T, k] int32 and weights [T, k]; ties go to the lowest id."""
        scores = torch.sigmoid(torch.nn.functional.linear(x, self.weight))
        biased = scores + self.e_score_correction_bias
        order = torch.sort(biased, dim=-1, descending=True, stable=True).indices
        chosen = order[:, : self.moe.top_k]
        weights = scores.gather(1, chosen)
        if self.moe.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + RENORMALISE_EPS)
        return chosen.to(torch.int32), weights * self.moe.routed_scaling_factor


class Experts(nn.Module):
    """The routed experts' weights, stacked, in full or packed precision."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        moe = config.moe
        size = moe.latent_size or config.hidden_size
        if config.quantization is None:
            self.gate_up = weight(moe.num_experts, 2 * moe.intermediate_size, size)
            self.down = weight(moe.num_experts, size, moe.intermediate_size)
            return
        self.gate_up_packed = packed(moe.num_experts, 2 * moe.intermediate_size, size // 2)
        self.gate_up_scale = packed(moe.num_experts, 2 * moe.intermediate_size, size // MXFP4_GROUP)
        self.down_packed = packed(moe.num_experts, size, moe.intermediate_size // 2)
        self.down_scale = packed(moe.num_experts, size, moe.intermediate_size // MXFP4_GROUP)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """x [T, L] -> [T, L], the weighted sum of the chosen experts."""
        attributes = {
            "activation": self.config.activation,
            "beta": self.config.situ_beta,
            "linear_beta": self.config.situ_linear_beta,
        }
        if self.config.quantization is None:
            return torch.ops.hybridge.moe_experts(
                x, expert_ids, expert_weights, self.gate_up, self.down, **attributes
            )
        return torch.ops.hybridge.moe_experts_mxfp4(
            x,
            expert_ids,
            expert_weights,
            self.gate_up_packed,
            self.gate_up_scale,
            self.down_packed,
            self.down_scale,
            **attributes,
        )


class MoeBlock(nn.Module):
    """Router on the full hidden state, experts on the latent one, a shared expert beside them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        self.latent = moe.latent_size is not None
        self.gate = Router(config)
        self.experts = Experts(config)
        if moe.latent_size is not None:
            self.routed_expert_down_proj = Linear(config.hidden_size, moe.latent_size)
            self.routed_expert_up_proj = Linear(moe.latent_size, config.hidden_size)
            if moe.latent_norm:
                self.routed_expert_norm = RmsNorm(moe.latent_size, config.rms_norm_eps)
        if moe.num_shared:
            self.shared_experts = GatedMlp(config, moe.num_shared * moe.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D], the normed sublayer input -> [T, D]."""
        expert_ids, expert_weights = self.gate(x)
        latent = self.routed_expert_down_proj(x) if self.latent else x
        routed = self.experts(latent, expert_ids, expert_weights)
        if hasattr(self, "routed_expert_norm"):
            routed = self.routed_expert_norm(routed)
        if self.latent:
            routed = self.routed_expert_up_proj(routed)
        return routed + self.shared_experts(x) if hasattr(self, "shared_experts") else routed


def packed(*shape: int) -> nn.Parameter:
    """A parameter of packed MXFP4 codes or scales, one byte each."""
    return weight(*shape, dtype=torch.uint8)
