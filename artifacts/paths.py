"""Paths that come from an artifact: believed only when they name a plain file inside a folder."""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath

from hybridge.artifacts.errors import ArtifactError

_REBUILD = "the artifact is damaged or was tampered with: compile it again from the checkpoint"


def check_relative(name: str, where: str) -> str:
    """Return ``name`` if it is a clean relative POSIX path that cannot leave its folder.

    Raises:
        ArtifactError: absolute, empty, with ``..``, ``.``, a backslash, a drive or a NUL.
    """
    path = PurePosixPath(name)
    bad = (
        not name
        or path.is_absolute()
        or str(path) != name
        or name == "."
        or ".." in path.parts
        or any(mark in name for mark in ("\\", "\0", ":"))
    )
    if bad:
        raise ArtifactError(f"{where}: path {name!r} does not stay inside its folder", _REBUILD)
    return name


def resolve_inside(root: Path, name: str, where: str) -> Path:
    """The regular file ``root/name``, with no symbolic link on the way below ``root``.

    Raises:
        ArtifactError: the path leaves ``root``, passes a link, or names no regular file.
    """
    current = root
    for part in PurePosixPath(check_relative(name, where)).parts:
        current = current / part
        try:
            mode = current.lstat().st_mode
        except OSError:
            raise ArtifactError(f"{where}: file {name!r} is missing in {root}", _REBUILD) from None
        if stat.S_ISLNK(mode):
            raise ArtifactError(
                f"{where}: {name!r} passes the symbolic link {current}",
                "copy the file itself into the artifact; links are never followed",
            )
    if not stat.S_ISREG(mode):
        raise ArtifactError(f"{where}: {name!r} is not a regular file", _REBUILD)
    return current
