"""PagedWrite and StateWrite: rows land in their slots, in place, and bad slots are refused."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import BFLOAT16, bf16, i32, run

DTYPES = (np.dtype(np.float32), BFLOAT16)


def write(cache: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> None:
    run(
        "PagedWrite",
        {"cache": cache, "rows": rows, "slot_mapping": slots},
        {"cache_out": cache.dtype},
        alias={"cache_out": "cache"},
    )


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("rows_dtype", DTYPES)
def test_rows_land_in_their_slots(level, rng, cache_dtype, rows_dtype):
    cache = rng.standard_normal((5, 3, 1, 37)).astype(cache_dtype)
    rows = rng.standard_normal((6, 1, 37)).astype(rows_dtype)
    slots = i32([14, -1, 0, 7, -1, 3])
    expected = cache.copy()
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            expected.reshape(15, 1, 37)[slot] = row.astype(np.float32).astype(cache_dtype)
    write(cache, rows, slots)
    np.testing.assert_array_equal(cache.view(np.uint8), expected.view(np.uint8))
