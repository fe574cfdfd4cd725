"""Configs with axes of size one: they match several places of a pattern, and must fuse like any other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybridge.compiler.pipeline import run_pipeline
from hybridge.compiler.trace import trace
from hybridge.ir.signature import PHASES
from hybridge.models.config import config_from_dict
from hybridge.models.presets import preset

CHOSEN = ["canonicalise", "fuse_lightning_indexer", "fuse_sparse_flash_attention"]
PROOFS: dict[str, Any] = {}


@pytest.mark.parametrize("phase", PHASES)
def test_one_head_a_top_k_and_a_latent_of_one_fuse(phase: Any) -> None:
    tiny = preset("kimi-k3.1-tiny")
    assert tiny.dsa is not None
    config = replace(
        tiny,
        num_layers=1,
        layer_kinds=("dsa",),
        kv_lora_rank=1,
        num_heads=1,
        dsa=replace(tiny.dsa, num_heads=1, top_k=1),
    )
    config = config_from_dict(config.to_published())
    traced = trace(config, phase, block_size=4)
    report = run_pipeline(
        traced.graph_module,
        phase,
        config,
        passes=CHOSEN,
        check=True,
        weights=traced.weights,
        proofs=PROOFS,
    )
    _, indexer, attention = report.results
    assert (len(indexer.matches), len(indexer.refusals)) == (1, 0)
    assert (len(attention.matches), len(attention.refusals)) == (1, 0)
