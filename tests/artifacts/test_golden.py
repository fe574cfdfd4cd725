from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.golden import GoldenCase, read_golden

TOKENS = np.arange(5, dtype=np.int32)


def test_round_trip(tmp_path: Path) -> None:
    logits = np.ones((2, 3), np.float32)
    case = GoldenCase(TOKENS, 3, logits, 3, np.array([1, 2], np.int32))
    (tmp_path / "x").write_bytes(case.to_bytes())
    read = read_golden(tmp_path / "x")
    assert (read.prefill_length, read.logits_start) == (3, 3)
    np.testing.assert_array_equal(read.token_ids, TOKENS)
    assert read.logits is not None
    np.testing.assert_array_equal(read.logits, logits)
    assert read.greedy_tokens is not None
    assert read.greedy_tokens.tolist() == [1, 2]


@pytest.mark.parametrize(
    "case",
    [
        GoldenCase(TOKENS, 0),
        GoldenCase(TOKENS, 6),
        GoldenCase(TOKENS, 3, np.ones((4, 3), np.float32), 2),
        GoldenCase(TOKENS[None], 1),
    ],
)
def test_a_case_that_contradicts_itself(case: GoldenCase) -> None:
    with pytest.raises(ArtifactError):
        case.to_bytes()
