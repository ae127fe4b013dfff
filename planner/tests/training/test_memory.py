"""Peaks per rank, routing distributions, the chance of running out, and the chunks that prevent it."""

from dataclasses import replace

import pytest

from memfine_fx.errors import BudgetInfeasible, ConfigError
from memfine_fx.memory.published import IMBALANCE, rank_rows
from memfine_planner.costs.model_configs import architecture
from memfine_planner.costs.strategy import Strategy
from memfine_planner.hardware.systems import system
from memfine_planner.training.memory import (
    ALPHA,
    choose_chunks,
    choose_rows,
    live_sets,
    memory,
    most_rows_that_fit,
    oom_risk,
    peak_expression,
)
from memfine_planner.training.routing import Routing, sample_rank_rows

MOE, H100 = architecture("deepseek_v3"), system("H100")
S = Strategy(gpus=256, pp=16, ep=16, global_batch=256, recompute="full")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_each_zero_stage_holds_less(zero: int) -> None:
    dense = architecture("llama3_8b")
    s = Strategy(gpus=8, global_batch=8, zero=zero)
    static = sum(
        size for name, size in memory(dense, H100, s)[0].terms if name in ("weights", "gradients", "optimizer state")
    )
    held = {0: 2 + 4 + 12, 1: 2 + 4 + 12 / 8, 2: 2 + 4 / 8 + 12 / 8, 3: (2 + 4 + 12) / 8}[zero]
    assert static == pytest.approx(dense.params * held, rel=1e-4)


def test_first_rank_keeps_most_micro_batches() -> None:
    s = replace(S, vp=1)
    assert [live_sets(s, rank) for rank in (0, 8, 15)] == [16, 8, 1]
    interleaved = replace(S, pp=8, vp=3, gpus=128, ep=16)
    assert live_sets(interleaved, 0) == pytest.approx((3 * 8 + 8 - 1) / 3)


def test_symbolic_peak_is_the_numeric_one_and_its_root_fills_the_memory() -> None:
    rank = memory(MOE, H100, S)[1]
    expression = peak_expression(rank)
    (rows,) = expression.free_symbols
    assert float(expression.subs(rows, 1e5)) == pytest.approx(rank.peak_with(1e5, 1e5))
    assert float(expression.subs(rows, most_rows_that_fit(H100, rank))) == pytest.approx(ALPHA * H100.memory_bytes)


def test_rounds_bound_the_peak_whatever_the_routing() -> None:
    rank = memory(MOE, H100, S)[1]
    bounded = memory(MOE, H100, replace(S, rows_per_round=choose_rows(H100, rank)))[1]
    assert bounded.peak_with(1e9, 1e9) <= ALPHA * H100.memory_bytes


def test_mact_chooses_more_chunks_for_more_rows() -> None:
    rank = memory(MOE, H100, S)[1]
    most = most_rows_that_fit(H100, rank)
    assert [choose_chunks(H100, rank, factor * most, S) for factor in (0.5, 1.5, 3, 9)] == [1, 2, 4, 16]


def test_model_that_does_not_fit_without_rows_is_infeasible() -> None:
    rank = memory(MOE, H100, Strategy(gpus=8, ep=8, global_batch=8))[0]
    with pytest.raises(BudgetInfeasible, match="optimizer state"):
        most_rows_that_fit(H100, rank)


@pytest.mark.parametrize("kind", ["balanced", "zipf", "table"])
def test_sampled_rows_lie_between_balanced_and_all(kind: str) -> None:
    rows = sample_rank_rows(MOE, S, Routing(kind), 50)  # type: ignore[arg-type]
    balanced = S.local_tokens * MOE.top_k
    assert rows.shape == (50, 58)
    assert rows.min() >= 0.99 * balanced
    assert rows.max() <= balanced * S.ep


def test_all_to_one_is_the_worst_routing() -> None:
    rows = sample_rank_rows(MOE, S, Routing("all_to_one"), 2)
    assert (rows == S.local_tokens * MOE.top_k * S.ep).all()


@pytest.mark.parametrize("kind", ["zipf", "table"])
def test_rank_with_fewer_experts_than_choices_cannot_receive_all(kind: str) -> None:
    arch = architecture("mixtral_8x7b")
    s = Strategy(gpus=8, ep=8, global_batch=8)
    (most,) = set(sample_rank_rows(arch, s, Routing("all_to_one"), 1).ravel())
    assert most == s.local_tokens * 8
    assert sample_rank_rows(arch, s, Routing(kind, alpha=4.0, bad_share=1.0), 20).max() <= most  # type: ignore[arg-type]


def test_table_routing_has_the_published_rows_in_a_bad_iteration() -> None:
    s = Strategy(gpus=32, ep=32, global_batch=32)
    rows = sample_rank_rows(MOE, s, Routing("table", bad_share=1.0), 20)
    # 32 ranks of 4,096 tokens, as in the paper; noise of the sampled tokens aside.
    assert rows[:, -1].mean() == pytest.approx(rank_rows(IMBALANCE[-1]), rel=0.02)


def test_worse_routing_risks_more_and_chunking_removes_the_risk() -> None:
    plain = replace(S, recompute="selective", gpus=512, pp=16, ep=32, global_batch=512)
    risks = {k: oom_risk(MOE, H100, plain, Routing(k), 200).per_iteration for k in ("balanced", "table")}  # type: ignore[arg-type]
    assert risks["balanced"] <= risks["table"]
    assert risks["table"] > 0
    rows = min(choose_rows(H100, rank) for rank in memory(MOE, H100, S))
    assert oom_risk(MOE, H100, replace(S, rows_per_round=rows), Routing("all_to_one"), 50).per_thousand == 0


def test_risk_is_the_same_for_the_same_seed_and_percentiles_rise() -> None:
    one, two = (oom_risk(MOE, H100, S, Routing("zipf"), 100, seed=3) for _ in range(2))
    assert one == two
    values = [value for _, value in one.percentiles]
    assert values == sorted(values)


def test_unknown_routing_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known: balanced, zipf, table, all_to_one"):
        Routing("uniform")  # type: ignore[arg-type]
