"""compile_model for an Ascend target: what the artifact holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden_data import FOLDER
from hybridge.artifacts.artifact import open_artifact
from hybridge.artifacts.errors import CompileError, UsageError
from hybridge.commands.report import artifact_document, read_passes
from hybridge.compiler import compile_model
from hybridge.compiler.targets.ascend.options import AscendOptions
from hybridge.compiler.targets.ascend.stand_in import find_wheel
from hybridge.models.presets import preset, scale


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(scale(preset("kimi-k3.1-pro"), layers=1).raw))
    return path


def test_packed_weights_are_of_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="packed weights do not fit ascend-950"):
        compile_model(tmp_path, tmp_path / "art", target="ascend-950", weights="packed")


def test_activations_are_a_choice_of_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--activations bfloat16 is a choice of the cpu target"):
        compile_model(tmp_path, tmp_path / "art", target="ascend-950", activations="bfloat16")


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
    assert (bucket["tokens"],) == options.decode_sequences
    assert {state.kind for state in manifest.states} == {"latent", "indexer"}
    plan = json.loads((out / "graphs/decode_weights.json").read_text())
    assert all(each["reason"] for each in plan)
    document = artifact_document(out, *read_passes(out))
    assert document["ascend"] == manifest.target_data["ascend"]


def test_without_weights_their_names_and_shapes_are_there(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "art"
    options = AscendOptions("ascend-a3", convert=False)
    compile_model(
        config, out, target="ascend-a3", weights="none", phases=["decode"], ascend=options
    )
    artifact = open_artifact(out)
    data = artifact.manifest.target_data["ascend"]
    assert len(artifact.weights) == data["nz_weights"] + data["nd_weights"]
    assert sum(each.length for each in artifact.weights.values()) == (
        data["nz_bytes"] + data["nd_bytes"]
    )
    assert {each.place for each in artifact.weights.values()} == {"absent"}
    assert not artifact.manifest.golden


def test_a_model_that_does_not_fit_is_told_every_reason_of_every_graph(tmp_path: Path) -> None:
    options = AscendOptions("ascend-950", convert=False)
    golden = FOLDER / "kimi-k3.1-tiny"
    with pytest.raises(CompileError) as caught:
        compile_model(golden, tmp_path / "art", target="ascend-950", ascend=options)
    message = caught.value.message
    assert "for 3 reasons" in message
    for reason in ("head dimension is 16", "latent dimension is 32", "rope dimension is 8"):
        assert message.count(reason) == 1
    assert message.count("; decode: ") == 3
    assert list(tmp_path.iterdir()) == []
