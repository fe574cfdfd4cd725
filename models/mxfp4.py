"""MXFP4 as compressed-tensors ships it (`mxfp4-pack-quantized`).

A value is E2M1(nibble) * 2 ** (scale - 127): magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6, bit 3 the sign.
The low nibble of a byte is the even (first) element along the input dimension, and 32 consecutive
inputs share a scale byte. Nothing is transposed or swizzled. Formats: OCP Microscaling Formats (MX)
v1.0.
"""

from __future__ import annotations

import itertools
from typing import Final

import torch

from hybridge.artifacts.errors import CheckpointError
from hybridge.models.config import MXFP4_GROUP
from hybridge.ops.moe import E2M1_MAGNITUDES, decode_mxfp4

_SIGN: Final = 8
_LARGEST_SCALE: Final = 254
_LARGEST_EXPONENT: Final = 2  # of E2M1: its largest value is 1.5 * 2 ** 2
_MANTISSA_BITS: Final = 23
# Added to the bits of a float32, carries into the exponent where the mantissa is at least 1.75.
_ROUND_UP_FROM_1_75: Final = 1 << (_MANTISSA_BITS - 2)


def decode(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values of packed MXFP4.

    Args:
        packed: uint8 [..., K / 2], two values a byte.
        scale: uint8 [..., K / 32]; 255 is NaN, as E8M0 defines.

    Returns:
        float32 [..., K], exact but where 2 ** (scale - 127) * 6 leaves the range of float32.

    Raises:
        CheckpointError: types or shapes do not fit each other.
    """
    columns = packed.shape[-1] * 2
    expected = (*packed.shape[:-1], columns // MXFP4_GROUP)
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise CheckpointError(
            f"MXFP4 data are {packed.dtype} with scales {scale.dtype}", "both must be uint8"
        )
    if columns % MXFP4_GROUP or tuple(scale.shape) != expected:
        raise CheckpointError(
            f"MXFP4 data of shape {tuple(packed.shape)} come with scales {tuple(scale.shape)}",
            f"one scale for {MXFP4_GROUP} values, that is {MXFP4_GROUP // 2} bytes, along the last"
            " dimension",
        )
    return decode_mxfp4(packed, scale)


def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to MXFP4 with the scale rule of compressed-tensors.

    The exponent of a block is that of its largest magnitude, rounded up where the mantissa is at
    least 1.75, less 2; values round to the nearest, ties to even, and saturate at 6. A block of
    zeros has scale 0.

    Args:
        values: floating [..., K], K a multiple of 32, finite.

    Returns:
        packed uint8 [..., K / 2] and scale uint8 [..., K / 32].

    Raises:
        CheckpointError: K is not a multiple of 32, or a value is not finite.
    """
    if values.shape[-1] % MXFP4_GROUP:
        raise CheckpointError(
            f"MXFP4 groups of {MXFP4_GROUP} do not divide {values.shape[-1]} columns",
            f"use a multiple of {MXFP4_GROUP}",
        )
    groups = values.float().reshape(*values.shape[:-1], -1, MXFP4_GROUP)
    largest = groups.abs().amax(-1)
    if not bool(torch.isfinite(largest).all()):
        raise CheckpointError("a value to quantise is not finite", "check the weights before")
    bits = largest.view(torch.int32) + _ROUND_UP_FROM_1_75
    biased = ((bits >> _MANTISSA_BITS) - _LARGEST_EXPONENT).clamp(0, _LARGEST_SCALE)
    # In float64, so that neither a scale of 0 nor one of 254 rounds anything away.
    scaled = groups.double() * torch.exp2(127.0 - biased.double()).unsqueeze(-1)
    nibbles = _nearest_magnitude(scaled.abs()) + _SIGN * torch.signbit(groups).to(torch.uint8)
    pairs = nibbles.reshape(*values.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), biased.to(torch.uint8)


def _nearest_magnitude(scaled: torch.Tensor) -> torch.Tensor:
    """Index of the nearest E2M1 magnitude; a tie goes to the even index; above 5 it is 6."""
    middles = torch.tensor(
        [(low + high) / 2 for low, high in itertools.pairwise(E2M1_MAGNITUDES)],
        dtype=torch.float64,
    )
    below = torch.bucketize(scaled, middles, right=False)
    above = torch.bucketize(scaled, middles, right=True)
    # The two differ only on a middle, where one of them is even.
    return torch.where(below % 2 == 0, below, above).to(torch.uint8)
