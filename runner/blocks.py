"""Who holds which cache blocks and state slots: a free list, and nothing shared."""

from __future__ import annotations

from hybridge.artifacts.errors import RunError


class FreeList:
    """Hands out the numbers 0 .. total-1; the lowest free ones first after a fresh start.

    Args:
        kind: what is handed out, for messages ("cache blocks").
        total: how many there are.
        remedy: what to do when there are none left.
    """

    def __init__(self, kind: str, total: int, remedy: str) -> None:
        self._kind = kind
        self._remedy = remedy
        self._free = list(range(total - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        """How many are left."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take ``count`` of them: all, or none.

        Raises:
            RunError: fewer are left.
        """
        if count > len(self._free):
            raise RunError(
                f"{count} {self._kind} needed, {len(self._free)} free of "
                f"{len(self._free) + len(self._held)}",
                self._remedy,
            )
        taken = [self._free.pop() for _ in range(count)]
        self._held.update(taken)
        return taken

    def give_back(self, numbers: list[int]) -> None:
        """Return numbers taken before.

        Raises:
            RunError: one of them is not held (it would then be handed out twice); nothing changes.
        """
        wrong = sorted(set(numbers) - self._held)
        if wrong or len(set(numbers)) != len(numbers):
            raise RunError(f"{self._kind} {wrong or numbers} returned, but not held")
        self._held.difference_update(numbers)
        self._free.extend(reversed(numbers))
