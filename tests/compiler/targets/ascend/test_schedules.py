"""Schedules of a model of published widths: proved as they are, and every mutation of them caught."""

from dataclasses import replace
from itertools import combinations

import pytest

from hybridge.compiler.pipeline import run_pipeline
from hybridge.compiler.targets.ascend.constraints import SOCS
from hybridge.compiler.targets.ascend.expert_parallel import ExpertParallel
from hybridge.compiler.targets.ascend.lowering import lower
from hybridge.compiler.targets.ascend.lowerings.context import Bucket
from hybridge.compiler.trace import trace
from hybridge.ir.schedule import MAIN_STREAM, Engine, HappensBefore, Kind, Step
from hybridge.ir.schedule_ops import schedule_of
from hybridge.models.presets import preset, scale
from hybridge.passes.assign_streams import AssignStreams
from hybridge.passes.check_schedule import prove
from hybridge.passes.merge_super_kernels import MergeSuperKernels, SuperKernelPolicy

pytestmark = pytest.mark.slow
SOC = "ascend-950"
MACHINE = SOCS[SOC].machine


@pytest.fixture(scope="module")
def config():
    """One KDA and one DSA layer with experts, at the widths of kimi-k3.1-pro; nothing is loaded."""
    return replace(scale(preset("kimi-k3.1-pro"), layers=3), layer_kinds=("kda", "kda", "dsa"))


@pytest.fixture(scope="module")
def traced(config):
    found = {phase: trace(config, phase, block_size=128) for phase in ("prefill", "decode")}
    for phase, each in found.items():
        run_pipeline(each.graph_module, phase, config, weights=each.weights, proofs={})
    return found


def placed(config, traced, phase, devices=1):
    """The schedule of a phase's lowered graph, with streams and scopes."""
    tokens = 16 if phase == "decode" else 512
    sequences = 16 if phase == "decode" else 4
    lowered = lower(
        traced[phase].graph_module,
        soc=SOC,
        phase=phase,
        bucket=Bucket(tokens, sequences, 64, 128, 16, 16, sequences),
        caches=traced[phase].caches,
        latent_width=config.kv_lora_rank,
        parallel=ExpertParallel(devices),
    )
    AssignStreams().run(lowered.graph_module, MACHINE)
    if phase == "decode":
        MergeSuperKernels().run(lowered.graph_module, MACHINE, SuperKernelPolicy())
    graph = lowered.graph_module.graph
    return schedule_of(graph, MACHINE.aic, MACHINE.aiv)


@pytest.fixture(scope="module")
def schedules(config, traced):
    return {
        "decode": placed(config, traced, "decode"),
        "decode of 16 devices": placed(config, traced, "decode", devices=16),
        "prefill": placed(config, traced, "prefill"),
    }


def task_order(schedule):
    order = HappensBefore(schedule)
    if order.stuck:
        return None
    names = [t.name for t in schedule.tasks if t.engine is not Engine.NONE]
    return [order._clocks[order._index[name]] for name in names]


@pytest.mark.parametrize("name", ["decode", "decode of 16 devices", "prefill"])
def test_every_dropped_event_and_every_swap_is_caught(schedules, name):
    schedule = schedules[name]
    assert prove(schedule).proved
    assert len(schedule.streams) == 3
    assert len(schedule.events) >= 8
    for event in schedule.events:
        assert not prove(schedule.without_event(event)).proved, event
    before = task_order(schedule)
    for first, second in combinations(schedule.events, 2):
        swapped = schedule.with_waits_swapped(first, second)
        # Two waits side by side may trade places: then the order is the same order.
        assert not prove(swapped).proved or task_order(swapped) == before, (first, second)


@pytest.mark.parametrize("name", ["decode", "decode of 16 devices", "prefill"])
def test_a_deadlock_is_caught(schedules, name):
    schedule = schedules[name]
    steps = list(schedule.steps)
    place = next(i for i, step in enumerate(steps) if step.kind is Kind.RECORD)
    record = steps.pop(place)
    steps.append(record)  # recorded only after it is awaited
    rules = {problem.rule for problem in prove(replace(schedule, steps=tuple(steps))).problems}
    assert "deadlock" in rules


def test_an_unlimited_kernel_beside_a_collective_and_limits_that_do_not_fit_are_caught(schedules):
    schedule = schedules["decode of 16 devices"]
    limited = [step for step in schedule.tasks if step.aiv is not None]
    assert {step.engine for step in limited} >= {Engine.COMMUNICATION, Engine.VECTOR}
    for aiv in (None, MACHINE.aiv):
        steps = tuple(
            replace(step, aiv=aiv) if step.stream != MAIN_STREAM and step.aiv else step
            for step in schedule.steps
        )
        problems = prove(replace(schedule, steps=steps)).problems
        assert {problem.rule for problem in problems} == {"core_overcommit"}


def test_memory_handed_on_while_another_stream_reads_it_is_caught(schedules):
    schedule = schedules["decode"]
    unknown = replace(schedule, recorded_streams=frozenset())
    assert "memory_reuse" in {problem.rule for problem in prove(unknown).problems}


def test_a_write_of_a_cache_on_another_stream_races(schedules):
    schedule = schedules["decode"]
    cache = next(name for name in schedule.inputs if name.startswith("indexer_cache"))
    side = next(stream for stream in schedule.streams if stream != MAIN_STREAM)
    stray = Step("stray", Kind.TASK, side, reads=(cache,), writes=(cache,))
    steps = (*schedule.steps[:-1], stray, schedule.steps[-1])
    rules = {problem.rule for problem in prove(replace(schedule, steps=steps)).problems}
    assert rules & {"race", "not_joined"}
