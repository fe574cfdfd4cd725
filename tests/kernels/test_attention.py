"""SparseFlashAttention and MlaAttention against float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from .harness import BFLOAT16, block_tables, f64, i32, run

DTYPES = (np.dtype(np.float32), BFLOAT16)
Inputs = dict[str, np.ndarray]


def batch(
    rng: np.random.Generator,
    queries: Sequence[int],
    contexts: Sequence[int],
    *,
    dtype: np.dtype = BFLOAT16,
    heads: int = 4,
    row: int = 40,
    block: int = 8,
    padding: int = 0,
) -> Inputs:
    lengths = [q + c if q else 0 for q, c in zip(queries, contexts, strict=True)]
    table, blocks = block_tables(rng, lengths, block)
    tokens = sum(queries) + padding
    return {
        "query": rng.standard_normal((tokens, heads, row)).astype(np.float32),
        "latent_cache": rng.standard_normal((blocks, block, 1, row)).astype(dtype),
        "query_start": i32(np.cumsum([0, *queries])),
        "context_len": i32(contexts),
        "block_table": table,
    }


def with_positions(inputs: Inputs, positions: np.ndarray) -> Inputs:
    """The inputs of SparseFlashAttention, in its order."""
    query, cache, *rest = inputs
    first = {query: inputs[query], cache: inputs[cache], "positions": i32(positions)}
    return first | {name: inputs[name] for name in rest}


def tokens_of(inputs: Inputs):
    """(token, its own position, the rows of its sequence in float64) of every token in use."""
    cache, block = inputs["latent_cache"], inputs["latent_cache"].shape[1]
    for b, context in enumerate(inputs["context_len"]):
        start, end = inputs["query_start"][b : b + 2]
        if start == end:
            continue
        length = int(context) + end - start
        used = inputs["block_table"][b, : -(-length // block)]
        rows = f64(cache[used].reshape(-1, cache.shape[-1])[:length])
        for t in range(start, end):
            yield t, int(context) + t - start, rows


def draw_positions(rng: np.random.Generator, inputs: Inputs, width: int) -> np.ndarray:
    positions = np.full((inputs["query"].shape[0], width), -1, np.int32)
    for t, own, _ in tokens_of(inputs):
        count = min(width, own + 1)
        positions[t, :count] = np.sort(rng.choice(own + 1, count, replace=False))
    return positions


def expected(inputs: Inputs, scale: float, value_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The output in float64, and the largest error of each element.

    With a bfloat16 cache, queries and probabilities may be rounded to bfloat16 (2^-8). A score is
    then off by at most d = 2^-8 scale |query| . |row|, a probability by a factor of exp(2 d).
    """
    query = f64(inputs["query"])
    out = np.zeros((*query.shape[:2], value_dim))
    bound = np.zeros_like(out)
    unit = 2.0**-8 if inputs["latent_cache"].dtype == BFLOAT16 else 0.0
    for t, own, rows in tokens_of(inputs):
        chosen = np.arange(own + 1)
        if "positions" in inputs:
            chosen = inputs["positions"][t][inputs["positions"][t] >= 0]
        if len(chosen) == 0:
            continue
        keys = rows[chosen]
        scores = scale * query[t] @ keys.T
        relative = unit + keys.shape[1] * 2.0**-23
        drift = scale * relative * (np.abs(query[t]) @ np.abs(keys).T).max(-1, keepdims=True)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[t] = weights @ keys[:, :value_dim]
        spread = weights @ np.abs(keys[:, :value_dim])
        bound[t] = spread * (np.expm1(2 * drift) + 2 * unit + (len(chosen) + 64) * 2.0**-23)
    return out, bound


def attention(inputs: Inputs, scale: float, value_dim: int, **options: int) -> np.ndarray:
    op = "SparseFlashAttention" if "positions" in inputs else "MlaAttention"
    out = {"out": np.float32}
    return run(op, inputs, out, scale=scale, value_dim=value_dim, **options)[0]


def check(inputs: Inputs, value_dim: int = 32, scale: float = 0.15, **options: int) -> None:
    out = attention(inputs, scale, value_dim, **options)
    want, bound = expected(inputs, scale, value_dim)
    assert out.shape == want.shape
    assert np.all(np.abs(out - want) <= bound + 1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "row", "value_dim"), [(1, 1, 1), (3, 17, 9), (16, 72, 64), (5, 96, 96), (70, 40, 32)]
)
def test_dense_sizes(level, rng, dtype, heads, row, value_dim):
    inputs = batch(rng, [1, 5], [90, 30], dtype=dtype, heads=heads, row=row)
    check(inputs, value_dim, row**-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 7, 64, 300])
def test_dense_ragged_prefill(level, rng, dtype, block):
    check(batch(rng, [70, 0, 1, 33], [3, 4, 0, 130], dtype=dtype, block=block, padding=2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_decode_shares_rows_over_tasks(level, rng, dtype):
    check(batch(rng, [1, 1, 1], [2100, 0, 515], dtype=dtype, block=16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "row", "value_dim"), [(1, 8, 8), (16, 72, 64), (67, 33, 17)])
def test_sparse_sizes(level, rng, dtype, heads, row, value_dim):
    inputs = batch(rng, [2, 3], [99, 0], dtype=dtype, heads=heads, row=row, padding=1)
    check(with_positions(inputs, draw_positions(rng, inputs, 37)), value_dim, row**-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_decode_shares_rows_over_tasks(level, rng, dtype):
    inputs = batch(rng, [1, 1], [3000, 700], dtype=dtype, block=32)
    check(with_positions(inputs, draw_positions(rng, inputs, 2051)))


def test_sparse_prefill(level, rng):
    inputs = batch(rng, [40, 1, 0, 9], [60, 0, 3, 200], padding=4)
    check(with_positions(inputs, draw_positions(rng, inputs, 48)))


def test_minus_one_is_skipped_wherever_it_stands(level, rng):
    inputs = batch(rng, [3], [50])
    positions = np.full((3, 9), -1)
    positions[0, [0, 4, 5]] = 7, 50, 3  # unsorted, with gaps
    positions[2, 8] = 52
    inputs = with_positions(inputs, positions)
    check(inputs)
    np.testing.assert_array_equal(attention(inputs, 1.0, 32)[1], 0.0)


@pytest.mark.parametrize("width", [0, 1])
def test_no_positions_give_zeros(level, rng, width):
    inputs = with_positions(batch(rng, [2], [5], padding=1), np.full((3, width), -1))
    np.testing.assert_array_equal(attention(inputs, 1.0, 8), 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_positions_equal_dense(level, rng, dtype):
    inputs = batch(rng, [20], [60], dtype=dtype)
    sparse = with_positions(inputs, draw_positions(rng, inputs, 80))
    np.testing.assert_allclose(
        attention(sparse, 0.2, 24), attention(inputs, 0.2, 24), rtol=0, atol=0.02
    )


def test_scores_of_any_size(level, rng):
    """Scores to +-3e4 (beyond float16, and beyond exp): the largest takes all."""
    inputs = batch(rng, [5], [100], dtype=DTYPES[0])
    inputs["query"] *= 1000
    out = attention(inputs, 1.0, 40)
    for t, own, rows in tokens_of(inputs):
        best = np.argmax(f64(inputs["query"])[t] @ rows[: own + 1].T, axis=-1)
        gap = np.sort(f64(inputs["query"])[t] @ rows[: own + 1].T, axis=-1)
        clear = gap[:, -1] - gap[:, -2] > 40
        np.testing.assert_allclose(out[t][clear], rows[best][clear], rtol=1e-6)


def test_equal_scores_average(level, rng):
    inputs = batch(rng, [1], [76])
    inputs["query"][:] = 0
    rows = next(tokens_of(inputs))[2]
    out = attention(inputs, 1.0, 40)
    np.testing.assert_allclose(out[0, 0], rows.mean(0), atol=2e-6)


@pytest.mark.parametrize(
    ("queries", "contexts"), [([0], [5]), ([], []), ([1], [0]), ([0, 2], [0, 0])]
)
def test_tiny_batches(level, rng, queries, contexts):
    inputs = batch(rng, queries, contexts, padding=1)
    check(inputs)
    check(with_positions(inputs, draw_positions(rng, inputs, 3)))


def test_future_and_unused_rows_do_not_matter(level, rng):
    """NaN in every row that no token may see: block ends, free blocks, table padding."""
    inputs = batch(rng, [5], [30])
    cache = inputs["latent_cache"]
    seen = {(int(inputs["block_table"][0, p // 8]), p % 8) for p in range(35)}
    for block in range(cache.shape[0]):
        for offset in range(8):
            if (block, offset) not in seen:
                cache[block, offset] = np.nan
    check(inputs)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (23, r"23 in the row of token 1 is not among its positions 0 to 21"),
        (-2, r"-2 in the row of token 1 is not among"),
        (2**31 - 1, r"2147483647 in the row of token 1"),
    ],
)
def test_bad_positions_are_refused(rng, value, message):
    inputs = batch(rng, [2], [20])
    positions = np.zeros((2, 4))
    positions[1, 2] = value
    with pytest.raises(
        Exception, match=r"hybridge\.SparseFlashAttention: input positions: " + message
    ):
        attention(with_positions(inputs, positions), 1.0, 8)


def test_bad_inputs_are_refused(rng):
    inputs = batch(rng, [2], [20])
    with pytest.raises(Exception, match=r"hybridge\.MlaAttention: attribute value_dim: 41 is more"):
        attention(inputs, 1.0, 41)
    with pytest.raises(Exception, match=r"attribute scale: nan is not a finite number above zero"):
        attention(inputs, float("nan"), 8)
    with pytest.raises(Exception, match=r"input latent_cache: .*on axis 2, not 1 \(one head\)"):
        attention({**inputs, "latent_cache": inputs["latent_cache"].repeat(2, 2)}, 1.0, 8)
    with pytest.raises(Exception, match=r"input latent_cache: .*on axis 3, not 40"):
        attention({**inputs, "latent_cache": inputs["latent_cache"][..., :32].copy()}, 1.0, 8)
    inputs["block_table"][0, 2] = 1000
    with pytest.raises(Exception, match=r"input block_table: block id 1000 at \[0, 2\] is outside"):
        attention(inputs, 1.0, 8)
