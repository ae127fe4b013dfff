"""Which partition a budget gets: the fastest of those that fit, or else the one that holds least."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import pytest
import sympy
import torch
from torch import fx

from memfine_fx.memory.liveness import Allocation, GraphMemory, Workspace
from memfine_fx.memory.step import GraphStep
from memfine_fx.passes.step.fit import fit
from memfine_fx.plan.cost import DeviceRates


def holding(num_bytes: int) -> GraphMemory:
    return GraphMemory((Allocation("buffer", sympy.Integer(num_bytes), 0, 1),), (), 1)


RATES = DeviceRates(((32, 1e9), (2048, 1e9)), copy_bytes=1e10, launch_seconds=1e-6)


class Budget:
    """Counts what partitions hold."""

    is_asked = True
    rates = RATES
    sizes: dict[str, int] = {}  # noqa: RUF012  # as a property of the protocol it may not be a ClassVar

    def __init__(self, available_bytes: int, beyond: Mapping[str, int] | None = None) -> None:
        self.available_bytes, self.beyond = available_bytes, beyond or {}

    def add_hints(self, graph: fx.Graph) -> None: ...

    def live_bytes(
        self, forward: GraphMemory, backward: GraphMemory, rows: int | None, without: Collection[str] = ()
    ) -> list[int]:
        return [sum(forward.bytes_at({})), 0, sum(backward.bytes_at({}))]

    def workspace(self, rows: int | None) -> Workspace:
        return lambda call: 0

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        yield

    def rows_choices(self) -> list[tuple[int | None, float]]:
        return [(None, 0.0), (64, 1.0)]


def joint_graph() -> fx.GraphModule:
    """One costly result that backward wants."""
    graph = fx.Graph()
    tokens = graph.placeholder("tokens")
    product = graph.call_function(torch.ops.aten.mm.default, (tokens, tokens))
    graph.output((product, product))
    for node in (tokens, product):
        node.meta["val"] = torch.empty(4, 4)
    return fx.GraphModule({}, graph)


def partition_of(gm: fx.GraphModule, forward: GraphMemory, backward: GraphMemory, decision: str) -> GraphStep:
    return GraphStep(forward=forward, backward=backward, decision=decision, modules=(gm, gm))


def held_by(gm: fx.GraphModule, decision: str, lean: int, spared: int, full: int = 400) -> GraphStep:
    held = lean if decision.startswith("no costly result") else spared if decision.startswith("element") else full
    return partition_of(gm, holding(held), holding(held), decision)


def test_what_code_holds_beyond_an_estimate_counts_for_its_like() -> None:
    """The full one seems to fit and is known not to; of the others nothing is known."""

    def base_of(beyond: dict[str, int]) -> str:
        partition = functools.partial(held_by, lean=250, spared=300)
        found = fit(joint_graph(), 1, partition, Budget(450, beyond))
        assert not found.is_least
        return found.base

    assert base_of({}) == "save_all"
    assert base_of({"save_all": 100}) == "recompute_pointwise"
    assert base_of({"save_all": 100, "recompute_pointwise": 200}) == "recompute_all"


@pytest.mark.parametrize(("lean", "spared", "chosen"), [(300, 200, "elementwise"), (200, 300, "no costly result")])
def test_where_nothing_fits_the_smaller_partition_is_taken(lean: int, spared: int, chosen: str) -> None:
    decisions: list[str] = []

    def partition(gm: fx.GraphModule, decision: str = "") -> GraphStep:
        decisions.append(decision)
        return held_by(gm, decision, lean, spared)

    found = fit(joint_graph(), 1, partition, Budget(1))

    assert found.decision.startswith(chosen)
    assert len(decisions) == 3


@pytest.mark.parametrize(
    ("available", "chosen", "num_partitions"),
    [(450, "nothing costly", 1), (350, "elementwise work", 3), (250, "no costly result", 3)],
)
def test_what_steps_without_a_budget_have_is_taken_before_more_is_computed_again(
    available: int, chosen: str, num_partitions: int
) -> None:
    decisions: list[str] = []

    def partition(gm: fx.GraphModule, decision: str = "") -> GraphStep:
        decisions.append(decision)
        held = 400 if decision.startswith("nothing costly") else 300 if decision.startswith("element") else 200
        return partition_of(gm, holding(held), holding(held), decision)

    assert fit(joint_graph(), 1, partition, Budget(available)).decision.startswith(chosen)
    assert len(decisions) == num_partitions


@pytest.mark.parametrize(
    ("save_bytes", "saved", "rewritten", "chosen"),
    [
        (math.inf, 100, 0, "nothing costly"),  # memory that is there already: nothing is recomputed
        (1e9, 100, 0, "elementwise work is recomputed in backward, and nothing costly"),
        (1e9, 100, 600, "nothing costly"),  # 100 ns of new memory against 120 ns of copies
        (1e9, 400, 0, "nothing costly"),  # the same bytes
    ],
)
def test_elementwise_results_are_not_kept_where_new_memory_takes_longer(
    save_bytes: float, saved: int, rewritten: int, chosen: str
) -> None:
    budget = Budget(10_000)
    budget.rates = replace(RATES, save_bytes=save_bytes)

    def partition(gm: fx.GraphModule, decision: str = "") -> GraphStep:
        is_full = decision.startswith("nothing")
        forward = GraphMemory((Allocation("kept", sympy.Integer(200 if is_full else saved), 0, None),), (), 1)
        return partition_of(gm, forward, holding(1000 if is_full else 1100 + rewritten), decision)

    found = fit(joint_graph(), 1, partition, budget)

    assert found.decision.startswith(chosen) and found.saves_all


@pytest.mark.parametrize(
    ("save_bytes", "chosen"),
    [(math.inf, "elementwise"), (1e9, "no costly result")],
)
def test_where_all_does_not_fit_new_memory_counts_too(save_bytes: float, chosen: str) -> None:
    budget = Budget(2_000)
    budget.rates = replace(RATES, save_bytes=save_bytes)

    def partition(gm: fx.GraphModule, decision: str = "") -> GraphStep:
        is_full, is_lean = decision.startswith("nothing"), decision.startswith("no costly")
        forward = GraphMemory((Allocation("kept", sympy.Integer(100 if is_lean else 300), 0, None),), (), 1)
        return partition_of(gm, forward, holding(3000 if is_full else 1300 if is_lean else 1000), decision)

    assert fit(joint_graph(), 1, partition, budget).decision.startswith(chosen)


def test_a_partition_that_holds_more_than_was_counted_is_chosen_again_with_less() -> None:
    """Two products that the lean partition computes again: by its record both fit, made both do not."""
    graph = fx.Graph()
    tokens, mm = graph.placeholder("tokens"), torch.ops.aten.mm.default
    products = [graph.create_node("call_function", mm, (tokens, tokens), name=f"mm_{place}") for place in range(2)]
    total = graph.call_function(torch.ops.aten.add.Tensor, tuple(products))
    graph.output((total, *products))
    for node in (tokens, *products, total):
        node.meta["val"] = torch.empty(4, 4)
    joint = fx.GraphModule({}, graph)
    names, lean_size, made = [product.name for product in products], 100, []

    def partition(gm: fx.GraphModule, decision: str = "") -> GraphStep:
        if not decision[0].isdigit() and not decision.startswith("no costly"):
            return partition_of(gm, holding(5000), holding(5000), decision)
        recomputed = [node.name for node in gm.graph.nodes if "recompute" in node.meta]
        saved = [name for name in names if name not in recomputed]
        made.append(len(saved))
        forward = [Allocation(name, sympy.Integer(lean_size), place, place + 1) for place, name in enumerate(names)]
        backward = [replace(one, start=1 - one.start, stop=2 - one.start) for one in forward]
        beside = Allocation("more than counted", sympy.Integer(120 * len(saved)), 0, None)
        to_backward = [replace(one, stop=None) if one.name in saved else one for one in forward]
        return partition_of(
            gm, GraphMemory((*to_backward, beside), (), 2), GraphMemory(tuple(backward), (), 2), decision
        )

    class Positions(Budget):
        def live_bytes(
            self, forward: GraphMemory, backward: GraphMemory, rows: int | None, without: Collection[str] = ()
        ) -> list[int]:
            halves = [memory.live_bytes({}, lambda call: 0) for memory in (forward, backward)]
            return [*halves[0], 0, *halves[1]]

    found = fit(joint, 1, partition, Positions(330))

    assert made == [0, 2, 1]
    assert found.base == "recompute_all" and found.decision.startswith("1 of 2 costly results")
