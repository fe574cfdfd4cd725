"""What an artifact's manifest says, as text for people and as JSON: pass tables and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridge.artifacts.errors import UsageError
from hybridge.artifacts.manifest import Manifest, passes_with_seconds, read_manifest, read_report
from hybridge.commands.console import format_bytes, format_table

PassRecords = dict[str, list[dict[str, Any]]]

COLUMNS = (
    *("matches", "expected", "refusals"),
    *("nodes before", "after", "moved before", "after", "seconds"),
)


def read_passes(artifact: Path) -> tuple[Manifest, PassRecords]:
    """The manifest, and the pass records of each phase (prefill first) with their seconds.

    Raises:
        ArtifactError: the folder is no artifact, or its manifest is damaged.
    """
    manifest, _ = read_manifest(artifact)
    passes = passes_with_seconds(manifest, read_report(artifact))
    return manifest, {phase: passes[phase] for phase in sorted(passes, reverse=True)}


def artifact_document(artifact: Path, manifest: Manifest, passes: PassRecords) -> dict[str, Any]:
    """The JSON of `inspect` and `compile`; an Ascend artifact has its `ascend` section too."""
    ascend = manifest.target_data.get("ascend")
    return {
        "artifact": str(artifact),
        "hybridge_version": manifest.hybridge_version,
        "model": {
            "family": manifest.model.family,
            "vocab_size": manifest.model.vocab_size,
            "config_digest": manifest.model.config_digest,
        },
        "target": manifest.target,
        "phases": {name: phase.graph for name, phase in manifest.phases.items()},
        "weights": manifest.weights_policy,
        "block_size": manifest.defaults.block_size,
        "states": len(manifest.states),
        "golden": [case.name for case in manifest.golden],
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "passes": passes,
        **({} if ascend is None else {"ascend": ascend}),
    }


def describe_artifact(artifact: Path, manifest: Manifest) -> str:
    """A few lines that say what an artifact is."""
    size = format_bytes(sum(entry.size for entry in manifest.files.values()))
    kinds = [state.kind for state in manifest.states]
    states = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    golden = ", ".join(case.name for case in manifest.golden) or "none"
    facts = {
        "artifact": f"{artifact} ({len(manifest.files)} files, {size})",
        "model": f"{manifest.model.family}, vocabulary {manifest.model.vocab_size}",
        "target": f"{manifest.target}, compiled by hybridge {manifest.hybridge_version}",
        "weights": manifest.weights_policy,
        "states": f"{states}; blocks of {manifest.defaults.block_size} tokens",
        "golden": golden,
    }
    return "\n".join(f"{name:<10}{value}" for name, value in facts.items())


def describe_passes(passes: PassRecords) -> str:
    """The pass table of each phase, and how many sites were refused."""
    sections = [f"{phase}\n{_table(records)}" for phase, records in passes.items()]
    refused = sorted(
        {record["name"] for records in passes.values() for record in records if record["refusals"]}
    )
    if refused:
        names = ", ".join(refused)
        sections.append(f"Some sites were left alone; --pass NAME says why, for: {names}")
    return "\n\n".join(sections)


def _table(records: list[dict[str, Any]]) -> str:
    rows = [
        (
            record["name"],
            record["matches"],
            record["expected"],
            len(record["refusals"]),
            record["nodes_before"],
            record["nodes_after"],
            *(_moved(record, place) for place in ("before", "after")),
            f"{record['seconds']:.2f}",
        )
        for record in records
    ]
    return format_table(("pass", *COLUMNS), rows) if rows else "(no passes were run)"


def _moved(record: Mapping[str, Any], place: str) -> str:
    """Bytes of intermediates that the graph reads and writes; artifacts of older versions do not say."""
    count = record["extra"].get(f"bytes_moved_{place}")
    return "-" if count is None else format_bytes(int(count))


def select_pass(passes: PassRecords, name: str) -> PassRecords:
    """The records of one pass, by phase.

    Raises:
        UsageError: the artifact was compiled without such a pass.
    """
    selected = {
        phase: [record for record in records if record["name"] == name]
        for phase, records in passes.items()
    }
    if any(selected.values()):
        return selected
    known = dict.fromkeys(record["name"] for records in passes.values() for record in records)
    raise UsageError(
        f"this artifact was compiled without a pass named {name!r}",
        f"its passes are: {', '.join(known) or 'none'}",
    )


def describe_pass(passes: PassRecords) -> str:
    """All about one pass: counts, what it noted, every refusal with rule, reason and remedy."""
    return "\n\n".join(
        _describe_record(phase, record) for phase, records in passes.items() for record in records
    )


def _describe_record(phase: str, record: Mapping[str, Any]) -> str:
    facts = {
        "matches": f"{record['matches']} (expected at least {record['expected']})",
        "nodes": f"{record['nodes_before']} -> {record['nodes_after']}",
        "moved": f"{_moved(record, 'before')} -> {_moved(record, 'after')}",
        "seconds": f"{record['seconds']:.2f}",
        **{
            name.replace("_", " "): value
            for name, value in record["extra"].items()
            if not name.startswith("bytes_moved_")
        },
        "refusals": len(record["refusals"]),
    }
    width = max(map(len, facts))
    lines = [f"{record['name']}, {phase}"]
    lines += [f"  {name:<{width}}  {value}" for name, value in facts.items()]
    for refusal in record["refusals"]:
        lines.append(f"    {refusal['node']}")
        lines += [f"      {key:<8}{refusal[key]}" for key in ("rule", "reason", "remedy")]
    return "\n".join(lines)
