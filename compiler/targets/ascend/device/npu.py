"""An NPU through torch-npu and its torchair. Not run where this was written: no machine there has one.

A graph is compiled by the device's own torchair from the FX graph that the artifact holds as data:
the same call as at compile time (`convert.concrete_graph`), with torchair's real core instead of the
stand-in. The `.pb` beside it is what that call gave at compile time, for inspection; torch-npu has no
interface that runs a GraphDef from a file.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hybridge.artifacts.errors import CompileError, DeviceError
from hybridge.compiler.targets.ascend.convert import concrete_graph, unconvertible
from hybridge.compiler.targets.ascend.device.device import CompiledGraph
from hybridge.compiler.targets.ascend.nz import ACL_FORMAT_FRACTAL_NZ
from hybridge.compiler.targets.ascend.operators import define_operators
from hybridge.compiler.targets.ascend.own_converters import register_own_converters
from hybridge.passes.assign_nz_layout import FRACTAL_NZ


class NpuDevice:
    """The first NPU of this machine; see `device.Device`.

    Raises:
        DeviceError: torch_npu cannot be imported, or sees no device.
    """

    def __init__(self) -> None:
        try:
            self._torch_npu: Any = importlib.import_module("torch_npu")
            importlib.import_module("torchair")
        except (ImportError, OSError, RuntimeError) as error:
            raise DeviceError(
                f"torch_npu cannot be imported: {error}",
                "source CANN's set_env.sh; versions of torch, torch-npu and CANN must fit together",
            ) from error
        self._npu: Any = self._torch_npu.npu
        if not self._npu.is_available():
            raise DeviceError(
                "torch_npu sees no NPU", "look at npu-smi info and ASCEND_RT_VISIBLE_DEVICES"
            )
        define_operators()
        importlib.import_module("torchair._ge_concrete_graph.ge_converter.custom")
        register_own_converters()

    def name(self) -> str:
        """Such as "Ascend910_9391"."""
        return str(self._npu.get_device_name())

    def cann_version(self) -> str:
        """Of the CANN that is loaded."""
        return str(self._npu.utils.get_cann_version("CANN"))

    def put(self, value: Tensor, layout: str = "ND") -> Tensor:
        """See `device.Device`; the cast to FRACTAL_NZ is the device's own."""
        placed = value.contiguous().to("npu:0")
        if layout != FRACTAL_NZ:
            return placed
        # Packed MXFP4 takes the block width of the MXFP8 rows that it is multiplied with.
        packed = value.dtype == torch.uint8
        options = {"customize_dtype": torch.float8_e4m3fn} if packed else {}
        cast: Tensor = self._torch_npu.npu_format_cast(placed, ACL_FORMAT_FRACTAL_NZ, **options)
        return cast

    def compile(self, name: str, graph: fx.GraphModule) -> CompiledGraph:
        """See `device.Device`: converted now, compiled by GE at the first call."""
        missing = unconvertible(graph)
        if missing:
            raise CompileError(
                f"{name}: this torch-npu has no converter for {', '.join(missing)}",
                "install the torch-npu that the artifact records",
            )
        concrete = concrete_graph(graph, name)

        def run(inputs: Sequence[Tensor]) -> Tensor:
            with torch.no_grad():
                return concrete(*inputs)[0]  # type: ignore[no-any-return]

        return run

    def fetch(self, value: Tensor) -> Tensor:
        """See `device.Device`."""
        return value.cpu()

    def synchronize(self) -> None:
        """See `device.Device`."""
        self._npu.synchronize()
