"""Effects become values in program order; what has no order in a value graph is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from hybridge.artifacts.errors import CompileError
from hybridge.compiler.targets.onnx.functionalise import functionalise

hybridge = torch.ops.hybridge


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, cache: Tensor, other: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        return self.function(cache, other, rows, slots)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    cache, other = (torch.randn(3, 2, 1, 4, generator=generator) for _ in range(2))
    rows = torch.randn(2, 1, 4, generator=generator)
    return cache, other, rows, torch.tensor([4, -1], dtype=torch.int32)


def traced(function: Callable[..., Tensor]) -> GraphModule:
    return torch.export.export(Module(function), inputs(), strict=False).graph_module


def targets(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def check(function: Callable[..., Tensor], caches: tuple[str, ...] = ("cache",)) -> dict[str, int]:
    """The functional graph returns what the program returns and leaves in its caches."""
    gm = traced(function)
    writes = functionalise(gm, caches)
    assert not [name for name in targets(gm) if name == "hybridge.paged_write.default"]
    given = inputs()
    found = gm(*given)
    for before, after in zip(inputs(), given, strict=True):
        assert torch.equal(before, after), "a functional graph changes no input"
    mutated = inputs()
    expected = function(*mutated)
    places = {"cache": 0, "other": 1}
    wanted = [expected, *(mutated[places[name]] for name in caches)]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    return writes


def test_a_read_after_a_write_sees_the_new_rows():
    def program(cache, other, rows, slots):
        hybridge.paged_write(cache, rows, slots)
        return cache.sum((1, 2, 3))

    assert check(program) == {"cache": 1}


def test_two_writes_chain_and_are_counted():
    def program(cache, other, rows, slots):
        hybridge.paged_write(cache, rows, slots)
        hybridge.paged_write(cache, rows + cache.sum(), slots + 1)
        return cache * 2

    assert check(program) == {"cache": 2}


def test_caches_are_returned_in_the_order_of_the_signature():
    def program(cache, other, rows, slots):
        hybridge.paged_write(other, rows, slots)
        hybridge.paged_write(cache, rows * 2, slots)
        return cache + other

    assert check(program, ("cache", "other")) == {"cache": 1, "other": 1}


def test_a_write_that_depends_on_a_read_of_the_old_value_is_ordered():
    def program(cache, other, rows, slots):
        old = cache.sum((0, 1))
        hybridge.paged_write(cache, rows + old, slots)
        return cache + 1

    check(program)


def test_an_op_with_outputs_and_state():
    tokens = torch.randn(2, 1, 3, generator=torch.Generator().manual_seed(0))
    starts, context = (torch.tensor(v, dtype=torch.int32) for v in ([0, 2], [4]))

    class Recurrence(torch.nn.Module):
        def forward(self, state: Tensor, slot: Tensor) -> Tensor:
            beta = tokens[..., 0].sigmoid()
            output = hybridge.kda_recurrence(
                tokens, tokens, tokens, -tokens.abs(), beta, state, starts, context, slot
            )
            return output + state.sum()

    state, slot = torch.randn(2, 1, 3, 3), torch.tensor([1], dtype=torch.int32)
    program = torch.export.export(Recurrence(), (state, slot), strict=False)
    gm = program.graph_module
    functionalise(gm, ("state",))
    assert "hybridge.kda_recurrence_functional.default" in targets(gm)
    mutated = state.clone()
    expected = Recurrence()(mutated, slot)
    constants = [program.constants[name] for name in lifted(program)]
    found, new_state = gm(*constants, state, slot)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(new_state, mutated)


def lifted(program: torch.export.ExportedProgram) -> list[str]:
    signature = program.graph_signature
    return list(signature.inputs_to_lifted_tensor_constants.values())


def unordered_read(cache, other, rows, slots):
    old = cache.sum((1, 2, 3))
    hybridge.paged_write(cache, rows, slots)
    return old


def unordered_read_through_a_view(cache, other, rows, slots):
    old = cache.flatten(1).sum(1)
    hybridge.paged_write(cache, rows, slots)
    return old


def stale_view(cache, other, rows, slots):
    flat = cache.flatten(0, 1)
    hybridge.paged_write(cache, rows, slots)
    return flat + 1


def write_through_a_view(cache, other, rows, slots):
    hybridge.paged_write(cache[1:], rows, slots)
    return rows + 1


def aten_in_place(cache, other, rows, slots):
    cache.add_(1.0)
    return rows + 1


def never_written(cache, other, rows, slots):
    return cache + 1


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (unordered_read, "does not depend on the read"),
        (unordered_read_through_a_view, "does not depend on the read"),
        (stale_view, "view of cache made before cache was written"),
        (write_through_a_view, "writes through"),
        (aten_in_place, r"aten::add_\) writes to cache in place"),
        (never_written, "never writes cache"),
    ],
)
def test_refusals_name_the_node_and_a_remedy(program, message):
    with pytest.raises(CompileError, match=message) as refused:
        functionalise(traced(program), ("cache",))
    assert refused.value.remedy


def test_a_size_read_before_a_write_is_no_read():
    def program(cache, other, rows, slots):
        size = torch.ops.aten.sym_size.int(cache, 0)
        hybridge.paged_write(cache, rows, slots)
        return cache * size

    gm = traced(program)
    functionalise(gm, ("cache",))
