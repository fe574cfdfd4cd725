"""Operators whose output may take an input's memory: the values are those of an output of its own."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import run

TOKENS, HIDDEN = 5, 203
SITE = {"site": 1, "eps": 1e-5}
MIX = {
    "query": (HIDDEN,),
    "numerator": (2, TOKENS, HIDDEN),
    "logit_max": (2, TOKENS),
    "exp_sum": (2, TOKENS),
}
ROWS, NORM = (TOKENS, HIDDEN), {"norm_weight": (HIDDEN,)}

# operator: input shapes, output -> the input that it may replace, attributes
CASES = {
    "RmsNorm": ({"x": ROWS, "weight": (HIDDEN,)}, {"out": "x"}, {"eps": 1e-5}),
    "Situ": ({"gate": ROWS, "up": ROWS}, {"out": "gate"}, {"beta": 4.0, "linear_beta": 25.0}),
    "AttnResUpdate": ({"prefix": ROWS, **MIX}, {"output": "prefix"}, SITE),
    "AttnResUpdateNorm": (
        {"prefix": ROWS, **MIX, **NORM},
        {"output": "prefix"},
        {**SITE, "norm_eps": 1e-5},
    ),
    "AttnResAddUpdateNorm": (
        {"prefix": ROWS, "delta": ROWS, **MIX, **NORM},
        {"new_prefix": "prefix", "output": "delta"},
        {**SITE, "norm_eps": 1e-5},
    ),
}


@pytest.mark.parametrize("operator", CASES)
def test_an_output_in_its_inputs_memory(level, rng, operator):
    shapes, replaced, attributes = CASES[operator]
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    inputs |= {name: abs(inputs[name]) + 1 for name in ("exp_sum",) if name in inputs}
    outputs = dict.fromkeys(replaced, np.float32)
    apart = run(operator, inputs, outputs, **attributes)
    assert run(operator, inputs, outputs, alias=replaced, **attributes) == []
    for found, name in zip(apart, replaced.values(), strict=True):
        np.testing.assert_array_equal(inputs[name], found)
