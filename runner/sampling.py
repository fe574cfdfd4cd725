"""Choosing the next token from logits: greedy, or drawn with temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridge.artifacts.errors import RunError, UsageError


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen.

    Attributes:
        temperature: 0 is greedy (ties: the lowest id); otherwise logits are divided by it.
        top_k: draw from this many likeliest tokens; 0 from all.
        top_p: draw from the fewest likeliest tokens whose probabilities reach this sum.
        seed: same seed, same draws; None draws differently every time.

    Raises:
        UsageError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature {self.temperature}", "give 0 (greedy) or more")
        if self.top_k < 0:
            raise UsageError(f"top_k {self.top_k}", "give 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p {self.top_p}", "give a number above 0, up to 1")
        if self.seed is not None and self.seed < 0:
            raise UsageError(f"seed {self.seed}", "give 0 or more")


class Sampler:
    """Chooses the tokens of one sequence; its draws depend on its own seed alone."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._generator = np.random.default_rng(options.seed)

    def choose(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token for logits [vocab].

        Raises:
            RunError: no token can be chosen, since the logits hold NaN or only -inf.
        """
        best = int(np.argmax(logits))  # of equals the first; a NaN, if there is one
        if np.isnan(logits[best]) or np.isneginf(logits[best]):
            raise RunError(
                f"the logits hold {logits[best]}: no token can be chosen",
                "check the checkpoint with `hybridge verify`",
            )
        if self._options.temperature == 0:
            return best
        return self._draw(logits)

    def _draw(self, logits: npt.NDArray[np.float32]) -> int:
        options = self._options
        # Stable, so that of equals the lowest id comes first, as in greedy.
        order = np.argsort(-logits, kind="stable")
        if options.top_k:
            order = order[: options.top_k]
        scaled = logits[order].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (scaled - scaled[0]) / options.temperature
        scaled = np.where(np.isnan(scaled), 0.0, scaled)  # inf - inf: the largest, a few times
        cumulative = np.cumsum(np.exp(scaled))
        kept = int(np.searchsorted(cumulative, options.top_p * cumulative[-1])) + 1
        kept = min(kept, len(order))
        point = self._generator.random() * cumulative[kept - 1]
        index = int(np.searchsorted(cumulative[:kept], point, side="right"))
        return int(order[min(index, kept - 1)])
