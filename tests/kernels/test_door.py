"""What no operator may accept: every input of every one, in every wrong shape, type and value.

Under `make sanitize` the same calls show that nothing outside is touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

from .cases import Case, all_cases, registered_operators
from .harness import BFLOAT16, i32

DTYPES = (np.dtype(np.float32), BFLOAT16)
CASES = [case for dtype in DTYPES for case in all_cases(dtype)]
NAMED = [pytest.param(case, id=f"{case.op}-{number}") for number, case in enumerate(CASES)]
INTEGERS = (-(2**31), -2, -1, 2**31 - 1)


def outcome(case: Case, inputs: dict[str, np.ndarray | None]) -> str:
    """The error, or nothing; a call that fails must have changed nothing."""
    copies = {name: None if a is None else a.copy() for name, a in inputs.items()}
    try:
        case.run(copies)
    except Exception as error:
        message = str(error)
    else:
        return ""
    for name, array in inputs.items():
        if array is not None:
            same = copies[name].tobytes() == array.tobytes()
            assert same, f"{name} was changed by a call that failed: {message}"
    return message


def is_named(case: Case, error: str) -> bool:
    """Whether an error names the operator, one of its inputs or attributes, and a remedy."""
    pattern = rf"hybridge\.{case.op}: (?:input|attribute) (\w+): .*; remedy: ."
    ours = re.search(pattern, error, re.DOTALL)
    return ours is not None and ours[1] in case.inputs.keys() | case.attributes.keys()


def resized(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Cut, or padded with zeros."""
    shape = list(array.shape)
    shape[axis] = size
    result = np.zeros(shape, array.dtype)
    common = tuple(slice(0, min(a, b)) for a, b in zip(shape, array.shape, strict=True))
    result[common] = array[common]
    return result


def given(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    for name, array in case.inputs.items():
        if array is not None:
            yield name, array


def test_every_operator_has_a_case():
    assert {case.op for case in CASES} == registered_operators()


@pytest.mark.parametrize("case", NAMED)
def test_the_case_itself_runs(level, case):
    assert outcome(case, case.inputs) == ""


@pytest.mark.parametrize("case", NAMED)
def test_another_rank_is_refused(case):
    for name, array in given(case):
        for changed in (array[None], array[0] if array.ndim > 1 else None):
            if changed is None:
                continue
            error = outcome(case, case.inputs | {name: np.ascontiguousarray(changed)})
            if not (case.op in ("Linear", "LinearPacked", "RmsNorm") and name == "x"):
                assert is_named(case, error), (name, changed.shape, error)


@pytest.mark.parametrize("case", NAMED)
@pytest.mark.parametrize("change", ["one more", "one less", "none"])
def test_another_size_is_refused(case, change):
    for name, array in given(case):
        for axis, size in enumerate(array.shape):
            new = {"one more": size + 1, "one less": size - 1, "none": 0}[change]
            error = outcome(case, case.inputs | {name: resized(array, axis, new)})
            if axis in case.free.get(name, ()):
                assert error == "" or (is_named(case, error) and new < size), (name, axis, error)
            else:
                assert is_named(case, error), (name, axis, error)


@pytest.mark.parametrize("case", NAMED)
def test_another_type_is_refused(case):
    for name, array in given(case):
        for dtype in (np.float32, np.int32, np.int64, np.uint8, BFLOAT16):
            if array.dtype == dtype:
                continue
            error = outcome(case, case.inputs | {name: np.zeros(array.shape, dtype)})
            two_types = {np.dtype(dtype), array.dtype} == set(DTYPES)
            assert (error == "" and two_types) or name in error or "parameter" in error, error


@pytest.mark.parametrize("case", NAMED)
def test_integers_out_of_range_are_refused(case):
    for name, array in given(case):
        if array.dtype != np.int32:
            continue
        for index in np.ndindex(array.shape):
            for value in INTEGERS:
                changed = array.copy()
                changed[index] = value
                error = outcome(case, case.inputs | {name: changed})
                assert error == "" or is_named(case, error), (name, index, value, error)
                assert error or not must_refuse(case, name, index, value), (name, index, value)


def must_refuse(case: Case, name: str, index: tuple[int, ...], value: int) -> bool:
    if name in ("block_table", "positions", "context_len"):
        starts = case.inputs.get("query_start")
        counts = np.ones(len(case.inputs[name])) if starts is None else np.diff(starts)
        if name == "positions":
            return index[0] < starts[-1] and value != -1
        if name == "context_len":
            return value < 0 or (counts[index[0]] > 0 and name not in case.any_value)
        lengths = np.where(counts > 0, counts + case.inputs["context_len"], 0)
        cache = case.inputs.get("latent_cache", case.inputs.get("indexer_cache"))
        return index[1] * cache.shape[1] < lengths[index[0]]
    return name == "expert_ids" or name == "query_start" or value != -1


@pytest.mark.parametrize("case", NAMED)
def test_nothing_at_all_is_a_result_or_a_named_error(level, case):
    """Every input in turn, and all together, without a single element."""
    empty = {n: None if a is None else a[:0].copy() for n, a in case.inputs.items()}
    for changed in [empty, *({n: empty[n]} for n, _ in given(case))]:
        error = outcome(case, case.inputs | changed)
        assert error == "" or is_named(case, error), (list(changed), error)


@pytest.mark.parametrize("case", NAMED)
def test_huge_sizes_beside_a_zero_are_refused(case):
    """Only an empty tensor can have them; sizes must not be computed from them."""
    for name, array in given(case):
        if array.ndim < 3:
            continue
        huge = (0, *[2 ** (59 // (array.ndim - 1))] * (array.ndim - 1))
        error = outcome(case, case.inputs | {name: np.zeros(huge, array.dtype)})
        assert is_named(case, error), (name, error)


def test_sizes_whose_product_overflows_are_refused():
    case = next(c for c in CASES if c.op == "MoeExpertsMxfp4")
    packed = np.zeros((0, 2**31 - 2, 3 << 30), np.uint8)
    error = outcome(case, case.inputs | {"gate_up_packed": packed})
    assert "input gate_up_packed: the sizes in shape" in error
    assert "multiply to more than 2^62; remedy:" in error


def test_ten_thousand_blocks(rng):
    """A table of 10,000 blocks of one row, shuffled, and one bad id in its last column."""
    case = next(c for c in all_cases(BFLOAT16) if c.op == "MlaAttention")
    cache = rng.standard_normal((10_000, 1, 1, 40)).astype(BFLOAT16)
    inputs = case.inputs | {
        "query": rng.standard_normal((1, 4, 40)).astype(np.float32),
        "latent_cache": cache,
        "query_start": i32([0, 1]),
        "context_len": i32([9_999]),
        "block_table": i32(rng.permutation(10_000))[None],
    }
    assert outcome(case, inputs) == ""
    inputs["block_table"][0, -1] = 10_000
    assert "block id 10000 at [0, 9999] is outside" in outcome(case, inputs)
