"""MXFP4 against hand-computed values: magnitudes, nibble order, extreme scales, the scale rule."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridge.artifacts.errors import CheckpointError
from hybridge.models.mxfp4 import decode, encode
from hybridge.ops.moe import E2M1_MAGNITUDES, decode_mxfp4


def packed_row(*nibbles: int) -> torch.Tensor:
    """One group of 32: the given codes first, zeros after."""
    codes = [*nibbles, *[0] * (32 - len(nibbles))]
    return torch.tensor(
        [[low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]],
        dtype=torch.uint8,
    )


def scales(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.uint8)


def test_every_code_at_scale_one():
    values = decode(packed_row(*range(16)), scales(127))[0, :16].tolist()
    assert values[:8] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert values[8:] == [-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    assert math.copysign(1, values[8]) == -1


def test_low_nibble_is_the_first_element():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = 0x72  # low 2 -> 1.0, high 7 -> 6.0
    assert decode(packed, scales(127))[0, :3].tolist() == [1.0, 6.0, 0.0]


@pytest.mark.parametrize("scale", [0, 1, 100, 126, 127, 128, 252, 254])
def test_scales_are_powers_of_two(scale):
    values = decode(packed_row(2, 1, 10), scales(scale))[0, :3].double().tolist()
    assert values == [2.0 ** (scale - 127), 2.0 ** (scale - 128), -(2.0 ** (scale - 127))]


def test_scale_254_overflows_only_where_float32_does():
    values = decode(packed_row(3, 4, 7), scales(254))[0, :3].tolist()
    assert values == [1.5 * 2.0**127, math.inf, math.inf]


@pytest.mark.parametrize("expand", [decode, decode_mxfp4])
def test_scale_255_is_nan_for_every_code(expand):
    assert expand(packed_row(*range(16)), scales(255)).isnan().all()


def test_the_ops_and_the_checkpoints_decoding_are_one():
    every = torch.cat([packed_row(*range(16))] * 256, dim=-1)
    scale = scales(*range(256))
    torch.testing.assert_close(
        decode(every, scale), decode_mxfp4(every, scale), rtol=0, atol=0, equal_nan=True
    )


def test_each_group_has_its_own_scale():
    packed = torch.cat((packed_row(2), packed_row(2)), dim=-1)
    values = decode(packed, scales(127, 130))
    assert (values[0, 0], values[0, 32]) == (1.0, 8.0)


@pytest.mark.parametrize(
    ("largest", "scale", "code"),
    [
        (6.0, 127, 7),
        (4.0, 127, 6),
        (6.9, 127, 7),  # mantissa 1.725 stays: saturates at 6
        (7.0, 128, 6),  # mantissa 1.75 rounds up: 3.5 ties to even, 4
        (7.9, 128, 6),
        (8.0, 128, 6),
        (1.0, 125, 6),
        (3.0, 126, 7),
        (2.0**-140, 0, 0),
        (2.0**-127, 0, 2),  # the scale does not go below 2 ** -127
        (1.5 * 2.0**127, 252, 7),
    ],
)
def test_scale_rule(largest, scale, code):
    values = torch.zeros(1, 32)
    values[0, 0] = largest
    packed, scale_byte = encode(values)
    assert int(scale_byte[0, 0]) == scale
    assert int(packed[0, 0]) == code


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.25, 0.0),
        (0.26, 0.5),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (5.1, 6.0),
    ],
)
def test_values_round_to_nearest_ties_to_even(value, rounded):
    values = torch.zeros(1, 32)
    values[0, :3] = torch.tensor([6.0, value, -value])
    assert decode(*encode(values))[0, :3].tolist() == [6.0, rounded, -rounded]


def test_zero_block():
    packed, scale = encode(torch.zeros(2, 64))
    assert not packed.any()
    assert not scale.any()
    assert not decode(packed, scale).any()


def test_a_zero_block_beside_another():
    values = torch.zeros(1, 64)
    values[0, 40] = 3.0
    packed, scale = encode(values)
    assert scale.tolist() == [[0, 126]]
    assert torch.equal(decode(packed, scale), values)


@given(st.lists(st.integers(0, 15), min_size=31, max_size=31), st.integers(0, 252))
def test_what_is_representable_survives(codes, scale):
    # A group whose largest code is 4 or 6 is one that the rule gives back.
    packed = packed_row(6, *codes)
    again, scale_again = encode(decode(packed, scales(scale)))
    assert torch.equal(again, packed)
    assert torch.equal(scale_again, scales(scale))


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=64, max_size=64))
def test_error_is_within_half_the_widest_step(values):
    row = torch.tensor([values], dtype=torch.float32)
    packed, scale = encode(row)
    half = torch.exp2(scale.double() - 127).repeat_interleave(32, dim=-1)
    error = (decode(packed, scale).double() - row.double()).abs()
    assert bool((error <= half).all())
    assert packed.shape == (1, 32)


def test_dimensions_are_kept():
    values = torch.arange(2 * 3 * 64).reshape(2, 3, 64).float()
    packed, scale = encode(values)
    assert (packed.shape, scale.shape) == ((2, 3, 32), (2, 3, 2))
    assert decode(packed, scale).shape == values.shape
    assert len(E2M1_MAGNITUDES) == 8


def test_refusals():
    with pytest.raises(CheckpointError, match="do not divide 33 columns"):
        encode(torch.zeros(1, 33))
    with pytest.raises(CheckpointError, match="not finite"):
        encode(torch.full((1, 32), math.nan))
    with pytest.raises(CheckpointError, match="not finite"):
        encode(torch.full((1, 32), -math.inf))
    with pytest.raises(CheckpointError, match="must be uint8"):
        decode(torch.zeros(1, 16), scales(1))
    with pytest.raises(CheckpointError, match=r"come with scales \(1, 2\)"):
        decode(packed_row(1), scales(1, 2))
