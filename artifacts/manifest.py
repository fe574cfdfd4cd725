"""manifest.json: what an artifact is, what it holds, and how it was made.

Reproducible: the same inputs and tools give the same bytes, so nothing here depends on the time,
the machine or a path. What does (seconds, the folder of a referenced checkpoint) is in
``report.json`` and ``weights/reference.json``, which the manifest does not list (`LOCAL_FILES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybridge.artifacts.canonical import readable_json
from hybridge.artifacts.dtypes import element_type
from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.paths import check_relative
from hybridge.artifacts.record import Record, parse_json, read_limited

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
REPORT = "report.json"
REFERENCE = "weights/reference.json"
LOCAL_FILES = (MANIFEST, REPORT, REFERENCE)
MAX_MANIFEST_BYTES = 64 << 20

WeightsPolicy = Literal["reference", "copy", "packed", "none"]
WEIGHTS_POLICIES: tuple[WeightsPolicy, ...] = ("reference", "copy", "packed", "none")
STATE_KINDS = ("latent", "indexer", "kda_state", "conv_state")
STATE_SYMBOLS = ("blocks", "block_size", "slots")


@dataclass(frozen=True)
class TensorSpec:
    """A graph input or output; a size is a number or the name of a symbolic one."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class PhaseSpec:
    """One executable graph.

    Attributes:
        graph: path of the graph file inside the artifact.
        inputs: in graph order, caches last.
        outputs: in graph order; ``<cache>_out`` is aliased to the input ``<cache>``.
        buckets: static sizes that were compiled, such as ``{"T": 128}``; empty for dynamic sizes.
    """

    graph: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    buckets: tuple[Mapping[str, int], ...] = ()


@dataclass(frozen=True)
class StateSpec:
    """One cache or recurrent state that the runner allocates.

    Attributes:
        name: the graph input's name; the output is ``<name>_out``.
        layer: 0-indexed layer that owns it.
        kind: one of `STATE_KINDS`.
        dtype: element type.
        shape: sizes; the strings ``blocks``, ``block_size`` and ``slots`` are filled in on loading.
    """

    name: str
    layer: int
    kind: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Refusal:
    """A site that a pass looked at and left alone."""

    node: str
    rule: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class PassRecord:
    """What one pass did to one phase; how long it took is in the report."""

    name: str
    matches: int
    expected: int
    refusals: tuple[Refusal, ...] = ()
    nodes_before: int = 0
    nodes_after: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Defaults:
    """What the runner uses when the caller says nothing.

    Attributes:
        block_size: tokens in a cache block (fixed by the artifact).
        max_context: longest sequence, in tokens.
        slots: sequences held at a time.
        prefill_chunk: tokens prefilled in one call.
    """

    block_size: int = 64
    max_context: int = 4096
    slots: int = 8
    prefill_chunk: int = 512


@dataclass(frozen=True)
class ModelInfo:
    """Which model: its family, the sha256 of its config's canonical JSON, its vocabulary size."""

    family: str
    config_digest: str
    vocab_size: int


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids with a meaning; generation stops at those in ``eos``."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


@dataclass(frozen=True)
class GoldenSpec:
    """One golden case and its tolerance (|got - want| <= atol + rtol * |want|)."""

    name: str
    file: str
    atol: float
    rtol: float = 0.0


@dataclass(frozen=True)
class FileEntry:
    """Size and hash of one file of the artifact."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The whole manifest. ``files`` is filled in by `ArtifactWriter.finish`.

    Attributes:
        hybridge_version: version that compiled it.
        model: family, config digest, vocabulary size.
        model_config: the checkpoint's config.json as published.
        target: "cpu" or an Ascend target.
        phases: by name, "prefill" and "decode".
        states: caches and states, in graph order.
        passes: by phase, in pipeline order.
        tools: versions of what took part in compiling.
        provenance: free, reproducible facts about the build (options, checkpoint's digest).
        target_data: whatever the target's own loader needs.
        tokenizer: path of tokenizer.json inside the artifact, or None.
    """

    hybridge_version: str
    model: ModelInfo
    model_config: Mapping[str, Any]
    target: str
    phases: Mapping[str, PhaseSpec]
    states: tuple[StateSpec, ...]
    defaults: Defaults
    weights_policy: WeightsPolicy
    passes: Mapping[str, tuple[PassRecord, ...]] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)
    special_tokens: SpecialTokens = SpecialTokens()
    golden: tuple[GoldenSpec, ...] = ()
    tokenizer: str | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    target_data: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)

    def to_bytes(self) -> bytes:
        """The bytes of manifest.json."""
        return readable_json(self.to_json())


@dataclass(frozen=True)
class Report:
    """report.json: facts that differ from run to run, so no part of the artifact's identity.

    Attributes:
        pass_seconds: phase -> pass -> seconds.
        seconds: other steps -> seconds.
    """

    pass_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The bytes of report.json."""
        return readable_json(asdict(self))


def passes_with_seconds(manifest: Manifest, report: Report) -> dict[str, list[dict[str, Any]]]:
    """Per phase, the pass records as JSON with their ``seconds`` (0.0 where not reported)."""
    result: dict[str, list[dict[str, Any]]] = {}
    for phase, records in manifest.passes.items():
        times = report.pass_seconds.get(phase, {})
        result[phase] = [
            {**asdict(record), "seconds": float(times.get(record.name, 0.0))} for record in records
        ]
    return result


def read_manifest(root: Path) -> tuple[Manifest, bytes]:
    """Read ``root/manifest.json``; also returns its bytes, whose sha256 identifies the artifact.

    Raises:
        ArtifactError: missing, damaged, or of another schema version.
    """
    path = root / MANIFEST
    if not root.is_dir() or path.is_symlink() or not path.is_file():
        raise ArtifactError(
            f"{root} is no hybridge artifact: it has no {MANIFEST}",
            "give the folder that `hybridge compile ... -o FOLDER` made",
        )
    data = read_limited(path, MAX_MANIFEST_BYTES, MANIFEST)
    return parse_manifest(data), data


def read_report(root: Path) -> Report:
    """Read report.json; an absent or unreadable one gives an empty report."""
    path = root / REPORT
    if not path.is_file():
        return Report()
    try:
        record = Record(parse_json(read_limited(path, MAX_MANIFEST_BYTES, REPORT), REPORT), REPORT)
        return Report(record.mapping("pass_seconds"), record.mapping("seconds"))
    except ArtifactError:
        return Report()


def parse_manifest(data: bytes) -> Manifest:
    """Parse and check the bytes of a manifest.

    Raises:
        ArtifactError: not a manifest, unknown schema version, unknown or ill-typed fields, or a
            path that leaves the artifact.
    """
    record = Record(parse_json(data, MANIFEST), MANIFEST)
    version = record.integer("schema_version")
    if version != SCHEMA_VERSION:
        raise ArtifactError(
            f"{MANIFEST}: schema version {version}; this hybridge reads version {SCHEMA_VERSION}",
            "install the hybridge that compiled it, or compile the checkpoint again with this one",
        )
    manifest = Manifest(
        schema_version=version,
        hybridge_version=record.text("hybridge_version"),
        model=_parse_model(record.record("model")),
        model_config=record.mapping("model_config"),
        target=record.text("target"),
        phases={name: _parse_phase(r) for name, r in record.named_records("phases").items()},
        states=tuple(_parse_state(r) for r in record.records("states")),
        defaults=_parse_defaults(record.record("defaults")),
        weights_policy=_parse_policy(record),
        passes=_parse_passes(record),
        tools={name: str(value) for name, value in record.mapping("tools").items()},
        special_tokens=_parse_special(record.record("special_tokens")),
        golden=tuple(_parse_golden(r) for r in record.records("golden")),
        tokenizer=record.optional_text("tokenizer"),
        provenance=record.mapping("provenance"),
        target_data=record.mapping("target_data"),
        files={name: _parse_file(r) for name, r in record.named_records("files").items()},
    )
    record.finish()
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Check what ties the fields together: every named file is listed, every path stays inside.

    Raises:
        ArtifactError: naming the field.
    """
    for name in manifest.files:
        check_relative(name, f"{MANIFEST}: files")
    named = {f"phases.{name}.graph": phase.graph for name, phase in manifest.phases.items()}
    named |= {f"golden.{case.name}": case.file for case in manifest.golden}
    if manifest.tokenizer is not None:
        named["tokenizer"] = manifest.tokenizer
    for where, path in named.items():
        if path not in manifest.files:
            raise ArtifactError(
                f"{MANIFEST}: {where} names {path!r}, which is not in its list of files",
                "compile the artifact again",
            )
    _check_unique_states(manifest)


def _check_unique_states(manifest: Manifest) -> None:
    names = [state.name for state in manifest.states]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ArtifactError(f"{MANIFEST}: states named twice: {doubled}", "compile it again")


def _parse_model(record: Record) -> ModelInfo:
    model = ModelInfo(
        record.text("family"), record.sha256("config_digest"), record.integer("vocab_size", 1)
    )
    record.finish()
    return model


def _parse_tensor(record: Record) -> TensorSpec:
    spec = TensorSpec(record.text("name"), record.text("dtype"), record.shape("shape"))
    record.finish()
    element_type(spec.dtype)
    return spec


def _parse_phase(record: Record) -> PhaseSpec:
    buckets = tuple(
        {name: bucket.integer(name, 1) for name in bucket.names()}
        for bucket in record.records("buckets")
    )
    phase = PhaseSpec(
        record.text("graph"),
        tuple(_parse_tensor(r) for r in record.records("inputs")),
        tuple(_parse_tensor(r) for r in record.records("outputs")),
        buckets,
    )
    record.finish()
    return phase


def _parse_state(record: Record) -> StateSpec:
    state = StateSpec(
        record.text("name"),
        record.integer("layer"),
        record.text("kind"),
        record.text("dtype"),
        record.shape("shape"),
    )
    if state.kind not in STATE_KINDS:
        raise record.fail(f"kind {state.kind!r} is none of {', '.join(STATE_KINDS)}")
    unknown = [dim for dim in state.shape if isinstance(dim, str) and dim not in STATE_SYMBOLS]
    if unknown:
        raise record.fail(f"shape has sizes {unknown}; known are {', '.join(STATE_SYMBOLS)}")
    element_type(state.dtype)
    record.finish()
    return state


def _parse_defaults(record: Record) -> Defaults:
    names = ("block_size", "max_context", "slots", "prefill_chunk")
    defaults = Defaults(*(record.integer(name, 1) for name in names))
    record.finish()
    return defaults


def _parse_policy(record: Record) -> WeightsPolicy:
    policy = record.text("weights_policy")
    if policy not in WEIGHTS_POLICIES:
        raise record.fail(f"weights_policy {policy!r} is none of {', '.join(WEIGHTS_POLICIES)}")
    return policy


def _parse_passes(record: Record) -> dict[str, tuple[PassRecord, ...]]:
    phases = record.record("passes")
    return {
        name: tuple(_parse_pass(item) for item in phases.records(name)) for name in phases.names()
    }


def _parse_pass(record: Record) -> PassRecord:
    result = PassRecord(
        name=record.text("name"),
        matches=record.integer("matches"),
        expected=record.integer("expected"),
        refusals=tuple(_parse_refusal(r) for r in record.records("refusals")),
        nodes_before=record.integer("nodes_before"),
        nodes_after=record.integer("nodes_after"),
        extra=record.mapping("extra"),
    )
    record.finish()
    return result


def _parse_refusal(record: Record) -> Refusal:
    refusal = Refusal(*(record.text(name) for name in ("node", "rule", "reason", "remedy")))
    record.finish()
    return refusal


def _parse_special(record: Record) -> SpecialTokens:
    special = SpecialTokens(
        record.optional_integer("bos"), record.integers("eos"), record.optional_integer("pad")
    )
    record.finish()
    return special


def _parse_golden(record: Record) -> GoldenSpec:
    golden = GoldenSpec(
        record.text("name"), record.text("file"), record.number("atol"), record.number("rtol")
    )
    record.finish()
    return golden


def _parse_file(record: Record) -> FileEntry:
    entry = FileEntry(record.integer("size"), record.sha256("sha256"))
    record.finish()
    return entry
