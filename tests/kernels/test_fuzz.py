"""What fuzz.py makes of the replay program's reports; the program itself runs in `make fuzz`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .fuzz import Entry, Fuzzer, entries_of, entry_of
from .fuzz_calls import call

LEVELS = ("plain", "avx2")


@dataclass
class FakeReplay:
    """Fails at the calls of these numbers, as replay.cpp does; alone too if `alone`."""

    bad: set[int]
    report: str
    alone: bool = True
    file: Path = Path("calls")
    program: Path = Path("replay")
    library: Path = Path("library.so")
    started: list[list[Entry]] = field(default_factory=list)

    def start(self, entries: Iterable[Entry]) -> None:
        self.started.append(list(entries))

    def wait(self) -> str:
        for at, entry in enumerate(self.started[-1]):
            if entry.number in self.bad:
                return f"replay: in call {at}: {entry.drawn.case.op} at level plain\n{self.report}"
        return ""

    def run(self, entries: list[Entry]) -> str:
        return self.report if self.alone else ""


def fuzzed(replay: FakeReplay) -> Fuzzer:
    fuzzer = Fuzzer(replay, seed=9)
    entries = entries_of(9, range(6), LEVELS)
    replay.start(entries)
    fuzzer.settle(entries)
    return fuzzer


def test_all_calls_are_counted_where_nothing_is_found():
    fuzzer = fuzzed(FakeReplay(set(), ""))
    assert fuzzer.calls.total() == 12
    assert "12  calls, 0 findings" in fuzzer.table()


def test_a_finding_is_reported_once_with_its_command_and_the_rest_goes_on(capsys):
    replay = FakeReplay({1, 4}, "#0 somewhere kernels/math/situ.cpp:24")
    fuzzer = fuzzed(replay)
    printed = capsys.readouterr().out
    assert printed.count("FINDING") == 1
    assert "reproduce with: make fuzz CALL=9:1\n" in printed
    assert fuzzer.findings == {"kernels/math/situ.cpp:24": 4}  # two calls at two levels
    assert fuzzer.calls.total() == 12
    assert [len(entries) for entries in replay.started] == [12, 9, 8, 3, 2]


def test_one_failure_of_two_operators_is_two_findings():
    fuzzer = fuzzed(FakeReplay({1, 4}, "replay: it must be refused, but returned\n"))
    assert len(fuzzer.findings) == 2


def test_a_finding_that_needs_the_calls_before_it_keeps_them(tmp_path, capsys):
    replay = FakeReplay({2}, "replay: it wrote into an input", False, tmp_path / "calls")
    fuzzed(replay)
    kept = tmp_path / "finding-9-1"
    assert f"reproduce with: replay library.so {kept}" in capsys.readouterr().out
    assert kept.read_bytes() == b"".join(entry.data for entry in replay.started[0][:5])


@pytest.mark.parametrize("level", LEVELS)
def test_a_call_becomes_a_recording(level):
    """At the level that is asked for, and with what has to come of it."""
    one = call(2, 5)
    data = entry_of(5, one, level).data
    assert data.startswith(len(level).to_bytes(8, "little") + level.encode())
    assert data.endswith(int(one.outcome).to_bytes(8, "little"))
