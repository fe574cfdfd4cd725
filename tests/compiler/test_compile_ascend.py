"""compile_model for an Ascend target: what the artifact holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridge.artifacts.artifact import open_artifact
from hybridge.artifacts.errors import UsageError
from hybridge.commands.report import artifact_document, read_passes
from hybridge.compiler import compile_model
from hybridge.compiler.targets.ascend.emit import AscendOptions
from hybridge.compiler.targets.ascend.stand_in import find_wheel
from hybridge.models.presets import preset, scale


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(scale(preset("kimi-k3.1-pro"), layers=1).raw))
    return path


def test_an_artifact_holds_graphs_plan_and_proof(config: Path, tmp_path: Path) -> None:
    options = AscendOptions("ascend-950", convert=find_wheel() is not None)
    out = tmp_path / "art"
    compile_model(
        config, out, target="ascend-950", weights="none", phases=["decode"], ascend=options
    )
    manifest = open_artifact(out).manifest
    assert manifest.target == "ascend-950"
    assert manifest.target_data["ascend"]["schedule_proved"]
    assert manifest.target_data["ascend"]["cache_copies"] == 0
    assert {"assign_nz_layout", "assign_streams"} <= {p.name for p in manifest.passes["decode"]}
    (bucket,) = manifest.phases["decode"].buckets
    assert bucket["tokens"] == options.decode_sequences
    assert {state.kind for state in manifest.states} == {"latent", "indexer"}
    plan = json.loads((out / "graphs/decode_weights.json").read_text())
    assert all(each["reason"] for each in plan)
    document = artifact_document(out, *read_passes(out))
    assert document["ascend"] == manifest.target_data["ascend"]


def test_weight_bytes_are_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="plan of the weights"):
        compile_model(config, tmp_path / "art", target="ascend-950", weights="copy")
