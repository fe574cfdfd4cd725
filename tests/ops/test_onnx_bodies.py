"""Every op's ONNX body, in onnxruntime without the native library, equals the reference."""

from __future__ import annotations

import pytest
import torch

from hybridge.compiler.targets.onnx.functions import BODIES
from hybridge.ops import vocabulary

from .cases import CASES, Case
from .harness import run_body


def test_every_op_has_a_body_and_a_case():
    assert set(BODIES) == set(vocabulary)
    assert {case.op for case in CASES.values()} == set(vocabulary)


@pytest.mark.parametrize("told_types", [False, True], ids=["any-type", "fp32-known"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_body_equals_reference(case: Case, told_types: bool):
    op = vocabulary[case.op]
    expected = op.functional(*case.args, **case.attributes)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    found = run_body(op, case.args, case.attributes, told_types=told_types)
    assert len(found) == len(expected)
    for ours, reference in zip(found, expected, strict=True):
        assert ours.dtype is reference.dtype
        torch.testing.assert_close(ours, reference, rtol=2e-5, atol=2e-5, equal_nan=True)
