"""`hybridge verify`: does the artifact compute here what it computed where it was made?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridge.artifacts.errors import ArtifactError, VerifyError
from hybridge.artifacts.golden import GoldenCase, read_golden
from hybridge.artifacts.manifest import GoldenSpec
from hybridge.runner.engine import Engine


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        case: the golden case.
        name: what was run: "prefill", "chunked prefill", "prefill and decode", "greedy tokens"; with
            ", median" the median over positions, where values are rounded.
        ok: within tolerance.
        difference: largest absolute difference of logits, or a median of each position's largest;
            for tokens, how many differ.
        position: token position of that difference (of the first differing token), or -1.
        tolerance: absolute tolerance at that element; 0 for tokens.
        detail: the two values, for a person.
    """

    case: str
    name: str
    ok: bool
    difference: float
    position: int
    tolerance: float
    detail: str


@dataclass(frozen=True)
class VerifyReport:
    """All comparisons."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether all are within tolerance."""
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}

    def raise_if_wrong(self) -> None:
        """Raise for the worst check that failed.

        Raises:
            VerifyError: values differ by more than the tolerance.
        """
        failed = [check for check in self.checks if not check.ok]
        if failed:
            # not <=: a NaN is worse than any number
            worst = max(failed, key=lambda check: (np.isnan(check.difference), check.difference))
            raise VerifyError(
                f"golden case {worst.case!r}, {worst.name}: {worst.detail} "
                f"({len(failed)} of {len(self.checks)} checks failed)",
                "compare passes with `hybridge inspect`; try without the native kernels "
                "to see whether they are the cause",
            )


def verify_golden(engine: Engine) -> VerifyReport:
    """Run every golden case of the artifact.

    Each is run as one prefill, as prefill in chunks, and as prefill then decode token by token.

    Raises:
        ArtifactError: the artifact has no golden case, or a damaged one.
        RunError: the engine has no room for a case.
    """
    artifact = engine.model.artifact
    if not artifact.manifest.golden:
        raise ArtifactError(
            f"{artifact.root} has no golden cases to verify against", "compile it again"
        )
    checks: list[Check] = []
    for spec in artifact.manifest.golden:
        artifact.read(spec.file)  # its hash
        checks += verify_case(engine, spec, read_golden(artifact.path(spec.file)))
    return VerifyReport(tuple(checks))


def verify_case(engine: Engine, spec: GoldenSpec, case: GoldenCase) -> list[Check]:
    """Run one case, of the artifact or of your own; see `verify_golden`."""
    checks = []
    tokens = [int(token) for token in case.token_ids]
    if case.logits is not None:
        total, prefill = len(tokens), case.prefill_length
        chunk = max(1, -(-prefill // 3))
        runs = {
            "prefill": engine.logits(tokens, prefill_chunk=total),
            "chunked prefill": engine.logits(tokens, prefill_chunk=chunk),
            "prefill and decode": engine.logits(tokens, prefill_chunk=total, decode_from=prefill),
        }
        checks += [_compare(spec, name, got, case) for name, got in runs.items()]
        if case.median_atol is not None:
            checks += [_compare_medians(spec, name, got, case) for name, got in runs.items()]
    if case.greedy_tokens is not None and len(case.greedy_tokens):
        checks.append(_compare_tokens(engine, spec, case))
    return checks


def _compare(spec: GoldenSpec, name: str, got: npt.NDArray[np.float32], case: GoldenCase) -> Check:
    assert case.logits is not None
    want = case.logits.astype(np.float64)
    start = case.logits_start
    difference = np.abs(got[start : start + len(want)] - want)
    tolerance = spec.atol + spec.rtol * np.abs(want)
    excess = np.where(np.isnan(difference), np.inf, difference - tolerance)
    row, column = (int(i) for i in np.unravel_index(int(np.argmax(excess)), excess.shape))
    worst, allowed = float(difference[row, column]), float(tolerance[row, column])
    detail = (
        f"logit of token {column} at position {start + row} is "
        f"{got[start + row, column]:.6g}, expected {want[row, column]:.6g}: "
        f"off by {worst:.3g}, allowed {allowed:.3g}"
    )
    ok = bool(excess[row, column] <= 0)
    return Check(spec.name, name, ok, float(np.max(difference)), start + row, allowed, detail)


def _compare_medians(
    spec: GoldenSpec, name: str, got: npt.NDArray[np.float32], case: GoldenCase
) -> Check:
    """The medians over each phase's positions: what no single choice that rounding tips can move."""
    assert case.logits is not None
    assert case.median_atol is not None
    start = case.logits_start
    difference = np.abs(got[start : start + len(case.logits)] - case.logits.astype(np.float64))
    medians = case.phase_medians(difference.max(-1))
    excess = np.where(np.isnan(medians), np.inf, medians - case.median_atol)
    phase = int(np.argmax(excess))
    median, allowed = float(medians[phase]), float(case.median_atol[phase])
    detail = (
        f"the median over the {('prompt', 'decoded tokens')[phase]} of each position's largest "
        f"difference is {median:.3g}, allowed {allowed:.3g}"
    )
    return Check(
        spec.name, f"{name}, median", bool(excess[phase] <= 0), median, -1, allowed, detail
    )


def _compare_tokens(engine: Engine, spec: GoldenSpec, case: GoldenCase) -> Check:
    assert case.greedy_tokens is not None
    prompt = [int(token) for token in case.token_ids[: case.prefill_length]]
    want = [int(token) for token in case.greedy_tokens]
    got = list(engine.generate(prompt, len(want), stop_ids=()))
    wrong = [index for index, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]]
    position = len(prompt) + wrong[0] if wrong else -1
    detail = f"generated {got}, expected {want}" if wrong else f"all {len(want)} tokens equal"
    return Check(spec.name, "greedy tokens", not wrong, len(wrong), position, 0.0, detail)
