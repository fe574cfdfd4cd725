"""A lowered graph from `graphs/<graph>_npu.json`: an FX graph of allowed operators, and no code run."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from hybridge.artifacts.dtypes import element_type
from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.record import Record, parse_json
from hybridge.compiler.targets.ascend.loadable import loadable
from hybridge.compiler.targets.ascend.symbolic_sizes import OPEN_SIZES, SymbolicSizes
from hybridge.ir.schedule_ops import CORES, STREAM, SUPER_KERNEL

_AGAIN = "compile the artifact again"
_CONSTANTS = {
    str(value): value
    for value in (
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn),
        *(torch.strided, torch.contiguous_format, torch.preserve_format),
    )
}


def read_graph(data: bytes, where: str) -> fx.GraphModule:
    """Rebuild a graph from its JSON.

    Args:
        data: of the file. where: its name, for messages.

    Returns:
        A graph on the CPU with fake values in `meta["val"]`, as lowering leaves it; its nodes keep
        their streams, super-kernel scopes and core limits.

    Raises:
        ArtifactError: ill-formed, or a node calls what is not allowed.
    """
    return _Reader(where).read(data)


class _Reader:
    def __init__(self, where: str) -> None:
        self.where = where
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.sizes = SymbolicSizes()
        self.is_open = False

    def read(self, data: bytes) -> fx.GraphModule:
        record = Record(parse_json(data, self.where), self.where)
        for each in record.records("nodes"):
            self._node(each)
        record.finish()
        if not self.nodes or self.graph.output_node() is None:
            raise record.fail("the graph has no output")
        module = fx.GraphModule({}, self.graph)
        module.graph.lint()
        values = [node.meta["val"] for node in self.graph.nodes if node.op == "placeholder"]
        try:
            with enable_python_dispatcher() if self.is_open else contextlib.nullcontext():
                FakeTensorProp(module, self.sizes.mode).propagate(*values)
        except Exception as error:
            raise record.fail(f"the graph does not fit together: {error}") from error
        if self.is_open:
            module.meta[OPEN_SIZES] = self.sizes
        return module

    def _node(self, record: Record) -> None:
        name, kind = record.text("name"), record.text("kind")
        if not name.isidentifier() or name in self.nodes:
            raise record.fail(f"{name!r} is no name, or is used twice")
        if kind == "placeholder":
            node = self._placeholder(record, name)
        elif kind == "call_function":
            node = self._call(record, name)
        elif kind == "output":
            node = self.graph.output(self._value(record.items("arguments"), record))
        else:
            raise record.fail(f"kind {kind!r} is not of a graph of operators")
        if node.name != name:
            node.name = name
        self.nodes[name] = node

    def _placeholder(self, record: Record, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        shape, dtype = record.shape("shape"), record.text("dtype")
        element_type(dtype)
        try:
            sizes = self.sizes.shape(shape)
        except ValueError as error:
            raise record.fail(str(error)) from error
        self.is_open |= sizes != shape
        with self.sizes.mode:
            node.meta["val"] = torch.empty(sizes, dtype=getattr(torch, dtype))
        return node

    def _call(self, record: Record, name: str) -> fx.Node:
        operator, overload = record.text("operator"), record.text("overload")
        target = loadable(operator, overload)
        if target is None:
            raise record.fail(f"{name} calls {operator}.{overload}, which no artifact may")
        args = tuple(self._value(each, record) for each in record.items("arguments"))
        keywords = record.mapping("keywords")
        kwargs = {key: self._value(value, record) for key, value in keywords.items()}
        node = self.graph.call_function(target, args, kwargs)
        for key, meta in (("stream", STREAM), ("super_kernel", SUPER_KERNEL)):
            if key in record.names():
                node.meta[meta] = record.text(key)
        if "cores" in record.names():
            node.meta[CORES] = record.integers("cores")
        return node

    def _value(self, value: Any, record: Record) -> Any:
        if isinstance(value, list):
            return [self._value(each, record) for each in value]
        if not isinstance(value, dict):
            return value
        if value.keys() == {"node"} and value["node"] in self.nodes:
            return self.nodes[value["node"]]
        if value.keys() == {"float"} and value["float"] in ("inf", "-inf"):
            return float(value["float"])
        if value == {"torch": "npu"}:
            return torch.device("cpu")
        if value.keys() == {"torch"} and value["torch"] in _CONSTANTS:
            return _CONSTANTS[value["torch"]]
        raise ArtifactError(f"{record.where}: cannot read the argument {value!r:.200}", _AGAIN)
