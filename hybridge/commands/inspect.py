"""`hybridge inspect`: what is in an artifact, what each pass did, and what it refused to do."""

from __future__ import annotations

from pathlib import Path

import click

from hybridge.commands.console import debug_option, json_option, print_json

EXAMPLES = """
\b
Examples:
  hybridge inspect art
  hybridge inspect art --pass fuse_lightning_indexer     its refusals: rule, reason, remedy
  hybridge inspect art --json

\b
JSON: `passes` holds for each phase a list, in pipeline order, of
  {name, matches, expected, refusals: [{node, rule, reason, remedy}],
   nodes_before, nodes_after, seconds,
   extra: {bytes_removed, bytes_moved_before, bytes_moved_after}}
  bytes are of intermediates, at the sizes of the traced example
"""


@click.command("inspect", epilog=EXAMPLES, short_help="What is in an artifact; what each pass did.")
@click.argument("artifact", metavar="ARTIFACT", type=click.Path(path_type=Path))
@click.option("--pass", "pass_name", metavar="NAME", help="Only this pass, in full.")
@json_option
@debug_option
def inspect_command(artifact: Path, pass_name: str | None, as_json: bool) -> None:
    """Show what an artifact holds and what each pass did to its graphs."""
    from hybridge.commands import report

    manifest, passes = report.read_passes(artifact)
    if pass_name is not None:
        passes = report.select_pass(passes, pass_name)
    if as_json:
        print_json(report.artifact_document(artifact, manifest, passes))
    elif pass_name is not None:
        print(report.describe_pass(passes))
    else:
        print(
            report.describe_artifact(artifact, manifest), report.describe_passes(passes), sep="\n\n"
        )
