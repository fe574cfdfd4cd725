"""`hybridge verify`: does an artifact compute what it should, here?"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hybridge.artifacts.errors import UsageError
from hybridge.commands.console import (
    Progress,
    debug_option,
    format_table,
    json_option,
    print_json,
    quiet_option,
    threads_option,
)

if TYPE_CHECKING:
    from hybridge.artifacts.artifact import Artifact
    from hybridge.runner import Engine
    from hybridge.runner.verify import Check, VerifyReport

# Longer than the stored prompt, so that it crosses blocks and exceeds a small top-k.
FRESH_PROMPT = 100

EXAMPLES = """
\b
Examples:
  hybridge verify art
  hybridge verify art --full                      hash every byte of the weights first
  hybridge verify art --eager --checkpoint ckpt   the comparison with eager must happen

Exit code 7 when values differ by more than the tolerance.
"""


@click.command(
    "verify",
    epilog=EXAMPLES,
    short_help="Its files by hash, its numbers by golden values and eager.",
)
@click.argument("artifact", metavar="ARTIFACT", type=click.Path(path_type=Path))
@click.option(
    "--eager/--no-eager",
    default=None,
    help="Compare with eager PyTorch too.  [default: if torch and the checkpoint are there]",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The checkpoint's folder.  [default: where it was when compiled]",
)
@click.option("--full", is_flag=True, help="Check the hash of every weight, however large.")
@threads_option
@quiet_option
@json_option
@debug_option
def verify(
    artifact: Path,
    eager: bool | None,
    checkpoint: Path | None,
    full: bool,
    threads: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Check an artifact's files and numbers.

    Hashes first; then its golden cases, each as one prefill, as prefill in chunks, and as prefill
    and decode; then the same against eager PyTorch on another prompt, where torch and the
    checkpoint are there.

    An artifact for Ascend runs on its device only: here its files are checked, all weights and
    graphs by hash, and `hybridge device-check` does the rest there.
    """
    from hybridge.artifacts.manifest import read_manifest
    from hybridge.artifacts.weights import read_reference
    from hybridge.runner import load
    from hybridge.runner.verify import VerifyReport, verify_golden

    progress = Progress(quiet=quiet)
    progress("check the files and load")
    if read_manifest(artifact)[0].target != "cpu":
        _verify_files(artifact, checkpoint, as_json)
        return
    with load(
        artifact, threads=threads, weights_dir=checkpoint, verify="full" if full else "fast"
    ) as engine:
        progress("golden cases")
        opened = engine.model.artifact
        checks = verify_golden(engine).checks if opened.manifest.golden else ()
        folder = checkpoint or read_reference(opened.root)
        if _eager_wanted(opened, eager, folder) and folder is not None:
            progress("eager PyTorch")
            checks += _verify_eager(engine, folder)
    report = VerifyReport(checks)
    if as_json:
        print_json({"artifact": str(artifact), **report.to_json()})
    else:
        print(describe(report))
    report.raise_if_wrong()


def _verify_files(artifact: Path, checkpoint: Path | None, as_json: bool) -> None:
    """What can be verified of an artifact whose graphs do not run here: every byte, by its hash."""
    from hybridge.artifacts.artifact import open_artifact

    opened = open_artifact(artifact, verify="full", weights_dir=checkpoint)
    files, target = len(opened.manifest.files), opened.manifest.target
    if as_json:
        found = {"artifact": str(artifact), "ok": True, "checks": [], "files": files}
        print_json({**found, "target": target})
        return
    print(
        f"all {files} files ok, by hash\n"
        f"the graphs are for {target}: compare their numbers there with `hybridge device-check`"
    )


def describe(report: VerifyReport) -> str:
    """A table of all comparisons, and their verdict."""
    rows = [
        (
            check.case,
            check.name,
            f"{check.difference:.3g}",
            f"{check.tolerance:.3g}",
            "ok" if check.ok else "WRONG",
        )
        for check in report.checks
    ]
    if not rows:
        return "files are as the manifest says; there is nothing to compare numbers with"
    table = format_table(("case", "run as", "largest difference", "allowed", ""), rows, left=2)
    wrong = sum(not check.ok for check in report.checks)
    verdict = f"{wrong} of {len(rows)} checks are wrong" if wrong else f"all {len(rows)} checks ok"
    return f"{table}\n\n{verdict}"


def _eager_wanted(artifact: Artifact, eager: bool | None, checkpoint: Path | None) -> bool:
    """Whether to compare with eager: as asked, or if it can be done here.

    Raises:
        UsageError: it is asked for, and the checkpoint is not there.
    """
    if eager is False:
        return False
    there = checkpoint is not None and checkpoint.is_dir()
    if eager and not there:
        raise UsageError(
            f"{artifact.root}: the checkpoint it was compiled from is not at "
            f"{checkpoint or 'a known place'}",
            "name its folder with --checkpoint",
        )
    return there and importlib.util.find_spec("torch") is not None


def _verify_eager(engine: Engine, folder: Path) -> tuple[Check, ...]:
    """Compare with the eager model on a prompt that is not the stored one."""
    from hybridge.artifacts.manifest import GoldenSpec
    from hybridge.compiler.compile import GOLDEN_TOLERANCE
    from hybridge.compiler.reference import eager_model, golden_case
    from hybridge.compiler.rounding import narrow_weights, with_rounding
    from hybridge.models.checkpoint import Checkpoint
    from hybridge.models.config import load_config
    from hybridge.runner.verify import verify_case

    checkpoint, config = Checkpoint.open(folder), load_config(folder)
    model = eager_model(checkpoint, config)
    case, atol = golden_case(model, prompt=FRESH_PROMPT), GOLDEN_TOLERANCE
    if _rounds(engine.model.artifact):
        case, atol = with_rounding(model, case, narrow_weights(checkpoint, config), atol)
    return tuple(verify_case(engine, GoldenSpec("eager, now", "", atol), case))


def _rounds(artifact: Artifact) -> bool:
    """Whether it was compiled to round activations."""
    options = artifact.manifest.provenance.get("options", {})
    return bool(options.get("activations", "float32") != "float32")
