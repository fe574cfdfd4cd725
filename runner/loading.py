"""From a folder to an engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from hybridge.artifacts.artifact import Artifact, Verify, open_artifact
from hybridge.artifacts.errors import ArtifactError, UsageError
from hybridge.runner.engine import Engine
from hybridge.runner.model import Capacity, Model
from hybridge.runner.sessions import SessionSettings


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    weights_dir: str | Path | None = None,
    verify: Verify = "fast",
    blocks: int | None = None,
    slots: int | None = None,
    max_context: int | None = None,
    prepack: bool = False,
    use_native: bool = True,
    expected_digest: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Engine:
    """Open a CPU artifact, check it, map its weights and allocate its caches.

    Args:
        path: the artifact's folder.
        threads: threads for one operator, at most one a processor; None lets onnxruntime choose.
        weights_dir: the checkpoint's folder, for weights compiled with ``reference``, when it is no
            longer where it was.
        verify: "fast" hashes all but large weights, "full" everything.
        blocks: cache blocks for all sequences together; default: every slot in full.
        slots: sequences held at a time; default from the artifact.
        max_context: tokens of the longest sequence; default from the artifact.
        prepack: let onnxruntime keep packed copies of the weights of standard matrix products: more
            memory for more speed at small batches.
        use_native: use the kernel library; without it, or where it is not installed, the graphs run
            on the standard operators that they carry.
        expected_digest: sha256 that manifest.json must have.
        progress: called with the number of bytes hashed since the last call.

    Raises:
        ArtifactError: damaged, of another version or target, without weights, or not loadable.
        RunError: not enough memory for the caches.
        UsageError: an argument out of range.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"threads {threads}", "give 1 or more")
    artifact = open_artifact(
        path,
        verify=verify,
        weights_dir=weights_dir,
        expected_digest=expected_digest,
        progress=progress,
    )
    _check_runnable(artifact)
    capacity = Capacity.from_defaults(artifact.manifest.defaults, blocks, slots, max_context)
    settings = SessionSettings(threads, prepack, use_native and _native_available())
    return Engine(Model(artifact, capacity, settings))


def _check_runnable(artifact: Artifact) -> None:
    manifest = artifact.manifest
    if manifest.target != "cpu":
        raise ArtifactError(
            f"{artifact.root} is compiled for {manifest.target}; this runner runs cpu artifacts",
            "compile with --target cpu, or run it with the target's own loader",
        )
    if manifest.weights_policy == "none":
        raise ArtifactError(
            f"{artifact.root} was compiled with --weights none: it can be inspected, not run",
            "compile again with --weights copy or --weights reference",
        )


def _native_available() -> bool:
    from hybridge import kernels

    try:
        kernels.library_path()
    except ArtifactError as error:
        warnings.warn(f"{error.message}: graphs run on standard operators, slowly", stacklevel=3)
        return False
    return True
