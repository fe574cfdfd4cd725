"""`hybridge device-check`: an Ascend artifact on the NPU of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hybridge.commands.console import (
    Progress,
    debug_option,
    format_table,
    json_option,
    print_json,
    quiet_option,
)

if TYPE_CHECKING:
    from hybridge.artifacts.artifact import Artifact
    from hybridge.compiler.targets.ascend.device.check import Report
    from hybridge.compiler.targets.ascend.device.environment import Need

EXAMPLES = """
\b
Examples:
  hybridge device-check art
  hybridge device-check art --json > report.json
  hybridge device-check art --repeats 0          compare only
  hybridge device-check art --look               what is missing here; runs nothing

Exit code 8 when this machine lacks torch-npu, CANN or an NPU of the artifact's SoC (each is named,
with what to do), 7 when values differ by more than the tolerance, 4 when the device cannot compile
a graph.
"""


@click.command(
    "device-check",
    epilog=EXAMPLES,
    short_help="An Ascend artifact on this machine's NPU: compare and time.",
)
@click.argument("artifact", metavar="ARTIFACT", type=click.Path(path_type=Path))
@click.option(
    "--weights-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The checkpoint, where weights are referenced.  [default: where it was when compiled]",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    metavar="N",
    help="Calls of each graph to time.",
)
@click.option("--look", is_flag=True, help="Only look whether everything needed is here.")
@quiet_option
@json_option
@debug_option
def device_check(
    artifact: Path,
    weights_dir: Path | None,
    repeats: int,
    look: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Check an Ascend artifact on the NPU of this machine.

    Its files are checked by hash; its graphs are rebuilt from data (no code of the artifact is run),
    compiled by the torchair of this machine, run on the artifact's golden case, compared, and timed.
    """
    from hybridge.compiler.targets.ascend.device.environment import look_around, require
    from hybridge.compiler.targets.ascend.device.loading import open_for_device

    progress = Progress(quiet=quiet)
    progress("check the files")
    opened = open_for_device(artifact, weights_dir=weights_dir)
    needs: Sequence[Need] = look_around(opened.manifest.target_data["ascend"])
    here = all(need.ok for need in needs)
    report = None
    if here and not look:
        needs, report = _run(opened, needs, repeats, progress)
    if as_json:
        print_json(document(artifact, needs, report))
    else:
        print(describe(needs, report))
    require(needs)
    if report is not None:
        report.raise_if_wrong()


def _run(
    opened: Artifact, needs: Sequence[Need], repeats: int, progress: Progress
) -> tuple[Sequence[Need], Report | None]:
    """The part that only a machine with an NPU gets to."""
    from hybridge.compiler.targets.ascend.device.check import run_check
    from hybridge.compiler.targets.ascend.device.environment import check_soc
    from hybridge.compiler.targets.ascend.device.loading import load
    from hybridge.compiler.targets.ascend.device.npu import NpuDevice

    device = NpuDevice()
    needs = (*needs, check_soc(opened.manifest.target, device.name()))
    if not needs[-1].ok:
        return needs, None
    progress("load the graphs")
    return needs, run_check(load(opened), device, repeats=repeats, progress=progress)


def document(artifact: Path, needs: Sequence[Need], report: Report | None) -> dict[str, object]:
    """The JSON: what is needed, and the report or null."""
    return {
        "artifact": str(artifact),
        "needs": [need.to_json() for need in needs],
        "report": None if report is None else report.to_json(),
    }


def describe(needs: Sequence[Need], report: Report | None) -> str:
    """Tables of what is needed, of the comparisons and of the times."""
    rows = [(need.name, need.wanted or "any", need.found or "none", need.verdict) for need in needs]
    sections = [format_table(("needed", "wanted", "found", ""), rows, left=4)]
    if report is not None:
        sections += _describe_report(report)
    return "\n\n".join(sections)


def _describe_report(report: Report) -> list[str]:
    comparisons = [
        (
            *(each.graph, each.run, each.positions, f"{each.median:.3g}"),
            *(f"{each.tolerance.median:.3g}", f"{each.largest:.3g}"),
            *(f"{each.tolerance.largest:.3g}", "ok" if each.ok else "WRONG"),
        )
        for each in report.comparisons
    ]
    timings = [
        (
            *(each.graph, each.tokens, each.context),
            *(f"{each.first_seconds:.2f}", f"{each.milliseconds:.3f}"),
        )
        for each in report.timings
    ]
    header = ("graph", "run as", "positions", "median", "allowed", "largest", "allowed", "")
    wrong = sum(not each.ok for each in report.comparisons)
    verdict = f"{wrong} of {len(comparisons)} WRONG" if wrong else f"all {len(comparisons)} ok"
    return [
        format_table(header, comparisons, left=2),
        format_table(("graph", "tokens", "cached", "first call, s", "then, ms"), timings),
        f"{report.device}: {verdict}",
    ]
