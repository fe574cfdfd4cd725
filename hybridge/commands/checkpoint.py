"""`hybridge checkpoint`: random checkpoints in the published format, and the known presets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from hybridge.commands.console import (
    Progress,
    debug_option,
    format_bytes,
    format_table,
    json_option,
    print_json,
    quiet_option,
)

if TYPE_CHECKING:
    from hybridge.models.config import ModelConfig, WeightType

EXAMPLES = """
\b
Examples:
  hybridge checkpoint new --preset kimi-k3.1-tiny ckpt
  hybridge checkpoint new --preset kimi-k3.1-pro --layers 8 --hidden 512 --experts 16 ckpt
  hybridge checkpoint new --preset kimi-k3-tiny --mxfp4 --dtype bfloat16 --seed 7 ckpt
"""


@click.group(short_help="Make random checkpoints; list the presets.")
def checkpoint() -> None:
    """Make random checkpoints in the published format; list the presets."""


@checkpoint.command("new", epilog=EXAMPLES)
@click.argument("output", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--preset", required=True, metavar="NAME", help="The model whose shape it takes.")
@click.option("--layers", type=click.IntRange(min=1), metavar="N", help="Number of layers.")
@click.option(
    "--hidden", type=click.IntRange(min=1), metavar="N", help="Hidden size; widths follow it."
)
@click.option(
    "--experts", type=click.IntRange(min=1), metavar="N", help="Number of routed experts."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Type of the weights that are not quantised.",
)
@click.option("--mxfp4/--no-mxfp4", default=None, help="Routed experts as MXFP4, or not.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same bytes.")
@quiet_option
@json_option
@debug_option
def new(
    output: Path,
    preset: str,
    layers: int | None,
    hidden: int | None,
    experts: int | None,
    dtype: str | None,
    mxfp4: bool | None,
    seed: int,
    quiet: bool,
    as_json: bool,
) -> None:
    """Write a random-weight checkpoint to the folder OUT.

    Options left out keep the preset's value. Weights are written tensor by tensor: memory stays
    small however large the checkpoint is.
    """
    from hybridge.models.new_checkpoint import write_checkpoint
    from hybridge.models.presets import preset as preset_config
    from hybridge.models.presets import scale

    config = scale(
        preset_config(preset),
        layers=layers,
        hidden=hidden,
        experts=experts,
        dtype=cast("WeightType | None", dtype),
        mxfp4=mxfp4,
    )
    write_checkpoint(config, output, seed=seed, progress=Progress(quiet=quiet))
    files = sorted(path for path in output.iterdir() if path.is_file())
    total = sum(path.stat().st_size for path in files)
    if as_json:
        names = [path.name for path in files]
        print_json({"output": str(output), "files": names, "bytes": total} | shape_of(config))
        return
    print(f"{output}: {describe_shape(config)}")
    print(f"{len(files)} files, {format_bytes(total)}")


@checkpoint.command("presets")
@json_option
@debug_option
def presets(as_json: bool) -> None:
    """List the models known by name, published sizes and small ones."""
    from hybridge.models.presets import preset, preset_names

    shapes = {name: shape_of(preset(name)) for name in preset_names()}
    if as_json:
        print_json({"presets": shapes})
        return
    columns = ["family", "layers", "hidden", "heads", "experts", "top_k", "dtype", "mxfp4"]
    rows = [[name, *(_cell(shape[column]) for column in columns)] for name, shape in shapes.items()]
    print(format_table(["preset", *columns], rows, left=2))


def _cell(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def shape_of(config: ModelConfig) -> dict[str, object]:
    """The few sizes that say which model this is."""
    return {
        "family": config.family,
        "layers": config.num_layers,
        "layer_kinds": {kind: config.layer_kinds.count(kind) for kind in config.layer_kinds},
        "hidden": config.hidden_size,
        "heads": config.num_heads,
        "experts": config.moe.num_experts,
        "top_k": config.moe.top_k,
        "vocabulary": config.vocab_size,
        "dtype": config.dtype,
        "mxfp4": config.quantization is not None,
    }


def describe_shape(config: ModelConfig) -> str:
    """One line about a model, for people."""
    kinds = ", ".join(
        f"{config.layer_kinds.count(kind)} {kind}" for kind in dict.fromkeys(config.layer_kinds)
    )
    experts = f"{config.moe.num_experts} experts" + (", MXFP4" if config.quantization else "")
    return (
        f"{config.family}, {config.num_layers} layers ({kinds}), hidden {config.hidden_size}, "
        f"{experts}, {config.dtype}"
    )
