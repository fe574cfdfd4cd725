"""Small fused graphs, a ragged batch, and a runner for lowered graphs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import hybridge.ops  # noqa: F401  (registers the vocabulary)
from hybridge.compiler.targets.ascend.device_state import from_device, to_device
from hybridge.compiler.targets.ascend.expert_parallel import ExpertParallel
from hybridge.compiler.targets.ascend.lowering import Lowered, lower
from hybridge.compiler.targets.ascend.lowerings.context import Bucket
from hybridge.compiler.targets.ascend.prepared_weights import apply_steps
from hybridge.models.caches import CacheShape

METADATA = (
    *("token_ids", "query_start", "context_len", "slot_mapping"),
    *("block_table", "state_slot", "logits_index"),
)


@dataclass
class Case:
    """One op in a graph of its own, with values for every input."""

    graph: fx.GraphModule
    values: dict[str, Tensor]
    caches: tuple[CacheShape, ...]
    bucket: Bucket
    phase: str
    function: Callable[..., Any]

    def lower(
        self,
        soc: str,
        dtype: torch.dtype = torch.float32,
        parallel: ExpertParallel | None = None,
    ) -> Lowered:
        return lower(
            self.graph,
            soc=soc,
            phase=self.phase,
            bucket=self.bucket,
            caches=self.caches,
            latent_width=512,
            dtype=dtype,
            parallel=parallel,
        )

    def eager(self) -> tuple[Any, dict[str, Tensor]]:
        """The function's result and the caches that it leaves."""
        values = {name: value.clone() for name, value in self.values.items()}
        result = self.function(**values)
        return result, {cache.name: values[cache.name] for cache in self.caches}

    def run(self, lowered: Lowered) -> tuple[Any, dict[str, Tensor]]:
        """The lowered graph's result by the npu references, and the caches in signature form."""
        device = {each.name: self.values[each.name].clone() for each in lowered.batch}
        for cache in lowered.caches:
            device[cache.name] = to_device(cache, self.values[cache.cache])
        for weight in lowered.weights:
            scale = self.values[weight.scale_source] if weight.scale_source else None
            device[weight.name] = apply_steps(weight, self.values[weight.source], scale)
        order = [n.name for n in lowered.graph_module.graph.nodes if n.op == "placeholder"]
        result = lowered.graph_module(*(device[name] for name in order))
        return result, from_device(lowered.caches, device)


def ragged_batch(decode: bool = False) -> dict[str, Tensor]:
    """Two sequences of different lengths, an inactive (and empty) one, and a padding token."""
    if decode:
        return {
            "token_ids": ints(0, 0, 0, 0),
            "query_start": ints(0, 1, 2, 3, 4),
            "context_len": ints(20, 0, 17, 3),
            "slot_mapping": ints(3 * 16 + 4, 0, -1, 4 * 16 + 3),
            "block_table": torch.tensor([[1, 3], [0, -1], [2, 2], [4, -1]], dtype=torch.int32),
            "state_slot": ints(2, 0, -1, 1),
            "logits_index": ints(0, 1, 3),
        }
    return {
        "token_ids": ints(*[0] * 8),
        "query_start": ints(0, 2, 7, 7),
        "context_len": ints(20, 0, 5),
        "slot_mapping": ints(3 * 16 + 4, 3 * 16 + 5, 0, 1, 2, 3, 4, -1),
        "block_table": torch.tensor([[1, 3], [0, -1], [2, -1]], dtype=torch.int32),
        "state_slot": ints(2, 0, -1),
        "logits_index": ints(1, 6),
    }


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_case(
    function: Callable[..., Any],
    values: dict[str, Tensor],
    caches: tuple[CacheShape, ...] = (),
    decode: bool = False,
    whole: bool = False,
) -> Case:
    """Trace `function(**batch, **values)`; what is neither batch nor cache counts as a weight.

    With `whole`, linear, einsum and the like stay calls of their own, as in a traced model.
    """
    batch = ragged_batch(decode)
    named = {**batch, **values}
    bucket = Bucket(
        tokens=len(batch["token_ids"]),
        sequences=len(batch["context_len"]),
        blocks=5,
        block_size=16,
        columns=2,
        slots=3,
        logits=len(batch["logits_index"]),
    )

    def run(*args: Tensor) -> Any:
        return function(**dict(zip(named, args, strict=True)))

    copies = [value.clone() for value in named.values()]
    gm = make_fx(run, tracing_mode="fake", pre_dispatch=whole)(*copies)
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    cached = {cache.name for cache in caches}
    for node, name in zip(nodes, named, strict=True):
        node.name = node.target = name
        if name not in METADATA and name not in cached:
            node.meta["weight"] = name
    gm.recompile()
    phase = "decode" if decode else "prefill"
    return Case(gm, named, caches, bucket, phase, function)
