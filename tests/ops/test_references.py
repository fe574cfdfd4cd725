"""Properties that every op of the vocabulary has: twin, fake kernel, effects, what padding may do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridge.ops import find, vocabulary

from .cases import CASES, LAYOUTS, Case

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def copied(case: Case) -> list[Tensor | None]:
    return [None if value is None else value.clone() for value in case.args]


def as_tuple(result: object) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)  # type: ignore[return-value]


def same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left.nan_to_num(7e7), right.nan_to_num(7e7))


@each_case
def test_the_functional_twin_returns_what_the_op_writes(case: Case):
    op = vocabulary[case.op]
    args, untouched = copied(case), copied(case)
    own = as_tuple(op.overload(*args, **case.attributes))
    found = as_tuple(op.functional(*untouched, **case.attributes))
    written = [args[op.tensor_arguments.index(name)] for name in op.mutated]
    assert len(found) == op.output_count + len(op.mutated)
    assert all(same(a, b) for a, b in zip(found, (*own, *written), strict=True))
    assert all(same(a, b) for a, b in zip(untouched, case.args, strict=True))


@each_case
def test_an_op_changes_only_what_it_declares(case: Case):
    op = vocabulary[case.op]
    args = copied(case)
    op.overload(*args, **case.attributes)
    for name, after, before in zip(op.tensor_arguments, args, case.args, strict=True):
        assert name in op.mutated or same(after, before), name


@each_case
def test_the_fake_kernel_agrees(case: Case):
    op = vocabulary[case.op]
    expected = as_tuple(op.functional(*copied(case), **case.attributes))
    with FakeTensorMode() as mode:
        args = [None if value is None else mode.from_tensor(value) for value in case.args]
        found = as_tuple(op.functional(*args, **case.attributes))
    for fake, real in zip(found, expected, strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("name", vocabulary)
def test_both_forms_are_found(name: str):
    op = vocabulary[name]
    assert find(op.overload) is op
    assert find(op.functional) is op


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.op == "lightning_indexer"]
)
def test_positions_are_a_dense_ascending_prefix_then_minus_one(name: str):
    case = CASES[name]
    positions = torch.ops.hybridge.lightning_indexer(*case.args, **case.attributes)
    valid = positions >= 0
    assert torch.equal(valid, valid.long().cummin(1).values.bool())
    assert bool(((positions[:, 1:] > positions[:, :-1]) | ~valid[:, 1:]).all())


@pytest.mark.parametrize("prefix", ["indexer", "sparse", "dense", "recurrence", "kda-prefill"])
def test_padding_gives_nothing(prefix: str):
    layout = LAYOUTS["padded"]
    case = CASES[f"{prefix}-padded"]
    output = as_tuple(vocabulary[case.op].functional(*copied(case), **case.attributes))[0]
    padding = output[layout.tokens - layout.padding :]
    assert bool((padding == (-1 if prefix == "indexer" else 0)).all())


@pytest.mark.parametrize("prefix", ["recurrence", "kda-prefill"])
def test_inactive_rows_and_foreign_slots_keep_their_state(prefix: str):
    case = CASES[f"{prefix}-padded-inactive"]
    op = vocabulary[case.op]
    named = dict(zip(op.tensor_arguments, copied(case), strict=True))
    slots = named["state_slot"]
    assert slots is not None
    written = set(slots[slots >= 0].tolist())
    results = as_tuple(op.functional(*named.values(), **case.attributes))
    for name, after in zip(op.mutated, results[op.output_count :], strict=True):
        before = named[name]
        assert before is not None
        changed = {s for s in range(len(before)) if not torch.equal(before[s], after[s])}
        assert changed == written


def test_a_new_sequence_starts_from_zero_whatever_its_slot_holds():
    case = CASES["kda-prefill-ragged"]
    args = copied(case)
    names = vocabulary["kda_prefill"].tensor_arguments
    context, slots = args[names.index("context_len")], args[names.index("state_slot")]
    assert context is not None
    assert slots is not None
    fresh = int(slots[int((context == 0).nonzero()[0])])
    poisoned = dataclasses.replace(case, args=tuple(copied(case)))
    for name in ("state", "conv_state"):
        poisoned.args[names.index(name)][fresh] = 1e9  # type: ignore[index]
    left = torch.ops.hybridge.kda_prefill_functional(*args, **case.attributes)
    right = torch.ops.hybridge.kda_prefill_functional(*poisoned.args, **case.attributes)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
