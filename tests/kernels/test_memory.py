"""Memory that runs out, and memory beyond 2^31 elements."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from . import test_attention, test_lightning_indexer, test_moe
from .harness import BFLOAT16, Operator, bf16, f64, i32, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs lazily mapped memory")

# In a task of the pool: 20 sequences of 2^24 keys, whose scores take 64 MB each. The table names
# one block again and again, so that the inputs are small.
EXHAUSTED = """
import resource
import sys
import numpy as np
sys.path.append(sys.argv[1])  # last: the checkout's own folders are no packages
from tests.kernels.harness import Operator, bf16, i32

length, block, sequences = 1 << 24, 1 << 12, 20
inputs = {
    "query": np.ones((sequences, 1, 1), np.float32),
    "head_weights": np.ones((sequences, 1), np.float32),
    "indexer_cache": bf16(np.ones((1, block, 1, 1))),
    "query_start": i32(range(sequences + 1)),
    "context_len": i32([length - 1] * sequences),
    "block_table": np.zeros((sequences, length // block), np.int32),
}
operator = Operator("LightningIndexer", inputs, {"positions": np.int32}, top_k=3, threads=2)
small = inputs | {"context_len": i32([9] * sequences)}
operator(small)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), -1))
try:
    operator(inputs)
except Exception as error:
    print(error)
print(operator(small)[0][0].tolist())
"""


def test_memory_that_runs_out_in_a_task_is_a_named_error():
    """And the process goes on."""
    command = [sys.executable, "-P", "-c", EXHAUSTED, str(Path(__file__).parents[2])]
    # Not for replay: it fails by the limit of this process, not by what it is.
    environment = {k: v for k, v in os.environ.items() if k != "HYBRIDGE_RECORD"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    error, after = done.stdout.strip().rsplit("\n", 1)
    assert "hybridge.LightningIndexer: no memory for its working buffers; remedy: " in error
    assert after == "[0, 1, 2]"


# Of the arrays below only the pages in use are ever touched: 4 GB of addresses, some KB of memory.
BLOCK, ROW = 64, 64
BLOCKS = (2**31 // (BLOCK * ROW)) + 3


@pytest.fixture(scope="module")
def vast_cache() -> np.ndarray:
    return np.zeros((BLOCKS, BLOCK, 1, ROW), np.uint16).view(BFLOAT16)


def moved(inputs: dict[str, np.ndarray], name: str, vast: np.ndarray) -> dict[str, np.ndarray]:
    """The inputs with their cache's blocks at the end of the vast one."""
    used = len(inputs[name])
    vast[-used:] = inputs[name]
    table = inputs["block_table"]
    return inputs | {name: vast, "block_table": np.where(table < 0, table, table + BLOCKS - used)}


def test_rows_are_written_beyond_2_31_elements(vast_cache):
    rows = np.random.default_rng(0).standard_normal((2, 1, ROW)).astype(np.float32)
    slots = i32([BLOCKS * BLOCK - 1, 5])
    inputs = {"cache": vast_cache, "rows": rows, "slot_mapping": slots}
    run("PagedWrite", inputs, {"cache_out": BFLOAT16}, alias={"cache_out": "cache"})
    flat = vast_cache.reshape(-1, ROW)
    np.testing.assert_array_equal(f64(flat[slots]), f64(bf16(rows[:, 0])))
    states = flat.reshape(-1, 2 * ROW)
    pairs = rows.reshape(1, -1)
    inputs = {"state": states, "rows": pairs, "state_slot": i32([len(states) - 1])}
    run("StateWrite", inputs, {"state_out": BFLOAT16}, alias={"state_out": "state"})
    np.testing.assert_array_equal(f64(states[-1]), f64(bf16(pairs[0])))
    flat[slots] = states[-1] = 0


@pytest.mark.parametrize("make", [test_attention.batch, test_lightning_indexer.batch])
def test_caches_are_read_beyond_2_31_elements(level, vast_cache, make):
    size = "row" if make is test_attention.batch else "dim"
    rng = np.random.default_rng(1)
    inputs = make(rng, [3, 1], [200, 70], block=BLOCK, **{size: ROW})
    if make is test_lightning_indexer.batch:
        far = moved(inputs, "indexer_cache", vast_cache)
        np.testing.assert_array_equal(
            test_lightning_indexer.indexer(far, 40), test_lightning_indexer.indexer(inputs, 40)
        )
        return
    positions = test_attention.draw_positions(rng, inputs, 90)
    for near in (inputs, test_attention.with_positions(inputs, positions)):
        far = moved(near, "latent_cache", vast_cache)
        np.testing.assert_array_equal(
            test_attention.attention(far, 0.1, 48), test_attention.attention(near, 0.1, 48)
        )


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_are_read_beyond_2_31_elements(level, tokens):
    """The last expert of as many as fill 4 GB, in bfloat16 and in MXFP4."""
    rng = np.random.default_rng(2)
    near = test_moe.draw(rng, tokens, experts=1, top_k=1, latent=64, intermediate=64)
    near |= {name: bf16(near[name]) for name in ("gate_up", "down")}
    packed = test_moe.draw_packed(rng, tokens, experts=1, top_k=1, latent=64, intermediate=64)
    for op, arrays in (("MoeExperts", near), ("MoeExpertsMxfp4", packed)):
        experts = 2**31 // (128 * 64) + 2
        far = dict(arrays)
        for name in list(arrays)[3:]:
            far[name] = np.zeros((experts, *arrays[name].shape[1:]), arrays[name].dtype)
            far[name][-1] = arrays[name][0]
        far["expert_ids"] = np.full_like(arrays["expert_ids"], experts - 1)
        results = [
            run(op, given, {"output": np.float32}, **test_moe.SITU)[0] for given in (arrays, far)
        ]
        np.testing.assert_array_equal(*results)


def test_states_are_used_beyond_2_31_elements(level):
    """KdaRecurrence with its state in the last of the slots that fill 8 GB of addresses."""
    from .test_kda_recurrence import inputs

    near = inputs(np.random.default_rng(3), [0, 20], [4], [0], heads=1, key=64, value=64, slots=1)
    slots = 2**31 // (64 * 64) + 2
    far = near | {"state": np.zeros((slots, 1, 64, 64), np.float32), "state_slot": i32([slots - 1])}
    far["state"][-1] = near["state"][0]
    outputs = {"output": np.float32, "state_out": np.float32}
    results = [
        Operator("KdaRecurrence", a, outputs, alias={"state_out": "state"})(a)[0]
        for a in (near, far)
    ]
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(far["state"][-1], near["state"][0])


@pytest.mark.parametrize("tokens", [2, 12])
def test_kv_b_rows_beyond_2_31_elements(level, rng, vast_cache, tokens):
    """Two heads: only their last rows are read, those of the second at the very end."""
    weight = vast_cache.reshape(-1, ROW)
    weight[-5:] = rng.standard_normal((5, ROW)).astype(BFLOAT16)
    latent = rng.standard_normal((tokens, 2, ROW)).astype(np.float32)
    given = {"latent": latent, "kv_b_weight": weight}
    (out,) = run("MlaExpandValue", given, {"out": np.float32}, value_dim=5)
    np.testing.assert_array_equal(out[:, 0], 0)
    np.testing.assert_allclose(out[:, 1], f64(latent[:, 1]) @ f64(weight[-5:]).T, atol=1e-4)
    weight[-5:] = 0
