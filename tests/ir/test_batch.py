"""The small batches that proofs run on."""

from __future__ import annotations

import pytest

from hybridge.ir.batch import BatchShape, batches

FREE = {"tokens": None, "sequences": None, "columns": None, "blocks": None, "slots": None}


@pytest.mark.parametrize("decode", [True, False])
def test_cache_rows_are_distinct_and_inside(decode: bool) -> None:
    for batch in batches(BatchShape(block=4, decode=decode, **FREE), reach=6):
        values = batch.inputs()
        slots = values["slot_mapping"][: batch.real_tokens].tolist()
        assert len(set(slots)) == len(slots)
        assert max(slots) < batch.blocks * batch.block
        assert values["slot_mapping"][batch.real_tokens :].eq(-1).all()
        assert values["query_start"][-1] == batch.real_tokens


def test_batches_fit_a_bucket() -> None:
    shape = BatchShape(tokens=6, sequences=2, columns=3, block=4, blocks=9, slots=4, decode=False)
    for batch in batches(shape, reach=100):
        values = batch.inputs()
        assert values["block_table"].shape == (2, 3)
        assert values["slot_mapping"].shape == (6,)
        assert max(c + n for c, n in zip(batch.contexts, batch.lengths, strict=True)) <= 12


def test_positions_follow_the_context() -> None:
    batch = next(
        b for b in batches(BatchShape(block=4, decode=False, **FREE)) if b.name == "ragged"
    )
    assert [batch.position_of(token) for token in range(4)] == [5, 6, 7, 0]
    assert [batch.sequence_of(token) for token in range(4)] == [0, 0, 0, 2]
