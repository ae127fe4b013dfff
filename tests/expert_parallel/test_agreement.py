"""Ranks that do not run a layer alike are all told who does what and why, in seconds; agreement costs nothing."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from memfine_fx.errors import Reason
from memfine_fx.expert_parallel.gathering import OUTSIDE
from memfine_fx.passes.lower.sharded import say_why_gathered
from memfine_fx.records import Refusal, Where
from tests.expert_parallel.agreement_cases import NUM_LAYERS, REASON, Agreement, agreeing
from tests.expert_parallel.fault_cases import ROWS
from tests.expert_parallel.ranks import run_ranks

SECONDS = 10.0
"""The group's timeout is 300 s."""


@pytest.fixture(scope="module")
def by_rank() -> list[Agreement]:
    """Starting processes takes longer than the cases."""
    return run_ranks(agreeing, 2)


def test_a_refusal_on_one_rank_is_an_error_on_all_with_module_and_reason(by_rank: list[Agreement]) -> None:
    for told in (one for agreement in by_rank for one in (agreement.refused, agreement.again)):
        assert "rank 0: runs layers.1.experts in rounds (4 experts, top-2" in told.message
        assert "rank 1: gathers the whole of layers.1.experts.gate_up_proj, because layers.1.experts" in told.message
        assert f"was refused: {REASON}" in told.message
        assert told.seconds < SECONDS


def test_a_refusal_on_all_ranks_trains_with_a_warning_and_later_steps_are_as_before(by_rank: list[Agreement]) -> None:
    for agreement in by_rank:
        assert any("all experts are gathered here" in message for message in agreement.warnings)
        assert agreement.change["all refuse"] < 1e-5
        assert agreement.change["afterwards"] == 0.0


def test_a_plan_that_no_longer_fits_once_forward_has_run_waits_for_the_next_step(by_rank: list[Agreement]) -> None:
    """An error of one rank in the middle of backward would leave the others waiting."""
    assert [agreement.change["late"] for agreement in by_rank] == [0.0, 0.0]


def test_chunked_layers_have_one_gather_of_counts_and_five_exchanges_of_rows_in_a_step(
    by_rank: list[Agreement],
) -> None:
    """Of one round: rows and results in both passes, gradients of results. Agreement has no collective of its own."""
    for agreement in by_rank:
        assert agreement.collectives == {"c10d::_allgather_base_": NUM_LAYERS, "c10d::alltoall_base_": 5 * NUM_LAYERS}


def test_a_rank_that_runs_uncompiled_is_told_apart(by_rank: list[Agreement]) -> None:
    for agreement in by_rank:
        assert f"rank 1: gathers the whole of layers.0.experts.gate_up_proj, because {OUTSIDE}" in (
            agreement.outside.message
        )


def test_ranks_that_gather_different_experts_do_not_take_one_for_the_other(by_rank: list[Agreement]) -> None:
    for agreement in by_rank:
        assert "rank 0: gathers the whole of experts.0.weight" in agreement.experts.message
        assert "rank 1: gathers the whole of experts.1.weight" in agreement.experts.message


def test_layers_with_different_numbers_of_experts_are_told_apart(by_rank: list[Agreement]) -> None:
    for agreement in by_rank:
        assert "rank 0: runs layers.0.experts in rounds (4 experts" in agreement.layers.message
        assert "rank 1: runs experts in rounds (6 experts" in agreement.layers.message


def test_an_error_on_one_rank_before_it_meets_the_others_is_told_to_them(by_rank: list[Agreement]) -> None:
    ids, budget = by_rank[1].ids.message, by_rank[1].budget.message
    assert "expert ids outside [0, 4)" in ids and "cannot be met" in budget
    assert f"rank 1: stopped, because of IndexError: {ids}" in by_rank[0].ids.message
    assert f"rank 1: stopped, because of BudgetInfeasible: {budget}" in by_rank[0].budget.message
    for agreement in by_rank:
        assert max(agreement.ids.seconds, agreement.budget.seconds) < SECONDS


def test_models_and_configs_that_differ_are_told_by_optimize(by_rank: list[Agreement]) -> None:
    for agreement in by_rank:
        config, model, slots = agreement.sharding
        assert config.message == (
            "ranks of the expert parallel group differ: "
            f"Config.rows_per_chunk is {ROWS} on rank 0 and {ROWS + 1} on rank 1"
        )
        assert "parameter gate_up_proj is [4, 24, 8] torch.float32, sharded on rank 0 and [5, 24, 8]" in model.message
        assert "expert_group(slots=...) is 0 on rank 0 and 1 on rank 1" in slots.message


def test_ranks_with_other_budgets_have_as_many_slots_as_the_smallest_allows(by_rank: list[Agreement]) -> None:
    assert [agreement.slots for agreement in by_rank] == [1, 1]


def test_ranks_that_know_of_nodes_of_other_sizes_count_as_one_node(by_rank: list[Agreement]) -> None:
    assert [agreement.node_ranks for agreement in by_rank] == [2, 2]


def test_layers_computed_in_different_ways_are_told_apart(by_rank: list[Agreement]) -> None:
    for agreement in by_rank:
        assert agreement.compiled_expert.message.count("in rounds (4 experts, top-2, torch.float32, function ") == 2


@pytest.mark.parametrize(
    "refusals, reason",
    [
        ((), "code outside of any region reads it"),
        (("layers.0.experts", "layers.1.gate"), "layers.1.gate was refused: reason 1"),
        (("layers.1.gate", "layers.1.experts"), "layers.1.experts was refused: reason 1"),
        (("", ""), "? was refused: reason 0; ? was refused: reason 1"),
    ],
)
def test_a_table_is_gathered_because_of_the_refusal_nearest_to_it(refusals: tuple[str, ...], reason: str) -> None:
    graph = fx.Graph()
    arguments = (graph.placeholder("own"), 4, "group", "layers.1.experts.down_proj", OUTSIDE)
    table = graph.call_function(torch.ops.memfine.all_experts.default, arguments)
    say_why_gathered(
        graph,
        [
            Refusal(Where(module), Reason.ROWS_NOT_FOLLOWED, f"reason {number}")
            for number, module in enumerate(refusals)
        ],
    )
    assert table.args == (*arguments[:-1], reason)
