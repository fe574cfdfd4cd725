"""Writing an artifact: built beside its place, then put there in one step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy.typing as npt

from hybridge.artifacts.canonical import digest_file
from hybridge.artifacts.dtypes import byte_length, element_type
from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.folders import StagingFolder, already_exists, write_failure
from hybridge.artifacts.golden import GoldenCase
from hybridge.artifacts.manifest import (
    LOCAL_FILES,
    MANIFEST,
    REFERENCE,
    REPORT,
    FileEntry,
    GoldenSpec,
    Manifest,
    Report,
    check_manifest,
    parse_manifest,
)
from hybridge.artifacts.onnx_initializers import GRAPH_WEIGHTS
from hybridge.artifacts.paths import check_relative
from hybridge.artifacts.weight_shards import WeightShards, WeightStream
from hybridge.artifacts.weights import (
    WEIGHTS,
    Origin,
    WeightEntry,
    reference_to_bytes,
    weights_to_bytes,
)


class ArtifactWriter:
    """Builds one artifact; a context manager. Nothing is visible before `finish` returns.

    Leaving the block without `finish`, or by an error, removes everything.

    Args:
        path: the artifact's folder.
        overwrite: replace an artifact that is there; another kind of folder is never replaced.

    Raises:
        ArtifactError: the folder exists, cannot be made, or (on leaving the block) takes no more.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self._overwrite = overwrite
        _check_target(self.path, overwrite)
        self._staging = StagingFolder(self.path)
        self._weights: dict[str, WeightEntry] = {}
        self._shards = WeightShards(self._staging.path, "weights", self._keep)
        self._checkpoint: Path | None = None
        self._finished = False

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        if failure := write_failure(self.path, error):
            raise failure from error

    def close(self) -> None:
        """Give up, unless `finish` has succeeded."""
        if not self._finished:
            with suppress(OSError):  # what a full disk does not take is removed anyway
                self._shards.abandon()
            self._staging.discard()

    def add_bytes(self, name: str, data: bytes) -> None:
        """Add a file with this content.

        Raises:
            ArtifactError: the name leaves the artifact, is reserved, or is there already.
        """
        self._new_file(name).write_bytes(data)

    def add_file(self, name: str, source: str | Path) -> None:
        """Add a copy of a file; links are followed.

        Raises:
            ArtifactError: as `add_bytes`, or the source cannot be read.
        """
        target = self._new_file(name)
        try:
            shutil.copyfile(source, target)
        except OSError as error:
            raise ArtifactError(f"{source}: cannot be copied: {error.strerror}") from None

    def add_golden(
        self, name: str, case: GoldenCase, *, atol: float, rtol: float = 0.0
    ) -> GoldenSpec:
        """Add a golden case; put the returned value into ``Manifest.golden``."""
        file = f"golden/{name}.safetensors"
        self.add_bytes(file, case.to_bytes())
        return GoldenSpec(name, file, atol, rtol)

    def open_weight(
        self, name: str, dtype: str, shape: tuple[int, ...], origin: Origin
    ) -> WeightStream:
        """Start writing a weight in chunks: ``with writer.open_weight(...) as w: w.write(chunk)``.

        One at a time, in an order that is the same in every build.

        Raises:
            ArtifactError: the name is taken, or another weight is unfinished.
        """
        self._check_new_weight(name)
        return self._shards.open(name, dtype, tuple(shape), origin)

    def add_weight(self, name: str, dtype: str, array: npt.NDArray[Any], origin: Origin) -> None:
        """Write a weight that is in memory (bf16 as uint16, float8 as uint8)."""
        with self.open_weight(name, dtype, array.shape, origin) as stream:
            stream.write(array)

    def add_reference(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        *,
        checkpoint: str | Path,
        file: str,
        offset: int,
        origin: Origin,
        sha256: str | None = None,
    ) -> None:
        """Refer to a region of a checkpoint's file, hashing it unless its hash is given.

        Args:
            name: the graphs' initializer name.
            dtype: element type.
            shape: sizes; the weight is dense and row-major in the file.
            checkpoint: the checkpoint's folder; one for all references.
            file: path relative to it.
            offset: first byte of the region in the file.
            origin: the checkpoint tensors it is.
            sha256: of the region, when already known.

        Raises:
            ArtifactError: the name is taken, the region does not fit the file, or another folder.
        """
        self._check_new_weight(name)
        folder = Path(os.path.abspath(checkpoint))
        if self._checkpoint not in (None, folder):
            raise ArtifactError(f"weights refer to {self._checkpoint} and to {folder}")
        self._checkpoint = folder
        length = byte_length(dtype, tuple(shape))
        path = folder / check_relative(file, f"weight {name!r}")
        if not path.is_file() or offset + length > path.stat().st_size:
            raise ArtifactError(
                f"weight {name!r}: {path} has no bytes {offset} to {offset + length}",
                "the checkpoint is incomplete: fetch it again",
            )
        self._keep(
            WeightEntry(
                name,
                element_type(dtype).name,
                tuple(shape),
                "checkpoint",
                file,
                offset,
                length,
                sha256 or digest_file(path, offset, length),
                origin,
            )
        )

    def add_absent(self, name: str, dtype: str, shape: tuple[int, ...], origin: Origin) -> None:
        """Record a weight that is not kept (``--weights none``)."""
        self._check_new_weight(name)
        length = byte_length(dtype, tuple(shape))
        known = element_type(dtype).name
        self._keep(WeightEntry(name, known, tuple(shape), "absent", "", 0, length, "", origin))

    def finish(
        self,
        manifest: Manifest,
        report: Report | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Manifest:
        """Write weights.json, report.json and manifest.json, and put the artifact in its place.

        Args:
            manifest: without ``files``, which is filled in here.
            report: what differs from run to run.
            progress: called with the number of bytes hashed since the last call.

        Returns:
            The manifest as written.

        Raises:
            ArtifactError: the manifest contradicts the files, or the folder has appeared meanwhile.
        """
        self._shards.close()
        self.add_bytes(WEIGHTS, weights_to_bytes(self._weights.values()))
        self.add_bytes(GRAPH_WEIGHTS, b"")
        complete = replace(manifest, files=self._list_files(progress))
        check_manifest(complete)
        data = complete.to_bytes()
        parse_manifest(data)  # what is written must be what a reader accepts
        self._write_local(REPORT, (report or Report()).to_bytes())
        if self._checkpoint is not None:
            self._write_local(REFERENCE, reference_to_bytes(self._checkpoint))
        self._write_local(MANIFEST, data)
        self._staging.publish(overwrite=self._overwrite)
        self._finished = True
        return complete

    def _write_local(self, name: str, data: bytes) -> None:
        path = self._staging.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def _new_file(self, name: str) -> Path:
        path = self._staging.path / check_relative(name, "artifact")
        if name in LOCAL_FILES or path.exists():
            raise ArtifactError(f"artifact file {name!r} is reserved or there already")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _check_new_weight(self, name: str) -> None:
        if name in self._weights:
            raise ArtifactError(f"weight {name!r} was added already", "give weights unique names")

    def _keep(self, entry: WeightEntry) -> None:
        self._weights[entry.name] = entry

    def _list_files(self, progress: Callable[[int], None] | None) -> dict[str, FileEntry]:
        root = self._staging.path
        names = sorted(
            path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()
        )
        return {
            name: FileEntry(
                (root / name).stat().st_size, digest_file(root / name, progress=progress)
            )
            for name in names
        }


def _check_target(path: Path, overwrite: bool) -> None:
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise already_exists(path)
    if path.is_symlink() or not (path / MANIFEST).is_file():
        raise ArtifactError(
            f"{path} is no hybridge artifact, so it is not overwritten",
            "choose another output folder, or remove it yourself",
        )
