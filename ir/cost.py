"""What a node of a lowered graph costs: work of the Cube unit, of the Vector unit, and bytes moved.

Formulas by operator, from the shapes in the graph's metadata; no names of models or layers. Views
and sizes cost nothing. An operator without a formula is taken for elementwise work over what it
reads and writes, which is what most of them are.

`bytes_moved` is for graphs of any stage: what their intermediates cost, which fusion is to save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum, prod
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from hybridge.ir.effects import arguments_of, is_assertion, is_view, op_name
from hybridge.ir.schedule import Engine


@dataclass(frozen=True)
class Cost:
    """Work of one node.

    Attributes:
        cube: multiply-adds, twice.
        vector: elementwise operations.
        bytes: read and written in memory.
        moved: to and from other devices.
    """

    cube: float = 0.0
    vector: float = 0.0
    bytes: float = 0.0
    moved: float = 0.0

    @property
    def engine(self) -> Engine:
        """What the node keeps busy: the unit that has work, MIXED where both have."""
        if self.cube and self.vector:
            return Engine.MIXED
        if self.cube:
            return Engine.CUBE
        return Engine.VECTOR if self.bytes else Engine.NONE


@dataclass(frozen=True)
class Machine:
    """Peak rates of one device, per second: a scale for comparisons, not a prediction.

    Attributes:
        cube: bf16 operations. vector: fp32 operations. memory: bytes.
        launch: seconds that one more kernel takes. event: that one more event takes.
        aic: Cube cores. aiv: Vector cores. link: bytes from one device to another.
    """

    cube: float
    vector: float
    memory: float
    launch: float
    event: float
    aic: int
    aiv: int
    link: float = 2e11

    def seconds(self, cost: Cost) -> float:
        """A roofline: the slowest of the four, and the launch."""
        if cost.engine is Engine.NONE:
            return 0.0
        busy = max(cost.cube / self.cube, cost.vector / self.vector, cost.bytes / self.memory)
        busy = max(busy, cost.moved / self.link)
        return busy + self.launch


_FREE = (
    *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze"),
    *("slice", "select", "split", "split_with_sizes", "tensor_split", "expand", "unflatten"),
    *("getitem", "alias", "detach", "chunk", "sym_size", "record_event", "wait_event"),
)
_GATHERS = ("embedding", "index_select", "index", "gather")
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "moe_distribute")


def cost_of(node: Node) -> Cost:
    """The cost of a call; nothing for inputs, outputs and views."""
    name = op_name(node).split("::")[-1]
    if node.op != "call_function" or name in _FREE:
        return Cost()
    touched = _bytes(node.meta.get("val"))
    touched += sum(_bytes(each.meta.get("val")) for each in node.all_input_nodes)
    formula = _FORMULAS.get(name)
    if formula is not None:
        return formula(node, touched)
    elements = sum(prod(map(_traced_size, t.shape)) for t in _tensors(node.meta.get("val")))
    return Cost(vector=float(elements), bytes=touched)


def bytes_moved(graph: Graph) -> int:
    """Bytes of intermediates that the calls of a graph read and write, at the sizes it was traced with.

    An intermediate is a tensor that the graph computes; its inputs (weights, caches, the batch) do not count. A view
    moves nothing, and reading it moves what it shows. A gather reads no more than it returns.
    """
    sizes: dict[Node, int] = {}  # of intermediates and their views, as a reader sees them
    moved = 0
    for node in graph.nodes:
        if node.op != "call_function" or is_assertion(node):
            continue
        read = {each: sizes[each] for each in node.all_input_nodes if each in sizes}
        written = traced_bytes(node.meta.get("val"))
        name = op_name(node).split("::")[-1]
        if name in _FREE or is_view(node):
            if read:
                sizes[node] = written
            continue
        sizes[node] = written
        if name in _GATHERS:
            read = {each: min(size, written) for each, size in read.items()}
        moved += written + sum(read.values()) - _of_other_sites(node, read)
    return moved


def _of_other_sites(node: Node, read: dict[Node, int]) -> int:
    """Bytes that stage two of AttnRes leaves alone: the statistics hold every site of a block, it reads one."""
    if "site" not in node.kwargs:
        return 0
    return sum(
        read[value] - read[value] // _traced_size(value.meta["val"].shape[0])
        for argument, value in arguments_of(node)
        if argument.name in ("numerator", "logit_max", "exp_sum")
    )


def traced_bytes(value: Any) -> int:
    """The size of tensors whose dimensions may be symbols, each taken as it was when traced."""
    return sum(
        prod(map(_traced_size, tensor.shape)) * tensor.element_size() for tensor in _tensors(value)
    )


def _traced_size(size: Any) -> int:
    """A symbol as it was when traced: `int` would fix it for the graph."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def engine_of(node: Node) -> Engine:
    """What a node keeps busy."""
    name = op_name(node).split("::")[-1]
    if any(part in name for part in _COLLECTIVES):
        return Engine.COMMUNICATION
    return cost_of(node).engine


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bytes(value: Any) -> float:
    return float(traced_bytes(value))


def _shape(value: Any) -> tuple[int, ...]:
    node = value[0] if isinstance(value, list | tuple) else value
    return tuple(map(_traced_size, node.meta["val"].shape))


def _matmul(node: Node, touched: float) -> Cost:
    *stack, rows, inner = _shape(node.args[0])
    columns = _shape(node.args[1])[-1]
    return Cost(cube=2.0 * prod(stack) * rows * inner * columns, bytes=touched)


def _grouped_matmul(node: Node, touched: float) -> Cost:
    rows, inner = _shape(node.args[0])
    experts, _, columns = _shape(node.args[1])
    # At most one expert a row has its weights read.
    weights = _bytes([each.meta["val"] for each in node.args[1]])  # type: ignore[union-attr]
    read = touched - weights * (1 - min(1.0, rows / experts))
    return Cost(cube=2.0 * rows * inner * columns, bytes=read)


def _indexer(node: Node, touched: float) -> Cost:
    tokens, heads, width = _shape(node.args[0])
    keys = _paged_keys(node)
    pairs = float(tokens) * keys
    return Cost(cube=2 * pairs * heads * width, vector=pairs * heads, bytes=keys * width * 2.0)


def _paged_keys(node: Node) -> int:
    """The longest sequence that the block table has room for."""
    table = node.kwargs.get("block_table")
    columns = _shape(table)[1] if isinstance(table, Node) else 1
    return columns * _shape(node.args[1])[1]


def _sparse_attention(node: Node, touched: float) -> Cost:
    tokens, heads, width = _shape(node.args[0])
    chosen = _shape(node.args[3])[-1]
    pairs = float(tokens) * chosen
    return Cost(cube=4 * pairs * heads * width, vector=pairs * heads, bytes=2.0 * pairs * width)


def _dense_attention(node: Node, touched: float) -> Cost:
    tokens, heads, width = _shape(node.args[0])
    columns, block = _shape(node.args[6])[1], _shape(node.args[1])[1]
    pairs = float(tokens) * columns * block
    return Cost(cube=4 * pairs * heads * width, vector=pairs * heads, bytes=touched)


def _recurrence(node: Node, touched: float) -> Cost:
    tokens, heads, width = _shape(node.args[2])
    key = _shape(node.args[0])[-1]
    # Only the rows of the state that are named are read and written.
    rows = 8.0 * tokens * heads * width * key
    return Cost(vector=6.0 * tokens * heads * width * key, bytes=rows)


def _chunked_recurrence(node: Node, touched: float) -> Cost:
    tokens, heads, width = _shape(node.args[2])
    key, chunk = _shape(node.args[0])[-1], 64
    return Cost(
        cube=2.0 * tokens * heads * (2 * key * width + 3 * chunk * key + chunk * width),
        vector=8.0 * tokens * heads * key,
        bytes=touched,
    )


def _prepare(node: Node, touched: float) -> Cost:
    tokens, blocks, width = _shape(node.args[0])
    sites = _shape(node.args[2])[0]
    work = 4.0 * tokens * blocks * sites * width
    return Cost(cube=work, vector=3.0 * tokens * blocks * width, bytes=touched)


def _scatter(node: Node, touched: float) -> Cost:
    """Only the updated rows move, not the whole cache."""
    moved = 2 * _bytes(node.args[2].meta["val"])  # type: ignore[union-attr]
    return Cost(vector=moved / 2, bytes=moved)


def _scatter_rows(node: Node, touched: float) -> Cost:
    """Rows of a key and of a value."""
    moved = 2 * fsum(_bytes(rows.meta["val"]) for rows in node.args[:2])  # type: ignore[union-attr]
    return Cost(vector=moved / 2, bytes=moved)


def _mla_prolog(node: Node, touched: float) -> Cost:
    """Four products with weights, two norms; of the caches only the written rows move."""
    tokens = _shape(node.args[0])[0]
    weights = [node.args[place].meta["val"] for place in range(1, 5)]  # type: ignore[union-attr]
    caches = fsum(_bytes(node.args[place].meta["val"]) for place in (9, 10))  # type: ignore[union-attr]
    return Cost(
        cube=2.0 * tokens * sum(prod(map(_traced_size, weight.shape)) for weight in weights),
        vector=8.0 * tokens * sum(_shape(node.args[place])[0] for place in (5, 6)),
        bytes=touched - caches,
    )


def _dispatch(node: Node, touched: float) -> Cost:
    """Every row travels once for each of its experts, quantised if dispatch quantises."""
    rows, width = _shape(node.args[0])
    choices = _shape(node.args[1])[1]
    element = 1.0 if node.kwargs.get("quant_mode", 0) else 2.0
    moved = rows * choices * width * element
    return Cost(vector=float(rows * width), bytes=moved, moved=moved)


def _combine(node: Node, touched: float) -> Cost:
    """The same rows come back, in bf16, and are summed."""
    rows, choices = _shape(node.args[1])
    moved = 2.0 * rows * choices * _shape(node.args[0])[1]
    return Cost(vector=moved, bytes=moved, moved=moved)


def _gather(node: Node, touched: float) -> Cost:
    """Only the chosen rows move, not the whole table."""
    moved = 2 * _bytes(node.meta["val"])
    return Cost(vector=moved / 2, bytes=moved)


_FORMULAS: dict[str, Callable[[Node, float], Cost]] = {
    "mm": _matmul,
    "bmm": _matmul,
    "matmul": _matmul,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_lightning_indexer": _indexer,
    "npu_sparse_flash_attention": _sparse_attention,
    "paged_mla_attention": _dense_attention,
    "npu_recurrent_gated_delta_rule": _recurrence,
    "chunk_kda_fwd": _chunked_recurrence,
    "block_attn_res_prepare": _prepare,
    "npu_scatter_nd_update_": _scatter,
    "npu_moe_distribute_dispatch_v2": _dispatch,
    "npu_moe_distribute_combine_v2": _combine,
    "npu_scatter_pa_kv_cache": _scatter_rows,
    "npu_mla_prolog_v3": _mla_prolog,
    "embedding": _gather,
    "index_select": _gather,
    "index": _gather,
}
