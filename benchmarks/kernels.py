"""Time every kernel alone against eager PyTorch and torch.compile of the same maths: `make benchkernels`.

    python benchmarks/kernels.py [--turns N] [--only SUBSTRING] [--out build/kernels.json]

Rows are those of `run.py`. A floor is the larger of bytes / bandwidth and operations / peak, both measured beside; a
kernel whose operands stay in the cache between turns can beat the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

import kernels_attention
import kernels_layers
from kernel_session import Case
from machine import Probes, Row, Step, compare, markdown, table

GROUPS = {
    "lightning_indexer": kernels_attention.indexer,
    "sparse_flash_attention": kernels_attention.sparse_attention,
    "mla_attention": kernels_attention.dense_attention,
    "linear": kernels_attention.linear,
    "elementwise": kernels_attention.elementwise,
    "kda_recurrence": kernels_layers.kda_recurrence,
    "kda_prefill": kernels_layers.kda_prefill,
    "kda_decode": kernels_layers.kda_decode,
    "moe_route": kernels_layers.moe_route,
    "moe_experts": kernels_layers.moe_experts,
    "attn_res": kernels_layers.attn_res,
}


def with_compiled(case: Case) -> Mapping[str, Step]:
    """The baselines, eager and through torch.compile."""
    steps = dict(case.baselines)
    if case.compiled:
        for name, step in case.baselines.items():
            steps[name.replace("eager", "torch.compile")] = torch.compile(step, dynamic=False)
    return steps


def rows(turns: int, only: str) -> Iterator[Row]:
    """All rows, or those of the groups whose name holds `only`."""
    probes = Probes()
    for name, cases in GROUPS.items():
        if only not in name:
            continue
        for case in cases(np.random.default_rng(0)):
            limits = probes.limits()
            floor = limits.floor_ms(case.read, case.operations, fp32=case.fp32)
            yield compare(case.name, case.ours, with_compiled(case), floor, turns)
            torch._dynamo.reset()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--only", default="", help="part of a group's name, such as indexer")
    parser.add_argument("--out", type=Path, default=Path("build/kernels.json"))
    options = parser.parse_args()
    found = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for each in rows(options.turns, options.only):
        found.append(each)
        print(f"  {each['name']}: {each['ours_ms']:.3f} ms", flush=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(table("kernel", found))
    print(markdown("kernel", found))


if __name__ == "__main__":
    main()
