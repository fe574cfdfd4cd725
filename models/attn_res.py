"""Attention Residuals in plain maths: a softmax over depth (spec/MODELS.md 6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridge.models.layers import RmsNorm


def mix(sources: Sequence[Tensor], norm: RmsNorm, pseudo_query: Tensor) -> Tensor:
    """Weigh the sources, per token, by a softmax of their normed values against a learned query.

    The keys are normed, the values are raw. One source is returned as it is.

    Args:
        sources: each [T, D]. norm: of the keys. pseudo_query: [1, D].

    Returns:
        [T, D].
    """
    if len(sources) == 1:
        return sources[0]
    values = torch.stack(list(sources))
    scores = (norm(values) * pseudo_query).sum(-1)
    weights = torch.softmax(scores, dim=0)
    return (weights.unsqueeze(-1) * values).sum(0)
