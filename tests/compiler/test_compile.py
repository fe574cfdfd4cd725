"""compile_model end to end: what is in the artifact, what is refused, and that builds repeat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden_data import FOLDER
from hybridge.artifacts.artifact import open_artifact
from hybridge.artifacts.errors import ArtifactError, CheckpointError, HybridgeError, UsageError
from hybridge.artifacts.weights import read_weights
from hybridge.compiler import compile as compiling
from hybridge.compiler import compile_model
from hybridge.compiler.build import CompileOptions
from hybridge.compiler.source import open_source
from hybridge.runner import load
from hybridge.runner.verify import verify_golden


@pytest.fixture(scope="module")
def compiled(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compile") / "k31"
    compile_model(tiny_checkpoint, folder, dumps=True, check_passes=True)
    return folder


def test_every_fusion_that_the_config_promises_is_recorded(compiled: Path) -> None:
    manifest = open_artifact(compiled).manifest
    for phase in ("prefill", "decode"):
        records = {each.name: each for each in manifest.passes[phase]}
        indexer = records["fuse_lightning_indexer"]
        assert (indexer.matches, indexer.expected, indexer.refusals) == (1, 1, ())
        assert records["fuse_sparse_flash_attention"].matches == 1
        assert records["fuse_kda"].matches == 3
        assert all(each.matches >= each.expected for each in records.values())
        differences = [
            each.extra["difference"] for each in records.values() if "difference" in each.extra
        ]
        assert differences
        assert max(differences) < 1e-4


def test_a_dump_a_step_is_kept_under_the_steps_name(compiled: Path) -> None:
    names = sorted(path.stem for path in (compiled / "dumps" / "decode").iterdir())
    assert names[0] == "00_trace"
    assert any(name.endswith("_fuse_lightning_indexer") for name in names)


def test_weights_that_serve_as_they_are_stay_in_the_checkpoint(compiled: Path) -> None:
    weights = read_weights(compiled / "weights.json")
    embedding = weights["model.embed_tokens.weight"]
    assert embedding.place == "checkpoint"
    experts = weights["model.layers.1.block_sparse_moe.experts.gate_up"]
    assert experts.place == "artifact"
    assert experts.origin.tensors[0].endswith("experts.0.w1.weight")


def test_rounded_activations_keep_half_the_cache_and_verify(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "rounded"
    compile_model(tiny_checkpoint, folder, activations="bfloat16")
    artifact = open_artifact(folder)
    dtypes = {state.kind: state.dtype for state in artifact.manifest.states}
    assert dtypes == {
        "kda_state": "float32",
        "conv_state": "float32",
        "latent": "bfloat16",
        "indexer": "bfloat16",
    }
    with load(folder) as engine:
        verify_golden(engine).raise_if_wrong()


def test_the_same_inputs_give_the_same_bytes(
    compiled: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    compile_model(tiny_checkpoint, again, dumps=True, check_passes=True)
    for name in ("manifest.json", "graphs/decode.onnx", "graphs/prefill.onnx", "weights.json"):
        assert (again / name).read_bytes() == (compiled / name).read_bytes(), name


@pytest.mark.parametrize("name", ["kimi-k3.1-tiny-mxfp4", "kimi-linear-tiny"])
def test_without_weights_only_a_config_is_needed(name: str, tmp_path: Path) -> None:
    out = tmp_path / "graphs"
    manifest = compile_model(FOLDER / name / "config.json", out, weights="none", phases=["decode"])
    assert manifest.weights_policy == "none"
    assert not manifest.golden
    assert set(manifest.phases) == {"decode"}
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert total < 4_000_000, "no weight bytes may be in the artifact"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"target": "gpu"}, "unknown target 'gpu'"),
        ({"weights": "some"}, "unknown weights policy 'some'"),
        ({"phases": ["train"]}, "unknown phase 'train'"),
        ({"passes": ["fuse_everything"]}, "fuse_everything"),
        ({"block_size": 0}, "block size 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_once(
    arguments: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        compile_model(FOLDER / "kimi-k3.1-tiny", tmp_path / "out", **arguments)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert caught.value.remedy
    assert not list(tmp_path.iterdir())


def test_golden_values_are_left_out_on_request() -> None:
    model = open_source(FOLDER / "kimi-linear-tiny", with_weights=True)
    assert compiling._eager(model, CompileOptions(), lambda _: None) is not None
    assert compiling._eager(model, CompileOptions(golden=False), lambda _: None) is None


def test_an_artifact_is_not_replaced_unasked(compiled: Path, tiny_checkpoint: Path) -> None:
    before = (compiled / "manifest.json").read_bytes()
    with pytest.raises(ArtifactError):
        compile_model(tiny_checkpoint, compiled)
    assert (compiled / "manifest.json").read_bytes() == before


def test_a_failed_compile_leaves_nothing_behind(tmp_path: Path) -> None:
    checkpoint = tmp_path / "broken"
    checkpoint.mkdir()
    config = json.loads((FOLDER / "kimi-k3-tiny" / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError):
        compile_model(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_an_unknown_source_names_the_presets(tmp_path: Path) -> None:
    with pytest.raises(HybridgeError, match=r"kimi-k3\.1-pro"):
        compile_model("no-such-model", tmp_path / "out", weights="none")
