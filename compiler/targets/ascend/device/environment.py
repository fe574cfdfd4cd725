"""What this machine has of what a device check needs: torch-npu, CANN, an NPU of the artifact's SoC.

Looked up without importing torch_npu, which fails where CANN is missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridge.artifacts.errors import DeviceError
from hybridge.compiler.targets.ascend.constraints import SOCS
from hybridge.compiler.targets.ascend.stand_in import find_wheel, wheel_version

_CANN_VARIABLES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_CANN_DEFAULT = "usr/local/Ascend/ascend-toolkit/latest"
_VERSION_FILES = ("version.cfg", "compiler/version.info", "runtime/version.info")
# What a device of the SoC calls itself begins with this; the rest is the variant.
_FAMILIES = {"ascend-a3": "Ascend910_93", "ascend-950": "Ascend950"}


@dataclass(frozen=True)
class Need:
    """One thing that is needed.

    Attributes:
        name: what. wanted: as the artifact records it, "" if any will do.
        found: what is here, "" if nothing.
        ok: whether the check can go on with it. remedy: if not, or if it differs.
    """

    name: str
    wanted: str
    found: str
    ok: bool
    remedy: str = ""

    @property
    def verdict(self) -> str:
        """What it comes to: ok, differs (which stops nothing), wrong or missing."""
        if not self.ok:
            return "missing" if not self.found else "wrong"
        return "ok" if self.wanted in ("", self.found) else "differs"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**asdict(self), "verdict": self.verdict}


def look_around(
    target_data: Mapping[str, Any],
    *,
    root: Path = Path("/"),
    variables: Mapping[str, str] | None = None,
) -> tuple[Need, ...]:
    """What can be seen without a device.

    Args:
        target_data: the artifact's `target_data.ascend`.
        root: of the file system. variables: of the environment; None takes the process's.
    """
    variables = os.environ if variables is None else variables
    return (
        _torch_npu(str(target_data["torch_npu"] or "")),
        _cann(str(target_data["cann_version"]), root, variables),
        _npu(root),
    )


def _torch_npu(wanted: str) -> Need:
    wheel = find_wheel()
    found = "" if wheel is None else wheel_version(wheel)
    version = wanted or "2.13.0"
    remedy = f"pip install torch-npu=={version}"
    return Need("torch-npu", wanted, found, bool(found), remedy)


def _cann(wanted: str, root: Path, variables: Mapping[str, str]) -> Need:
    named = [variables[name] for name in _CANN_VARIABLES if variables.get(name)]
    folders = [root / folder.lstrip("/") for folder in (*named, _CANN_DEFAULT)]
    folder = next((each for each in folders if each.is_dir()), None)
    found = "" if folder is None else _cann_version(folder)
    remedy = (
        f"install the CANN toolkit {wanted} with the kernels of this SoC, and source its set_env.sh"
    )
    return Need("CANN", wanted, found, folder is not None, remedy)


def _cann_version(folder: Path) -> str:
    for name in _VERSION_FILES:
        if (folder / name).is_file():
            text = (folder / name).read_text("utf-8", errors="replace")[:10_000]
            match = re.search(r"(\d+\.\d+(?:\.(?:\d+|RC\d+|rc\d+))?(?:\.\w+)?)", text)
            if match:
                return match[1]
    return "of unknown version"


def _npu(root: Path) -> Need:
    devices = sorted(
        each.name for each in (root / "dev").glob("davinci*") if each.name[7:].isdigit()
    )
    remedy = "run this on a machine with an Ascend NPU and its driver (npu-smi info shows it)"
    found = f"{len(devices)} devices" if devices else ""
    return Need("NPU", "", found, bool(devices), remedy)


def check_soc(soc: str, device_name: str) -> Need:
    """Whether the device is of the artifact's SoC generation."""
    ok = device_name.startswith(_FAMILIES[soc])
    wanted = SOCS[soc].ge_name
    remedy = f"compile for the SoC of this device; this artifact is for {soc} ({wanted})"
    return Need("SoC", wanted, device_name, ok, remedy)


def require(needs: Sequence[Need]) -> None:
    """Raise for all that is missing, each with its remedy.

    Raises:
        DeviceError: something is missing or wrong.
    """
    missing = [need for need in needs if not need.ok]
    if missing:
        lines = [
            f"  {need.name}: {need.found or 'not found'}"
            + (f", wanted {need.wanted}" if need.wanted else "")
            + f"\n    {need.remedy}"
            for need in missing
        ]
        raise DeviceError(
            f"{len(missing)} of {len(needs)} things that a device check needs are not here:\n"
            + "\n".join(lines),
            "the artifact holds all the rest; copy it to a machine that has these",
        )
