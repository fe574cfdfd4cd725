"""The errors that every room raises: one base, one exit code a kind, always with a remedy."""

from __future__ import annotations

from typing import ClassVar


class HybridgeError(Exception):
    """Base of all errors meant for a person.

    Args:
        message: what was wrong, naming the file or pass and the node or field.
        remedy: what to do about it; shown on a line of its own.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message


class UsageError(HybridgeError):
    """The command or call was made with arguments that do not fit."""

    exit_code = 2


class CheckpointError(HybridgeError):
    """A config or checkpoint is missing something, contradicts itself or cannot be read."""

    exit_code = 3


class CompileError(HybridgeError):
    """Tracing, a pass or a lowering could not do what was asked."""

    exit_code = 4


class ArtifactError(HybridgeError):
    """An artifact is damaged, of another version, or not what its manifest says."""

    exit_code = 5


class RunError(HybridgeError):
    """The runner cannot serve a request: capacity, a bad id, a prompt too long."""

    exit_code = 6


class VerifyError(HybridgeError):
    """Computed values differ from the expected ones by more than the stated tolerance."""

    exit_code = 7


class DeviceError(HybridgeError):
    """This machine lacks the device, or the software for it, that was asked for."""

    exit_code = 8
