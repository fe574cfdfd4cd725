"""An Ascend target's part in `compile_model`: which options fit, and what goes into the artifact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hybridge.artifacts.errors import UsageError
from hybridge.artifacts.manifest import Manifest
from hybridge.artifacts.store import ArtifactWriter
from hybridge.compiler.build import Build
from hybridge.compiler.targets.ascend.constraints import SOCS
from hybridge.compiler.targets.ascend.emit import AscendOptions, Emitted, emit_ascend
from hybridge.compiler.targets.ascend.stand_in import require_wheel
from hybridge.models.config import ModelConfig

# What a size is called in `--buckets` -> in AscendOptions.
BUCKETS = {
    "decode": "decode_sequences",
    "prefill": "prefill_tokens",
    "sequences": "prefill_sequences",
    "blocks": "blocks",
    "columns": "columns",
    "slots": "slots",
}


def parse_buckets(text: str) -> dict[str, int]:
    """`decode=16,prefill=1024` as arguments of `AscendOptions`.

    Raises:
        UsageError: a part is not NAME=SIZE.
    """
    found: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, number = part.partition("=")
        if name not in BUCKETS or not number.isdigit() or int(number) < 1:
            raise UsageError(
                f"--buckets: cannot read {part!r}", f"write NAME=SIZE with {', '.join(BUCKETS)}"
            )
        found[BUCKETS[name]] = int(number)
    return found


def choose_options(
    target: str, weights: str, block_size: int, wanted: AscendOptions | None
) -> AscendOptions | None:
    """The options of an Ascend target, whose SoC and block size are the caller's; None for others.

    Raises:
        UsageError: the options do not fit the target, or weight bytes are wanted.
        CompileError: the graph is to be converted and the torch-npu wheel is missing; told here,
            not after minutes of tracing.
    """
    if target not in SOCS:
        if wanted is not None:
            raise UsageError(f"options of an Ascend target do not fit {target}", "leave them out")
        return None
    if weights != "none":
        raise UsageError(
            f"--weights {weights} is not there for {target}: its artifact holds a plan of the "
            "weights, not their bytes",
            "give --weights none",
        )
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


def complete(manifest: Manifest, emitted: Emitted) -> Manifest:
    """The manifest with the device's graphs, states and data."""
    return replace(
        manifest,
        phases=emitted.phases,
        states=emitted.states,
        target_data=emitted.target_data,
    )
