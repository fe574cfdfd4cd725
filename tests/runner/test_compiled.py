"""The runner on a compiled model and the native kernels: batches, padding, and states in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hybridge.artifacts.errors import ArtifactError
from hybridge.kernels import library_path
from hybridge.runner import Engine, load
from hybridge.runner.batch import Row, build_batch
from hybridge.runner.model import Model
from hybridge.runner.verify import verify_golden


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Path:
    pytest.importorskip("torch")
    try:
        library_path()
    except ArtifactError:
        pytest.skip("the kernel library is not built")
    return request.getfixturevalue("tiny_artifact")


@pytest.fixture(scope="module")
def prompts(compiled: Path) -> list[list[int]]:
    random = np.random.default_rng(0)
    vocab = load(compiled, threads=1).model.vocab_size
    return [random.integers(0, vocab, length).tolist() for length in (5, 90, 17, 1)]


def test_golden_values(compiled: Path) -> None:
    with load(compiled, threads=1, verify="full") as engine:
        verify_golden(engine).raise_if_wrong()


@pytest.mark.parametrize("chunk", [6, 64, 1000])
def test_a_batch_computes_what_each_alone_computes(
    compiled: Path, prompts: list[list[int]], chunk: int
) -> None:
    engine = load(compiled, threads=1)
    alone = [list(engine.generate(prompt, 8, stop_ids=())) for prompt in prompts]
    batched = Engine(engine.model, prefill_chunk=chunk)
    ids = [batched.add(prompt, 8, stop_ids=()) for prompt in prompts]
    while batched.active:
        batched.step()
    assert [batched.tokens(sequence) for sequence in ids] == alone


def test_padding_changes_no_state(compiled: Path, prompts: list[list[int]]) -> None:
    model = load(compiled, threads=1).model
    random = np.random.default_rng(1)
    for state in model.states.values():
        state[...] = random.standard_normal(state.shape)
    tokens, slot, blocks = prompts[1], 1, [3, 1]
    for phase, new, context in (("prefill", tokens[:20], 0), ("decode", tokens[20:21], 20)):
        before = {name: state.copy() for name, state in model.states.items()}
        row = Row(new, context, blocks, slot)
        padded = build_batch([row], model.capacity.block_size, pad_tokens=3, pad_rows=3)
        model.run(phase, padded)
        for spec in model.artifact.manifest.states:
            used = blocks if "blocks" in spec.shape else [slot]
            rest = [i for i in range(len(model.states[spec.name])) if i not in used]
            np.testing.assert_array_equal(
                model.states[spec.name][rest], before[spec.name][rest], err_msg=spec.name
            )


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_no_state_is_copied_in_a_call(compiled: Path, phase: str) -> None:
    """With hundreds of MB of caches and states, a call takes what it takes with few."""
    few = load(compiled, threads=1, blocks=64, slots=8).model
    many = load(compiled, threads=1, blocks=8000, slots=1000).model
    batch = build_batch([Row([5], 3, [7], 1)], few.capacity.block_size)
    for state in many.states.values():
        state.fill(0)  # every page is there
    copy = min(timed(lambda: [state.copy() for state in many.states.values()]) for _ in range(3))
    extra = quickest(many, phase, batch) - quickest(few, phase, batch)
    assert extra < copy / 8, f"{extra:.6f} s more; copying all states takes {copy:.6f} s"


def quickest(model: Model, phase: str, batch: dict) -> float:
    return min(timed(lambda: model.run(phase, batch)) for _ in range(20))


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
