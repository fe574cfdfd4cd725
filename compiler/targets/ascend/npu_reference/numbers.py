"""What the references share: how wide they accumulate."""

from __future__ import annotations

import torch
from torch import Tensor

L2_EPS = 1e-6


def wide(x: Tensor) -> Tensor:
    """At least fp32: what accumulates."""
    return x if x.dtype == torch.float64 else x.float()
