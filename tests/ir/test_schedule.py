"""The happens-before order of a schedule, and what keeps it from finishing."""

from hybridge.ir.schedule import HappensBefore, Kind, Schedule, Span, Step


def task(name, stream="main", reads=(), writes=()):
    return Step(name, Kind.TASK, stream, reads=reads, writes=writes)


def record(event, stream="main"):
    return Step(f"record_{event}", Kind.RECORD, stream, event)


def wait(event, stream="main"):
    return Step(f"wait_{event}_{stream}", Kind.WAIT, stream, event)


def test_a_stream_orders_its_own_steps_and_an_event_orders_two_streams():
    schedule = Schedule((task("a"), record("e"), wait("e", "side"), task("b", "side"), task("c")))
    order = HappensBefore(schedule)
    assert order.stuck is None
    assert order.precedes("a", "b")
    assert order.precedes("a", "c")
    assert not order.ordered("b", "c")
    assert order.path(None, "b") == ("a", "record_e", "wait_e_side", "b")


def test_order_passes_through_a_third_stream():
    steps = (
        *(task("a"), record("e")),
        *(wait("e", "s1"), record("f", "s1")),
        *(wait("f", "s2"), task("b", "s2")),
    )
    assert HappensBefore(Schedule(steps)).precedes("a", "b")


def test_a_wait_sees_the_latest_record_before_it():
    steps = (task("a"), record("e"), task("b"), Step("again", Kind.RECORD, event="e"))
    order = HappensBefore(Schedule((*steps, wait("e", "side"), task("c", "side"))))
    assert order.precedes("b", "c")


def test_a_control_edge_orders_two_tasks():
    schedule = Schedule((task("a"), task("b", "side")), control_edges=(("a", "b"),))
    assert HappensBefore(schedule).precedes("a", "b")


def test_an_event_awaited_before_it_is_recorded_is_stuck():
    stuck = HappensBefore(Schedule((wait("e", "side"), task("a"), record("e")))).stuck
    assert stuck is not None
    assert stuck.reason == "event 'e' is awaited on 'side' but recorded only later"
    nowhere = HappensBefore(Schedule((wait("e", "side"),))).stuck
    assert nowhere is not None
    assert "nowhere" in nowhere.reason


def test_a_circle_of_control_edges_is_stuck_and_shown():
    schedule = Schedule((task("a"), task("b", "side")), control_edges=(("a", "b"), ("b", "a")))
    stuck = HappensBefore(schedule).stuck
    assert stuck is not None
    assert set(stuck.steps) == {"a", "b"}


def test_the_last_common_step_is_where_two_tasks_may_race():
    steps = (task("a"), record("e"), wait("e", "side"), task("b", "side"), task("c"))
    assert HappensBefore(Schedule(steps)).last_common("b", "c") == "record_e"


def test_spans_overlap_only_in_one_pool():
    assert Span("p", 0, 8).overlaps(Span("p", 7, 9))
    assert not Span("p", 0, 8).overlaps(Span("p", 8, 9))
    assert not Span("p", 0, 8).overlaps(Span("q", 0, 8))


def test_what_runs_beside_a_step_is_what_no_event_orders():
    steps = (
        *(Step("a"), Step("record_e", Kind.RECORD, event="e")),
        *(Step("wait_e", Kind.WAIT, "side", "e"), Step("s", stream="side")),
        *(Step("b"), Step("record_f", Kind.RECORD, "side", "f"), Step("c")),
        *(Step("wait_f", Kind.WAIT, event="f"), Step("d")),
    )
    schedule = Schedule(steps)
    main = [step for step in schedule.tasks if step.stream == "main"]
    beside = HappensBefore(schedule).beside("s", main)
    assert [step.name for step in beside] == ["b", "c"]
