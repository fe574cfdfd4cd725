"""The proof: a correct schedule is proved, and every broken one is caught and shown."""

from dataclasses import replace
from itertools import combinations

import pytest

from hybridge.ir.schedule import Engine, HappensBefore, Kind, Schedule, Span, Step
from hybridge.passes.check_schedule import prove


def task(name, stream="main", reads=(), writes=(), engine=Engine.VECTOR, **more):
    return Step(name, Kind.TASK, stream, "", tuple(reads), tuple(writes), engine, **more)


def cube(name, stream="main", reads=(), writes=(), **more):
    return task(name, stream, reads, writes, Engine.CUBE, **more)


def record(event, stream="main"):
    return Step(f"record_{event}", Kind.RECORD, stream, event)


def wait(event, stream="main"):
    return Step(f"wait_{event}_{stream}", Kind.WAIT, stream, event)


def indexer_prolog(layer=0, first_read="x"):
    """The three-stream indexer prolog of one layer, with its four events."""
    n = f"{layer}_"
    e = [f"{n}{i}" for i in range(4)]
    return (
        task(n + "q_norm", reads=[first_read], writes=[n + "qr"]),
        cube(n + "wk", reads=[first_read], writes=[n + "k"]),
        record(e[0]),
        wait(e[0], "indexer"),
        cube(n + "wq_b", "indexer", [n + "qr"], [n + "q"]),
        record(e[1], "indexer"),
        task(n + "q_quant", "indexer", [n + "q"], [n + "qq"]),
        record(e[2], "indexer"),
        wait(e[1], "weights"),
        cube(n + "weights_proj", "weights", [first_read], [n + "w"]),
        record(e[3], "weights"),
        task(n + "k_norm", reads=[n + "k"], writes=[n + "kn"]),
        task(n + "k_write", reads=[n + "kn", "cache"], writes=["cache"]),
        wait(e[2]),
        wait(e[3]),
        task(
            n + "select",
            reads=[n + "qq", n + "w", "cache"],
            writes=[n + "top"],
            engine=Engine.MIXED,
        ),
        cube(n + "attend", reads=[n + "top"], writes=[f"x{layer}"]),
    )


def two_layers():
    steps = (*indexer_prolog(0), *indexer_prolog(1, first_read="x0"))
    recorded = {("0_qr", "indexer"), ("1_qr", "indexer"), ("x0", "weights")}
    return Schedule(steps, inputs=frozenset({"x", "cache"}), recorded_streams=frozenset(recorded))


def task_order(schedule):
    order = HappensBefore(schedule)
    if order.stuck:
        return None
    names = [t.name for t in schedule.tasks]
    return {(a, b) for a in names for b in names if order.precedes(a, b)}


def rules(schedule):
    return {problem.rule for problem in prove(schedule).problems}


def test_the_indexer_prolog_is_proved():
    proof = prove(two_layers())
    assert proof.problems == ()
    assert (proof.streams, proof.events, proof.tasks) == (3, 8, 18)
    assert proof.pairs > 0


def test_the_indexer_prolog_needs_its_tensors_recorded_on_the_side_streams():
    assert rules(replace(two_layers(), recorded_streams=frozenset())) == {"memory_reuse"}


@pytest.mark.parametrize("event", two_layers().events)
def test_dropping_any_one_event_is_caught(event):
    assert not prove(two_layers().without_event(event)).proved


@pytest.mark.parametrize(("first", "second"), list(combinations(two_layers().events, 2)))
def test_swapping_any_two_events_is_caught(first, second):
    """Two waits side by side on one stream may trade places: then the order is the same order."""
    swapped = two_layers().with_waits_swapped(first, second)
    same = task_order(swapped) == task_order(two_layers())
    assert prove(swapped).proved == same
    assert not same or {first, second} in ({"0_2", "0_3"}, {"1_2", "1_3"})


def test_a_tensor_used_on_another_stream_without_an_event_is_a_race_with_its_path():
    steps = (task("a", writes=["v"]), record("e"), wait("e", "side"), task("b", "side", ["v"]))
    schedule = Schedule((*steps, record("f", "side"), wait("f"), task("c")))
    assert prove(schedule).proved
    problem = prove(schedule.without_event("e")).shortest()
    assert problem is not None
    assert problem.rule == "race"
    assert problem.path == (("a",), ("b",))
    assert "a on 'main' and b on 'side' may run in either order" in str(problem)


def test_two_readers_need_no_order():
    assert prove(Schedule((task("a", reads=["v"]), task("b", "side", ["v"])))).problems[0].rule == (
        "not_joined"
    )


def test_bytes_reused_by_a_plan_while_another_stream_reads_them():
    steps = (
        *(task("a", writes=["v"]), record("e"), wait("e", "side"), task("b", "side", ["v"])),
        *(record("f", "side"), task("c", writes=["u"]), wait("f"), task("d", reads=["u"])),
    )
    apart = {"v": Span("hbm", 0, 64), "u": Span("hbm", 64, 128)}
    shared = {"v": Span("hbm", 0, 64), "u": Span("hbm", 32, 96)}
    assert prove(Schedule(steps, memory=apart)).proved
    assert rules(Schedule(steps, memory=shared)) == {"memory_reuse"}


def test_a_freed_tensor_is_safe_only_if_the_allocator_knows_of_the_other_stream():
    steps = (
        *(task("a", writes=["v"]), record("e"), wait("e", "side")),
        *(task("b", "side", ["v"], ["r"]), record("f", "side")),
        *(task("c", writes=["u"]), wait("f"), task("d", reads=["u", "r"])),
    )
    schedule = Schedule(steps)
    assert rules(schedule) == {"memory_reuse"}
    assert prove(replace(schedule, recorded_streams=frozenset({("v", "side")}))).proved


def test_an_event_awaited_too_early_is_a_deadlock():
    steps = (wait("e", "side"), task("b", "side"), task("a"), record("e"))
    assert "deadlock" in rules(Schedule(steps))


@pytest.mark.parametrize("name", ["all_reduce", "all_to_all"])
def test_a_collective_stays_on_the_main_stream(name):
    collective = task(name, "side", engine=Engine.COMMUNICATION)
    steps = (collective, record("e", "side"), wait("e"), task("a"))
    assert rules(Schedule(steps)) == {"collective_on_side_stream"}
    assert prove(Schedule((replace(collective, stream="main"), task("a")))).proved


def test_one_stream_a_layer_is_refused():
    steps = []
    for layer in range(5):
        side = f"layer_{layer}"
        steps += [task(f"s{layer}", side), record(f"e{layer}", side), wait(f"e{layer}")]
        steps += [task(f"m{layer}")]
    assert rules(Schedule(tuple(steps))) == {"too_many_streams"}


def test_two_cube_tasks_side_by_side_need_core_limits_that_fit():
    def both(first, second):
        return Schedule(
            (
                cube("a", aic=first, aiv=0),
                cube("b", "side", aic=second, aiv=0),
                record("e", "side"),
                wait("e"),
                task("c"),
            )
        )

    assert rules(both(None, None)) == {"core_overcommit"}
    assert rules(both(16, 16)) == {"core_overcommit"}
    assert prove(both(16, 8)).proved
    problem = prove(both(16, 16)).problems[0]
    assert problem.reason == "b 16 + a 16 = 32 aic, the device has 24"


def test_a_side_stream_that_is_never_joined():
    steps = (task("a"), task("b", "side"), task("c"))
    assert rules(Schedule(steps)) == {"not_joined"}


def scope(*members, begin="moe", end="moe"):
    bounds = Step("begin", Kind.SCOPE_BEGIN, event=begin), Step("end", Kind.SCOPE_END, event=end)
    return Schedule((bounds[0], *members, bounds[1]))


def test_scopes_are_balanced_static_and_on_one_stream():
    assert prove(scope(task("a"))).proved
    assert rules(scope(task("a"), end="other")) == {"scope"}
    assert rules(scope(task("a", static=False))) == {"scope"}
    assert rules(scope(task("a", engine=Engine.COMMUNICATION))) == {"scope"}
    assert rules(scope(task("a"), begin="x" * 256, end="x" * 256)) == {"scope"}
    assert "scope" in rules(scope(task("a", "side")))
    unclosed = Schedule((Step("begin", Kind.SCOPE_BEGIN, event="moe"), task("a")))
    assert prove(unclosed).problems[0].reason == "begin: scope 'moe' is never closed"
