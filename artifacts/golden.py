"""Golden cases: inputs and expected outputs that an artifact carries to check itself anywhere.

One safetensors file a case: ``token_ids`` [T] int32, ``prefill_length`` [1] int32 and optionally
``logits`` [L, vocab] fp32 (of positions ``logits_start`` .. ``logits_start + L - 1``),
``median_atol`` [2] fp32, the bounds of `GoldenCase.phase_medians`, and ``greedy_tokens`` [G] int32,
the greedy continuation of ``token_ids[:prefill_length]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.safetensors import encode, read_tensors

_AGAIN = "compile the artifact again"


@dataclass(frozen=True, eq=False)
class GoldenCase:
    """One case.

    Attributes:
        token_ids: [T] int32.
        prefill_length: tokens to prefill before decoding the rest one by one.
        logits: [L, vocab] fp32 expected values, or None.
        logits_start: position of the first row of ``logits``.
        greedy_tokens: [G] int32 greedy continuation of the first ``prefill_length`` tokens.
        median_atol: [2] fp32 bounds of `phase_medians`, or None: each logit's tolerance says it all.
    """

    token_ids: npt.NDArray[np.int32]
    prefill_length: int
    logits: npt.NDArray[np.float32] | None = None
    logits_start: int = 0
    greedy_tokens: npt.NDArray[np.int32] | None = None
    median_atol: npt.NDArray[np.float32] | None = None

    def phase_medians(self, largest: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
        """[2]: the median over the prompt's positions, and over the decoded ones; 0 over none.

        Args:
            largest: [L], of each row of ``logits`` the largest difference. A NaN makes its median one.
        """
        split = max(0, self.prefill_length - self.logits_start)
        parts = (largest[:split], largest[split:])
        return np.array([np.median(part) if part.size else 0.0 for part in parts])

    def to_bytes(self) -> bytes:
        """The bytes of the case's file.

        Raises:
            ArtifactError: the case contradicts itself.
        """
        _check(self, "golden case")
        tensors: dict[str, npt.NDArray[Any]] = {
            "token_ids": np.asarray(self.token_ids, np.int32),
            "prefill_length": np.array([self.prefill_length], np.int32),
            "logits_start": np.array([self.logits_start], np.int32),
        }
        if self.logits is not None:
            tensors["logits"] = np.asarray(self.logits, np.float32)
        if self.greedy_tokens is not None:
            tensors["greedy_tokens"] = np.asarray(self.greedy_tokens, np.int32)
        if self.median_atol is not None:
            tensors["median_atol"] = np.asarray(self.median_atol, np.float32)
        return encode(tensors)


def read_golden(path: Path) -> GoldenCase:
    """Read a case.

    Raises:
        ArtifactError: damaged, or it contradicts itself.
    """
    tensors = read_tensors(path)
    for name in ("token_ids", "prefill_length", "logits_start"):
        if name not in tensors:
            raise ArtifactError(f"{path}: has no tensor {name!r}", _AGAIN)
    case = GoldenCase(
        tensors["token_ids"],
        int(tensors["prefill_length"].reshape(-1)[0]),
        tensors.get("logits"),
        int(tensors["logits_start"].reshape(-1)[0]),
        tensors.get("greedy_tokens"),
        tensors.get("median_atol"),
    )
    _check(case, str(path))
    return case


def _check(case: GoldenCase, where: str) -> None:
    total = case.token_ids.shape[0] if case.token_ids.ndim == 1 else 0
    if not 1 <= case.prefill_length <= total:
        raise ArtifactError(
            f"{where}: prefill_length {case.prefill_length} is not within 1..{total}", _AGAIN
        )
    if case.median_atol is not None and case.median_atol.shape != (2,):
        raise ArtifactError(
            f"{where}: median_atol {list(case.median_atol.shape)} is not one number a phase", _AGAIN
        )
    if case.logits is None:
        return
    end = case.logits_start + case.logits.shape[0]
    if case.logits.ndim != 2 or not 0 <= case.logits_start < end <= total:
        raise ArtifactError(
            f"{where}: logits {list(case.logits.shape)} from position {case.logits_start} "
            f"do not fit {total} tokens",
            _AGAIN,
        )
