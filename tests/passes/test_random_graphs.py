"""Model parts with random noise in them: the pipeline never changes what a graph computes, and never fails.

`make soak` runs thousands; `python tests/passes/random_graphs.py --first SEED --count 1` runs one again.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # random_graphs is a program as well

from random_graphs import attempt

GRAPHS = 100


def test_the_pipeline_never_changes_results_and_still_fuses() -> None:
    matches: Counter[str] = Counter()
    possible: Counter[str] = Counter()
    errors = {}
    for seed in range(GRAPHS):
        _, outcome, error = attempt(seed)
        if outcome is None:
            errors[seed] = error
        else:
            matches += outcome.fusions(outcome.matches)
            possible += outcome.fusions(outcome.possible)
    assert not errors, "\n".join(f"seed {seed}:\n{error}" for seed, error in errors.items())
    # Noise forbids some of what fuses without it; a test in which nothing fuses would show nothing.
    assert set(matches) == set(possible)
    assert matches.total() > possible.total() / 2, (matches, possible)
