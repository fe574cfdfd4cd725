"""The two products with kv_b against float64: few tokens and many, at every instruction-set level."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import BFLOAT16, f64, run

DTYPES = (np.dtype(np.float32), BFLOAT16)
OUT = {"out": np.float32}
# Above so many tokens, bf16_activations rounds x where the weight is bfloat16
# (kernels/math/mla_absorb.h).
EXACT_TOKENS = 8


def absorb(query: np.ndarray, weight: np.ndarray, **attributes: int) -> np.ndarray:
    given = {"query": query, "kv_b_weight": weight}
    return run("MlaAbsorbQuery", given, OUT, **attributes)[0]


def expand(latent: np.ndarray, weight: np.ndarray, value: int, **attributes: int) -> np.ndarray:
    given = {"latent": latent, "kv_b_weight": weight}
    return run("MlaExpandValue", given, OUT, value_dim=value, **attributes)[0]


def draw(rng, tokens, heads, nope, value, latent, dtype):
    """A query, a mixed latent and kv_b's weight."""
    query = rng.standard_normal((tokens, heads, nope)).astype(np.float32)
    mixed = rng.standard_normal((tokens, heads, latent)).astype(np.float32)
    weight = rng.standard_normal((heads * (nope + value), latent)).astype(dtype)
    return query, mixed, weight


def expect(out: np.ndarray, x: np.ndarray, by_head: np.ndarray, *, rounded: bool) -> None:
    """`out` is x [T, H, K] times by_head [H, K, N], to the rounding of the running sum, and of x by 2^-8.

    The instruction for rounded x also takes subnormal numbers (below 2^-126) as zero.
    """
    inputs = x.shape[-1]
    exact = np.einsum("thk,hkn->thn", f64(x), by_head)
    assert out.shape == exact.shape
    sizes = np.abs(f64(x)), np.abs(by_head)
    relative = inputs * 2.0**-24 + 2.0**-23 + (2.0**-8 if rounded else 0)
    error = np.einsum("thk,hkn->thn", *sizes) * relative + 1e-44 * inputs
    if rounded:
        error += 2.0**-125 * (sizes[0].sum(-1)[..., None] + sizes[1].sum(1) + 2 * inputs)
    assert np.all(np.abs(out - exact) <= error)


def check(query: np.ndarray, mixed: np.ndarray, weight: np.ndarray) -> None:
    tokens, heads, nope = query.shape
    by_head = f64(weight).reshape(heads, len(weight) // heads, mixed.shape[2])
    for rounding in (1, 0):
        rounded = bool(rounding) and weight.dtype == BFLOAT16 and tokens > EXACT_TOKENS
        out = absorb(query, weight, bf16_activations=rounding)
        expect(out, query, by_head[:, :nope], rounded=rounded)
        value = by_head.shape[1] - nope
        out = expand(mixed, weight, value, bf16_activations=rounding)
        expect(out, mixed, by_head[:, nope:].transpose(0, 2, 1), rounded=rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 3, 32, 16, 64),
        (2, 1, 1, 1, 1),
        (3, 2, 13, 7, 37),
        (8, 2, 24, 33, 50),
        (9, 2, 24, 33, 50),
        (12, 3, 13, 15, 31),
        (17, 1, 16, 32, 16),
        (40, 2, 7, 70, 129),
    ],
    ids=str,
)
def test_matches_float64(level, rng, dtype, sizes):
    check(*draw(rng, *sizes, dtype))


def test_several_blocks_of_tokens(level, rng):
    check(*draw(rng, 517, 2, 20, 18, 40, BFLOAT16))


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_may_have_rows_between_those_of_the_two_products(level, rng, dtype, tokens):
    query, mixed, weight = draw(rng, tokens, 2, 11, 9, 35, dtype)
    by_head = f64(weight).reshape(2, 20, 35)
    expect(absorb(query[..., :6], weight), query[..., :6], by_head[:, :6], rounded=False)
    expect(expand(mixed, weight, 5), mixed, by_head[:, 15:].transpose(0, 2, 1), rounded=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [2, 7, 20])
def test_large_tiny_and_subnormal_values(level, rng, dtype, tokens):
    query, mixed, weight = draw(rng, tokens, 2, 19, 21, 40, np.float32)
    for x in (query, mixed):
        x *= np.exp2(rng.integers(-60, 60, (tokens, 2, 1))).astype(np.float32)
        x[0] = 1e-41
    scale = np.exp2(rng.integers(-30, 30, (len(weight), 1)))
    check(query, mixed, (weight * scale).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [3, 20])
def test_infinity_and_nan_stay_in_their_token_and_head(level, dtype, tokens):
    weight = np.ones((2 * 13, 18), dtype)
    for size, multiply in ((8, absorb), (18, lambda x, weight: expand(x, weight, 5))):
        x = np.ones((tokens, 2, size), np.float32)
        x[0, 0, 3], x[1, 1, size - 1] = np.inf, np.nan
        out = multiply(x, weight)
        assert np.all(np.isposinf(out[0, 0]))
        assert np.all(np.isnan(out[1, 1]))
        out[0, 0], out[1, 1] = size, size
        np.testing.assert_array_equal(out, float(size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [4, 20])
def test_weights_that_are_not_finite_stay_in_their_head_and_column(level, dtype, tokens):
    query, mixed = np.ones((tokens, 2, 8), np.float32), np.ones((tokens, 2, 35), np.float32)
    weight = np.ones((2, 13, 35), dtype)
    weight[0, 7, 34], weight[1, 12, 34] = np.inf, np.nan
    weight = weight.reshape(26, 35)
    absorbed, values = absorb(query, weight), expand(mixed, weight, 5)
    assert np.all(np.isposinf(absorbed[:, 0, 34]))
    assert np.all(np.isnan(values[:, 1, 4]))
    absorbed[:, 0, 34], values[:, 1, 4] = 8, 35
    np.testing.assert_array_equal(absorbed, 8.0)
    np.testing.assert_array_equal(values, 35.0)


@pytest.mark.parametrize("sizes", [(0, 2, 4, 3, 5), (3, 2, 0, 3, 5), (12, 2, 4, 3, 0)], ids=str)
def test_empty_dimensions(level, rng, sizes):
    check(*draw(rng, *sizes, BFLOAT16))


def test_tokens_do_not_influence_each_other(level, rng):
    query, mixed, weight = draw(rng, 300, 2, 24, 16, 40, BFLOAT16)
    for multiply, x in ((absorb, query), (lambda x, weight: expand(x, weight, 16), mixed)):
        np.testing.assert_array_equal(multiply(x[250:280], weight), multiply(x, weight)[250:280])


def test_inputs_that_do_not_fit_are_refused(rng):
    query, mixed, weight = draw(rng, 2, 3, 8, 4, 10, np.float32)
    with pytest.raises(Exception, match=r"MlaAbsorbQuery: input kv_b_weight: its 35 rows are no"):
        absorb(query, weight[:-1])
    with pytest.raises(
        Exception, match=r"kv_b_weight: it has 7 rows a head, fewer than 8, the las"
    ):
        absorb(query, weight[:21])
    with pytest.raises(Exception, match=r"query: it has no heads.*; remedy: pass at least one"):
        absorb(query[:, :0], weight)
    with pytest.raises(Exception, match=r"kv_b_weight: .* fewer than 13, the attribute value_dim"):
        expand(mixed, weight, 13)
    with pytest.raises(Exception, match=r"MlaExpandValue: input latent: .*9 on axis 2, not 10"):
        expand(mixed[..., :9], weight, 4)
    with pytest.raises(Exception, match=r"attribute value_dim"):
        expand(mixed, weight, 0)


@pytest.mark.parametrize("tokens", [1, 9])
def test_latents_without_elements_give_zeros(level, tokens):
    """And have no memory to read (under `make sanitize`)."""
    out = expand(np.zeros((tokens, 3, 0), np.float32), np.zeros((33, 0), np.float32), 5)
    np.testing.assert_array_equal(out, np.zeros((tokens, 3, 5)))
