"""The stand-in for torchair's native core: what its Python half asks of C++, answered or refused.

torchair ships inside the torch-npu wheel (`torch_npu/dynamo/torchair`). Its converters are pure
Python and turn an FX graph into a GE GraphDef; only one compiled module stands between them and a
machine without CANN: `torchair.core._torchair`. `install` puts this file's modules in its place and
in the place of `torch_npu`, of which the converters read a few constants. The wheel itself is used
unmodified.

What is answered: the CANN version and the SoC the caller named, the GE operator definitions
declared in `own_converters`, and dtype constants. What the real core would look up in the installed
CANN operator library cannot be known here; such questions are answered "compatible", and every one
is kept in `StandIn.unverified`, which ends up in the artifact. Everything else raises
`NeedsDeviceError`: nothing here compiles, exports or runs.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import os
import re
import signal
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hybridge.artifacts.errors import CompileError, UsageError

# torch imports every installed backend at start, and torch_npu without CANN makes that import fail.
AUTOLOAD_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"

# torch_npu's numbers for dtypes that torch lacks, as its converters compare them
# (torch_npu 2.13.0, op_plugin/meta/_meta_registrations.py).
TORCH_NPU_DTYPES = {
    "int4": 285,
    "hifloat8": 290,
    "float8_e5m2": 291,
    "float8_e4m3fn": 292,
    "float8_e8m0fnu": 293,
    "float4_e2m1fn_x2": 296,
    "float4_e1m2fn_x2": 297,
}
_TORCH_DATA_TYPES = (
    *("BOOL", "UINT8", "INT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64"),
    *("BF16", "FLOAT16", "FLOAT32", "FLOAT64", "COMPLEX32", "COMPLEX64", "COMPLEX128"),
)


class NeedsDeviceError(CompileError, AttributeError):
    """torchair asked for something that only CANN or an NPU can do.

    Also an AttributeError, so that `hasattr` on a stand-in module answers as on a module.
    """


@dataclass
class StandIn:
    """What was installed and what was asked of it.

    Attributes:
        cann_version: the CANN version that version checks are answered with.
        soc_name: the SoC name that `GetSocName` and `get_device_name` answer with.
        definitions: GE operator name -> (inputs, outputs, attributes), each a list of
            (name, type) pairs.
        unverified: questions that only the CANN operator library can answer, in order, each once.
        engine_options: what torchair would start the graph engine with.
        torch_npu: the modules that stand for torch_npu, by name.
    """

    cann_version: str
    soc_name: str
    definitions: dict[str, tuple[list[Any], list[Any], list[Any]]] = field(default_factory=dict)
    unverified: list[str] = field(default_factory=list)
    engine_options: dict[str, str] = field(default_factory=dict)
    torch_npu: dict[str, types.ModuleType] = field(default_factory=dict)

    @contextlib.contextmanager
    def as_torch_npu(self) -> Iterator[None]:
        """While converters run: `import torch_npu` finds the stand-in.

        Only then, because torchair takes a loaded torch_npu for a machine with a device.
        """
        before = {name: sys.modules.get(name) for name in self.torch_npu}
        sys.modules.update(self.torch_npu)
        try:
            yield
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module

    def note(self, question: str) -> None:
        """Remember a question that could not be verified."""
        if question not in self.unverified:
            self.unverified.append(question)


_installed: StandIn | None = None


def find_wheel() -> Path | None:
    """The installed torch_npu package folder, found without importing it, or None."""
    spec = importlib.util.find_spec("torch_npu") if "torch_npu" not in sys.modules else None
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    for entry in sys.path:
        folder = Path(entry) / "torch_npu"
        if (folder / "dynamo" / "torchair").is_dir():
            return folder
    return None


def require_wheel() -> Path:
    """The installed torch_npu package folder.

    Raises:
        CompileError: the torch-npu wheel is not installed.
    """
    wheel = find_wheel()
    if wheel is None:
        raise CompileError(
            "the Ascend target needs torchair, which the torch-npu wheel carries",
            remedy="pip install --no-deps torch-npu==2.13.0, and set "
            f"{AUTOLOAD_SWITCH}=0 where there is no CANN",
        )
    return wheel


def wheel_version(folder: Path) -> str:
    """The version of the torch-npu distribution at `folder`, read from its metadata."""
    for info in sorted(folder.parent.glob("torch_npu-*.dist-info")):
        return info.name.removeprefix("torch_npu-").removesuffix(".dist-info")
    return "unknown"


def installed_version() -> str:
    """The version of the wheel whose torchair is installed."""
    wheel = find_wheel()
    return wheel_version(wheel) if wheel is not None else "none"


def parse_cann_version(text: str) -> tuple[int, ...]:
    """`9.0.0`, `8.2.RC1`, `8.5.0.alpha003` as a tuple that compares as releases do.

    Raises:
        UsageError: the text is no CANN version.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.(alpha|beta|RC|rc)(\d+))?", text)
    if match is None:
        raise UsageError(
            f"--cann {text!r} is not a CANN version",
            remedy="write it as 9.0.0, 8.2.RC1 or 8.5.0.alpha003",
        )
    major, minor, patch, stage, number = match.groups()
    rank = {"alpha": 0, "beta": 1, "rc": 2}.get((stage or "").lower(), 3)
    return int(major), int(minor), int(patch or 0), rank, int(number or 0)


def install(cann_version: str, soc_name: str) -> StandIn:
    """Make the wheel's torchair importable on this machine.

    Installs once a process; a second call changes the versions that are answered.

    Raises:
        UsageError: the CANN version cannot be read.
        CompileError: the torch-npu wheel is not installed.
    """
    global _installed
    parse_cann_version(cann_version)
    if _installed is not None:
        _installed.cann_version, _installed.soc_name = cann_version, soc_name
        _installed.unverified.clear()
        return _installed
    os.environ.setdefault(AUTOLOAD_SWITCH, "0")
    wheel = require_wheel()
    stand_in = StandIn(cann_version, soc_name)
    sys.path.insert(0, str(wheel / "dynamo"))
    stand_in.torch_npu = {module.__name__: module for module in _torch_npu_modules(stand_in)}
    core = _core_module(stand_in)
    sys.modules[core.__name__] = core
    with stand_in.as_torch_npu():
        _import_torchair()
    _installed = stand_in
    return stand_in


def _import_torchair() -> None:
    """Import torchair, and take back the process-wide handlers that it installs."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        importlib.import_module("torchair")
        backend = importlib.import_module("torchair.core._backend")
    finally:
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
    atexit.unregister(backend.finalize_graph_engine)  # no engine was started


def _refuse(what: str) -> NoReturn:
    raise NeedsDeviceError(
        f"torchair called {what}, which needs CANN or an NPU; this machine has neither",
        remedy="run this step on a device (hybridge device-check), or stop at the GE graph",
    )


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        _refuse(what)

    return refuse


def _module(name: str, **members: Any) -> types.ModuleType:
    """A module that has `members` and refuses every other public name."""
    module = types.ModuleType(name, "hybridge's stand-in: see compiler/targets/ascend/stand_in.py")
    module.__dict__.update(members)

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        _refuse(f"{name}.{attribute}")

    module.__dict__["__getattr__"] = missing
    return module


def _core_module(stand_in: StandIn) -> types.ModuleType:
    """`torchair.core._torchair`."""

    def get_registered_ir_def(name: str) -> tuple[str, list[Any], list[Any], list[Any]]:
        # The real core asks the CANN operator library whether the operator exists.
        if name in stand_in.definitions:
            stand_in.note(f"CANN {stand_in.cann_version} has the GE operator {name}")
            return ("SUCCESS", *stand_in.definitions[name])
        return "ERROR", [], [], []

    def check_cann_compat(operator: str, inputs: tuple[str, ...], attrs: tuple[str, ...]) -> str:
        # "" means compatible: the operator library would be asked for these optional parts.
        if inputs or attrs:
            parts = ", ".join((*inputs, *attrs))
            stand_in.note(f"CANN {stand_in.cann_version}'s {operator} takes {parts}")
        return ""

    def initialize(options: dict[str, str]) -> None:
        # Nothing is started; whatever needs the engine later is refused.
        stand_in.engine_options = dict(options)

    def check_aclnn(name: str) -> bool:
        stand_in.note(f"CANN {stand_in.cann_version} has {name}")
        return True

    class TorchNpuGraphBase:
        """The base of torchair's graph handle: it can be made and named, not used."""

        def __init__(self, name: str = "") -> None:
            self.name = name

    for method in ("load", "set_hint_shape", "compile", "auto_tune", "run"):
        setattr(TorchNpuGraphBase, method, _refusing(f"TorchNpuGraph.{method}"))

    return _module(
        "torchair.core._torchair",
        TorchNpuGraphBase=TorchNpuGraphBase,
        TorchDataType=types.SimpleNamespace(**{n: i for i, n in enumerate(_TORCH_DATA_TYPES)}),
        InitializeGraphEngine=initialize,
        GetSocName=lambda: stand_in.soc_name,
        CheckAclnnAvaliable=check_aclnn,  # the core's own spelling
        check_cann_compat=check_cann_compat,
        get_registered_ir_def=get_registered_ir_def,
    )


def _torch_npu_modules(stand_in: StandIn) -> list[types.ModuleType]:
    """`torch_npu` and the submodules that converters import while they convert."""

    def is_at_least(version: str, module: str = "CANN") -> bool:
        return parse_cann_version(stand_in.cann_version) >= parse_cann_version(version)

    utils = _module(
        "torch_npu.npu.utils",
        _is_gte_cann_version=is_at_least,
        get_cann_version=lambda module="CANN": stand_in.cann_version,
    )
    npu = _module("torch_npu.npu", utils=utils, get_device_name=lambda *_: stand_in.soc_name)
    root = _module("torch_npu", npu=npu, **TORCH_NPU_DTYPES)
    root.__path__, npu.__path__ = [], []  # packages, without anything more to import
    for module in (root, npu, utils):
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, loader=None)
    return [root, npu, utils]
