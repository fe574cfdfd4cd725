"""Which branches move to a side stream, what orders them, and that the result is proved."""

from dataclasses import replace

import pytest
import torch

from hybridge.ir.schedule import HappensBefore
from hybridge.ir.schedule_ops import RECORD, WAIT, schedule_of, stream_of
from hybridge.passes.assign_streams import AssignStreams, explain, kinds
from hybridge.passes.check_schedule import prove

from .lowered_graphs import MACHINE, experts, indexer_prolog, trace


def assigned(gm, machine=MACHINE):
    result, choices = AssignStreams().run(gm, machine)
    return result, choices, schedule_of(gm.graph, machine.aic, machine.aiv)


def streams(gm, *parts):
    found = {}
    for node in gm.graph.nodes:
        for part in parts:
            if part in node.name and node.op == "call_function":
                found.setdefault(part, set()).add(stream_of(node))
    return found


def test_the_indexer_prolog_gets_three_streams_and_four_events():
    gm = indexer_prolog()
    result, choices, schedule = assigned(gm)
    assert [match.node for match in result.matches] == ["npu_lightning_indexer"]
    assert prove(schedule).proved
    assert (len(schedule.streams), len(schedule.events)) == (3, 4)
    # Keys stay on the main stream, which writes the cache; queries and head weights move.
    kept = streams(gm, "layer_norm", "scatter", "lightning_indexer")
    assert set.union(*kept.values()) == {"main"}
    assert set(kinds(gm)) == {"main", "side", "side_2"}
    order = HappensBefore(schedule)
    cubes = [t.name for t in schedule.tasks if t.name.startswith("mm")]
    assert all(order.ordered(a, b) for a in cubes for b in cubes if a != b)
    assert "branches" in choices[0].why
    assert explain(choices)[0]["gain_us"] > 0


@pytest.mark.parametrize("make", [indexer_prolog, experts])
def test_dropping_any_event_or_swapping_any_two_is_caught(make):
    _, _, schedule = assigned(make())
    before = order_of(schedule)
    for event in schedule.events:
        assert not prove(schedule.without_event(event)).proved, event
    for first in schedule.events:
        for second in schedule.events:
            swapped = schedule.with_waits_swapped(first, second)
            same = order_of(swapped) == before
            assert same or not prove(swapped).proved, (first, second)


def order_of(schedule):
    order = HappensBefore(schedule)
    names = [task.name for task in schedule.tasks]
    if order.stuck:
        return None
    return {(a, b) for a in names for b in names if order.precedes(a, b)}


def test_the_shared_expert_runs_beside_the_routed_ones():
    gm = experts()
    result, _, schedule = assigned(gm)
    assert len(result.matches) == 1
    assert prove(schedule).proved
    routed = streams(gm, "gating", "grouped", "routing")
    assert set.union(*routed.values()) == {"main"}
    assert streams(gm, "situ_glu")["situ_glu"] == {"main", "side"}


def test_the_order_of_issue_still_runs_on_one_stream():
    gm = experts()
    before = [n.name for n in gm.graph.nodes]
    assigned(gm)
    gm.graph.lint()
    kept = [n.name for n in gm.graph.nodes if n.target not in (RECORD, WAIT)]
    assert sorted(kept) == sorted(before)


def test_thousands_of_rows_are_judged_by_the_same_numbers():
    result, choices, schedule = assigned(experts(rows=4096))
    assert len(result.matches) == 1
    assert "branches" in choices[0].why
    assert prove(schedule).proved


def test_a_branch_that_gains_nothing_is_refused_with_its_numbers():
    result, choices, schedule = assigned(indexer_prolog(), replace(MACHINE, event=1e-3))
    assert result.matches == ()
    assert schedule.events == ()
    assert any("not worth it: branches" in choice.why for choice in choices)
    assert all(refusal.reason for refusal in result.refusals)


def test_a_branch_that_reads_what_the_main_stream_writes_is_not_moved():
    def function(x, w, cache, slots, rows, other):
        flat = cache.view(-1, 4096)
        written = torch.ops.npu.npu_scatter_nd_update_(flat, slots, rows)
        slow = torch.sin(torch.cos(other @ w))
        stale = (x @ w).sum(0) + cache.sum((0, 1))  # reads the cache itself, after the write
        return slow * stale, written

    gm = trace(
        function,
        x=(16, 7168),
        w=(7168, 4096),
        cache=(65, 128, 4096),
        slots=((16, 1), torch.int32),
        rows=(16, 4096),
        other=(4096, 7168),
    )
    _, _, schedule = assigned(gm)
    assert prove(schedule).proved


def test_no_name_of_a_model_part_decides():
    gm = indexer_prolog()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.name = node.target = f"p{node.name[::-1]}"
    gm.recompile()
    result, _, _ = assigned(gm)
    assert len(result.matches) == 1
