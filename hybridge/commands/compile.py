"""`hybridge compile`: a checkpoint in, an artifact out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridge.commands.console import (
    Progress,
    debug_option,
    json_option,
    print_json,
    quiet_option,
    split_names,
)

if TYPE_CHECKING:
    from hybridge.compiler.targets.ascend.options import AscendOptions

EXAMPLES = """
\b
Examples:
  hybridge compile ckpt -o art
  hybridge compile ckpt -o art --weights copy            an artifact that can be moved alone
  hybridge compile ckpt -o art --passes none             the plain traced graph
  hybridge compile ckpt -o art --phase decode --passes canonicalise,fuse_lightning_indexer
  hybridge compile kimi-k3.1-pro -o art --target ascend-950 --block-size 128 --weights none
  hybridge compile kimi-k3.1-pro -o art --weights none   graphs of a published size, no weights
"""


@click.command("compile", epilog=EXAMPLES, short_help="Checkpoint in, artifact out.")
@click.argument("source", metavar="CKPT")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder to write the artifact to.",
)
@click.option(
    "--target",
    metavar="NAME",
    default="cpu",
    show_default=True,
    help="What the graphs will run on.",
)
@click.option(
    "--phase",
    "phases",
    metavar="NAME",
    multiple=True,
    callback=split_names,
    help="prefill or decode; repeat, or separate by commas.  [default: both]",
)
@click.option(
    "--passes",
    metavar="NAMES",
    default=None,
    help="Names separated by commas, 'all' or 'none'; the order is the pipeline's.  [default: all]",
)
@click.option(
    "--weights",
    type=click.Choice(["reference", "copy", "packed", "none"]),
    help="Refer to the checkpoint's own files, copy them in (packed: bf16 matrices in 12 bits a weight), or leave "
    "them out."
    "  [default: reference; copy for Ascend]",
)
@click.option(
    "--block-size",
    type=click.IntRange(min=1),
    metavar="N",
    default=64,
    show_default=True,
    help="Tokens a block of the paged caches holds.",
)
@click.option(
    "--activations",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="bfloat16: products may round activations, caches are half as large; faster.",
)
@click.option(
    "--cann", metavar="VERSION", help="Ascend: CANN version to convert for.  [default: 9.0.0]"
)
@click.option(
    "--nz",
    type=click.Choice(["auto", "off", "quantised", "all"]),
    help="Ascend: which weights lie as FRACTAL_NZ.  [default: auto, as the SoC asks]",
)
@click.option(
    "--buckets",
    metavar="SIZES",
    default="",
    help="Ascend: static sizes, such as decode=1/16,prefill=1024,sequences=4,blocks=1024.",
)
@click.option(
    "--expert-parallel",
    "devices",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ascend: devices that share the experts; each gets an artifact of its own.",
)
@click.option(
    "--expert-rank",
    "rank",
    type=click.IntRange(min=0),
    metavar="R",
    help="Ascend: which of the N devices this artifact is for.  [default: 0]",
)
@click.option("--no-streams", is_flag=True, help="Ascend: keep everything on one stream.")
@click.option("--overwrite", is_flag=True, help="Replace an artifact that is there.")
@click.option(
    "--cache",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Keep a copy of the artifact here, and take it from here where nothing that decides it has changed.",
)
@click.option("--dumps", is_flag=True, help="Keep the graph after each pass, in dumps/.")
@click.option(
    "--check-passes",
    is_flag=True,
    help="Run the graph after each pass against the one before, on numbers.",
)
@quiet_option
@json_option
@debug_option
def compile_command(
    source: str,
    output: Path,
    target: str,
    phases: list[str],
    passes: str | None,
    weights: str | None,
    block_size: int,
    activations: str,
    cann: str | None,
    nz: str | None,
    buckets: str,
    devices: int | None,
    rank: int | None,
    no_streams: bool,
    overwrite: bool,
    cache: Path | None,
    dumps: bool,
    check_passes: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compile a checkpoint into an artifact: graphs, weights and golden values.

    CKPT is a checkpoint folder (config.json and safetensors). With --weights none it may also be
    the name of a preset (`hybridge checkpoint presets`) or a config.json.
    """
    from hybridge.commands import report
    from hybridge.compiler import compile_model

    compile_model(
        source,
        output,
        target=target,
        phases=phases or None,
        passes=_pass_names(passes),
        weights=weights,
        block_size=block_size,
        activations=activations,
        ascend=_ascend_options(target, cann, nz, buckets, devices, rank, no_streams),
        overwrite=overwrite,
        cache=cache,
        dumps=dumps,
        check_passes=check_passes,
        progress=Progress(quiet=quiet),
    )
    manifest, records = report.read_passes(output)
    if as_json:
        print_json(report.artifact_document(output, manifest, records))
        return
    print(report.describe_passes(records), report.describe_artifact(output, manifest), sep="\n\n")


def _ascend_options(
    target: str,
    cann: str | None,
    nz: str | None,
    buckets: str,
    devices: int | None,
    rank: int | None,
    no_streams: bool,
) -> AscendOptions | None:
    """The options of an Ascend target; None where none was given."""
    from hybridge.compiler.targets.ascend.options import AscendOptions, parse_buckets

    given: dict[str, Any] = dict(parse_buckets(buckets))
    given |= {"cann_version": cann} if cann else {}
    given |= {"nz": nz} if nz else {}
    given |= {"expert_parallel": devices} if devices else {}
    given |= {"expert_rank": rank} if rank is not None else {}
    given |= {"streams": False} if no_streams else {}
    return AscendOptions(target, **given) if given else None


def _pass_names(text: str | None) -> list[str] | None:
    """The value of --passes: None for all of them, an empty list for none."""
    if text is None or text == "all":
        return None
    if text in {"none", ""}:
        return []
    return [name.strip() for name in text.split(",") if name.strip()]
