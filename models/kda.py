"""The KDA layer in plain maths; prefill's recurrence, a data-dependent loop, is the op (spec/MODELS.md 3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from hybridge.models.batch import Batch, Packing
from hybridge.models.config import ModelConfig
from hybridge.models.layers import Linear, RmsNorm, weight
from hybridge.ops.kda import l2_normalise


class KdaAttention(nn.Module):
    """Projections, short convolution, gated delta rule, gated output norm."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        kda = config.kda
        self.config, self.kda, self.layer = config, kda, layer
        hidden, size = config.hidden_size, kda.num_heads * kda.head_dim
        self.q_proj = Linear(hidden, size)
        self.k_proj = Linear(hidden, size)
        self.v_proj = Linear(hidden, size)
        self.conv_weight = weight(3 * size, kda.conv_width)
        self.A_log = weight(kda.num_heads)
        self.dt_bias = weight(size)
        self.f_a_proj = Linear(hidden, kda.gate_rank)
        self.f_b_proj = Linear(kda.gate_rank, size)
        self.b_proj = Linear(hidden, kda.num_heads)
        if kda.full_rank_gate:
            self.g_proj = Linear(hidden, size)
        else:
            self.g_a_proj = Linear(hidden, kda.gate_rank)
            self.g_b_proj = Linear(kda.gate_rank, size)
        self.o_norm = RmsNorm(kda.head_dim, config.rms_norm_eps)
        self.o_proj = Linear(size, hidden)

    def forward(self, x: Tensor, caches: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Args:
            x: [T, D], the normed layer input.
            caches: `conv_state_{layer}` and `kda_state_{layer}`, written in place.

        Returns:
            [T, D].
        """
        conv_state = caches[f"conv_state_{self.layer}"]
        state = caches[f"kda_state_{self.layer}"]
        raw = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        if batch.packing is None:
            mixed = self._convolve_one(raw, conv_state, batch)
        else:
            mixed = self._convolve_packed(raw, conv_state, batch, batch.packing)
        query, key, value = (self._heads(part) for part in mixed.chunk(3, dim=-1))
        query = l2_normalise(query) * self.kda.head_dim**-0.5
        key = l2_normalise(key)
        beta = torch.sigmoid(self.b_proj(x))
        decay = self._log_decay(x)
        if batch.packing is None:
            core = self._recur_one(query, key, value, decay, beta, state, batch)
        else:
            core = torch.ops.hybridge.kda_recurrence(
                query,
                key,
                value,
                decay,
                beta,
                state,
                batch.query_start,
                batch.context_len,
                batch.state_slot,
            )
        gated = self.o_norm(core).flatten(1) * torch.sigmoid(self._output_gate(x))
        return self.o_proj(gated)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.kda.num_heads, self.kda.head_dim))

    def _log_decay(self, x: Tensor) -> Tensor:
        """[T, H, K] natural-log decay (spec/MODELS.md 3.1 step 6)."""
        z = self._heads(self.f_b_proj(self.f_a_proj(x)) + self.dt_bias)
        rate = self.A_log.exp().unsqueeze(-1)
        if self.kda.gate_lower_bound is None:
            return -rate * functional.softplus(z)
        return self.kda.gate_lower_bound * torch.sigmoid(rate * z)

    def _output_gate(self, x: Tensor) -> Tensor:
        if self.kda.full_rank_gate:
            return self.g_proj(x)
        return self.g_b_proj(self.g_a_proj(x))

    def _convolve_one(self, raw: Tensor, conv_state: Tensor, batch: Batch) -> Tensor:
        """One token a row: [B, 3P] -> [B, 3P]."""
        window = torch.cat([started(conv_state, batch), raw.unsqueeze(-1)], dim=-1)
        torch.ops.hybridge.state_write(conv_state, window[..., 1:], batch.state_slot)
        return functional.silu((window * self.conv_weight).sum(-1))

    def _convolve_packed(
        self, raw: Tensor, conv_state: Tensor, batch: Batch, packing: Packing
    ) -> Tensor:
        """Packed sequences, [T, 3P] -> [T, 3P]: a tap reaches a token or a sequence's history."""
        history = started(conv_state, batch).transpose(1, 2).flatten(0, 1)
        rows = torch.cat([history, raw])
        kept = rows[packing.kept].transpose(1, 2)
        torch.ops.hybridge.state_write(conv_state, kept, packing.kept_slot)
        return functional.silu((rows[packing.window] * self.conv_weight.T).sum(1))

    def _recur_one(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor,
        batch: Batch,
    ) -> Tensor:
        """One step of the gated delta rule a row (spec/MODELS.md 3.1 step 7)."""
        memory = started(state, batch) * decay.exp().unsqueeze(-1)
        predicted = (memory * key.unsqueeze(-1)).sum(-2)
        change = beta.unsqueeze(-1) * (value - predicted)
        memory = memory + key.unsqueeze(-1) * change.unsqueeze(-2)
        torch.ops.hybridge.state_write(state, memory, batch.state_slot)
        return (memory * query.unsqueeze(-1)).sum(-2)


def started(state: Tensor, batch: Batch) -> Tensor:
    """Each row's state, zero for a sequence that starts: state [slots, ...] -> [B, ...]."""
    rows = state[batch.state_slot.clamp(min=0)]
    begun = (batch.context_len > 0).view(-1, *(1,) * (rows.dim() - 1))
    return torch.where(begun, rows, 0.0)
