"""An Ascend target's part in `compile_model`: which options fit, and what goes into the artifact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from hybridge.artifacts.errors import UsageError
from hybridge.artifacts.manifest import GoldenSpec, Manifest
from hybridge.artifacts.store import ArtifactWriter
from hybridge.compiler.build import Build
from hybridge.compiler.reference import golden_case
from hybridge.compiler.targets.ascend.constraints import SOCS
from hybridge.compiler.targets.ascend.emit import Emitted, emit_ascend
from hybridge.compiler.targets.ascend.golden import DeviceTolerance, device_tolerance
from hybridge.compiler.targets.ascend.options import AscendOptions
from hybridge.compiler.targets.ascend.stand_in import require_wheel
from hybridge.compiler.targets.ascend.stored_weights import write_weights
from hybridge.compiler.weight_reader import WeightReader
from hybridge.compiler.weights import WeightsPolicy
from hybridge.models.checkpoint import Checkpoint
from hybridge.models.config import ModelConfig
from hybridge.models.model import HybridModel


def choose_options(
    target: str, block_size: int, wanted: AscendOptions | None
) -> AscendOptions | None:
    """The options of an Ascend target, whose SoC and block size are the caller's; None for others.

    Raises:
        UsageError: the options do not fit the target.
        CompileError: the graph is to be converted and the torch-npu wheel is missing; told here,
            not after minutes of tracing.
    """
    if target not in SOCS:
        if wanted is not None:
            raise UsageError(f"options of an Ascend target do not fit {target}", "leave them out")
        return None
    options = replace(wanted or AscendOptions(target), soc=target, block_size=block_size)
    if options.convert:
        require_wheel()
    return options


def emit_into(
    writer: ArtifactWriter,
    build: Build,
    config: ModelConfig,
    options: AscendOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> Emitted:
    """Emit every traced phase, add its files, and record its passes and times in `build`."""
    emitted = emit_ascend(list(build.traced.values()), config, options, progress)
    for path, data in emitted.files.items():
        writer.add_bytes(path, data)
    for phase, report in build.reports.items():
        more = emitted.results[phase]
        build.reports[phase] = replace(report, results=(*report.results, *more))
    build.seconds.update(emitted.seconds)
    return emitted


def weights_into(
    writer: ArtifactWriter,
    emitted: Emitted,
    config: ModelConfig,
    checkpoint: Checkpoint | None,
    policy: WeightsPolicy,
) -> None:
    """Write the weights that the emitted graphs read; see `write_weights`."""
    reader = WeightReader(config, checkpoint, emitted.recipes)
    write_weights(writer, reader, emitted.weights, policy)


@dataclass(frozen=True)
class DeviceGolden:
    """A golden case that was added, and what a device may differ by."""

    spec: GoldenSpec
    tolerance: DeviceTolerance


def golden_into(writer: ArtifactWriter, eager: HybridModel, options: AscendOptions) -> DeviceGolden:
    """Add the eager model's golden case, with the tolerance that the device's types call for."""
    case = golden_case(eager)
    tolerance = device_tolerance(eager, case, options.soc)
    # Rounding may tip a choice between two tokens that are nearly as likely.
    case = replace(case, greedy_tokens=None)
    return DeviceGolden(writer.add_golden("eager", case, atol=tolerance.largest), tolerance)


def complete(
    manifest: Manifest, emitted: Emitted, options: AscendOptions, golden: DeviceGolden | None
) -> Manifest:
    """The manifest with the device's graphs, states, defaults and data."""
    defaults = replace(
        manifest.defaults,
        max_context=options.columns * options.block_size,
        slots=options.slots,
        prefill_chunk=max(bucket.tokens for bucket in options.buckets("prefill").values()),
    )
    data = dict(emitted.target_data)
    if golden is not None:
        data["ascend"] = {**data["ascend"], "golden_tolerance": asdict(golden.tolerance)}
    return replace(
        manifest,
        phases=emitted.phases,
        states=emitted.states,
        defaults=defaults,
        golden=() if golden is None else (golden.spec,),
        target_data=data,
    )
