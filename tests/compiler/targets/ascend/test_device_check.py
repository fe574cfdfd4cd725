"""The device check, all of it but the device: artifacts run on a fake one that computes by reference."""

import json
import shutil

import pytest
import torch

from hybridge import cli
from hybridge.artifacts.artifact import open_artifact
from hybridge.artifacts.errors import ArtifactError, DeviceError, VerifyError
from hybridge.compiler.targets.ascend.device import environment, npu
from hybridge.compiler.targets.ascend.device.check import run_check
from hybridge.compiler.targets.ascend.device.loading import load, open_for_device

from .fake_device import FakeNpu


@pytest.fixture(scope="module")
def loaded(legal_artifact):
    return load(open_for_device(legal_artifact))


@pytest.fixture(scope="module")
def checked(loaded):
    device = FakeNpu("fake")
    return device, run_check(loaded, device, repeats=1)


def test_what_the_artifact_holds_computes_the_golden_values(checked):
    device, report = checked
    assert report.ok, report
    ran = {(each.graph, each.run) for each in report.comparisons}
    assert ran == {
        ("prefill", "prefill"),
        ("prefill", "prefill in chunks"),
        ("decode_b1", "decode"),
        ("decode_b3", "decode"),
    }
    assert set(device.compiled) == {"prefill", "decode_b1", "decode_b3"}
    # Decoding 8 tokens in one row, and in two rows of different lengths.
    positions = {each.graph: each.positions for each in report.comparisons}
    assert (positions["decode_b1"], positions["decode_b3"]) == (8, 16)
    report.raise_if_wrong()


def test_the_tolerance_is_narrow_enough_to_tell(checked):
    for each in checked[1].comparisons:
        # Logits that have nothing to do with the expected ones have an error of about 1.4.
        assert each.median < each.tolerance.median < 0.5


def test_times_are_of_full_buckets(checked):
    timings = {each.graph: each for each in checked[1].timings}
    assert timings["prefill"].tokens == 32
    assert timings["decode_b3"].tokens == 3
    assert timings["decode_b3"].context > 0
    assert all(each.milliseconds > 0 and each.first_seconds > 0 for each in timings.values())


def test_the_report_is_plain_json(checked):
    document = json.loads(json.dumps(checked[1].to_json()))
    assert document["ok"]
    assert {"graph", "run", "median", "largest", "tolerance", "ok"} <= set(
        document["comparisons"][0]
    )


def test_weights_get_the_layout_that_the_plan_says(loaded, checked):
    planned = [form.layout for form in loaded.forms.values()]
    assert "FRACTAL_NZ" in planned
    assert checked[0].layouts[: len(planned)] == planned


@pytest.mark.parametrize("kind", ["weight", "logits", "nan"])
def test_a_wrong_result_is_told(loaded, kind):
    class Wrong(FakeNpu):
        def put(self, value, layout="ND"):
            if kind == "weight" and layout == "FRACTAL_NZ":
                value = value.flip(-1)  # as if a layout had been misread
            return super().put(value, layout)

        def fetch(self, value):
            if kind == "logits":
                return value.roll(1, -1)
            return value * float("nan") if kind == "nan" else value

    report = run_check(loaded, Wrong("wrong"), repeats=0)
    assert not report.ok
    with pytest.raises(VerifyError, match="median error"):
        report.raise_if_wrong()


def test_graphs_of_another_artifact_are_refused(legal_artifact, loaded, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(legal_artifact, copy)
    plan = copy / "graphs/prefill_npu.json"
    plan.write_text(plan.read_text().replace("aten::add", "aten::sub", 1))
    with pytest.raises(ArtifactError, match=r"prefill_npu.json: (sha256|\d+ bytes)"):
        open_for_device(copy)


def test_a_cpu_artifact_is_refused(tiny_artifact):
    with pytest.raises(ArtifactError, match="compiled for cpu"):
        open_for_device(tiny_artifact)


def test_the_verb_on_a_machine_that_has_a_device(legal_artifact, monkeypatch, capsys):
    device = FakeNpu("Ascend950PR_fake")
    if open_artifact(legal_artifact).manifest.target == "ascend-a3":
        device = FakeNpu("Ascend910_93xx_fake")
    found = tuple(
        environment.Need(name, wanted, found, ok=True)
        for name, wanted, found in [
            ("torch-npu", "2.13.0", "2.13.0"),
            ("CANN", "9.0.0", "9.1.0"),
            ("NPU", "", "8 devices"),
        ]
    )
    monkeypatch.setattr(environment, "look_around", lambda _: found)
    monkeypatch.setattr(npu, "NpuDevice", lambda: device)
    assert cli.main(["device-check", str(legal_artifact), "--quiet", "--repeats", "0"]) == 0
    output = capsys.readouterr().out
    assert "differs" in output
    assert "all 4 ok" in output
    assert (
        cli.main(["device-check", str(legal_artifact), "--quiet", "--repeats", "0", "--json"]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["report"]["ok"]
    assert [each["verdict"] for each in document["needs"]] == ["ok", "differs", "ok", "differs"]


def test_the_verb_on_a_device_of_another_generation(legal_artifact, monkeypatch, capsys):
    monkeypatch.setattr(environment, "look_around", lambda _: ())
    monkeypatch.setattr(npu, "NpuDevice", lambda: FakeNpu("Ascend310P3"))
    assert cli.main(["device-check", str(legal_artifact), "--quiet"]) == 8
    captured = capsys.readouterr()
    assert "Ascend310P3" in captured.out
    assert "compile for the SoC of this device" in captured.err


def test_the_verb_here_says_what_is_missing(legal_artifact, capsys):
    assert cli.main(["device-check", str(legal_artifact), "--quiet"]) == 8
    captured = capsys.readouterr()
    assert "missing" in captured.out
    for words in ("CANN: not found", "set_env.sh", "NPU: not found", "npu-smi info"):
        assert words in captured.err
    assert "Traceback" not in captured.err
    assert cli.main(["device-check", str(legal_artifact), "--quiet", "--json"]) == 8
    document = json.loads(capsys.readouterr().out)
    assert document["report"] is None
    assert {each["name"] for each in document["needs"] if not each["ok"]} >= {"CANN", "NPU"}


def test_verify_checks_the_files_and_says_where_numbers_are_checked(
    legal_artifact, capsys, tmp_path
):
    assert cli.main(["verify", str(legal_artifact), "--quiet"]) == 0
    assert "device-check" in capsys.readouterr().out
    assert cli.main(["verify", str(legal_artifact), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    copy = tmp_path / "copy"
    shutil.copytree(legal_artifact, copy)
    (shard,) = (copy / "weights").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    assert cli.main(["verify", str(copy), "--quiet"]) == 5


def test_a_machine_without_cann_is_no_npu_device():
    if hasattr(torch, "npu"):
        pytest.skip("the stand-in's device module is registered in this process")
    with pytest.raises(DeviceError, match="torch_npu"):
        npu.NpuDevice()
