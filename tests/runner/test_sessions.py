"""Loading: what is mapped is not copied, what is bound stays in place, what is wrong is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.store import ArtifactWriter
from hybridge.artifacts.weights import Origin
from hybridge.runner import Engine
from hybridge.runner.batch import Row, build_batch

from .toy_model import Toy, external, toy_graph, toy_manifest, write_toy

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def state_pointers(engine: Engine) -> set[int]:
    return {state.ctypes.data for state in engine.model.states.values()}


def test_states_are_bound_in_place(engine: Engine) -> None:
    engine.add(PROMPT, 3)
    while engine.active:
        engine.step()
    for session in engine.model.sessions.values():
        assert state_pointers(engine) <= session.output_pointers()


def test_a_cache_is_not_copied_in_a_step(
    toy: Toy, tmp_path: Path, open_engine: Callable[..., Engine]
) -> None:
    """A step that writes one row into a 64 MB cache takes far less than copying 64 MB once."""
    engine = open_engine(write_toy(tmp_path / "a", toy), blocks=1 << 19)
    cache = engine.model.states["latent_cache_1"]
    assert cache.nbytes == 64 << 20
    cache.fill(1.0)  # every page is there
    copy = min(timed(cache.copy) for _ in range(3))
    batch = build_batch([Row([5], 3, [77], 1)], toy.block_size)
    engine.model.run("decode", batch)
    step = min(timed(lambda: engine.model.run("decode", batch)) for _ in range(20))
    assert step < copy / 4, f"a step takes {step:.6f} s, a copy {copy:.6f} s"
    np.testing.assert_array_equal(cache[77, 3, 0], toy.embed[5])
    assert state_pointers(engine) <= engine.model.sessions["decode"].output_pointers()


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_states_are_aligned_and_not_touched_before_use(engine: Engine) -> None:
    assert all(pointer % 64 == 0 for pointer in state_pointers(engine))


def test_one_file_is_mapped_once(engine: Engine) -> None:
    files = engine.model.artifact.files
    assert len(files._maps) == 1
    assert engine.model.weight_copies == frozenset()


def test_a_tiny_step_allocates_no_new_inputs(engine: Engine) -> None:
    """In steady decode the same input memory is written again: nothing is bound anew."""
    session = engine.model.sessions["decode"]
    engine.model.run("decode", build_batch([Row([5], 0, [1], 0)], 4))
    before = {name: buffer.ctypes.data for name, buffer in session._buffers.items()}
    engine.model.run("decode", build_batch([Row([6], 1, [1], 0)], 4))
    assert before == {name: buffer.ctypes.data for name, buffer in session._buffers.items()}


MEASURE = """
import resource, sys
from hybridge.runner import load

def resident(kind):
    for line in open("/proc/self/status"):
        if line.startswith(kind):
            return int(line.split()[1]) // 1024

load(sys.argv[1], use_native=False, threads=1)  # onnxruntime itself is loaded and warm
before = resident("RssAnon")
engine = load(sys.argv[2], use_native=False, threads=1)
list(engine.generate([1, 2, 3], 3))
print(resident("RssAnon") - before, len(engine.model.weight_copies))
"""


def anonymous_growth(small: Path, large: Path) -> tuple[int, int]:
    """MB of private memory that loading and running ``large`` costs, and weights copied."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(large)],
        capture_output=True,
        text=True,
        check=True,
        cwd=small.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    growth, copies = result.stdout.split()
    return int(growth), int(copies)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_weights_cost_no_private_memory(toy_artifact: Path, tmp_path: Path) -> None:
    """Two weights of 16 MB, two sessions: nothing of them is copied; folding would copy them."""
    mapped = write_toy(tmp_path / "mapped", Toy(vocab=1 << 13, width=512))
    growth, copies = anonymous_growth(toy_artifact, mapped)
    assert copies == 0
    assert growth < 8
    folded = write_toy(tmp_path / "folded", Toy(vocab=1 << 13, width=512, fold=True))
    growth, copies = anonymous_growth(toy_artifact, folded)
    assert copies == 1
    assert growth > 32  # the copy that is folded, in each session


def test_a_graph_that_folds_weights_still_runs(
    tmp_path: Path, open_engine: Callable[..., Engine]
) -> None:
    toy = Toy(fold=True)
    engine = open_engine(write_toy(tmp_path / "a", toy))
    assert engine.model.weight_copies == {"head"}  # and only what is folded is copied
    np.testing.assert_allclose(engine.logits(PROMPT), toy.logits(PROMPT), atol=1e-5)


def test_a_function_that_folds_weights_still_runs(
    tmp_path: Path, toy: Toy, open_engine: Callable[..., Engine]
) -> None:
    """Inside a function body it cannot be seen beforehand: then small weights are copied."""
    model = onnx.load_from_string(toy_graph(toy))
    last = model.graph.node[-1]
    body = [
        onnx.helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        onnx.helper.make_node("MatMul", ["x", "t"], ["y"]),
    ]
    opset = [onnx.helper.make_opsetid("", 20)]
    function = onnx.helper.make_function("hybridge", "Linear", ["x", "w"], ["y"], body, opset)
    model.functions.append(function)
    model.opset_import.add(domain="hybridge", version=1)
    call = onnx.helper.make_node("Linear", last.input[:2], last.output, domain="hybridge")
    last.CopyFrom(call)
    weights = {"embed": toy.embed, "head": toy.head}
    engine = open_engine(write_with(tmp_path / "a", model.SerializeToString(), weights))
    assert engine.model.weight_copies == {"embed", "head"}
    np.testing.assert_allclose(engine.logits(PROMPT), toy.logits(PROMPT), atol=1e-5)


def test_prepacking_computes_the_same(toy: Toy, open_engine: Callable[..., Engine]) -> None:
    got = open_engine(prepack=True).logits(PROMPT)
    np.testing.assert_allclose(got, toy.logits(PROMPT), atol=1e-5)


def write_with(path: Path, graph: bytes, weights: dict[str, np.ndarray], **changes: object) -> Path:
    with ArtifactWriter(path) as writer:
        writer.add_bytes("graphs/prefill.onnx", graph)
        writer.add_bytes("graphs/decode.onnx", graph)
        for name, array in weights.items():
            writer.add_weight(name, array.dtype.name, array, Origin((name,)))
        writer.finish(toy_manifest(Toy(), **changes))
    return path


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (np.zeros((31, 4), np.float32), r"float32 \[31, 8\] in the graph, but float32 \[31, 4\]"),
        (np.zeros((31, 8), np.float64), "but float64"),
        (np.zeros((8, 31), np.float32), r"but float32 \[8, 31\]"),
    ],
)
def test_a_weight_of_another_shape_is_refused(
    tmp_path: Path, toy: Toy, open_engine: Callable[..., Engine], head: np.ndarray, message: str
) -> None:
    """onnxruntime itself would read out of bounds."""
    path = write_with(tmp_path / "a", toy_graph(toy), {"embed": toy.embed, "head": head})
    with pytest.raises(ArtifactError, match=message):
        open_engine(path)


def test_a_missing_weight_is_named(
    tmp_path: Path, toy: Toy, open_engine: Callable[..., Engine]
) -> None:
    path = write_with(tmp_path / "a", toy_graph(toy), {"embed": toy.embed})
    with pytest.raises(ArtifactError, match="weight 'head' is not listed"):
        open_engine(path)


def test_a_graph_that_reads_elsewhere_is_refused(
    tmp_path: Path, toy: Toy, open_engine: Callable[..., Engine]
) -> None:
    model = onnx.load_from_string(toy_graph(toy))
    model.graph.initializer[0].CopyFrom(external("embed", toy.embed, "../../secret"))
    (tmp_path / "secret").write_bytes(toy.embed.tobytes())
    graph = model.SerializeToString()
    path = write_with(tmp_path / "a", graph, {"embed": toy.embed, "head": toy.head})
    with pytest.raises(ArtifactError, match="only 'weights' is allowed"):
        open_engine(path)


def test_a_graph_that_is_none(tmp_path: Path, toy: Toy, open_engine: Callable[..., Engine]) -> None:
    for index, graph in enumerate((b"", b"\x00\x01", b"not a graph at all")):
        path = write_with(tmp_path / str(index), graph, {})
        with pytest.raises(ArtifactError, match=r"\.onnx: (no ONNX model|onnxruntime cannot)"):
            open_engine(path)


def test_a_graph_with_an_unknown_operator(
    tmp_path: Path, toy: Toy, open_engine: Callable[..., Engine]
) -> None:
    model = onnx.load_from_string(toy_graph(toy))
    model.graph.node[0].domain = "hybridge"
    model.opset_import.add(domain="hybridge", version=1)
    weights = {"embed": toy.embed, "head": toy.head}
    path = write_with(tmp_path / "a", model.SerializeToString(), weights)
    with pytest.raises(ArtifactError, match="cannot load the graph") as caught:
        open_engine(path)
    assert "native kernels" in caught.value.remedy


def test_other_targets_and_no_weights_are_refused(
    tmp_path: Path, toy: Toy, open_engine: Callable[..., Engine]
) -> None:
    ascend = write_toy(tmp_path / "ascend", toy, target="ascend-a3")
    with pytest.raises(ArtifactError, match="compiled for ascend-a3"):
        open_engine(ascend)
    with ArtifactWriter(tmp_path / "none") as writer:
        for phase in ("prefill", "decode"):
            writer.add_bytes(f"graphs/{phase}.onnx", toy_graph(toy))
        writer.add_absent("embed", "float32", toy.embed.shape, Origin(("e",)))
        writer.finish(toy_manifest(toy, weights_policy="none"))
    with pytest.raises(ArtifactError, match="--weights none") as caught:
        open_engine(tmp_path / "none")
    assert "--weights copy" in caught.value.remedy


def test_one_phase_alone(tmp_path: Path, toy: Toy, open_engine: Callable[..., Engine]) -> None:
    whole = toy_manifest(toy)
    for phase in ("prefill", "decode"):
        with ArtifactWriter(tmp_path / phase) as writer:
            writer.add_bytes(f"graphs/{phase}.onnx", toy_graph(toy))
            writer.add_weight("embed", "float32", toy.embed, Origin(("e",)))
            writer.add_weight("head", "float32", toy.head, Origin(("h",)))
            writer.finish(toy_manifest(toy, phases={phase: whole.phases[phase]}, passes={}))
    engine = open_engine(tmp_path / "prefill")  # a prefill graph decodes too
    assert list(engine.generate(PROMPT, 4)) == toy.greedy(PROMPT, 4)
    with pytest.raises(Exception, match="no prefill graph"):
        open_engine(tmp_path / "decode").logits(PROMPT)


def test_a_bfloat16_weight_and_state(tmp_path: Path, open_engine: Callable[..., Engine]) -> None:
    """bf16 is carried as uint16 bits: bf16 in, Cast to fp32 by onnxruntime."""
    toy = Toy(fold=False)
    bits = (toy.head.view(np.uint32) >> 16).astype(np.uint16)
    rounded = (bits.astype(np.uint32) << 16).view(np.float32)
    model = onnx.load_from_string(toy_graph(toy))
    for initializer in model.graph.initializer:
        if initializer.name == "head":
            initializer.data_type = onnx.TensorProto.BFLOAT16
            initializer.external_data[2].value = str(bits.nbytes)
    cast = onnx.helper.make_node("Cast", ["head"], ["head32"], to=onnx.TensorProto.FLOAT)
    model.graph.node[-1].input[1] = "head32"
    nodes = [cast, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    with ArtifactWriter(tmp_path / "a") as writer:
        for phase in ("prefill", "decode"):
            writer.add_bytes(f"graphs/{phase}.onnx", model.SerializeToString())
        writer.add_weight("embed", "float32", toy.embed, Origin(("e",)))
        writer.add_weight("head", "bfloat16", bits, Origin(("h",)))
        writer.finish(toy_manifest(toy))
    got = open_engine(tmp_path / "a").logits(PROMPT)
    mixed = np.linalg.lstsq(toy.head.astype(np.float64), toy.logits(PROMPT).T, rcond=None)[0].T
    np.testing.assert_allclose(got, mixed @ rounded.T, atol=1e-4)


def test_a_checkpoint_with_an_odd_header_is_copied_where_it_must(
    tmp_path: Path, toy: Toy, open_engine: Callable[..., Engine]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "odd.bin").write_bytes(b"x" + toy.embed.tobytes())
    with ArtifactWriter(tmp_path / "a") as writer:
        for phase in ("prefill", "decode"):
            writer.add_bytes(f"graphs/{phase}.onnx", toy_graph(toy))
        writer.add_reference(
            "embed",
            "float32",
            toy.embed.shape,
            checkpoint=checkpoint,
            file="odd.bin",
            offset=1,
            origin=Origin(("e",)),
        )
        writer.add_weight("head", "float32", toy.head, Origin(("h",)))
        writer.finish(toy_manifest(toy, weights_policy="reference"))
    engine = open_engine(tmp_path / "a")
    assert engine.model.weight_copies == {"embed"}
    np.testing.assert_allclose(engine.logits(PROMPT), toy.logits(PROMPT), atol=1e-5)


def test_without_the_library_a_warning_says_so(
    toy_artifact: Path, open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDGE_KERNELS_LIBRARY", str(toy_artifact / "absent.so"))
    with pytest.warns(UserWarning, match="standard operators, slowly"):
        engine = open_engine(use_native=True)
    assert not engine.model.native


def test_nothing_heavy_is_imported(toy_artifact: Path) -> None:
    code = (
        "import json, sys\n"
        "import hybridge.runner\n"
        "early = set(sys.modules)\n"
        "engine = hybridge.runner.load(sys.argv[1], use_native=False)\n"
        "list(engine.generate([1, 2], 2))\n"
        "print(json.dumps([sorted(early), sorted(sys.modules)]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(toy_artifact)],
        capture_output=True,
        text=True,
        check=True,
        cwd=toy_artifact.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    early, late = ({name.split(".")[0] for name in names} for names in json.loads(result.stdout))
    assert "onnxruntime" not in early
    heavy = {"torch", "onnx", "onnxscript", "ml_dtypes", "safetensors", "tokenizers", "sympy"}
    assert not heavy & late


def test_more_threads_than_processors_do_no_harm(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine(threads=100_000)
    assert len(list(engine.generate(PROMPT, 2, stop_ids=()))) == 2
