"""Opening an artifact: what may be believed about a folder, and how that is checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy.typing as npt

from hybridge.artifacts.canonical import digest, digest_file
from hybridge.artifacts.errors import ArtifactError, UsageError
from hybridge.artifacts.manifest import (
    Manifest,
    Report,
    read_manifest,
    read_report,
)
from hybridge.artifacts.paths import resolve_inside
from hybridge.artifacts.weights import (
    WEIGHTS,
    WeightEntry,
    WeightFiles,
    parse_weights,
    read_reference,
)

Verify = Literal["fast", "full"]
SMALL_WEIGHTS_BYTES = 64 << 20
_DAMAGED = "restore the file, or compile the artifact again"


@dataclass(frozen=True, eq=False)
class Artifact:
    """A checked artifact.

    Attributes:
        root: its folder.
        digest: sha256 of manifest.json, which names the sha256 of every other file.
        manifest: what manifest.json says.
        report: times of the compilation.
        weights: by name.
        files: finds and maps the weights' files.
    """

    root: Path
    digest: str
    manifest: Manifest
    report: Report
    weights: dict[str, WeightEntry]
    files: WeightFiles

    def read(self, name: str) -> bytes:
        """A listed file's bytes, whose hash is checked on just these bytes.

        Raises:
            ArtifactError: not listed, missing, or changed.
        """
        entry = self.manifest.files.get(name)
        if entry is None:
            raise ArtifactError(f"{self.root}: the manifest lists no file {name!r}", _DAMAGED)
        path = resolve_inside(self.root, name, "artifact")
        _check_size(path, name, entry.size)
        data = path.read_bytes()
        _check_digest(name, digest(data), entry.sha256)
        return data

    def path(self, name: str) -> Path:
        """Where a listed file lies (links refused)."""
        return resolve_inside(self.root, name, "artifact")

    def weight(self, name: str) -> npt.NDArray[Any]:
        """A weight as a read-only view of its mapped file.

        Raises:
            ArtifactError: no such weight, or its file is missing or too short.
        """
        entry = self.weights.get(name)
        if entry is None:
            raise ArtifactError(f"{self.root}: {WEIGHTS} lists no weight {name!r}", _DAMAGED)
        return self.files.array(entry)


def open_artifact(
    path: str | Path,
    *,
    verify: Verify = "fast",
    weights_dir: str | Path | None = None,
    expected_digest: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Artifact:
    """Open an artifact and check it.

    ``fast`` checks that every listed file is there with its size, and the sha256 of every file but
    large weights: weights (inside, or referenced) are hashed too when they come to no more than
    64 MiB in all, otherwise only their sizes are checked. ``full`` hashes everything. Files that
    the manifest does not list are never read.

    Hashes find damage. They do not prove who made an artifact: for that compare ``digest`` with one
    that reached you another way (``expected_digest``).

    Args:
        path: the artifact's folder.
        verify: "fast" or "full".
        weights_dir: the checkpoint's folder, when it is not where it was at compile time.
        expected_digest: sha256 that manifest.json must have.
        progress: called with the number of bytes hashed since the last call.

    Raises:
        ArtifactError: anything missing, damaged, or of another version.
        UsageError: `verify` is neither.
    """
    if verify not in get_args(Verify):
        raise UsageError(f"verify {verify!r} is not known", "use 'fast' or 'full'")
    root = Path(os.path.abspath(path))
    manifest, data = read_manifest(root)
    found = digest(data)
    if expected_digest is not None and found != expected_digest.lower():
        raise ArtifactError(
            f"{root}: manifest.json has sha256 {found}, expected {expected_digest}",
            "this is another artifact than the one you were given the digest of",
        )
    checkpoint = Path(weights_dir) if weights_dir is not None else read_reference(root)
    if WEIGHTS not in manifest.files:
        raise ArtifactError(f"{root}: the manifest lists no {WEIGHTS}", _DAMAGED)
    _check_sizes(root, manifest)
    _check_hashes(root, manifest, verify, progress)
    weights = parse_weights(resolve_inside(root, WEIGHTS, "artifact").read_bytes())
    artifact = Artifact(
        root, found, manifest, read_report(root), weights, WeightFiles(root, checkpoint)
    )
    _check_weights(artifact)
    _check_referenced(artifact, verify)
    return artifact


def _check_sizes(root: Path, manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        _check_size(resolve_inside(root, name, "artifact"), name, entry.size)


def _check_size(path: Path, name: str, size: int) -> None:
    found = path.stat().st_size
    if found != size:
        raise ArtifactError(f"{name}: {found} bytes, the manifest says {size}", _DAMAGED)


def _check_digest(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ArtifactError(
            f"{name}: sha256 {found[:16]}..., the manifest says {expected[:16]}...", _DAMAGED
        )


def _is_weights(name: str) -> bool:
    return name.startswith("weights/")


def _check_hashes(
    root: Path, manifest: Manifest, verify: Verify, progress: Callable[[int], None] | None
) -> None:
    total = sum(entry.size for name, entry in manifest.files.items() if _is_weights(name))
    everything = verify == "full" or total <= SMALL_WEIGHTS_BYTES
    for name, entry in manifest.files.items():
        if everything or not _is_weights(name):
            path = resolve_inside(root, name, "artifact")
            _check_digest(name, digest_file(path, progress=progress), entry.sha256)


def _check_weights(artifact: Artifact) -> None:
    """A weight inside must lie in a file whose hash the manifest names."""
    for entry in artifact.weights.values():
        if entry.place == "artifact" and entry.file not in artifact.manifest.files:
            raise ArtifactError(
                f"weight {entry.name!r}: the manifest lists no file {entry.file!r}", _DAMAGED
            )
        if entry.place == "artifact":
            artifact.files.path(entry)


def _check_referenced(artifact: Artifact, verify: Verify) -> None:
    referenced = [entry for entry in artifact.weights.values() if entry.place == "checkpoint"]
    total = sum(entry.length for entry in referenced)
    if verify != "full" and total > SMALL_WEIGHTS_BYTES:
        return
    for entry in referenced:
        artifact.files.check_hash(entry)
