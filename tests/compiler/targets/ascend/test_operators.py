"""Shapes and dtypes of our fake kernels against the wheel's own Meta functions, and the schemas."""

from __future__ import annotations

import ast
import sys
import types
from functools import cache
from unittest import mock

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from hybridge.compiler.targets.ascend import stand_in
from hybridge.compiler.targets.ascend.operators import FAKES, read_schemas

from . import op_cases as cases

SOCS = ["ascend-a3", "ascend-950"]
CASES = {
    "dsa": lambda: cases.dsa_case(True),
    "prolog": lambda: cases.prolog_case(True),
    "kda": lambda: cases.kda_decode_case(False),
    "moe": lambda: cases.moe_case("situ"),
    "moe silu": lambda: cases.moe_case("silu"),
    "moe mxfp4": lambda: cases.moe_case("situ", mxfp4=True),
}
needs_wheel = pytest.mark.skipif(
    stand_in.find_wheel() is None,
    reason="needs the torch-npu wheel: pip install --no-deps torch-npu==2.13.0",
)


def open_module(name, **members):
    """A module that answers everything; the Meta functions only compare with it or format errors."""
    module = types.ModuleType(name)
    module.__dict__.update(members)
    module.__dict__["__getattr__"] = lambda attribute: mock.MagicMock(name=f"{name}.{attribute}")
    module.__path__ = []
    return module


@cache
def wheel_functions():
    """The Meta functions of the wheel's `_meta_registrations.py`, by operator; none is registered."""
    found = {}

    def impl(_library, name, *_):
        return lambda function: found.setdefault(name.split(".")[0], function)

    stubs = {
        name: open_module(name)
        for name in (
            *("torch_npu.utils", "torch_npu.utils._error_code", "torch_npu.npu"),
            *("torch_npu.npu.utils", "torch_npu.npu._backends"),
        )
    }
    stubs["torch_npu"] = open_module("torch_npu", **stand_in.TORCH_NPU_DTYPES)
    stubs["torch_npu.npu.utils"].get_cann_version = lambda *_: "9.0.0"
    path = stand_in.find_wheel() / "op_plugin" / "meta" / "_meta_registrations.py"
    tree = ast.parse(path.read_text())
    # Without bare calls, which ask for the real operators.
    tree.body = [statement for statement in tree.body if not isinstance(statement, ast.Expr)]
    scope = {"__name__": "wheel_meta"}
    with (
        mock.patch.dict(sys.modules, stubs),
        mock.patch("torch.library.impl", impl),
        mock.patch("torch.library.Library", mock.MagicMock()),
    ):
        exec(compile(tree, str(path), "exec"), scope)
    return found


def npu_calls(graph: fx.Graph):
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name.startswith("npu::"):
            yield schema.name.removeprefix("npu::"), node


def on_meta(argument):
    """An argument as a meta tensor of the shape and dtype that it has in the graph."""
    if not isinstance(argument, fx.Node):
        return argument
    value = argument.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@needs_wheel
@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("name", CASES)
def test_fakes_agree_with_the_wheel(name, soc):
    lowered = CASES[name]().lower(soc, torch.bfloat16)
    for operator, node in npu_calls(lowered.graph_module.graph):
        args, kwargs = pytree.tree_map_only(fx.Node, on_meta, (node.args, node.kwargs))
        theirs = wheel_functions()[operator](*args, **kwargs)
        if theirs is None:
            assert node.meta.get("val") is None, operator
            continue
        theirs = theirs if isinstance(theirs, tuple | list) else (theirs,)
        ours = node.meta["val"]
        ours = ours if isinstance(ours, tuple | list) else (ours,)
        assert len(theirs) == len(ours), operator
        for index, (mine, wheel) in enumerate(zip(ours, theirs, strict=True)):
            assert (mine.shape, mine.dtype) == (wheel.shape, wheel.dtype), (operator, index)


@needs_wheel
def test_the_wheel_has_every_operator_of_the_data_file():
    names = {schema.split("(")[0].split(".")[0] for schema in read_schemas()}
    assert names <= set(wheel_functions()) | {"npu_format_cast"}, "an operator the wheel lacks"


def test_every_fake_has_a_schema():
    names = {f"npu::{schema.split('(')[0]}" for schema in read_schemas()}
    assert {name for name in FAKES if name.startswith("npu::")} <= names
