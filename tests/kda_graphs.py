"""A KDA layer written another way than the eager model's, for the tests of its fusions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plain_maths import batch, metadata, positions_of

D, H, K, TAPS, RANK = 12, 2, 6, 4, 5
P = H * K


class PlainKda(nn.Module):
    """KDA by matmul projections, one gather for all taps, norms by division and an einsum recurrence.

    Args:
        form: how the convolution is written: "" (one, of all channels), "three" (q, k and v apart), "three writes"
            (and their histories written apart), "conv1d" (three calls of conv1d), "conv1d joint".
        spelling: how the rest is written, see `SPELLINGS`.
    """

    def __init__(
        self,
        phase: str,
        mistake: str = "",
        bounded: bool = True,
        form: str = "",
        spelling: str = "divide",
    ) -> None:
        super().__init__()
        self.phase, self.mistake, self.bounded = phase, mistake, bounded
        self.form, self.spelling = form, spelling
        shapes: dict[str, tuple[int, ...]] = {
            "q": (P, D), "k": (P, D), "v": (P, D), "f_a": (RANK, D), "f_b": (P, RANK),
            "b": (H, D), "g_a": (RANK, D), "g_b": (P, RANK), "a_log": (H,),
            **({f"conv_{part}": (P, 1, TAPS) for part in "qkv"} if "three" in form or form == "conv1d"
               else {"conv": (3 * P, TAPS)}),
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
        raw = [x @ w["q"].T, x @ w["k"].T, x @ w["v"].T]
        begun = context_len > (1 if self.mistake == "late start" else 0)
        slot = state_slot.clamp(min=0).long()
        history = conv_state[slot] * begun.float()[:, None, None]
        mixed = self._convolve(raw, history, query_start, context_len, state_slot, conv_state)
        sigmoid, unit, softplus, rms_norm = SPELLINGS[self.spelling]
        mixed = mixed * sigmoid(mixed)
        query, key, value = mixed.view(-1, 3, H, K).unbind(1)
        l2_eps = 1e-5 if self.mistake == "l2 eps" else 1e-6
        # Only a tiny q with a tiny core tells: the output norm hides how long q is.
        query_eps = -l2_eps if self.mistake == "negative q eps" else l2_eps
        query, key = unit(query, query_eps) / K**0.5, unit(key, l2_eps)
        if self.mistake == "unit value":
            value = unit(value, l2_eps)
        z = (((x @ w["f_a"].T) @ w["f_b"].T) + w["dt_bias"]).view(-1, H, K)
        rate = torch.exp(w["a_log"]).view(1, H, 1)
        soft = -(rate * softplus(z))
        decay = -5.0 * sigmoid(rate * z) if self.bounded else soft
        if self.mistake == "clamped gate":
            decay = soft.clamp(min=-5.0)
        beta = sigmoid(x @ w["b"].T)
        if self.phase == "prefill":
            core: Tensor = torch.ops.hybridge.kda_recurrence(
                query, key, value, decay, beta, kda_state, query_start, context_len, state_slot
            )
        else:
            memory = kda_state[slot] * begun.float()[:, None, None, None]
            core = self._step(query, key, value, decay, beta, memory, kda_state, state_slot)
        normed = rms_norm(core, w["norm"], 1e-5)
        raw_gate = (x @ w["g_a"].T) @ w["g_b"].T
        gate = raw_gate * sigmoid(raw_gate)
        if self.mistake != "silu gate":
            gate = sigmoid(raw_gate)
        out = (normed.flatten(1) * gate) @ w["o"].T
        if self.mistake == "seventh projection":
            return out, x @ w["q"].flip(0).T, x @ w["extra"].T
        return (out, core.sum()) if self.mistake == "shared core" else out

    def _convolve(
        self,
        raw: list[Tensor],
        history: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        state_slot: Tensor,
        conv_state: Tensor,
    ) -> Tensor:
        """[T, 3P]; the histories after these tokens go into the state."""
        if self.phase == "decode":
            windows = _windows_of_one(raw, history)
            kept, slot = [window[:, :, 1:] for window in windows], state_slot
        else:
            where = _places(query_start, context_len, raw[0].shape[0])
            count = query_start[1:] - query_start[:-1]
            slot = torch.where(count > 0, state_slot, -1)
            tables = [
                torch.cat([past.permute(0, 2, 1).reshape(-1, P), part])
                for past, part in zip(history.split(P, dim=1), raw, strict=True)
            ]
            windows = [table[where[0]].permute(0, 2, 1) for table in tables]
            kept = [table[where[1]].permute(0, 2, 1) for table in tables]
        if self.mistake == "swapped histories":
            kept = [kept[1], kept[0], kept[2]]
        if self.form == "three writes":
            for place, part in enumerate(kept):
                own = conv_state[:, place * P : (place + 1) * P]
                torch.ops.hybridge.state_write(own, part, slot)
        elif self.mistake == "state by index":
            conv_state[slot.long()] = torch.cat(kept, dim=1)
        else:
            torch.ops.hybridge.state_write(conv_state, torch.cat(kept, dim=1), slot)
        return self._taps(windows)

    def _taps(self, windows: list[Tensor]) -> Tensor:
        """Windows [T, P, taps] of q, k and v -> [T, 3P]."""
        conv1d = torch.nn.functional.conv1d
        if self.form == "conv1d joint":
            every = torch.cat(windows, dim=1)
            return conv1d(every, self.w["conv"].unsqueeze(1), groups=3 * P).squeeze(2)
        if not self.form:
            return torch.einsum("bcw,cw->bc", torch.cat(windows, dim=1), self.w["conv"])
        weights = [self.w[f"conv_{part}"] for part in "qkv"]
        pairs = list(zip(windows, weights, strict=True))
        if self.form == "conv1d":
            parts = [conv1d(window, weight, groups=P).flatten(1) for window, weight in pairs]
        else:
            parts = [_shifted(window, weight.squeeze(1)) for window, weight in pairs]
        return torch.cat(parts, dim=1)

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


def _windows_of_one(raw: list[Tensor], history: Tensor) -> list[Tensor]:
    parts = zip(history.split(P, dim=1), raw, strict=True)
    return [torch.cat([past, part[:, :, None]], dim=2) for past, part in parts]


def _places(query_start: Tensor, context_len: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows of a table [histories of all sequences; tokens]: under every token's taps, and the new histories."""
    row, _ = positions_of("prefill", count, query_start, context_len)
    offset = torch.arange(count) - query_start[row]
    past = (query_start.shape[0] - 1) * (TAPS - 1)
    back = torch.arange(TAPS - 1, -1, -1)
    token = torch.arange(count)[:, None] - back + past
    old = row[:, None] * (TAPS - 1) + (offset[:, None] - back + TAPS - 1).clamp(max=TAPS - 2)
    taps = torch.where(offset[:, None] >= back, token, old).clamp(min=0)
    wanted = (query_start[1:] - query_start[:-1])[:, None] + torch.arange(TAPS - 1)
    rows = torch.arange(query_start.shape[0] - 1)[:, None]
    kept_old = rows * (TAPS - 1) + wanted.clamp(max=TAPS - 2)
    kept_new = query_start[:-1, None] + wanted - (TAPS - 1) + past
    return taps, torch.where(wanted < TAPS - 1, kept_old, kept_new).clamp(min=0)


def _shifted(window: Tensor, weight: Tensor) -> Tensor:
    """A convolution as a sum of shifted products."""
    result = window[:, :, 0] * weight[:, 0]
    for tap in range(1, TAPS):
        result = result + window[:, :, tap] * weight[:, tap]
    return result


def _divided(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def _rooted(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.pow(2).sum(-1, keepdim=True).add(eps)) * x


def _by_norm(x: Tensor, eps: float) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (length.square() + eps).pow(-0.5)


def _root_mean(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _by_einsum(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean = torch.einsum("thk,thk->th", x, x) / x.shape[-1]
    return weight * x * (mean + eps).rsqrt().unsqueeze(-1)


def _whole_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


# (sigmoid, L2 norm, softplus, RMS norm)
SPELLINGS: dict[str, tuple[Any, Any, Any, Any]] = {
    "divide": (torch.sigmoid, _divided, torch.nn.functional.softplus, _root_mean),
    "exp": (
        lambda x: 1 / (1 + torch.exp(-x)), _rooted, lambda z: torch.log1p(torch.exp(z)), _by_einsum,
    ),
    "tanh": (
        lambda x: 0.5 * (torch.tanh(x / 2) + 1), _by_norm,
        lambda z: torch.logaddexp(z, torch.zeros_like(z)), _whole_norm,
    ),
    "log": (
        lambda x: torch.exp(torch.nn.functional.logsigmoid(x)), _divided,
        lambda z: -torch.log(torch.sigmoid(-z)), _whole_norm,
    ),
    "normalize": (
        torch.sigmoid, lambda x, eps: torch.nn.functional.normalize(x, dim=-1, eps=eps**0.5),
        torch.nn.functional.softplus, _root_mean,
    ),
}  # fmt: skip


class ThreeStates(nn.Module):
    """`PlainKda` with a history of its own for q, k and v each: three inputs of the graph."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.inner = PlainKda(phase, form="three")

    def forward(
        self,
        x: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        state_slot: Tensor,
        q_conv_state: Tensor,
        k_conv_state: Tensor,
        v_conv_state: Tensor,
        kda_state: Tensor,
    ) -> Any:
        states = [q_conv_state, k_conv_state, v_conv_state]
        inner, w = self.inner, self.inner.w
        weights = [w[f"conv_{part}"].squeeze(1) for part in "qkv"]
        begun = (context_len > 0).float()
        slot = state_slot.clamp(min=0).long()
        mixed = []
        for part, state, weight in zip("qkv", states, weights, strict=True):
            window = torch.cat(
                [state[slot] * begun[:, None, None], (x @ w[part].T).unsqueeze(2)], dim=2
            )
            torch.ops.hybridge.state_write(state, window[:, :, 1:], state_slot)
            mixed.append(torch.nn.functional.silu(_shifted(window, weight)).view(-1, H, K))
        query, key = _divided(mixed[0], 1e-6) / K**0.5, _divided(mixed[1], 1e-6)
        z = (((x @ w["f_a"].T) @ w["f_b"].T) + w["dt_bias"]).view(-1, H, K)
        decay = -5.0 * torch.sigmoid(torch.exp(w["a_log"]).view(1, H, 1) * z)
        beta = torch.sigmoid(x @ w["b"].T)
        memory = kda_state[slot] * begun[:, None, None, None]
        core = inner._step(query, key, mixed[2], decay, beta, memory, kda_state, state_slot)
        gate = torch.sigmoid((x @ w["g_a"].T) @ w["g_b"].T)
        return (_root_mean(core, w["norm"], 1e-5).flatten(1) * gate) @ w["o"].T


def three_state_inputs(phase: str) -> dict[str, Tensor]:
    inputs = inputs_of(phase)
    joint, state = inputs.pop("conv_state"), inputs.pop("kda_state")
    parts = zip("qkv", joint.split(P, dim=1), strict=True)
    return {**inputs, **{f"{part}_conv_state": own for part, own in parts}, "kda_state": state}


def inputs_of(phase: str) -> dict[str, Tensor]:
    example = batch(phase)
    generator = torch.Generator().manual_seed(2)
    return {
        "x": torch.randn(example.tokens, D, generator=generator),
        **metadata(phase, "query_start", "context_len", "state_slot"),
        "conv_state": torch.randn(example.slots, 3 * P, TAPS - 1, generator=generator),
        "kda_state": torch.randn(example.slots, H, K, K, generator=generator),
    }
