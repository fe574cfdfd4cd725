"""Putting a finished folder in place: all of it appears at once, or nothing does."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import time
import uuid
from pathlib import Path

from hybridge.artifacts.errors import ArtifactError

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_STALE_SECONDS = 3600.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class StagingFolder:
    """A hidden sibling of ``target`` to build in; held by a lock, so that it is known to be alive.

    Args:
        target: the folder to appear in the end.

    Raises:
        ArtifactError: the parent cannot be written.
    """

    def __init__(self, target: Path) -> None:
        self.target = Path(os.path.abspath(target))
        parent = self.target.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(parent, self._prefix)
            self.path = parent / f"{self._prefix}{uuid.uuid4().hex}"
            self.path.mkdir()
        except OSError as error:
            raise ArtifactError(
                f"{parent}: cannot be written: {error.strerror}", "choose another output folder"
            ) from None
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    @property
    def _prefix(self) -> str:
        return f".{self.target.name}.partial-"

    def publish(self, *, overwrite: bool) -> None:
        """Flush to disk and rename to the target in one step.

        Args:
            overwrite: an existing target is swapped out (atomically if the system can), removed.

        Raises:
            ArtifactError: the target exists and ``overwrite`` is False.
        """
        _sync_tree(self.path)
        try:
            self._rename()
        except ArtifactError:
            if not overwrite or not self.target.is_dir():
                raise
            _exchange(self.path, self.target)
            shutil.rmtree(self.path, ignore_errors=True)
        _sync_folder(self.target.parent)
        self._release()

    def _rename(self) -> None:
        # rename() alone would replace an empty folder or follow nothing else: what exists, stays.
        try:
            if self.target.is_symlink() or self.target.exists():
                raise FileExistsError(errno.EEXIST, "it exists")
            self.path.rename(self.target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise ArtifactError(f"{self.target}: cannot be made: {error.strerror}") from None
            raise already_exists(self.target) from None

    def discard(self) -> None:
        """Remove what was built, if it was not published."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def already_exists(target: Path) -> ArtifactError:
    """The error for a target that is there already."""
    return ArtifactError(
        f"{target} exists already", "choose another output folder, or say --overwrite"
    )


def write_failure(target: Path, error: BaseException | None) -> ArtifactError | None:
    """The error for a place that took no more bytes; None where ``error`` is of another kind."""
    if isinstance(error, shutil.Error):
        # (source, target, reason) of every file; the reason names both once more.
        reason = str(error.args[0][0][2]).partition(": ")[0]
    elif isinstance(error, OSError) and error.errno in _NO_ROOM:
        reason = str(error.strerror)
    else:
        return None
    return ArtifactError(
        f"{target}: cannot be written: {reason}", "make room there, or choose another folder"
    )


def _remove_stale(parent: Path, prefix: str) -> None:
    """Remove what a crashed writer left: an old staging folder that nobody holds a lock on."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            if time.time() - folder.stat().st_mtime < _STALE_SECONDS:
                continue
            handle = os.open(folder, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(handle)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders; falls back to two renames where the system has no atomic swap."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        paths = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old))
        if renameat2(*paths, _RENAME_EXCHANGE) == 0:
            return
    aside = old.with_name(f"{new.name}-old")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            _sync_folder(Path(folder) / name)
        _sync_folder(Path(folder))


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
