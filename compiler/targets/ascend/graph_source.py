"""A lowered graph as text: Python source for npugraph_ex, and JSON.

The JSON is what is loaded again (`device/graph_reader.py`). The Python source is for a person with a
device to read, import and capture; nothing in this project runs it. Streams are `torch.npu.stream`
contexts, events are recorded and awaited by name, and every tensor that another stream uses is
recorded on that stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from hybridge.artifacts.errors import CompileError
from hybridge.compiler.targets.ascend.loadable import ARITHMETIC, loadable
from hybridge.compiler.targets.ascend.symbolic_sizes import OPEN_SIZES, SymbolicSizes
from hybridge.ir.effects import op_name
from hybridge.ir.schedule import MAIN_STREAM, Schedule
from hybridge.ir.schedule_ops import CORES, RECORD, SUPER_KERNEL, WAIT, stream_of

_SIGNS = {"add": " + ", "sub": " - ", "mul": " * "}

_HEAD = '''"""{title}

Inputs and outputs are described in the artifact's manifest (target_data). On a device:

    streams = {{name: torch.npu.Stream() for name in STREAMS}}
    streams["main"] = torch.npu.current_stream()
    events = {{name: torch.npu.Event() for name in EVENTS}}
    forward(streams, events, *inputs)

Operators of `torch.ops.hybridge_ascend` stand for CANN operators that torch_npu does not wrap: see
target_data["own_operators"]. Super-kernel scopes need static kernels:
options={{"static_kernel_compile": True, "super_kernel_optimize": True}}.
"""

import torch

STREAMS = {streams}
EVENTS = {events}


def forward(
    streams,
    events,
    {arguments},
):
'''


def python_source(graph_module: fx.GraphModule, schedule: Schedule, title: str) -> str:
    """The graph as a Python function of streams, events and inputs."""
    nodes = list(graph_module.graph.nodes)
    inputs = [node.name for node in nodes if node.op == "placeholder"]
    head = _HEAD.format(
        title=title,
        streams=json.dumps(list(schedule.streams), indent=4),
        events=json.dumps(list(schedule.events), indent=4),
        arguments=",\n    ".join(inputs),
    )
    recorded: dict[str, list[str]] = {}
    for value, stream in sorted(schedule.recorded_streams):
        recorded.setdefault(value, []).append(stream)
    return head + "\n".join(_lines(nodes, recorded)) + "\n"


def _lines(nodes: list[fx.Node], recorded: dict[str, list[str]]) -> Iterator[str]:
    scope, stream = "", MAIN_STREAM
    for node in nodes:
        if node.op == "output":
            yield from _scope(scope, "")
            yield f"    return {_text(node.args[0])}"
        if node.op != "call_function":
            continue
        if node.target in (RECORD, WAIT):
            yield from _scope(scope, "")
            scope = ""
            verb = "record" if node.target is RECORD else "wait"
            yield f'    events["{node.args[0]}"].{verb}(streams["{node.args[1]}"])'
            stream = MAIN_STREAM
            continue
        wanted = str(node.meta.get(SUPER_KERNEL, ""))
        yield from _scope(scope, wanted)
        scope = wanted
        if stream_of(node) != stream and stream_of(node) != MAIN_STREAM:
            yield f'    with torch.npu.stream(streams["{stream_of(node)}"]):'
        stream = stream_of(node)
        indent = "    " if stream == MAIN_STREAM else "        "
        if CORES in node.meta:
            aic, aiv = node.meta[CORES]
            yield f"{indent}with torch.npu.npugraph_ex.scope.limit_core_num({aic}, {aiv}):"
            yield f"{indent}    {node.name} = {_call(node)}"
        else:
            yield f"{indent}{node.name} = {_call(node)}"
        for other in recorded.get(node.name, []):
            if isinstance(node.meta.get("val"), torch.Tensor):
                yield f'{indent}{node.name}.record_stream(streams["{other}"])'


def _scope(current: str, wanted: str) -> Iterator[str]:
    if current and current != wanted:
        yield f'    torch.npu.super_kernel_scope_end("{current}")'
    if wanted and current != wanted:
        yield f'    torch.npu.super_kernel_scope_begin("{wanted}")'


def _call(node: fx.Node) -> str:
    if op_name(node) == "getitem":
        return f"{_text(node.args[0])}[{node.args[1]}]"
    if op_name(node) in ARITHMETIC:
        return f"{_SIGNS[op_name(node)].join(map(_text, node.args))}"
    arguments = [_text(argument) for argument in node.args]
    arguments += [f"{name}={_text(value)}" for name, value in node.kwargs.items()]
    return f"torch.ops.{node.target}({', '.join(arguments)})"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, torch.device):
        return '"npu"'
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    return str(value) if isinstance(value, torch.dtype | torch.layout) else repr(value)


def graph_json(graph_module: fx.GraphModule) -> str:
    """The graph as JSON, one node a line: name, operator, arguments, stream, scope, result.

    Raises:
        CompileError: an operator that would not be loaded again.
    """
    sizes = graph_module.meta.get(OPEN_SIZES)
    lines = [json.dumps(_record(node, sizes)) for node in graph_module.graph.nodes]
    return '{"nodes": [\n' + ",\n".join(lines) + "\n]}\n"


def _record(node: fx.Node, sizes: SymbolicSizes | None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": node.name, "kind": node.op}
    if node.op == "call_function":
        overload = getattr(node.target, "_overloadname", "")
        if loadable(op_name(node), overload) is None:
            raise CompileError(
                f"{node.name} calls {op_name(node)}.{overload}, which an artifact's graph may not",
                "the site was not fused, see why; or add the operator to loadable.py if it is pure",
            )
        found["operator"] = op_name(node)
        found["overload"] = overload
        found["arguments"] = [_plain(value) for value in node.args]
        found["keywords"] = {name: _plain(value) for name, value in node.kwargs.items()}
    if node.op == "output":
        results = node.args[0]
        found["arguments"] = _plain(results if isinstance(results, list | tuple) else [results])
    if stream_of(node) != MAIN_STREAM:
        found["stream"] = stream_of(node)
    if CORES in node.meta:
        found["cores"] = list(node.meta[CORES])
    if SUPER_KERNEL in node.meta:
        found["super_kernel"] = node.meta[SUPER_KERNEL]
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        found["shape"] = sizes.texts(value.shape) if sizes else list(map(int, value.shape))
        found["dtype"] = str(value.dtype).removeprefix("torch.")
    return found


def _plain(value: Any) -> Any:
    """A JSON value; a node is {"node": name}."""
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"torch": "npu" if isinstance(value, torch.device) else str(value)}
