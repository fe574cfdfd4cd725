"""How far a device's numbers may be from the eager model's, measured on the eager model.

A lowered graph keeps matrices, caches and most activations in bf16 (and, for MXFP4 experts on 950,
expert inputs in MXFP8), where the eager model computes in fp32. Rounding the eager model at the same
places shows what that is worth on this model and these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridge.artifacts.golden import GoldenCase
from hybridge.compiler.targets.ascend.npu_reference.moe import dynamic_mx_quant, from_mx
from hybridge.compiler.targets.ascend.own_operators import ASCEND_950
from hybridge.models.model import HybridModel
from hybridge.models.moe import Experts
from hybridge.models.session import evaluate

# Sums in another order, and values that no module of the eager model returns, are rounded too.
MARGIN = 4.0

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DeviceTolerance:
    """What a device's logits may differ by.

    Rounding may tip a choice of an expert or of a cached token, and then all logits of that position
    change, as they do in any other arithmetic. So each logit has a wide bound, and the median over
    positions a narrow one, which a wrong operator, layout or weight breaks.

    Attributes:
        largest: bound of |got - want| for each logit.
        median: bound of the median over positions of `position_errors`.
    """

    largest: float
    median: float


def position_errors(
    got: npt.NDArray[np.float32], want: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """[L]: RMS of a position's differences over RMS of its expected logits [L, vocab]."""
    difference = got.astype(np.float64) - want
    scale = np.square(want.astype(np.float64)).mean(-1)
    errors: npt.NDArray[np.float64] = np.sqrt(np.square(difference).mean(-1) / scale)
    return errors


def device_tolerance(model: HybridModel, case: GoldenCase, soc: str) -> DeviceTolerance:
    """What the device's types explain, with a `MARGIN`.

    Args:
        model: the eager model in fp32; left as it is found.
        case: with the exact logits of all its tokens.
        soc: the target.
    """
    packed = soc == ASCEND_950
    with _rounded_weights(model), _rounded_activations(model, packed):
        rounded = evaluate(model, torch.from_numpy(case.token_ids)).to(torch.float32).numpy()
    assert case.logits is not None
    return DeviceTolerance(
        largest=MARGIN * float(np.abs(rounded - case.logits).max()),
        median=MARGIN * float(np.median(position_errors(rounded, case.logits))),
    )


def to_bf16(x: Tensor) -> Tensor:
    """Rounded to bf16; the dtype stays."""
    return x.to(torch.bfloat16).to(x.dtype)


def to_mxfp8(x: Tensor) -> Tensor:
    """Rounded to MXFP8 in blocks of 32 of the last axis; the dtype stays."""
    return from_mx(*dynamic_mx_quant(to_bf16(x))).to(x.dtype)


@contextmanager
def _rounded_weights(model: HybridModel) -> Iterator[None]:
    exact: list[tuple[torch.nn.Parameter, Tensor]] = []
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.dtype == torch.float32:
            exact.append((parameter, parameter.data))
            parameter.data = to_bf16(parameter.data)
    try:
        yield
    finally:
        for parameter, value in exact:
            parameter.data = value


@contextmanager
def _rounded_activations(model: HybridModel, packed_experts: bool) -> Iterator[None]:
    handles = []
    for module in model.modules():
        if isinstance(module, Experts):
            narrow = to_mxfp8 if packed_experts and _is_packed(module) else to_bf16
            handles.append(module.register_forward_pre_hook(_round_first(narrow)))
        if module is not model:
            handles.append(module.register_forward_hook(_round_result))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_packed(experts: Experts) -> bool:
    return any(parameter.dtype == torch.uint8 for parameter in experts.parameters())


def _round_first(narrow: Rounding) -> Callable[..., Any]:
    def hook(_module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (narrow(inputs[0]), *inputs[1:])

    return hook


def _round_result(_module: torch.nn.Module, _inputs: Any, result: Any) -> Any:
    floating = isinstance(result, Tensor) and result.is_floating_point()
    return to_bf16(result) if floating else result
