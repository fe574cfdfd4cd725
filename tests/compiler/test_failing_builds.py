"""A change of the model's maths that breaks a fusion fails the build, with the first refusing site and its rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridge.artifacts.errors import CompileError
from hybridge.compiler import compile_model
from hybridge.models import attention, indexer, kda, layers, model, moe
from hybridge.models.presets import preset, scale

Change = Callable[[pytest.MonkeyPatch], None]


def unrectified(patch: pytest.MonkeyPatch) -> None:
    """The indexer scores keys without relu."""
    patch.setattr(indexer.torch, "relu", lambda x: x)


def strict(patch: pytest.MonkeyPatch) -> None:
    """A token does not see its own position."""
    own = indexer.select_positions
    patch.setattr(indexer, "select_positions", lambda score, last, k: own(score, last - 1, k))


def scaled_values(patch: pytest.MonkeyPatch) -> None:
    """Attention's result gets one more factor, before the mask that clears empty rows."""

    def masked(
        query: Tensor, rows: Tensor, mask: Tensor, scale: float, value_dim: int, softmax: nn.Softmax
    ) -> Tensor:
        admitted = mask.unsqueeze(1)
        scores = scale * (query @ rows.transpose(-1, -2))
        weights = softmax(scores.masked_fill(~admitted, float("-inf"))) * 1.25
        return (weights.masked_fill(~admitted, 0.0) @ rows[..., :value_dim]).relu()

    patch.setattr(attention, "masked_attention", masked)


def mixed_over_tokens(patch: pytest.MonkeyPatch) -> None:
    """AttnRes takes its softmax over another axis."""

    def mix(sources: list[Tensor], norm: Any, query: Tensor) -> Tensor:
        if len(sources) == 1:
            return sources[0]
        values = torch.stack(list(sources))
        weights = torch.softmax((norm(values) * query).sum(-1), dim=1)
        return (weights.unsqueeze(-1) * values).sum(0)

    patch.setattr(model, "mix", mix)


def clamped_gate(patch: pytest.MonkeyPatch) -> None:
    """The bounded decay gate becomes a clamp, another activation."""

    def log_decay(self: Any, x: Tensor) -> Tensor:
        z = self._heads(self.f_b_proj(self.f_a_proj(x)) + self.dt_bias)
        return (-self.A_log.exp().unsqueeze(-1) * kda.functional.softplus(z)).clamp(min=-5.0)

    patch.setattr(kda.KdaAttention, "_log_decay", log_decay)


def other_eps(patch: pytest.MonkeyPatch) -> None:
    """The L2 norm's constant becomes that of the RMS norms."""
    patch.setattr(
        kda,
        "l2_normalise",
        lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-5),
    )


def other_input(patch: pytest.MonkeyPatch) -> None:
    """The output gate projects something else than the layer's input."""
    patch.setattr(kda.KdaAttention, "_output_gate", lambda self, x: self.g_proj(x * 0.5))


def leaking_bias(patch: pytest.MonkeyPatch) -> None:
    """The router's bias takes part in the weights."""

    def route(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(torch.nn.functional.linear(x, self.weight))
        scores = scores + self.e_score_correction_bias
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
        chosen = order[:, : self.moe.top_k]
        return chosen.to(torch.int32), scores.gather(1, chosen)

    patch.setattr(moe.Router, "forward", route)


def summed_norm(patch: pytest.MonkeyPatch) -> None:
    """RMS norms divide by a root of a sum."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps) * self.weight

    patch.setattr(layers.RmsNorm, "forward", forward)


def bounded_sigmoid(patch: pytest.MonkeyPatch) -> None:
    """SiTU's sigmoid takes the bounded gate."""

    def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        inner = beta * torch.tanh(gate / beta)
        return inner * torch.sigmoid(inner) * (linear_beta * torch.tanh(up / linear_beta))

    patch.setattr(layers, "situ", situ)


def read_before_norm(patch: pytest.MonkeyPatch) -> None:
    """A feed-forward sublayer adds what AttnRes mixed, before its norm, to its result."""
    own = model.DecoderLayer.feed_forward
    patch.setattr(model.DecoderLayer, "feed_forward", lambda self, h: own(self, h) + h)


K31, LINEAR = "kimi-k3.1-tiny", "kimi-linear-tiny"
GATES = "convolution, norms, gates and delta rule as in the definition"
CASES: tuple[tuple[Change, str, str, str, str], ...] = (
    # Without relu, or with it after the weights: on a small batch both may choose the same.
    (unrectified, K31, "decode", "fuse_lightning_indexer", "relu comes before the head weights"),
    (strict, K31, "prefill", "fuse_lightning_indexer", "a token sees its own position"),
    (scaled_values, K31, "decode", "fuse_sparse_flash_attention", "out is softmax(scale"),
    (scaled_values, LINEAR, "prefill", "fuse_sparse_flash_attention", "out is softmax(scale"),
    (mixed_over_tokens, K31, "decode", "fuse_attn_res", "h is sum_i softmax_i"),
    (read_before_norm, K31, "prefill", "fuse_attn_res_norm", "shared intermediate"),
    (clamped_gate, K31, "prefill", "fuse_kda", GATES),
    (other_eps, LINEAR, "decode", "fuse_kda", "1e-6 is added inside the root of the L2 norms"),
    (other_input, K31, "decode", "fuse_kda", "one input"),
    (other_input, K31, "prefill", "merge_projections", "one output gate"),
    (leaking_bias, K31, "decode", "fuse_moe", "experts by descending sigmoid(logit) + bias"),
    (summed_norm, LINEAR, "prefill", "fuse_rms_norm", "x * rsqrt(mean(x^2) + eps) * weight"),
    (bounded_sigmoid, K31, "prefill", "fuse_situ", "beta tanh(g / beta) sigmoid(g)"),
)


@pytest.mark.parametrize(
    ("change", "name", "phase", "step", "rule"),
    CASES,
    ids=[f"{case[0].__name__}-{case[2]}-{case[1]}" for case in CASES],
)
def test_a_changed_model_does_not_compile(
    change: Change,
    name: str,
    phase: str,
    step: str,
    rule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(scale(preset(name), layers=4).to_published()))
    change(monkeypatch)
    with pytest.raises(CompileError) as caught:
        compile_model(config, tmp_path / "out", weights="none", phases=[phase])
    message = str(caught.value)
    assert message.startswith(f"{step}: ")
    assert f"expected sites match in the {phase} graph" in message
    assert f"refused by the rule '{rule}" in message
    assert caught.value.remedy
    assert not (tmp_path / "out").exists()


def test_the_first_site_that_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(scale(preset(K31), layers=4).to_published()))
    read_before_norm(monkeypatch)
    with pytest.raises(CompileError) as caught:
        compile_model(config, tmp_path / "out", weights="none", phases=["decode"])
    # Three of seven still fuse: what attention mixes is read by its norm alone.
    assert (
        "3 of 7 expected sites match in the decode graph; attn_res_update_default refused by"
        in str(caught.value)
    )
    assert "attn_res_update_default is used outside of the region, by add" in str(caught.value)
