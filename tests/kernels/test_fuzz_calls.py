"""The calls that `make fuzz` draws: the same ones from the same seed, of every operator, and as they are said to be."""

from __future__ import annotations

import numpy as np
import pytest

from .cases import registered_operators
from .fuzz_calls import BFLOAT16, DRAWS, Outcome, call
from .fuzz_faults import FAULTS, broken
from .test_door import outcome

COUNT = len(DRAWS)


def bytes_of(seed: int, number: int) -> bytes:
    case = call(seed, number).case
    arrays = [a for a in case.inputs.values() if a is not None]
    shapes = repr([(a.dtype, a.shape) for a in arrays])
    return (repr(case.attributes) + shapes).encode() + b"".join(a.tobytes() for a in arrays)


def test_every_operator_is_drawn():
    """And one a round: the numbers of a round are the operators, in the order of their names."""
    missing = registered_operators() - DRAWS.keys()
    assert not missing, (
        f"{', '.join(sorted(missing))}: nothing draws calls of it; "
        "write a function that does and list it in DRAWS of tests/kernels/fuzz_calls.py"
    )
    assert DRAWS.keys() == registered_operators()
    assert [call(1, number).case.op for number in range(COUNT)] == sorted(DRAWS)


def test_a_call_is_made_of_its_seed_and_number_alone():
    first = [bytes_of(7, number) for number in range(2 * COUNT)]
    again = [bytes_of(7, number) for number in reversed(range(2 * COUNT))]
    assert first == again[::-1]
    assert first != [bytes_of(8, number) for number in range(2 * COUNT)]
    assert len(set(first)) > COUNT


def test_all_outcomes_of_every_operator_are_drawn():
    drawn = [call(3, number) for number in range(20 * COUNT)]
    outcomes = {(one.case.op, one.outcome) for one in drawn}
    assert {(op, Outcome.RETURNS) for op in DRAWS} <= outcomes
    assert {(op, Outcome.REFUSED) for op in DRAWS} <= outcomes


def test_every_fault_applies_somewhere():
    """And breaks the call: what it changes is not what was there."""
    rng = np.random.default_rng(0)
    cases = [one.case for one in (call(5, n) for n in range(4 * COUNT)) if one.what == "valid"]
    for fault in FAULTS:
        results = [one for one in (fault(case, rng) for case in cases) if one is not None]
        assert results, fault.__name__
    assert all(broken(case, rng).case is not case for case in cases)


@pytest.mark.parametrize("op", sorted(DRAWS))
def test_drawn_calls_end_as_said(op):
    """Through onnxruntime, which refuses some broken models itself; `make fuzz` does without it."""
    for round_ in range(4):
        one = call(11, sorted(DRAWS).index(op) + round_ * COUNT)
        bound = one.case.alias or not any(dtype == BFLOAT16 for dtype in one.case.outputs.values())
        if not bound:  # numpy has no such type for onnxruntime to return
            continue
        error = outcome(one.case, one.case.inputs)
        if one.outcome != Outcome.EITHER:
            assert bool(error) == (one.outcome == Outcome.REFUSED), (one.describe(), error)
