"""A KDA layer written another way than the eager model's, for the tests of its fusions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plain_maths import batch, metadata, positions_of

D, H, K, TAPS, RANK = 12, 2, 6, 4, 5
P = H * K


class PlainKda(nn.Module):
    """KDA by matmul projections, one gather for all taps, norms by division and an einsum recurrence."""

    def __init__(self, phase: str, mistake: str = "", bounded: bool = True) -> None:
        super().__init__()
        self.phase, self.mistake, self.bounded = phase, mistake, bounded
        shapes: dict[str, tuple[int, ...]] = {
            "q": (P, D), "k": (P, D), "v": (P, D), "f_a": (RANK, D), "f_b": (P, RANK),
            "b": (H, D), "g_a": (RANK, D), "g_b": (P, RANK), "conv": (3 * P, TAPS), "a_log": (H,),
            "dt_bias": (P,), "norm": (K,), "o": (D, P), "extra": (3, D),
        }  # fmt: skip
        generator = torch.Generator().manual_seed(3)
        self.w = nn.ParameterDict(
            {
                name: nn.Parameter(torch.randn(shape, generator=generator) * 0.5)
                for name, shape in shapes.items()
            }
        )

    def forward(
        self,
        x: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        state_slot: Tensor,
        conv_state: Tensor,
        kda_state: Tensor,
    ) -> Any:
        w = self.w
        raw = torch.cat([x @ w["q"].T, x @ w["k"].T, x @ w["v"].T], dim=1)
        begun = context_len > (1 if self.mistake == "late start" else 0)
        slot = state_slot.clamp(min=0).long()
        history = conv_state[slot] * begun.float()[:, None, None]
        mixed = self._convolve(raw, history, query_start, context_len, state_slot, conv_state)
        mixed = mixed * torch.sigmoid(mixed)
        query, key, value = mixed.view(-1, 3, H, K).unbind(1)
        l2_eps = 1e-5 if self.mistake == "l2 eps" else 1e-6
        query = query / torch.sqrt((query * query).sum(-1, keepdim=True) + l2_eps) / K**0.5
        key = key / torch.sqrt((key * key).sum(-1, keepdim=True) + l2_eps)
        z = (((x @ w["f_a"].T) @ w["f_b"].T) + w["dt_bias"]).view(-1, H, K)
        rate = torch.exp(w["a_log"]).view(1, H, 1)
        soft = -(rate * torch.nn.functional.softplus(z))
        decay = -5.0 * torch.sigmoid(rate * z) if self.bounded else soft
        if self.mistake == "clamped gate":
            decay = soft.clamp(min=-5.0)
        beta = torch.sigmoid(x @ w["b"].T)
        if self.phase == "prefill":
            core: Tensor = torch.ops.hybridge.kda_recurrence(
                query, key, value, decay, beta, kda_state, query_start, context_len, state_slot
            )
        else:
            memory = kda_state[slot] * begun.float()[:, None, None, None]
            core = self._step(query, key, value, decay, beta, memory, kda_state, state_slot)
        variance = core.pow(2).mean(-1, keepdim=True)
        normed = core / torch.sqrt(variance + 1e-5) * w["norm"]
        raw_gate = (x @ w["g_a"].T) @ w["g_b"].T
        gate = raw_gate * torch.sigmoid(raw_gate)
        if self.mistake != "silu gate":
            gate = torch.sigmoid(raw_gate)
        out = (normed.flatten(1) * gate) @ w["o"].T
        if self.mistake == "seventh projection":
            return out, x @ w["q"].flip(0).T, x @ w["extra"].T
        return (out, core.sum()) if self.mistake == "shared core" else out

    def _convolve(
        self,
        raw: Tensor,
        history: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        state_slot: Tensor,
        conv_state: Tensor,
    ) -> Tensor:
        weight = self.w["conv"]
        if self.phase == "decode":
            window = torch.cat([history, raw[:, :, None]], dim=2)
            torch.ops.hybridge.state_write(conv_state, window[:, :, 1:], state_slot)
            return torch.einsum("bcw,cw->bc", window, weight)
        row, position = positions_of("prefill", raw.shape[0], query_start, context_len)
        offset = torch.arange(raw.shape[0]) - query_start[row]
        # One table of every row that a tap can reach: the histories of all sequences, then the batch.
        past = history.permute(0, 2, 1).reshape(-1, 3 * P)
        table = torch.cat([past, raw])
        back = torch.arange(TAPS - 1, -1, -1)
        inside = offset[:, None] >= back
        token = torch.arange(raw.shape[0])[:, None] - back + past.shape[0]
        old = row[:, None] * (TAPS - 1) + (offset[:, None] - back + TAPS - 1).clamp(max=TAPS - 2)
        place = torch.where(inside, token, old)
        taps = table[place.clamp(min=0)]
        count = query_start[1:] - query_start[:-1]
        wanted = count[:, None] + torch.arange(TAPS - 1)
        kept_old = torch.arange(count.shape[0])[:, None] * (TAPS - 1) + wanted.clamp(max=TAPS - 2)
        kept_new = query_start[:-1, None] + wanted - (TAPS - 1) + past.shape[0]
        kept = table[torch.where(wanted < TAPS - 1, kept_old, kept_new).clamp(min=0)]
        slot = torch.where(count > 0, state_slot, -1)
        torch.ops.hybridge.state_write(conv_state, kept.permute(0, 2, 1), slot)
        del position
        return (taps * weight.T).sum(1)

    def _step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        memory: Tensor,
        kda_state: Tensor,
        state_slot: Tensor,
    ) -> Tensor:
        decayed = memory * torch.exp(decay).unsqueeze(3)
        seen = memory if self.mistake == "before decay" else decayed
        change = (value - torch.einsum("bhkv,bhk->bhv", seen, key)) * beta[:, :, None]
        after = decayed + torch.einsum("bhk,bhv->bhkv", key, change)
        torch.ops.hybridge.state_write(kda_state, after, state_slot)
        if self.mistake == "written twice":
            kda_state.mul_(0.5)
        return torch.einsum("bhkv,bhk->bhv", after, query)


def inputs_of(phase: str) -> dict[str, Tensor]:
    example = batch(phase)
    generator = torch.Generator().manual_seed(2)
    return {
        "x": torch.randn(example.tokens, D, generator=generator),
        **metadata(phase, "query_start", "context_len", "state_slot"),
        "conv_state": torch.randn(example.slots, 3 * P, TAPS - 1, generator=generator),
        "kda_state": torch.randn(example.slots, H, K, K, generator=generator),
    }
