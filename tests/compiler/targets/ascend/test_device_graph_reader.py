"""A graph comes back from its JSON as it was, and nothing but allowed operators comes back at all."""

import json

import pytest
import torch

from hybridge.artifacts.errors import ArtifactError, CompileError
from hybridge.compiler.targets.ascend import convert as ge
from hybridge.compiler.targets.ascend import stand_in
from hybridge.compiler.targets.ascend.device.graph_reader import read_graph
from hybridge.compiler.targets.ascend.graph_source import graph_json
from hybridge.compiler.targets.ascend.loadable import loadable
from hybridge.ir.schedule_ops import CORES, STREAM, SUPER_KERNEL

from . import op_cases as cases

CASES = {
    "dsa prefill": lambda: cases.dsa_case(False),
    "dsa decode": lambda: cases.dsa_case(True),
    "dense": lambda: cases.dense_case(True),
    "kda prefill": lambda: cases.kda_prefill_case(-5.0),
    "kda decode": lambda: cases.kda_decode_case(False),
    "attn_res": cases.attn_res_case,
    "moe": lambda: cases.moe_case("situ"),
    "mxfp4": lambda: cases.moe_case("silu", mxfp4=True),
}


def reread(module):
    return read_graph(graph_json(module).encode(), "graph.json")


@pytest.mark.parametrize("soc", ["ascend-a3", "ascend-950"])
@pytest.mark.parametrize("name", CASES)
def test_a_graph_comes_back_as_it_was(name, soc):
    module = CASES[name]().lower(soc, torch.bfloat16).graph_module
    again = reread(module)
    assert graph_json(again) == graph_json(module)
    if stand_in.find_wheel() is not None:
        converted = [
            ge.convert(each, {}, soc=soc, cann_version="9.0.0", name="g").proto
            for each in (module, again)
        ]
        assert converted[0] == converted[1]


def test_streams_scopes_and_core_limits_come_back():
    module = cases.moe_case("situ").lower("ascend-950", torch.bfloat16).graph_module
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    marks = {STREAM: "side", SUPER_KERNEL: "scope_0", CORES: (8, 16)}
    calls[3].meta.update(marks)
    again = reread(module)
    found = {node.name: node.meta for node in again.graph.nodes}
    assert {key: found[calls[3].name][key] for key in marks} == marks
    assert not marks.keys() & found[calls[2].name].keys()
    assert graph_json(again) == graph_json(module)


def document(**changes):
    call = {
        "name": "y",
        "kind": "call_function",
        "operator": "aten::add",
        "overload": "Tensor",
        "arguments": [{"node": "x"}, {"node": "x"}],
        "keywords": {},
        **changes,
    }
    start = {"name": "x", "kind": "placeholder", "shape": [2], "dtype": "float32"}
    end = {"name": "output", "kind": "output", "arguments": [{"node": "y"}]}
    return json.dumps({"nodes": [start, call, end]}).encode()


def test_a_small_graph_runs():
    (result,) = read_graph(document(), "g")(torch.tensor([1.0, 2.0]))
    assert result.tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"operator": "aten::from_file", "overload": "default"}, "from_file.default, which no"),
        ({"operator": "aten::add_", "overload": "Tensor"}, "add_.Tensor, which no"),
        ({"operator": "aten::add", "overload": "out"}, "add.out, which no"),
        ({"operator": "aten::__class__", "overload": "default"}, "which no artifact may"),
        ({"operator": "os::system", "overload": "default"}, "which no artifact may"),
        ({"operator": "eval", "overload": ""}, "which no artifact may"),
        ({"operator": "npu::npu_print", "overload": "default"}, "which no artifact may"),
        ({"operator": "aten::add", "overload": "__init__"}, "which no artifact may"),
        ({"kind": "call_module"}, "is not of a graph of operators"),
        ({"kind": "get_attr"}, "is not of a graph of operators"),
        ({"name": "x"}, "used twice"),
        ({"name": "import os"}, "is no name"),
        ({"arguments": [{"node": "z"}]}, "cannot read the argument"),
        ({"arguments": [{"torch": "torch.load"}]}, "cannot read the argument"),
        ({"arguments": [{"node": "x"}, [[1]]]}, "does not fit together"),
        ({"overload": 3}, "must be a string"),
    ],
)
def test_nothing_else_is_loaded(changes, words):
    with pytest.raises(ArtifactError, match=words):
        read_graph(document(**changes), "g")


def test_a_graph_needs_an_output():
    with pytest.raises(ArtifactError, match="no output"):
        read_graph(b'{"nodes": []}', "g")


def test_what_could_not_be_loaded_is_not_written():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.add_.Tensor, (x, x)),))
    with pytest.raises(CompileError, match=r"add_.Tensor, which an artifact's graph may not"):
        graph_json(torch.fx.GraphModule({}, graph))


def test_the_list_of_operators():
    assert loadable("npu::npu_rms_norm", "default") is torch.ops.npu.npu_rms_norm.default
    assert loadable("aten::silu", "default") is torch.ops.aten.silu.default
    assert loadable("aten::arange", "default") is torch.ops.aten.arange.default
