"""From a lowered graph to a GE GraphDef, by the real torchair of the torch-npu wheel.

No CANN and no NPU take part: torchair's Python half converts on fake tensors, over the stand-in for
its native core. Nothing is compiled to a device binary, nothing runs.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import logging
import operator
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridge.artifacts.errors import CompileError
from hybridge.compiler.targets.ascend import stand_in
from hybridge.compiler.targets.ascend.constraints import SOCS
from hybridge.compiler.targets.ascend.operators import define_operators
from hybridge.compiler.targets.ascend.own_converters import definitions, register_own_converters
from hybridge.compiler.targets.ascend.symbolic_sizes import OPEN_SIZES, SymbolicSizes
from hybridge.ir.effects import op_name
from hybridge.ir.schedule import MAIN_STREAM
from hybridge.ir.schedule_ops import CORES, RECORD, SUPER_KERNEL, WAIT, stream_of

DEVICE = "npu:0"
# What the attributes of a GE node are called, as torchair writes them.
STREAM_LABEL = "_user_stream_label"
SUPER_KERNEL_SCOPE = "_super_kernel_scope"
SUPER_KERNEL_OPTIONS = "_super_kernel_options"
CORE_LIMITS = ("_op_aicore_num", "_op_vectorcore_num")
CONTROL = ":-1"  # how GE writes the control output of a node


@dataclass(frozen=True)
class CacheCopy:
    """A TensorMove whose input is a whole cache."""

    node: str
    cache: str
    cause: str


@dataclass(frozen=True)
class GeGraph:
    """One converted graph.

    Attributes:
        proto: the serialised GraphDef.
        text: the same, readable.
        nodes: GE nodes by operator type, without Data, Const and NetOutput.
        cache_copies: whole caches that the graph copies.
        moves: all TensorMove nodes.
        unverified: what only an installed CANN can confirm.
        torchair: the version of the wheel that converted.
        cann_version: the version that torchair was told.
    """

    proto: bytes
    text: str
    nodes: dict[str, int]
    cache_copies: tuple[CacheCopy, ...]
    moves: int
    unverified: tuple[str, ...]
    torchair: str
    cann_version: str


def load_torchair(cann_version: str, soc: str) -> stand_in.StandIn:
    """Make torchair ready to convert for one CANN version and SoC.

    Raises:
        CompileError: the torch-npu wheel is not installed.
    """
    define_operators()  # before torchair is imported: its converters look the operators up
    first = "torchair" not in sys.modules
    core = stand_in.install(cann_version, SOCS[soc].ge_name)
    core.definitions.update(definitions())
    if first:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend("npu")
        with core.as_torch_npu(), warnings.catch_warnings():
            # A warning for each converter of an operator that npu_schemas.txt leaves out.
            warnings.simplefilter("ignore")
            importlib.import_module("torchair._ge_concrete_graph.ge_converter.custom")
        register_own_converters()
    return core


def convert(
    graph_module: fx.GraphModule, caches: dict[str, str], *, soc: str, cann_version: str, name: str
) -> GeGraph:
    """Convert one graph of aten, npu and own operators.

    Args:
        graph_module: metadata on every placeholder; static shapes, or open sizes in its own metadata.
        caches: device input -> the cache it holds, for those inputs that are caches.
        soc: the target. cann_version: see `stand_in.install`.
        name: of the GE graph.

    Raises:
        CompileError: torchair is missing, or a node has no converter; the message has every such
            node.
    """
    core = load_torchair(cann_version, soc)
    missing = unconvertible(graph_module)
    if missing:
        lines = "\n".join(f"  {op}: {', '.join(nodes[:4])}" for op, nodes in missing.items())
        raise CompileError(
            f"torchair has no converter for {len(missing)} operators:\n{lines}",
            "these sites were not fused, or need a lowering of their own",
        )
    concrete = concrete_graph(graph_module, name, core.as_torch_npu())
    if OPEN_SIZES in graph_module.meta:
        graph_module.meta[OPEN_SIZES].require_open("conversion")
    graph = concrete.graph._proto  # the GraphDef inside torchair's wrapper
    return GeGraph(
        proto=graph.SerializeToString(deterministic=True),
        text=_text(graph),
        nodes=_count(graph),
        cache_copies=tuple(_cache_copies(graph, caches)),
        moves=sum(op.type == "TensorMove" for op in graph.op),
        unverified=tuple(core.unverified),
        torchair=stand_in.installed_version(),
        cann_version=cann_version,
    )


def unconvertible(graph_module: fx.GraphModule) -> dict[str, list[str]]:
    """Operators that torchair cannot convert -> the nodes that call them."""
    found: dict[str, list[str]] = {}
    for node in graph_module.graph.nodes:
        overload = isinstance(node.target, torch._ops.OpOverload)
        overload = overload and node.target not in (RECORD, WAIT) and op_name(node) not in _TWINS
        if node.op == "call_function" and overload and not _has_converter(node.target):
            found.setdefault(str(node.target), []).append(node.name)
    return found


def _has_converter(overload: Any) -> bool:
    """Whether there is a converter, and not one of the many placeholders that only raise."""
    converter = getattr(overload, "_ge_converter", None)
    if converter is None:
        return False
    code = getattr(inspect.unwrap(converter), "__code__", None)
    return code is None or code.co_names != ("NotImplementedError",)


def _on_device(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph whose own tensors are made on the device and whose output is a list."""
    graph = copy.deepcopy(graph_module.graph)
    for node in graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device(DEVICE)}
        if node.op == "output" and isinstance(node.args[0], fx.Node):
            node.args = ((node.args[0],),)
    read_what_is_written(graph)
    _write_streams(graph)
    return fx.GraphModule(graph_module, graph)


# Operator that writes arguments and returns none of them -> how many values its functional twin
# returns before them, and the places of the arguments.
_TWINS = {"npu::npu_mla_prolog_v3": (5, (9, 10)), "npu::npu_scatter_pa_kv_cache": (0, (2, 3))}


def read_what_is_written(graph: fx.Graph) -> None:
    """Give readers of a written input the writer's result: GE orders by data and nothing else."""
    for node in list(graph.nodes):
        if op_name(node) not in _TWINS:
            continue
        returned, places = _TWINS[op_name(node)]
        twin = op_name(node).removeprefix("npu::") + "_functional"
        node.target = getattr(torch.ops.npu, twin).default
        later = set(_after(node))
        for i, place in enumerate(places):
            cache = node.args[place]
            with graph.inserting_after(node):
                written = graph.call_function(operator.getitem, (node, returned + i))
            written.meta = {**node.meta, "val": cache.meta["val"]}
            for user in list(cache.users):
                if user in later:
                    user.replace_input_with(cache, written)


def _after(node: fx.Node) -> Iterator[fx.Node]:
    at = node.next
    while at.op != "root":
        yield at
        at = at.next


def _write_streams(graph: fx.Graph) -> None:
    """Streams and super-kernel scopes as torchair's scopes, events as its records and waits.

    GE orders data by itself; what an event adds beyond that becomes a control edge.
    """
    air = torch.ops.air
    records: dict[str, fx.Node] = {}
    opened: tuple[tuple[str, str], ...] = ()
    for node in list(graph.nodes):
        if node.op == "placeholder":
            continue
        wanted = () if node.op == "output" else _scope_attributes(node)
        with graph.inserting_before(node):
            if opened and wanted != opened:
                graph.call_function(air.scope_exit.default, ())
            if wanted and wanted != opened:
                keys, values = zip(*wanted, strict=True)
                graph.call_function(air.scope_enter.default, (list(keys), list(values)))
            opened = wanted
            if node.target is RECORD:
                record = graph.call_function(air.record.default)
                record.kwargs = {"device": torch.device(DEVICE)}
                records[str(node.args[0])] = record
            if node.target is WAIT:
                graph.call_function(air.wait.default, ([records[str(node.args[0])]],))
        if node.target in (RECORD, WAIT):
            graph.erase_node(node)


def _scope_attributes(node: fx.Node) -> tuple[tuple[str, str], ...]:
    found = []
    stream = stream_of(node)
    if stream != MAIN_STREAM:
        found.append((STREAM_LABEL, stream))
    if CORES in node.meta:
        found += [
            (name, str(count)) for name, count in zip(CORE_LIMITS, node.meta[CORES], strict=True)
        ]
    if SUPER_KERNEL in node.meta:
        found += [(SUPER_KERNEL_SCOPE, str(node.meta[SUPER_KERNEL])), (SUPER_KERNEL_OPTIONS, "")]
    return tuple(found)


def _fake_inputs(graph_module: fx.GraphModule, mode: FakeTensorMode) -> list[Tensor]:
    with mode:
        return [
            torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device=DEVICE)
            for node in graph_module.graph.nodes
            if node.op == "placeholder"
        ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torchair logs and prints what it does not find on this machine."""
    logger = logging.getLogger("torchair")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def concrete_graph(
    graph_module: fx.GraphModule,
    name: str,
    converting: AbstractContextManager[None] | None = None,
) -> Any:
    """torchair's GE graph of a lowered graph: here with its stand-in core, on a device with the real one.

    Args:
        graph_module: see `convert`. name: of the GE graph.
        converting: entered while converters run.

    It is what `torchair.get_compiler` makes, without a look at the graph by torchair's own fusions,
    and with control edges where they are meant. On a device it is called with tensors: the first call
    compiles it.
    """
    from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph
    from torchair._utils.graph_transform_observer import GraphTransformObserver
    from torchair.configs.compiler_config import CompilerConfig
    from torchair.npu_fx_compiler import _NpuGraphConverter, _optimize_fx

    sizes: SymbolicSizes | None = graph_module.meta.get(OPEN_SIZES)
    mode = sizes.mode if sizes else FakeTensorMode(allow_non_fake_inputs=True)
    graph_module = _on_device(graph_module)
    inputs = _fake_inputs(graph_module, mode)
    config = CompilerConfig()
    # What is fused is decided by this compiler's passes, which say so; torchair's own patterns
    # (addition and norm, norm and quantisation) would change the graph behind their backs.
    config.experimental_config.pattern_fusion_pass = False
    observer = GraphTransformObserver(graph_module, inputs, config)
    with _quiet(), torch.no_grad():
        graph_module = _optimize_fx(graph_module, config, observer)
        target = GeConcreteGraph(config, name=name)
        target.save_fx_graph(graph_module)
        converter = _NpuGraphConverter(graph_module, graph=target, garbage_collect_values=False)
        symbolically = enable_python_dispatcher() if sizes else contextlib.nullcontext()
        with converting or contextlib.nullcontext(), symbolically, mode:
            concrete = converter.run(*inputs)
        concrete.optimize_graph_without_runtime(*inputs, observer=observer, aot_gm=graph_module)
    _settle_control_edges(concrete.graph._proto)
    return concrete


def _settle_control_edges(graph: Any) -> None:
    """Move control edges from constants to the operators that were meant.

    torchair ties an event to the first and last GE node of an FX node. For an operator with absent
    inputs these are the constants that fill them (grouped matmul), and GE folds constants away,
    edge and all.
    """
    constant: set[str] = set()
    stream_last: dict[bytes, str] = {}
    stands_for: dict[str, str] = {}
    pending: dict[bytes, list[str]] = {}
    for op in graph.op:
        label = op.attr[STREAM_LABEL].s if STREAM_LABEL in op.attr else b""
        data = [name for name in op.input if name and not name.endswith(CONTROL)]
        control = [name for name in op.input if name.endswith(CONTROL)]
        fed = {name.split(":")[0] for name in data}
        if op.type in ("Data", "RefData", "NetOutput"):
            continue
        if op.type == "Const" or (fed and fed <= constant):
            constant.add(op.name)
            stands_for[op.name] = stream_last.get(label, "")
            pending.setdefault(label, []).extend(control)
            op.input[:] = [name for name in op.input if name not in control]
            continue
        stream_last[label] = op.name
        kept = [_meant(name, stands_for) for name in [*pending.pop(label, []), *control]]
        wanted = [name for name in dict.fromkeys(kept) if name and name != op.name + CONTROL]
        op.input[:] = [*(name for name in op.input if name not in control), *wanted]


def _meant(control: str, stands_for: dict[str, str]) -> str:
    """The control edge from the operator before a constant; "" if there is none."""
    name = control.removesuffix(CONTROL)
    while name in stands_for:
        name = stands_for[name]
    return name + CONTROL if name else ""


def _count(graph: Any) -> dict[str, int]:
    plumbing = ("Data", "RefData", "Const", "NetOutput")
    return dict(sorted(Counter(op.type for op in graph.op if op.type not in plumbing).items()))


def _cache_copies(graph: Any, caches: dict[str, str]) -> Iterator[CacheCopy]:
    """TensorMoves that read a cache input, straight or through views."""
    producers = {op.name: op for op in graph.op}
    for op in graph.op:
        if op.type != "TensorMove":
            continue
        source = op
        while source.type in ("TensorMove", "Reshape", "Identity") and source.input:
            source = producers[source.input[0].split(":")[0]]
        if source.name in caches:
            cause = "a functionalised write, whose in-place form the graph does not use"
            yield CacheCopy(op.name, caches[source.name], cause)


_SHOWN = (
    (STREAM_LABEL, "stream"),
    (SUPER_KERNEL_SCOPE, "super_kernel"),
    *zip(CORE_LIMITS, ("aic", "aiv"), strict=True),
)


def _text(graph: Any) -> str:
    """One line a node: `MatMul_1 = MatMul(x, w) stream=side after MatMul`."""
    lines = []
    for op in graph.op:
        data = [name.removesuffix(":0") for name in op.input if name and not name.endswith(CONTROL)]
        control = [name.removesuffix(CONTROL) for name in op.input if name.endswith(CONTROL)]
        line = f"{op.name} = {op.type}({', '.join(data)})"
        if op.output_desc:
            shapes = [f"[{','.join(map(str, desc.shape.dim))}]" for desc in op.output_desc]
            line += f" -> {' '.join(shapes)}"
        for attribute, shown in _SHOWN:
            if attribute in op.attr:
                line += f" {shown}={op.attr[attribute].s.decode()}"
        lines.append(line + (f" after {', '.join(control)}" if control else ""))
    return "\n".join(lines) + "\n"


def read_graph(proto: bytes) -> Any:
    """A GraphDef from its bytes; needs the wheel's protobuf classes.

    Raises:
        CompileError: the torch-npu wheel is not installed.
    """
    load_torchair("9.0.0", next(iter(SOCS)))
    from torchair._ge_concrete_graph.ge_ir_pb2 import GraphDef

    graph = GraphDef()
    graph.ParseFromString(proto)
    return graph
