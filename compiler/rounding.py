"""How far rounded activations move the eager model's logits: the tolerance of an artifact that allows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from hybridge.artifacts.golden import GoldenCase
from hybridge.models.checkpoint import Checkpoint
from hybridge.models.config import ModelConfig
from hybridge.models.indexer import Indexer
from hybridge.models.layers import Linear
from hybridge.models.mla import MlaAttention
from hybridge.models.model import HybridModel
from hybridge.models.session import EagerSession
from hybridge.models.tensor_names import weight_sources
from hybridge.ops.moe import experts_mxfp4_reference, experts_reference

# One draw may miss a choice of an expert that another rounding tips.
DRAWS = 8
# On the golden checkpoints no draw of the largest difference passed twice the largest of eight others;
# a median, over as few as eight positions, passed that in up to 3% of draws.
LARGEST_MARGIN, MEDIAN_MARGIN = 2.0, 4.0

Rounding = Callable[[Tensor], Tensor]


class StochasticRounding:
    """fp32 to a neighbouring bf16 value, the nearer one more often, so that the mean stays; fixed draws."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, x: Tensor) -> Tensor:
        """x of any shape, fp32 -> the same, with the values of bf16."""
        bits = x.contiguous().view(torch.int32)
        noise = torch.randint(0, 1 << 16, x.shape, generator=self.generator, dtype=torch.int32)
        rounded: Tensor = ((bits + noise) & -(1 << 16)).view(torch.float32)
        return torch.where(x.isfinite(), rounded, x)


def narrow_weights(checkpoint: Checkpoint, config: ModelConfig) -> frozenset[str]:
    """Names of the weights whose products may round: those that the checkpoint stores in less than fp32."""
    return frozenset(
        source.name
        for source in weight_sources(config)
        if checkpoint.weight_dtype(source) is not torch.float32
    )


def with_rounding(
    model: HybridModel, case: GoldenCase, narrow: Set[str], atol: float
) -> tuple[GoldenCase, float]:
    """A case for an artifact that rounds activations.

    Rounding may tip the choice of an expert or a key. All logits of that position, and those that follow from
    it, then move by as much as a fault would move them. So each logit has a wide bound and the median over a
    phase's positions, which no single choice moves, a narrow one.

    Args:
        model: the eager model in fp32; left as it is found.
        case: its tokens and exact logits.
        narrow: see `narrow_weights`.
        atol: what the order of sums explains.

    Returns:
        The case with `median_atol`, and the bound for each logit.
    """
    assert case.logits is not None
    moved = _moved(model, case, narrow)
    medians = np.stack([case.phase_medians(draw) for draw in moved]).max(0)
    bounds = (atol + MEDIAN_MARGIN * medians).astype(np.float32)
    # A rounded activation may tip a choice between two tokens that are nearly as likely.
    bounded = replace(case, median_atol=bounds, greedy_tokens=None)
    return bounded, atol + LARGEST_MARGIN * float(moved.max())


def _moved(model: HybridModel, case: GoldenCase, narrow: Set[str]) -> np.ndarray[Any, Any]:
    """[DRAWS, T]: the largest difference of a logit; the draws are the rows of one batch."""
    ids = torch.from_numpy(case.token_ids)
    session = EagerSession(model, rows=DRAWS, max_context=len(ids))
    with rounded_activations(model, narrow, StochasticRounding()):
        logits = session.step([ids] * DRAWS).view(DRAWS, len(ids), -1)
    assert case.logits is not None
    return np.stack([np.abs(draw - case.logits).max(-1) for draw in logits.numpy()])


@contextmanager
def rounded_activations(model: HybridModel, narrow: Set[str], rounding: Rounding) -> Iterator[None]:
    """Round every value of the eager model that a kernel may round.

    With bf16 caches (kernels/math/write_rows, attention, lightning_indexer):
        rows of the latent and the indexer cache; attention's queries and probabilities; the indexer's queries.
    With narrow weights (kernels/math/linear, mla_absorb, moe_experts, kda's projections):
        inputs of linear and of the absorbed products; inputs and hidden activations of experts.
    Nothing else is: not the router's scores, the recurrence, norms, sums or logits.

    Args:
        model: hooked meanwhile. narrow: see `narrow_weights`. rounding: called once for each value.
    """
    with ExitStack() as stack:
        for name, module in model.named_modules():
            for handle in _hooks(name, module, narrow, rounding):
                stack.callback(handle.remove)
        if any(".experts." in name for name in narrow):
            stack.enter_context(_RoundedExperts(rounding))
        yield


def _hooks(
    name: str, module: nn.Module, narrow: Set[str], rounding: Rounding
) -> Iterator[RemovableHandle]:
    if isinstance(module, Linear) and f"{name}.weight" in narrow:
        yield _round_input(module, rounding)
    if isinstance(module, Indexer):
        yield _round_result(module.wq_b, rounding)
        yield _round_result(module.k_norm, rounding)
    if isinstance(module, MlaAttention):
        yield from _attention_hooks(name, module, narrow, rounding)


def _attention_hooks(
    name: str, module: MlaAttention, narrow: Set[str], rounding: Rounding
) -> Iterator[RemovableHandle]:
    config = module.config
    yield _round_result(module.kv_a_layernorm, rounding)
    yield _round_result(module.kv_a_proj_with_mqa, _tail(rounding, config.qk_rope_head_dim))
    yield _round_result(module.absorb_query, rounding)
    query = module.q_proj if config.q_lora_rank is None else module.q_b_proj
    size = config.qk_nope_head_dim + config.qk_rope_head_dim
    yield _round_result(query, _tail(rounding, config.qk_rope_head_dim, size))
    yield _round_result(module.softmax, rounding)
    if f"{name}.kv_b_proj.weight" in narrow:
        yield _round_input(module.absorb_query, rounding)
        yield _round_input(module.expand_value, rounding)


def _tail(rounding: Rounding, count: int, size: int | None = None) -> Rounding:
    """Rounds the last `count` of each `size` elements of the last axis (default: of all of it)."""

    def rounded(x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, size or x.shape[-1]))
        kept, rest = groups.split((groups.shape[-1] - count, count), dim=-1)
        return torch.cat([kept, rounding(rest)], dim=-1).flatten(-2)

    return rounded


def _round_input(module: nn.Module, rounding: Rounding) -> RemovableHandle:
    return module.register_forward_pre_hook(
        lambda _module, inputs: (rounding(inputs[0]), *inputs[1:])
    )


def _round_result(module: nn.Module, rounding: Rounding) -> RemovableHandle:
    return module.register_forward_hook(lambda _module, _inputs, result: rounding(result))


class _RoundedExperts(TorchDispatchMode):
    """Experts that round their left sides: hidden activations are inside the op, where no hook sees them."""

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounding = rounding
        self.references: dict[Any, Callable[..., Tensor]] = {
            torch.ops.hybridge.moe_experts.default: experts_reference,
            torch.ops.hybridge.moe_experts_mxfp4.default: experts_mxfp4_reference,
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        reference = self.references.get(func)
        if reference is None:
            return func(*args, **(kwargs or {}))
        return reference(self.rounding(args[0]), *args[1:], **kwargs, round_hidden=self.rounding)
