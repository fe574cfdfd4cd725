"""Index tensors: every new token in its own block, padding nowhere."""

from __future__ import annotations

import numpy as np
import pytest

from hybridge.artifacts.errors import RunError
from hybridge.runner.batch import Row, build_batch
from hybridge.runner.blocks import FreeList


def test_a_ragged_batch_with_padding() -> None:
    rows = [Row([5, 6, 7], 3, [9, 2], 1), Row([8], 0, [4], 0)]
    batch = build_batch(rows, 4, pad_tokens=2, pad_rows=1)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "token_ids": [5, 6, 7, 8, 0, 0],
        "query_start": [0, 3, 4, 4],
        "context_len": [3, 0, 0],
        "slot_mapping": [39, 8, 9, 16, -1, -1],
        "block_table": [[9, 2], [4, 0], [0, 0]],
        "state_slot": [1, 0, -1],
        "logits_index": [2, 3],
    }
    assert all(value.dtype == np.int32 for value in batch.values())


def test_a_position_past_the_last_block_is_refused() -> None:
    """Position 130, blocks of 4, a table of 32: column 32 does not exist."""
    row = Row([1], 130, list(range(32)), 0)
    with pytest.raises(RunError, match="position 130 lies in block 32 of a sequence that holds 32"):
        build_batch([row], 4)
    empty = Row([], 132, list(range(32)), 0)
    with pytest.raises(RunError, match="holds 32"):
        build_batch([empty], 4)  # its table would be narrower than its context
    assert build_batch([Row([1], 127, list(range(32)), 0)], 4)["slot_mapping"].tolist() == [127]


def test_the_table_holds_the_blocks_in_use() -> None:
    rows = [Row([1], 8, list(range(9, 0, -1)), 0), Row([1], 0, [4, 5], 1)]
    table = build_batch(rows, 4)["block_table"]
    assert table.tolist() == [[9, 8, 7, 0], [4, 0, 0, 0]]


def test_a_row_without_tokens() -> None:
    batch = build_batch([Row([], 4, [3], 0), Row([1], 0, [0], 1)], 4)
    assert batch["query_start"].tolist() == [0, 0, 1]
    assert batch["slot_mapping"].tolist() == [0]


def test_a_free_list_hands_nothing_out_twice() -> None:
    blocks = FreeList("cache blocks", 4, "wait")
    first = blocks.take(3)
    with pytest.raises(RunError, match="2 cache blocks needed, 1 free of 4"):
        blocks.take(2)
    assert blocks.free == 1
    blocks.give_back(first[:1])
    with pytest.raises(RunError, match="not held"):
        blocks.give_back(first[:1])
    with pytest.raises(RunError, match="not held"):
        blocks.give_back([first[1], first[1]])
    assert sorted(blocks.take(2) + first[1:]) == [0, 1, 2, 3]
