"""Threads of the runner and of its callers, forked children, and the end of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridge.artifacts.errors import ArtifactError
from hybridge.kernels import library_path
from hybridge.runner import Engine, load

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 3]]
SECONDS = 300  # a machine may stall; a hang does not end


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Path:
    pytest.importorskip("torch")
    try:
        library_path()
    except ArtifactError:
        pytest.skip("the kernel library is not built")
    return Path(request.getfixturevalue("tiny_artifact"))


def generate(engine: Engine, prompt: list[int]) -> list[int]:
    return list(engine.generate(prompt, 12, stop_ids=()))


def run_script(text: str, artifact: Path) -> str:
    """What a script prints; it must end by itself, without an error."""
    command = [sys.executable, "-P", "-c", text, str(artifact)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAD = """
import os, sys
import numpy, onnxruntime
from hybridge.runner import load
count = lambda: len(os.listdir("/proc/self/task"))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_a_session_has_a_pool_of_the_size_asked_for_and_no_other(compiled: Path) -> None:
    """The calling thread is one of `threads`. Kernels use the session's pool: no call adds one."""
    text = """
before = count()
for threads in (1, 2):
    engine = load(sys.argv[1], threads=threads)
    loaded = count() - before
    assert loaded == len(engine.model.sessions) * (min(threads, os.cpu_count()) - 1), loaded
    engine.logits(list(range(70)), decode_from=60)
    assert count() - before == loaded, count()
    del engine
    assert count() == before, count()
"""
    run_script(HEAD + text, compiled)


def test_threads_share_an_engine(compiled: Path) -> None:
    alone = [generate(load(compiled, threads=1), prompt) for prompt in PROMPTS]
    engine = load(compiled, threads=2)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for _ in range(3):
            together = list(pool.map(lambda prompt: generate(engine, prompt), PROMPTS))
            assert together == alone
    assert engine.free_blocks == engine.model.capacity.blocks


def test_engines_in_several_threads_do_not_mix(compiled: Path) -> None:
    alone = [generate(load(compiled, threads=1), prompt) for prompt in PROMPTS]
    engines = [load(compiled, threads=2) for _ in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for _ in range(3):
            assert list(pool.map(generate, engines, PROMPTS)) == alone


def test_a_stream_that_others_finish_loses_no_token(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine()
    whole = list(engine.generate(PROMPTS[0], 9))
    stream = engine.generate(PROMPTS[0], 9)
    first = next(stream)
    while engine.active:
        engine.step()
    assert [first, *stream] == whole


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_is_refused_and_can_load_its_own(compiled: Path) -> None:
    text = """
engine = load(sys.argv[1], threads=2)
expected = list(engine.generate([3, 1, 4], 5, stop_ids=()))
child = os.fork()
if child == 0:
    try:
        list(engine.generate([3, 1, 4], 5))
    except Exception as error:
        print("before this process was forked" in str(error), flush=True)
    engine = load(sys.argv[1], threads=2)
    print(list(engine.generate([3, 1, 4], 5, stop_ids=())) == expected, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert list(engine.generate([3, 1, 4], 5, stop_ids=())) == expected
"""
    assert run_script(HEAD + text, compiled).split() == ["True", "True"]


@pytest.mark.parametrize("end", ["sys.exit(0)", "engine = None", "sys.modules.clear()"])
def test_a_process_ends_with_an_engine_in_use(compiled: Path, end: str) -> None:
    """In the middle of a stream, with another engine beside."""
    text = """
engine, other = load(sys.argv[1], threads=2), load(sys.argv[1], threads=2)
stream = engine.generate([3, 1, 4], 9)
print(next(stream), next(other.generate([5], 3)))
"""
    assert run_script(HEAD + text + end, compiled)


def test_threads_rest_between_steps(compiled: Path) -> None:
    """A pool that spins on after a step (for 40 ms, measured) takes the cores from whoever samples or serves."""
    for session in load(compiled, threads=2).model.sessions.values():
        options = session._session.get_session_options()
        assert options.get_session_config_entry("session.force_spinning_stop") == "1"
