"""LightningIndexer against float64: exact top-k, ties to the lowest position, paged and ragged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from .harness import BFLOAT16, Operator, bf16, block_tables, f64, i32, run

DTYPES = (np.dtype(np.float32), BFLOAT16)
Inputs = dict[str, np.ndarray]


def batch(
    rng: np.random.Generator,
    queries: Sequence[int],
    contexts: Sequence[int],
    *,
    dtype: np.dtype = BFLOAT16,
    heads: int = 4,
    dim: int = 16,
    block: int = 8,
    padding: int = 0,
    integers: bool = False,
) -> Inputs:
    """A ragged batch; with ``integers`` all sums are exact, so that ties are ties in any order."""
    lengths = [q + c for q, c in zip(queries, contexts, strict=True)]
    used = [length if q else 0 for length, q in zip(lengths, queries, strict=True)]
    table, blocks = block_tables(rng, used, block)
    tokens = sum(queries) + padding

    def draw(*shape: int) -> np.ndarray:
        if integers:
            return rng.integers(-2, 3, shape).astype(np.float32)
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "query": draw(tokens, heads, dim),
        "head_weights": draw(tokens, heads),
        "indexer_cache": draw(blocks, block, 1, dim).astype(dtype),
        "query_start": i32(np.cumsum([0, *queries])),
        "context_len": i32(contexts),
        "block_table": table,
    }


def keys_of(inputs: Inputs, b: int, length: int) -> np.ndarray:
    cache = inputs["indexer_cache"]
    block = cache.shape[1]
    used = inputs["block_table"][b, : -(-length // block)]
    return f64(cache[used].reshape(-1, cache.shape[-1])[:length])


def visible_scores(inputs: Inputs) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """For each token: its index, its scores in float64, and the bound of their error."""
    query = inputs["query"]
    if inputs["indexer_cache"].dtype == BFLOAT16:
        query = bf16(query)
    query, weights = f64(query), f64(inputs["head_weights"])
    rows = []
    for b, context in enumerate(inputs["context_len"]):
        start, end = inputs["query_start"][b : b + 2]
        for t in range(start, end):
            keys = keys_of(inputs, b, int(context) + t - start + 1)
            dots = query[t] @ keys.T
            spread = np.abs(weights[t]) @ (np.abs(query[t]) @ np.abs(keys).T)
            bound = spread * (keys.shape[1] + len(weights[t])) * 2.0**-22
            rows.append((t, weights[t] @ np.maximum(dots, 0), bound))
    return rows


def indexer(inputs: Inputs, top_k: int, **options: int) -> np.ndarray:
    out = {"positions": np.int32}
    return run("LightningIndexer", inputs, out, top_k=top_k, **options)[0]


def check(inputs: Inputs, top_k: int, positions: np.ndarray | None = None) -> None:
    positions = indexer(inputs, top_k) if positions is None else positions
    rows = visible_scores(inputs)
    for t, scores, bound in rows:
        count = min(top_k, len(scores))
        chosen = positions[t, :count]
        assert np.all(positions[t, count:] == -1)
        assert np.all(np.diff(chosen) > 0)
        assert chosen[0] >= 0
        assert chosen[-1] < len(scores)
        left_out = np.setdiff1d(np.arange(len(scores)), chosen)
        if len(left_out):
            worst, best = chosen[np.argmin(scores[chosen])], left_out[np.argmax(scores[left_out])]
            assert scores[best] <= scores[worst] + bound[best] + bound[worst]
    assert np.all(positions[len(rows) :] == -1)


def check_exact(inputs: Inputs, top_k: int) -> None:
    positions = indexer(inputs, top_k)
    for t, scores, _ in visible_scores(inputs):
        best = np.sort(np.argsort(-scores, kind="stable")[:top_k])
        np.testing.assert_array_equal(positions[t, : len(best)], best)
        assert np.all(positions[t, len(best) :] == -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim"), [(1, 1), (3, 17), (8, 32), (16, 64), (33, 48), (64, 128)]
)
def test_head_and_row_sizes(level, rng, dtype, heads, dim):
    check(batch(rng, [1, 3], [70, 41], dtype=dtype, heads=heads, dim=dim), 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 3, 16, 200])
def test_ragged_prefill_over_pages(level, rng, dtype, block):
    inputs = batch(rng, [37, 0, 1, 80], [5, 9, 0, 61], dtype=dtype, block=block, padding=3)
    check(inputs, 13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_shares_keys_over_tasks(level, rng, dtype):
    check(batch(rng, [1, 1, 1], [3000, 0, 2047], dtype=dtype, heads=2, dim=8, block=64), 300)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, 5, 64, 2051])
def test_ties_go_to_the_lowest_position(level, rng, dtype, top_k):
    inputs = batch(rng, [50, 1], [150, 2100], dtype=dtype, heads=2, dim=4, integers=True)
    check_exact(inputs, top_k)


def test_width_2051_with_more_positions_than_that(level, rng):
    check_exact(batch(rng, [2], [2500], heads=1, dim=4, integers=True), 2051)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_all_zero_scores(level, rng, sign):
    """Every relu is 0; with negative weights the sum is -0, which must tie with +0."""
    inputs = batch(rng, [40], [30], heads=4)
    inputs["query"] = np.abs(inputs["query"])
    inputs["indexer_cache"] = -np.abs(f64(inputs["indexer_cache"])).astype(np.float32)
    inputs["head_weights"] = np.full_like(inputs["head_weights"], sign)
    inputs["head_weights"][:, ::2] *= -1
    positions = indexer(inputs, 8)
    np.testing.assert_array_equal(positions, np.tile(np.arange(8), (40, 1)))


def test_zero_and_minus_zero_tie(level, rng):
    inputs = batch(rng, [1], [19], heads=1, dim=2, dtype=DTYPES[0])
    inputs["query"][:] = 1
    inputs["head_weights"][:] = -1
    inputs["indexer_cache"][:] = -1  # relu 0, score -0
    inputs["indexer_cache"][inputs["block_table"][0, 0], 3] = 1  # score -2
    np.testing.assert_array_equal(indexer(inputs, 4)[0], [0, 1, 2, 4])


ODD_SCORES = np.float32(
    [0, -0.0, 1e-45, 1e-41, 2**-126, 2**-149, 1, 1 + 2**-23, 1 - 2**-24, 65504, 1e30, 3.4e38]
)


def scored(scores: np.ndarray) -> Inputs:
    """One token whose scores are exactly these: relu of one product of head 1, less that of 2."""
    count = len(scores)
    keys = np.zeros((count, 1, 1, 2), np.float32)
    keys[:, 0, 0, 0], keys[:, 0, 0, 1] = np.maximum(scores, 0), np.maximum(-scores, 0)
    return {
        "query": np.eye(2, dtype=np.float32)[None],
        "head_weights": np.float32([[1, -1]]),
        "indexer_cache": keys,
        "query_start": i32([0, 1]),
        "context_len": i32([count - 1]),
        "block_table": np.arange(count, dtype=np.int32)[None],
    }


@pytest.mark.parametrize("count", [2, 17, 64, 1000, 5000])
@pytest.mark.parametrize("kinds", [1, 2, 5, 24])
def test_odd_scores_are_chosen_exactly(level, rng, count, kinds):
    """Few kinds of scores, each many times: zeros of both signs, denormals, neighbours, huge ones."""
    pool = rng.choice(np.concatenate([ODD_SCORES, -ODD_SCORES]), kinds, replace=False)
    scores = rng.choice(pool, count)
    for top_k in {1, count // 3 + 1, count - 1}:
        chosen = indexer(scored(scores), top_k)[0]
        best = np.sort(np.argsort(-f64(scores), kind="stable")[:top_k])
        np.testing.assert_array_equal(chosen, best)


def test_scores_that_overflow_tie_and_are_chosen_first(level, rng):
    inputs = scored(rng.choice(ODD_SCORES, 900))
    inputs["query"] *= np.float32(1e20)
    with np.errstate(over="ignore"):
        scores = inputs["indexer_cache"][:, 0, 0, 0] * np.float32(1e20)
    assert np.isinf(scores).sum() > 40
    for top_k in (1, 40, 400, 899):
        best = np.sort(np.argsort(-f64(scores), kind="stable")[:top_k])
        np.testing.assert_array_equal(indexer(inputs, top_k)[0], best)


def test_an_infinite_key_is_refused(level):
    """Its product with another head's zero is no number."""
    with pytest.raises(Exception, match=r"not a number; remedy: look for NaN or infinity"):
        indexer(scored(np.float32([1, np.inf, 0])), 2)


@pytest.mark.parametrize("scale", [1e6, 1e15, 1e-19])
def test_scores_beyond_half_precision(level, rng, scale):
    inputs = batch(rng, [9], [100], dtype=DTYPES[0])
    inputs["query"] *= np.float32(scale)
    inputs["head_weights"] = -np.abs(inputs["head_weights"])
    check(inputs, 10)


def test_equal_keys_have_equal_scores(level, rng):
    """Bit for bit, wherever they lie in a tile: the lowest copies are chosen."""
    inputs = batch(rng, [1], [99], heads=5, dim=24)
    inputs["indexer_cache"][:] = inputs["indexer_cache"][0, 0]
    inputs["head_weights"][:] = np.abs(inputs["head_weights"])
    np.testing.assert_array_equal(indexer(inputs, 20)[0], np.arange(20))


@pytest.mark.parametrize(("queries", "contexts"), [([0], [5]), ([1], [0]), ([], []), ([3], [0])])
def test_tiny_batches(level, rng, queries, contexts):
    check(batch(rng, queries, contexts, padding=1), 4)


def test_same_result_for_any_number_of_threads(rng):
    inputs = batch(rng, [70, 5], [40, 900])
    np.testing.assert_array_equal(indexer(inputs, 32, threads=1), indexer(inputs, 32, threads=4))


def test_prefill_equals_decode(level, rng):
    """A token's choice does not depend on what it is batched with."""
    inputs = batch(rng, [80], [50], block=16)
    whole = indexer(inputs, 24)
    last = {
        **inputs,
        "query": inputs["query"][-1:],
        "head_weights": inputs["head_weights"][-1:],
        "query_start": i32([0, 1]),
        "context_len": i32([129]),
    }
    np.testing.assert_array_equal(indexer(last, 24)[0], whole[-1])


def test_table_padding_and_idle_sequences_are_not_read(rng):
    inputs = batch(rng, [2, 0], [9, 0])
    inputs["context_len"][1] = 10_000  # an idle row: longer than its table, with no block
    check(inputs, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("block_table", (0, 1), 77), r"block id 77 at \[0, 1\] is outside the cache of 8 blocks"),
        (("block_table", (1, 0), -1), r"block id -1 at \[1, 0\] is outside"),
        (("context_len", 0, 400), r"sequence 0 has 402 tokens, more than 4 blocks of 8 hold"),
        (("context_len", 1, -2), r"input context_len: -2 at index 1"),
        (("query_start", 0, 1), r"input query_start: starts at 1"),
        (("query_start", 1, 9), r"input query_start: falls from 9 to 4 at index 2"),
        (("query_start", 2, 9), r"input query_start: ends at 9, beyond the 4 tokens"),
        (("query", (3, 1, 2), np.nan), r"token 3 has a score that is not a number; remedy: look"),
        (("head_weights", (0, 0), np.nan), r"token 0 has a score that is not a number"),
    ],
)
def test_bad_values_are_refused(rng, change, message):
    inputs = batch(rng, [2, 2], [20, 27])
    name, index, value = change
    inputs[name][index] = value
    with pytest.raises(Exception, match=r"hybridge\.LightningIndexer: .*" + message):
        indexer(inputs, 4)


def test_bad_shapes_are_refused(rng):
    inputs = batch(rng, [2], [20])
    with pytest.raises(Exception, match=r"input head_weights: .*not 4 \(heads of query\)"):
        indexer({**inputs, "head_weights": inputs["head_weights"][:, :3].copy()}, 4)
    with pytest.raises(Exception, match=r"input indexer_cache: .*on axis 3, not 16"):
        indexer({**inputs, "indexer_cache": inputs["indexer_cache"][..., :8].copy()}, 4)
    with pytest.raises(Exception, match=r"input block_table: .*on axis 0, not 1 \(sequences\)"):
        indexer({**inputs, "block_table": np.tile(inputs["block_table"], (2, 1))}, 4)
    with pytest.raises(Exception, match=r"attribute top_k: 0 is below 1"):
        indexer(inputs, 0)


def test_long_context_in_bounded_memory(rng):
    """128k positions, one token: the top ones are where large keys were put."""
    inputs = batch(rng, [1], [131_071], heads=4, dim=8, block=64)
    planted = np.sort(rng.choice(131_072, 50, replace=False))
    cache, table = inputs["indexer_cache"], inputs["block_table"][0]
    inputs["head_weights"][:] = 1
    for position in planted:
        cache[table[position // 64], position % 64, 0] = bf16(inputs["query"][0].sum(0) * 100)
    operator = Operator("LightningIndexer", inputs, {"positions": np.int32}, top_k=50)
    np.testing.assert_array_equal(operator(inputs)[0][0], planted)
