"""A toy of the real graph signature in standard ONNX operators, and its definition in numpy.

Layer 0 keeps a recurrent state (the decayed sum of embeddings, per slot); layer 1 a paged cache of
embeddings, of which each token reads its own and all earlier rows with a weight that depends on the
position. So a wrong slot, block, position, order or padding changes the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hybridge.artifacts.canonical import digest_json
from hybridge.artifacts.golden import GoldenCase
from hybridge.artifacts.manifest import (
    Defaults,
    Manifest,
    ModelInfo,
    PassRecord,
    PhaseSpec,
    Refusal,
    Report,
    SpecialTokens,
    StateSpec,
    TensorSpec,
)
from hybridge.artifacts.store import ArtifactWriter
from hybridge.artifacts.weights import Origin

INDICES = {
    "token_ids": ("T",),
    "query_start": ("B1",),
    "context_len": ("B",),
    "slot_mapping": ("T",),
    "block_table": ("B", "M"),
    "state_slot": ("B",),
    "logits_index": ("L",),
}
STATES = ("kda_state_0", "latent_cache_1")


@dataclass(frozen=True)
class Toy:
    vocab: int = 31
    width: int = 8
    block_size: int = 4
    seed: int = 0
    fold: bool = False  # transpose the weight in the graph: onnxruntime folds that at load

    @property
    def embed(self) -> np.ndarray:
        random = np.random.default_rng(self.seed)
        return random.standard_normal((self.vocab, self.width)).astype(np.float32)

    @property
    def head(self) -> np.ndarray:
        random = np.random.default_rng(self.seed + 1)
        return random.standard_normal((self.vocab, self.width)).astype(np.float32)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """[T, vocab] in fp64: the definition."""
        x = self.embed[tokens].astype(np.float64)
        positions = np.arange(len(tokens))
        weight = 1 / (1 + positions)
        recurrent = np.cumsum(x, 0)
        attended = np.stack([(weight[: t + 1, None] * x[: t + 1]).sum(0) for t in positions])
        return np.tanh(0.3 * recurrent + attended) @ self.head.astype(np.float64).T

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(np.argmax(self.logits(tokens)[-1])))
        return tokens[len(prompt) :]

    def state_specs(self) -> tuple[StateSpec, ...]:
        return (
            StateSpec("kda_state_0", 0, "kda_state", "float32", ("slots", 1, 1, self.width)),
            StateSpec(
                "latent_cache_1",
                1,
                "latent",
                "float32",
                ("blocks", "block_size", 1, self.width),
            ),
        )


def external(name: str, array: np.ndarray, location: str = "weights") -> TensorProto:
    """An initializer that holds no data, only where it would lie."""
    proto = TensorProto(name=name, data_type=numpy_helper.from_array(array[:0]).data_type)
    proto.dims.extend(array.shape)
    proto.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(array.nbytes))):
        proto.external_data.add(key=key, value=value)
    return proto


class _Graph:
    """Builds nodes by nested calls: g("Add", a, b) gives the output's name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []

    def __call__(self, op: str, *inputs: str, out: str = "", **attributes: object) -> str:
        name = out or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def const(self, value: object, dtype: type = np.int64) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def long(self, name: str) -> str:
        return self("Cast", name, to=TensorProto.INT64)


def toy_graph(toy: Toy) -> bytes:
    """The serialized model; it serves both phases, since prefill takes any ragged batch."""
    g = _Graph()
    const = g.const
    zero, one, axis0, axis1 = const([0]), const([1]), const([0]), const([1])
    x = g("Gather", "embed", "token_ids")  # [T, D]
    start = g.long("query_start")
    ends = g("Slice", start, one, const([2**31]), axis0)  # [B]
    begins = g("Slice", start, zero, const([-1]), axis0)
    rows_of_x = g("Slice", g("Shape", x), zero, one, axis0)  # [1]: T
    index = g("Range", const(0), g("Squeeze", rows_of_x), const(1))  # [T]
    # sequence of each token: how many sequences end at or before it; padding belongs to the last
    after = g("GreaterOrEqual", g("Unsqueeze", index, axis1), g("Unsqueeze", ends, axis0))
    sequence = g("ReduceSum", g("Cast", after, to=TensorProto.INT64), axis1, keepdims=0)
    last = g("Sub", g("Shape", ends), one)
    sequence = g("Min", sequence, last)
    context = g.long("context_len")
    offset = g("Sub", index, g("Gather", begins, sequence))
    position = g("Add", g("Gather", context, sequence), offset)  # [T]

    # recurrent state: [slots, 1, 1, D]
    width = const([-1, toy.width])
    state = g("Reshape", "kda_state_0", width)
    slots = g("Slice", g("Shape", state), zero, one, axis0)
    slot_index = g("Range", const(0), g("Squeeze", slots), const(1))
    slot = g.long("state_slot")
    same = g("Equal", g("Unsqueeze", slot_index, axis1), g("Unsqueeze", slot, axis0))
    onehot = g("Cast", same, to=TensorProto.FLOAT)  # [slots, B]
    initial = g("Gather", state, g("Max", slot, zero))  # [B, D]
    fresh = g("Unsqueeze", g("Greater", context, zero), axis1)
    initial = g("Where", fresh, initial, const([[0.0]], np.float32))
    sums = g("CumSum", x, const(0))  # inclusive
    empty = g("Expand", const([[0.0]], np.float32), const([1, toy.width]))
    padded = g("Concat", empty, sums, axis=0)
    until_begin = g("Gather", padded, begins)
    final = g("Add", initial, g("Sub", g("Gather", padded, ends), until_begin))
    own = g(
        "Sub", g("Add", sums, g("Gather", initial, sequence)), g("Gather", until_begin, sequence)
    )
    written = g("Unsqueeze", g("ReduceMax", onehot, axis1, keepdims=0), axis1)
    new = g("Where", g("Cast", written, to=TensorProto.BOOL), g("MatMul", onehot, final), state)
    g("Reshape", new, g("Shape", "kda_state_0"), out="kda_state_0_out")

    # paged cache: [N, block, 1, D]
    mapping = g.long("slot_mapping")
    kept = g("Squeeze", g("NonZero", g("GreaterOrEqual", mapping, zero)), axis0)
    rows = g("Unsqueeze", g("Gather", mapping, kept), axis1)
    size = const(toy.block_size)
    targets = g("Concat", g("Div", rows, size), g("Mod", rows, size), axis=1)  # block, offset
    new_rows = g("Unsqueeze", g("Gather", x, kept), axis1)
    # The scatter itself gives the output: a Reshape in between would copy the whole cache.
    cache = g("ScatterND", "latent_cache_1", targets, new_rows, out="latent_cache_1_out")
    pages = g("Gather", cache, "block_table")  # [B, M, block, 1, D]
    pages = g("Reshape", pages, const([0, -1, toy.width]))  # [B, S, D]
    length = g("Slice", g("Shape", pages), one, const([2]), axis0)
    places = g("Range", const(0), g("Squeeze", length), const(1))  # [S]
    seen = g("LessOrEqual", g("Unsqueeze", places, axis0), g("Unsqueeze", position, axis1))
    divisor = g("Cast", g("Add", places, one), to=TensorProto.FLOAT)
    weight = g("Div", const([1.0], np.float32), divisor)
    weight = g("Mul", g("Cast", seen, to=TensorProto.FLOAT), weight)  # [T, S]
    own_pages = g("Gather", pages, sequence)  # [T, S, D]
    attended = g("MatMul", g("Unsqueeze", weight, axis1), own_pages)  # [T, 1, D]
    attended = g("Squeeze", attended, axis1)

    mixed = g("Tanh", g("Add", g("Mul", own, const(0.3, np.float32)), attended))
    wanted = g("Gather", mixed, "logits_index")
    if toy.fold:
        g("MatMul", wanted, g("Transpose", "head", perm=[1, 0]), out="logits")
    else:
        g("Gemm", wanted, "head", transB=1, out="logits")
    return _serialize(toy, g)


def _serialize(toy: Toy, g: _Graph) -> bytes:
    float_, int_ = TensorProto.FLOAT, TensorProto.INT32
    states = {
        "kda_state_0": ["slots", 1, 1, toy.width],
        "latent_cache_1": ["N", toy.block_size, 1, toy.width],
    }
    info = helper.make_tensor_value_info
    inputs = [info(name, int_, list(shape)) for name, shape in INDICES.items()]
    inputs += [info(name, float_, shape) for name, shape in states.items()]
    outputs = [info("logits", float_, ["L", toy.vocab])]
    outputs += [info(f"{name}_out", float_, shape) for name, shape in states.items()]
    weights = [external("embed", toy.embed), external("head", toy.head)]
    graph = helper.make_graph(g.nodes, "toy", inputs, outputs, weights + g.constants)
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()


def toy_manifest(toy: Toy, **changes: object) -> Manifest:
    """The manifest of a toy, without its files."""
    inputs = tuple(TensorSpec(name, "int32", shape) for name, shape in INDICES.items())
    caches = tuple(TensorSpec(s.name, s.dtype, s.shape) for s in toy.state_specs())
    outputs = (TensorSpec("logits", "float32", ("L", toy.vocab)),)
    outputs += tuple(TensorSpec(f"{c.name}_out", c.dtype, c.shape) for c in caches)
    config = {"model_type": "toy", "vocab_size": toy.vocab}
    record = PassRecord(
        "fuse", 1, 1, (Refusal("add_1", "shared user", "used twice", "copy it"),), 20, 10
    )
    values: dict[str, object] = {
        "hybridge_version": "0.0",
        "model": ModelInfo("toy", digest_json(config), toy.vocab),
        "model_config": config,
        "target": "cpu",
        "phases": {
            phase: PhaseSpec(f"graphs/{phase}.onnx", inputs + caches, outputs)
            for phase in ("prefill", "decode")
        },
        "states": toy.state_specs(),
        "defaults": Defaults(toy.block_size, max_context=32, slots=3, prefill_chunk=8),
        "weights_policy": "copy",
        "passes": {"prefill": (record,), "decode": (record,)},
        "tools": {"numpy": "2"},
        "special_tokens": SpecialTokens(bos=1, eos=(), pad=0),
    }
    return Manifest(**{**values, **changes})  # type: ignore[arg-type]


def write_toy(path: Path, toy: Toy | None = None, **changes: object) -> Path:
    """Compile a toy "by hand" into ``path``."""
    toy = toy or Toy()
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    case = GoldenCase(
        np.array(tokens, np.int32),
        6,
        toy.logits(tokens).astype(np.float32),
        greedy_tokens=np.array(toy.greedy(tokens[:6], 5), np.int32),
    )
    with ArtifactWriter(path) as writer:
        for phase in ("prefill", "decode"):
            writer.add_bytes(f"graphs/{phase}.onnx", toy_graph(toy))
        writer.add_weight("embed", "float32", toy.embed, Origin(("embed_tokens",)))
        writer.add_weight("head", "float32", toy.head, Origin(("lm_head",)))
        golden = writer.add_golden("first", case, atol=1e-4)
        manifest = toy_manifest(toy, **{"golden": (golden,), **changes})
        writer.finish(manifest, Report({"prefill": {"fuse": 0.5}}))
    return path
