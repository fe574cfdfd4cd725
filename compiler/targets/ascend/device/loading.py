"""An Ascend artifact, checked and read: its graphs, its weights and caches. No code in it is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from hybridge.artifacts.artifact import Artifact, open_artifact
from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.golden import GoldenCase, read_golden
from hybridge.artifacts.record import Record, parse_json
from hybridge.compiler.targets.ascend.constraints import SOCS
from hybridge.compiler.targets.ascend.device.graph_reader import read_graph
from hybridge.compiler.targets.ascend.golden import DeviceTolerance
from hybridge.compiler.targets.ascend.lowerings.context import Bucket
from hybridge.compiler.targets.ascend.stored_weights import read_stored

_AGAIN = "compile the artifact again"
_BUCKET = ("tokens", "sequences", "blocks", "block_size", "columns", "slots", "logits")


@dataclass(frozen=True)
class DeviceGraph:
    """One graph.

    Attributes:
        name: "decode", or "decode_b8". phase: "prefill" or "decode". bucket: its static sizes.
        module: of npu operators. weights: its inputs that are weights -> the stored weight.
    """

    name: str
    phase: str
    bucket: Bucket
    module: fx.GraphModule
    weights: Mapping[str, str]

    @property
    def inputs(self) -> list[str]:
        """Names of all inputs, in order."""
        return [str(n.target) for n in self.module.graph.nodes if n.op == "placeholder"]


@dataclass(frozen=True)
class StoredForm:
    """How a stored weight lies: see `read_stored`."""

    shape: tuple[int, ...]
    layout: str
    dtype: str


@dataclass(frozen=True)
class DeviceArtifact:
    """Everything a device check needs.

    Attributes:
        artifact: checked. soc: the target. target_data: the manifest's `target_data.ascend`.
        graphs: by name. forms: of every stored weight.
        golden: the case. tolerance: what a device may differ from it by.
    """

    artifact: Artifact
    soc: str
    target_data: Mapping[str, Any]
    graphs: Mapping[str, DeviceGraph]
    forms: Mapping[str, StoredForm]
    golden: GoldenCase
    tolerance: DeviceTolerance

    def weight(self, name: str) -> tuple[Tensor, str]:
        """A stored weight in ND, and the layout that the device is to have it in."""
        form = self.forms[name]
        value = read_stored(self.artifact.weight(name), form.shape, form.layout, form.dtype)
        return value, form.layout

    def of_phase(self, phase: str) -> list[DeviceGraph]:
        """The graphs of a phase, smallest bucket first."""
        found = [graph for graph in self.graphs.values() if graph.phase == phase]
        return sorted(found, key=lambda graph: graph.bucket.tokens)


def open_for_device(path: str | Path, *, weights_dir: str | Path | None = None) -> Artifact:
    """Open and check an Ascend artifact.

    Args:
        path: its folder. weights_dir: the checkpoint's, where weights are referenced.

    Raises:
        ArtifactError: damaged, for another target, or without weights or golden values.
    """
    artifact = open_artifact(path, weights_dir=weights_dir)
    manifest = artifact.manifest
    if manifest.target not in SOCS or "ascend" not in manifest.target_data:
        raise ArtifactError(
            f"{artifact.root} is compiled for {manifest.target}; a device check takes one for "
            f"{' or '.join(SOCS)}",
            "verify this one with `hybridge verify`, or compile with --target",
        )
    devices = manifest.target_data["ascend"]["options"]["expert_parallel"]
    if devices > 1:
        raise ArtifactError(
            f"{artifact.root} is for one of {devices} devices that share the experts; a device check "
            "runs one device alone",
            "check an artifact compiled without --expert-parallel: its graphs differ in the experts only",
        )
    if manifest.weights_policy == "none":
        raise ArtifactError(
            f"{artifact.root} has no weights (--weights none), so it cannot be run",
            "compile it again from a checkpoint, without --weights none",
        )
    if not manifest.golden:
        raise ArtifactError(
            f"{artifact.root} has no golden values to compare with",
            "compile both phases, where the eager model fits in memory",
        )
    return artifact


def load(artifact: Artifact) -> DeviceArtifact:
    """Read the graphs and the golden case of an opened artifact.

    Raises:
        ArtifactError: a file is ill-formed, or contradicts another.
    """
    record = Record(dict(artifact.manifest.target_data["ascend"]), "manifest.json: ascend")
    graphs: dict[str, DeviceGraph] = {}
    forms: dict[str, StoredForm] = {}
    for name, each in record.named_records("graphs").items():
        weights = _read_plan(artifact, name, forms)
        where = f"graphs/{name}_npu.json"
        module = read_graph(artifact.read(where), where)
        graphs[name] = DeviceGraph(
            name, each.text("phase"), _bucket(each.record("bucket")), module, weights
        )
    tolerance = record.record("golden_tolerance")
    spec = artifact.manifest.golden[0]
    artifact.read(spec.file)  # its hash
    return DeviceArtifact(
        artifact,
        artifact.manifest.target,
        artifact.manifest.target_data["ascend"],
        graphs,
        forms,
        read_golden(artifact.path(spec.file)),
        DeviceTolerance(tolerance.number("largest"), tolerance.number("median")),
    )


def _bucket(record: Record) -> Bucket:
    sizes: dict[str, Any] = {name: record.integer(name, 1) for name in _BUCKET}
    return Bucket(**sizes)


def _read_plan(artifact: Artifact, graph: str, forms: dict[str, StoredForm]) -> dict[str, str]:
    """The plan's weights, each checked against weights.json; input -> stored weight."""
    where = f"graphs/{graph}_weights.json"
    plan = parse_json(artifact.read(where), where)
    found = {}
    for each in plan if isinstance(plan, list) else [plan]:
        record = Record(each, where)
        name = record.text("weight")
        entry = artifact.weights.get(name)
        if entry is None or entry.shape != record.integers("stored"):
            raise ArtifactError(f"{where}: weight {name!r} is not that of weights.json", _AGAIN)
        forms[name] = StoredForm(record.integers("shape"), record.text("layout"), entry.dtype)
        found[record.text("input")] = name
    return found
