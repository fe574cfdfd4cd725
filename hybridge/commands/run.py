"""`hybridge run`: a prompt through the compiled graphs, tokens out as they come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hybridge.commands.console import (
    debug_option,
    json_option,
    print_json,
    quiet_option,
    threads_option,
)

if TYPE_CHECKING:
    from hybridge.runner.text import Text

EXAMPLES = """
\b
Examples:
  hybridge run art --prompt "The capital of France is"
  hybridge run art --ids 1,2,3 --max-new-tokens 64
  hybridge run art --ids-file ids.txt --prefill-chunk 256 --json
  echo "Once upon a time" | hybridge run art --temperature 0.8 --top-p 0.95 --seed 7
  hybridge run art --ids-file ids.txt --max-new-tokens 0 --logits logits.safetensors

Without --prompt, --ids or --ids-file the prompt is read from standard input: text where the
artifact has a tokenizer, token ids where it has none. Tokens are chosen greedily unless
--temperature is above 0.
"""


@click.command("run", epilog=EXAMPLES, short_help="A prompt in, tokens out; needs no torch.")
@click.argument("artifact", metavar="ARTIFACT", type=click.Path(path_type=Path))
@click.option(
    "--prompt", metavar="TEXT", help="The prompt as text; needs the artifact's tokenizer."
)
@click.option("--ids", metavar="IDS", help="The prompt as token ids: 1,2,3")
@click.option(
    "--ids-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A file of token ids; any separators.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=0), default=32, show_default=True, metavar="N"
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="X",
    default=0.0,
    show_default=True,
    help="0 takes the most likely token.",
)
@click.option(
    "--top-k", type=click.IntRange(min=1), metavar="K", help="Choose among the k most likely."
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="P",
    default=1.0,
    help="Choose among the most likely that make up probability p.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Same seed, same tokens.",
)
@click.option(
    "--prefill-chunk",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens of the prompt in one call.  [default: the artifact's]",
)
@threads_option
@click.option(
    "--weights-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the referenced checkpoint is now, if it has moved.",
)
@click.option(
    "--logits",
    "logits_file",
    type=click.Path(path_type=Path),
    metavar="FILE.safetensors",
    help="Also write `logits` [T, vocab] fp32 of every position and `token_ids` [T]: the prompt's "
    "and the new tokens. The new ones are decoded one by one, as in generation.",
)
@quiet_option
@json_option
@debug_option
def run(
    artifact: Path,
    prompt: str | None,
    ids: str | None,
    ids_file: Path | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    prefill_chunk: int | None,
    threads: int | None,
    weights_dir: Path | None,
    logits_file: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run a prompt through an artifact. Needs neither torch nor the compiler."""
    from hybridge.artifacts.manifest import read_manifest
    from hybridge.commands.generation import Generation, check_writable, open_text, write_logits
    from hybridge.commands.prompt import read_prompt
    from hybridge.runner import SamplingOptions, load

    if logits_file is not None:
        check_writable(logits_file)
    has_tokenizer = read_manifest(artifact)[0].tokenizer is not None
    given = read_prompt(prompt, ids, ids_file, has_tokenizer=has_tokenizer)
    text = None
    if isinstance(given, str):
        text = open_text(artifact, weights_dir)
        given = text.encode(given)
    sampling = SamplingOptions(temperature, top_k or 0, top_p, seed)

    start = time.monotonic()
    room = max(1, len(given) + max_new_tokens)
    with load(
        artifact, threads=threads, weights_dir=weights_dir, slots=1, max_context=room
    ) as engine:
        engine.prefill_chunk = prefill_chunk or engine.prefill_chunk
        generation = Generation(given, load_seconds=time.monotonic() - start)
        if max_new_tokens > 0:
            tokens = generation.watch(engine.generate(given, max_new_tokens, sampling))
            consume(tokens) if as_json else show(tokens, text)
        if logits_file is not None:
            write_logits(engine, generation, logits_file)

    if as_json:
        print_json(generation.document(text, logits_file))
    elif not quiet:
        print(generation.describe(logits_file), file=sys.stderr)


def show(tokens: Iterator[int], text: Text | None) -> None:
    """Print tokens as they come: as text, or as ids with blanks between."""
    pieces = map(str, tokens) if text is None else text.stream(tokens)
    separator = " " if text is None else ""
    for place, piece in enumerate(pieces):
        print(separator if place else "", piece, sep="", end="", flush=True)
    print(flush=True)  # before the report on stderr, where both go into one file


def consume(tokens: Iterator[int]) -> None:
    """Let the tokens come, showing nothing."""
    for _ in tokens:
        pass
