"""Cases of the cache, attention and linear kernels, for `kernels.py`.

PyTorch gathers the paged rows through the block table first, as it must, in fp32 and in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch.nn import functional

from hybridge.models.indexer import select_positions
from kernel_session import Case, Kernel, as_torch, bf16, i32

BLOCK = 64
TOP_K = 512
INDEXER_HEADS, INDEXER_DIM = 32, 128
HEADS, VALUE_DIM, LATENT_ROW = 16, 512, 576
SCALE = 192**-0.5

DTYPES = {"eager fp32": torch.float32, "eager bf16": torch.bfloat16}


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


def eager_indexer(inputs: Mapping[str, np.ndarray], dtype: torch.dtype, any_ties: bool):  # type: ignore[no-untyped-def]
    """The eager model's own code; with `any_ties`, torch.topk, which promises no order among equal scores."""
    query, weights = (as_torch(inputs[n]).to(dtype) for n in ("query", "head_weights"))
    cache, table = as_torch(inputs["indexer_cache"]).to(dtype), as_torch(inputs["block_table"])
    tokens = len(query)
    position = as_torch(inputs["context_len"]) + torch.arange(tokens)
    visible = position[:, None] >= torch.arange(table.shape[1] * BLOCK)

    def step() -> torch.Tensor:
        keys = gathered(cache, table)
        dots = torch.relu(query.flatten(0, 1) @ keys.mT).view(tokens, INDEXER_HEADS, -1)
        score = (weights.unsqueeze(1) @ dots).squeeze(1)
        if any_ties:
            return score.masked_fill(~visible, -torch.inf).topk(TOP_K).indices.sort().values
        return select_positions(score, position, TOP_K)

    return step


def indexer(rng: np.random.Generator) -> Iterator[Case]:
    for tokens, length in ((1, 4096), (1, 16384), (1, 65536), (8, 16384), (256, 4096)):
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
        read = length * INDEXER_DIM * 2
        for note, any_ties in (("", False), (", ties in any order", True)):
            eager = {n: eager_indexer(inputs, d, any_ties) for n, d in DTYPES.items()}
            name = f"lightning_indexer T={tokens} S={length}{note}"
            yield Case(name, ours, eager, read, flops)


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


def sparse_attention(rng: np.random.Generator) -> Iterator[Case]:
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
        read = tokens * TOP_K * LATENT_ROW * 2
        eager = {n: eager_sparse(inputs, d) for n, d in DTYPES.items()}
        yield Case(f"sparse_flash_attention T={tokens} k={TOP_K}", ours, eager, read, flops)


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


def dense_attention(rng: np.random.Generator) -> Iterator[Case]:
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
        read = length * LATENT_ROW * 2
        eager = {n: eager_dense(inputs, length - tokens, d) for n, d in DTYPES.items()}
        yield Case(f"mla_attention T={tokens} S={length}", ours, eager, read, flops)


# ---- Linear and the small ones ----------------------------------------------------------------


def linear(rng: np.random.Generator) -> Iterator[Case]:
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
            ours = Kernel("Linear", arrays, {"out": None}, bf16_activations=int(element == 2))
            x, w = as_torch(arrays["x"]).to(dtype), as_torch(arrays["weight"])
            read, operations = outputs * inputs * element, 2.0 * rows * w.numel()
            name = f"linear {str(dtype)[6:]} M={rows} {outputs}x{inputs}"
            eager = {"eager": lambda x=x, w=w: functional.linear(x, w)}
            yield Case(name, ours, eager, read, operations, fp32=element == 4)


def elementwise(rng: np.random.Generator) -> Iterator[Case]:
    for rows in (1, 512):
        x, weight = normal(rng, rows, 2048), normal(rng, 2048)
        ours = Kernel("RmsNorm", {"x": x, "weight": weight}, {"out": None}, eps=1e-5)
        a, b = as_torch(x), as_torch(weight)
        eager = {"eager": lambda a=a, b=b: functional.rms_norm(a, (2048,), b, 1e-5)}
        yield Case(f"rms_norm T={rows}", ours, eager, 2 * x.nbytes)
        ours = Kernel("Situ", {"gate": x, "up": x}, {"out": None}, beta=4.0, linear_beta=25.0)
        eager = {
            "eager": lambda a=a: 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(a / 25)
        }
        yield Case(f"situ T={rows}", ours, eager, 3 * x.nbytes)


GROUPS = (indexer, sparse_attention, dense_attention, linear, elementwise)
