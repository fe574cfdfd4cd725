"""Time the cache, attention and linear kernels alone against eager PyTorch, with floors.

    python benchmarks/kernels_bench.py [--repeats N] [--only SUBSTRING] [--out build/kernels.json]

The machinery and the rows' form are those of `kda_moe_bench.py`. PyTorch gathers the paged rows
through the block table first, as it must; its best of float32 and bfloat16 is the baseline.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from kda_moe_bench import THREADS, Kernel, Machine, Row, as_torch, bf16, i32, smallest_ms

BLOCK = 64
TOP_K = 512
INDEXER_HEADS, INDEXER_DIM = 32, 128
HEADS, VALUE_DIM, LATENT_ROW = 16, 512, 576
SCALE = 192**-0.5

Steps = Mapping[str, Callable[[], object]]
DTYPES = {"eager float32": torch.float32, "eager bfloat16": torch.bfloat16}


def compare(name: str, ours: Kernel, baselines: Steps, floor_ms: float, repeats: int) -> Row:
    with torch.inference_mode():
        ours_ms, *times = smallest_ms([ours, *baselines.values()], repeats)
    return {
        "name": name,
        "ours_ms": ours_ms,
        "baselines": dict(zip(baselines, times, strict=True)),
        "ratio_vs_best": min(times) / ours_ms,
        "floor_ms": floor_ms,
        "floor_share": floor_ms / ours_ms,
    }


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def paged(rng: np.random.Generator, length: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    """A bfloat16 cache of one sequence, and its shuffled block table."""
    blocks = length // BLOCK
    return bf16(normal(rng, blocks, BLOCK, 1, row)), i32(*rng.permutation(blocks))[None]


def gathered(cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[length, row]: the sequence's rows in order."""
    return cache.index_select(0, table[0]).flatten(0, 2)


# ---- Lightning indexer ----------------------------------------------------------------------------


def eager_indexer(inputs: Mapping[str, np.ndarray], context: int, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    query, weights = (as_torch(inputs[n]).to(dtype) for n in ("query", "head_weights"))
    cache, table = as_torch(inputs["indexer_cache"]).to(dtype), as_torch(inputs["block_table"])
    visible = context + torch.arange(query.shape[0])[:, None] >= torch.arange(
        table.shape[1] * BLOCK
    )

    def step() -> torch.Tensor:
        keys = gathered(cache, table)
        dots = torch.relu(torch.einsum("thd,sd->ths", query, keys))
        scores = torch.einsum("th,ths->ts", weights, dots)
        return scores.masked_fill(~visible, -torch.inf).topk(TOP_K).indices.sort().values

    return step


def indexer(rng: np.random.Generator, machine: Machine, repeats: int) -> Iterator[Row]:
    for tokens, length in ((1, 4096), (1, 16384), (1, 65536), (256, 4096)):
        cache, table = paged(rng, length, INDEXER_DIM)
        inputs = {
            "query": normal(rng, tokens, INDEXER_HEADS, INDEXER_DIM),
            "head_weights": normal(rng, tokens, INDEXER_HEADS),
            "indexer_cache": cache,
            "query_start": i32(0, tokens),
            "context_len": i32(length - tokens),
            "block_table": table,
        }
        outputs = {"positions": None}
        ours = Kernel("LightningIndexer", inputs, outputs, ids_output="positions", top_k=TOP_K)
        flops = 2.0 * tokens * length * INDEXER_HEADS * INDEXER_DIM
        floor = machine.floor_ms(length * INDEXER_DIM * 2, flops, torch.bfloat16)
        eager = {n: eager_indexer(inputs, length - tokens, d) for n, d in DTYPES.items()}
        yield compare(f"indexer T={tokens} S={length}", ours, eager, floor, repeats)


# ---- Attention ------------------------------------------------------------------------------------


def eager_sparse(inputs: Mapping[str, np.ndarray], dtype: torch.dtype):  # type: ignore[no-untyped-def]
    query, cache = (as_torch(inputs[n]).to(dtype) for n in ("query", "latent_cache"))
    positions, table = as_torch(inputs["positions"]).long(), as_torch(inputs["block_table"])

    def step() -> torch.Tensor:
        slots = table[0].long()[positions // BLOCK] * BLOCK + positions % BLOCK
        rows = cache.flatten(0, 2)[slots]  # [T, k, row]
        weights = torch.softmax((query @ rows.mT).float() * SCALE, -1).to(dtype)
        return weights @ rows[..., :VALUE_DIM]

    return step


def sparse_attention(rng: np.random.Generator, machine: Machine, repeats: int) -> Iterator[Row]:
    length = 16384
    for tokens in (1, 8, 128):
        cache, table = paged(rng, length, LATENT_ROW)
        chosen = [rng.choice(length - tokens, TOP_K, replace=False) for _ in range(tokens)]
        inputs = {
            "query": normal(rng, tokens, HEADS, LATENT_ROW),
            "latent_cache": cache,
            "positions": np.sort(np.asarray(chosen, np.int32)),
            "query_start": i32(0, tokens),
            "context_len": i32(length - tokens),
            "block_table": table,
        }
        ours = Kernel(
            "SparseFlashAttention", inputs, {"out": None}, scale=SCALE, value_dim=VALUE_DIM
        )
        flops = 2.0 * tokens * TOP_K * HEADS * (LATENT_ROW + VALUE_DIM)
        floor = machine.floor_ms(tokens * TOP_K * LATENT_ROW * 2, flops, torch.bfloat16)
        eager = {n: eager_sparse(inputs, d) for n, d in DTYPES.items()}
        yield compare(f"sparse attention T={tokens} k={TOP_K}", ours, eager, floor, repeats)


def eager_dense(inputs: Mapping[str, np.ndarray], context: int, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    query, cache = (as_torch(inputs[n]).to(dtype) for n in ("query", "latent_cache"))
    table = as_torch(inputs["block_table"])
    positions = torch.arange(table.shape[1] * BLOCK)
    hidden = positions > context + torch.arange(query.shape[0])[:, None, None]

    def step() -> torch.Tensor:
        rows = gathered(cache, table)
        scores = (query @ rows.mT).float() * SCALE
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).to(dtype)
        return weights @ rows[:, :VALUE_DIM]

    return step


def dense_attention(rng: np.random.Generator, machine: Machine, repeats: int) -> Iterator[Row]:
    for tokens, length in ((1, 1024), (1, 16384), (512, 1024)):
        cache, table = paged(rng, length, LATENT_ROW)
        inputs = {
            "query": normal(rng, tokens, HEADS, LATENT_ROW),
            "latent_cache": cache,
            "query_start": i32(0, tokens),
            "context_len": i32(length - tokens),
            "block_table": table,
        }
        ours = Kernel("MlaAttention", inputs, {"out": None}, scale=SCALE, value_dim=VALUE_DIM)
        pairs = tokens * (length - (tokens - 1) / 2)
        flops = 2.0 * pairs * HEADS * (LATENT_ROW + VALUE_DIM)
        floor = machine.floor_ms(length * LATENT_ROW * 2, flops, torch.bfloat16)
        eager = {n: eager_dense(inputs, length - tokens, d) for n, d in DTYPES.items()}
        yield compare(f"dense attention T={tokens} S={length}", ours, eager, floor, repeats)


# ---- Linear and the small ones ----------------------------------------------------------------


def linear(rng: np.random.Generator, machine: Machine, repeats: int) -> Iterator[Row]:
    for rows, outputs, inputs in (
        (1, 4096, 4096),
        (8, 4096, 4096),
        (64, 4096, 4096),
        (512, 4096, 4096),
    ):
        for dtype, element in ((torch.bfloat16, 2), (torch.float32, 4)):
            weight = normal(rng, outputs, inputs)
            arrays = {
                "x": normal(rng, rows, inputs),
                "weight": bf16(weight) if element == 2 else weight,
            }
            ours = Kernel("Linear", arrays, {"out": None})
            x, w = as_torch(arrays["x"]).to(dtype), as_torch(arrays["weight"])
            floor = machine.floor_ms(outputs * inputs * element, 2.0 * rows * w.numel(), dtype)
            name = f"linear {str(dtype)[6:]} M={rows} {outputs}x{inputs}"
            eager = {"eager": lambda x=x, w=w: functional.linear(x, w)}
            yield compare(name, ours, eager, floor, repeats)


def elementwise(rng: np.random.Generator, machine: Machine, repeats: int) -> Iterator[Row]:
    for rows in (1, 512):
        x, weight = normal(rng, rows, 2048), normal(rng, 2048)
        ours = Kernel("RmsNorm", {"x": x, "weight": weight}, {"out": None}, eps=1e-5)
        a, b = as_torch(x), as_torch(weight)
        floor = machine.floor_ms(2 * 4 * x.size, 0.0, torch.float32)
        eager = {"eager": lambda a=a, b=b: functional.rms_norm(a, (2048,), b, 1e-5)}
        yield compare(f"rms_norm T={rows}", ours, eager, floor, repeats)
        ours = Kernel("Situ", {"gate": x, "up": x}, {"out": None}, beta=4.0, linear_beta=25.0)
        eager = {
            "eager": lambda a=a: 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(a / 25)
        }
        yield compare(f"situ T={rows}", ours, eager, floor * 1.5, repeats)


GROUPS = (indexer, sparse_attention, dense_attention, linear, elementwise)


def rows(repeats: int, only: str = "") -> Iterator[Row]:
    """All rows, or those of the groups whose name holds `only`."""
    torch.set_num_threads(THREADS)
    machine = Machine()
    for group in GROUPS:
        if only in group.__name__:
            yield from group(np.random.default_rng(0), machine, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="part of a group's name, such as indexer")
    parser.add_argument("--out", type=Path, help="write the rows there as JSON")
    arguments = parser.parse_args()
    print(f"{'kernel':36} {'ours ms':>9} {'best ms':>9} {'ratio':>6} {'floor ms':>9} {'share':>6}")
    found = []
    for one in rows(arguments.repeats, arguments.only):
        found.append(one)
        print(
            f"{one['name']:36} {one['ours_ms']:9.3f} {min(one['baselines'].values()):9.3f} "
            f"{one['ratio_vs_best']:6.2f} {one['floor_ms']:9.3f} {one['floor_share']:6.0%}",
            flush=True,
        )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
