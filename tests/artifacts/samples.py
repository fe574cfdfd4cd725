"""A small artifact for tests of the format: its graphs are not graphs, since nobody runs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

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

CONFIG = {"model_type": "sample", "name": "Größe"}
WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)
HALF = np.arange(5, dtype=np.uint16)  # bf16


def sample_manifest(**changes: object) -> Manifest:
    refusal = Refusal("add_1", "shared user", "its scores are used twice", "none")
    record = PassRecord("fuse", 1, 2, (refusal,), 30, 20, {"largest_difference": 1e-6})
    values: dict[str, object] = {
        "hybridge_version": "0.0",
        "model": ModelInfo("sample", digest_json(CONFIG), 16),
        "model_config": CONFIG,
        "target": "cpu",
        "phases": {
            "decode": PhaseSpec(
                "graphs/decode.onnx",
                (TensorSpec("token_ids", "int32", ("T",)),),
                (TensorSpec("logits", "float32", ("L", 16)),),
                ({"T": 8},),
            )
        },
        "states": (
            StateSpec("latent_cache_1", 1, "latent", "float32", ("blocks", "block_size", 1, 8)),
        ),
        "defaults": Defaults(4, 32, 2, 8),
        "weights_policy": "copy",
        "passes": {"decode": (record,)},
        "tools": {"numpy": "2"},
        "special_tokens": SpecialTokens(None, (2, 3), None),
        "provenance": {"options": {"passes": "all"}},
    }
    return Manifest(**{**values, **changes})  # type: ignore[arg-type]


def fill(writer: ArtifactWriter, **changes: object) -> Manifest:
    """Write all of the sample and finish."""
    writer.add_bytes("graphs/decode.onnx", b"a graph")
    writer.add_weight("a.weight", "float32", WEIGHT, Origin(("model.a.weight",)))
    writer.add_weight("b.weight", "bfloat16", HALF, Origin(("b1", "b2"), "concatenate"))
    case = GoldenCase(np.arange(6, dtype=np.int32), 4, np.zeros((6, 16), np.float32))
    golden = writer.add_golden("one", case, atol=1e-3)
    manifest = sample_manifest(**{"golden": (golden,), **changes})
    return writer.finish(manifest, Report({"decode": {"fuse": 0.25}}, {"trace": 1.5}))


def write_sample(path: Path, **changes: object) -> Path:
    with ArtifactWriter(path) as writer:
        fill(writer, **changes)
    return path
