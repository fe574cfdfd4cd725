from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hybridge.artifacts.errors import ArtifactError, VerifyError
from hybridge.artifacts.golden import GoldenCase
from hybridge.artifacts.store import ArtifactWriter
from hybridge.artifacts.weights import Origin
from hybridge.runner import Engine
from hybridge.runner.verify import verify_golden

from .toy_model import Toy, toy_graph, toy_manifest, write_toy

TOKENS = [3, 1, 4, 1, 5, 9, 2]


def write_case(path: Path, toy: Toy, case: GoldenCase, atol: float = 1e-4) -> Path:
    with ArtifactWriter(path) as writer:
        for phase in ("prefill", "decode"):
            writer.add_bytes(f"graphs/{phase}.onnx", toy_graph(toy))
        writer.add_weight("embed", "float32", toy.embed, Origin(("e",)))
        writer.add_weight("head", "float32", toy.head, Origin(("h",)))
        golden = writer.add_golden("case", case, atol=atol)
        writer.finish(toy_manifest(toy, golden=(golden,)))
    return path


def test_a_good_artifact_verifies(engine: Engine) -> None:
    report = verify_golden(engine)
    assert report.ok
    report.raise_if_wrong()
    names = [check.name for check in report.checks]
    assert names == ["prefill", "chunked prefill", "prefill and decode", "greedy tokens"]
    assert all(check.difference < 1e-5 for check in report.checks)
    assert report.to_json()["ok"] is True


def test_a_wrong_logit_is_named(
    tmp_path: Path, toy: Toy, open_engine: Callable[..., Engine]
) -> None:
    logits = toy.logits(TOKENS)[3:].astype(np.float32)
    logits[1, 17] += 0.25
    case = GoldenCase(np.array(TOKENS, np.int32), 4, logits, logits_start=3)
    report = verify_golden(open_engine(write_case(tmp_path / "a", toy, case)))
    assert [check.ok for check in report.checks] == [False] * 3
    assert report.checks[0].position == 4
    assert report.checks[0].difference == pytest.approx(0.25, abs=1e-4)
    with pytest.raises(
        VerifyError, match=r"token 17 at position 4 .*off by 0\.25, allowed 0\.0001"
    ):
        report.raise_if_wrong()


@pytest.mark.parametrize(
    ("moved", "wrong"), [([], []), ([0], []), ([0, 1, 2], [0]), ([5], []), ([4, 5, 6], [1])]
)
def test_the_median_of_each_phase_has_its_bound(
    tmp_path: Path,
    toy: Toy,
    open_engine: Callable[..., Engine],
    moved: list[int],
    wrong: list[int],
) -> None:
    logits = toy.logits(TOKENS).astype(np.float32)
    logits[moved, 5] += 0.25
    median_atol = np.array([0.1, 0.2], np.float32)
    case = GoldenCase(np.array(TOKENS, np.int32), 4, logits, median_atol=median_atol)
    path = write_case(tmp_path / "a", toy, case, atol=0.5)
    report = verify_golden(open_engine(path))
    assert [check.ok for check in report.checks] == [True] * 3 + [not wrong] * 3
    for check in report.checks[3:]:
        assert check.name.endswith(", median")
        if wrong:
            assert check.tolerance == pytest.approx(float(median_atol[wrong[0]]))
            assert check.difference == pytest.approx(0.25, abs=1e-4)
            assert ("prompt", "decoded tokens")[wrong[0]] in check.detail


def test_a_nan_is_never_within_tolerance(
    tmp_path: Path, toy: Toy, open_engine: Callable[..., Engine]
) -> None:
    logits = toy.logits(TOKENS).astype(np.float32)
    logits[2, 3] = np.nan
    bounds = np.ones(2, np.float32)
    case = GoldenCase(np.array(TOKENS, np.int32), 4, logits, median_atol=bounds)
    report = verify_golden(open_engine(write_case(tmp_path / "a", toy, case)))
    assert not any(check.ok for check in report.checks)
    with pytest.raises(VerifyError, match="expected nan"):
        report.raise_if_wrong()


def test_a_wrong_token_is_named(
    tmp_path: Path, toy: Toy, open_engine: Callable[..., Engine]
) -> None:
    want = toy.greedy(TOKENS[:4], 3)
    want[1] = (want[1] + 1) % toy.vocab
    case = GoldenCase(np.array(TOKENS, np.int32), 4, greedy_tokens=np.array(want, np.int32))
    report = verify_golden(open_engine(write_case(tmp_path / "a", toy, case)))
    (check,) = report.checks
    assert (check.ok, check.position) == (False, 5)
    with pytest.raises(VerifyError, match="greedy tokens: generated"):
        report.raise_if_wrong()


def test_no_golden_case(tmp_path: Path, toy: Toy, open_engine: Callable[..., Engine]) -> None:
    engine = open_engine(write_toy(tmp_path / "a", toy, golden=()))
    with pytest.raises(ArtifactError, match="no golden cases"):
        verify_golden(engine)
