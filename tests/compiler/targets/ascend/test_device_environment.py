"""What a machine has of what a device check needs, on file systems made up for it."""

import pytest

from hybridge.artifacts.errors import DeviceError
from hybridge.compiler.targets.ascend.device.environment import check_soc, look_around, require

DATA = {"torch_npu": "2.13.0", "cann_version": "9.0.0"}


def look(root, **variables):
    return {need.name: need for need in look_around(DATA, root=root, variables=variables)}


def install_cann(folder, version):
    folder.mkdir(parents=True)
    (folder / "version.cfg").write_text(f"runtime_running_version=[{version}]\n")


def test_an_empty_machine(tmp_path):
    needs = look(tmp_path)
    assert (needs["CANN"].verdict, needs["NPU"].verdict) == ("missing", "missing")
    with pytest.raises(DeviceError) as caught:
        require(list(needs.values()))
    for words in ("CANN: not found, wanted 9.0.0", "set_env.sh", "NPU: not found", "npu-smi info"):
        assert words in caught.value.message


def test_a_machine_with_both(tmp_path):
    install_cann(tmp_path / "usr/local/Ascend/ascend-toolkit/latest", "9.0.0")
    (tmp_path / "dev").mkdir()
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / "dev" / name).touch()
    needs = look(tmp_path)
    assert (needs["CANN"].found, needs["CANN"].verdict) == ("9.0.0", "ok")
    assert (needs["NPU"].found, needs["NPU"].verdict) == ("2 devices", "ok")


@pytest.mark.parametrize(("version", "verdict"), [("9.1.0", "differs"), ("8.2.RC1", "differs")])
def test_cann_where_the_environment_says(tmp_path, version, verdict):
    install_cann(tmp_path / "opt/cann", version)
    need = look(tmp_path, ASCEND_TOOLKIT_HOME="/opt/cann")["CANN"]
    assert (need.found, need.verdict) == (version, verdict)
    require([need])  # another version is told, and stops nothing


def test_cann_without_a_version_file(tmp_path):
    (tmp_path / "opt/cann").mkdir(parents=True)
    need = look(tmp_path, ASCEND_HOME_PATH="/opt/cann")["CANN"]
    assert (need.ok, need.found) == (True, "of unknown version")


@pytest.mark.parametrize(
    ("soc", "device", "ok"),
    [
        ("ascend-a3", "Ascend910_9391", True),
        ("ascend-a3", "Ascend910B3", False),
        ("ascend-950", "Ascend950PR_9599", True),
        ("ascend-950", "Ascend910_9391", False),
    ],
)
def test_the_generation_of_the_device(soc, device, ok):
    assert check_soc(soc, device).ok == ok
