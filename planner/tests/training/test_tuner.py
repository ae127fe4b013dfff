"""The search: what it returns fits, is on the front, and says why."""

from dataclasses import replace

import pytest

from memfine_planner.costs.model_configs import architecture
from memfine_planner.costs.strategy import StrategyError
from memfine_planner.hardware.systems import system
from memfine_planner.training.memory import oom_risk
from memfine_planner.training.plan import make_plan, reasons
from memfine_planner.training.report import plan_json, plan_text
from memfine_planner.training.routing import Routing
from memfine_planner.training.tuner import Request, Tuned, space, tune

DENSE = Request(architecture("llama3_70b"), system("H100"), 64, 128, 8192, "FP8-CS")
SPARSE = Request(
    architecture("qwen3_30b_a3b"), system("H100"), 16, 512, 4096, "BF16", Routing("table"), fixed=(("micro_batch", 1),)
)


@pytest.fixture(scope="module")
def sparse() -> Tuned:
    return tune(SPARSE)


def test_search_beats_or_meets_the_published_strategy() -> None:
    tuned = tune(DENSE)
    published = [c for c in tuned.candidates if (c.strategy.tp, c.strategy.pp, c.strategy.vp) == (4, 8, 5)]
    assert published
    assert tuned.best.step.tokens_per_s >= max(c.step.tokens_per_s for c in published)


def test_everything_returned_fits_in_a_bad_iteration(sparse: Tuned) -> None:
    assert all(candidate.headroom >= 0 for candidate in sparse.candidates)
    risk = oom_risk(SPARSE.arch, SPARSE.system, sparse.best.strategy, SPARSE.routing, 300)
    assert risk.per_iteration <= 1 - SPARSE.percentile / 100 + 1 / 300


def test_front_trades_speed_for_headroom(sparse: Tuned) -> None:
    speeds = [candidate.step.tokens_per_s for candidate in sparse.front]
    rooms = [candidate.headroom for candidate in sparse.front]
    assert speeds == sorted(speeds, reverse=True) and rooms == sorted(rooms)
    for candidate in sparse.candidates:
        assert any(
            f.step.tokens_per_s >= candidate.step.tokens_per_s and f.headroom >= candidate.headroom - 1e-9
            for f in sparse.front
        )


def test_reasons_name_what_binds_and_the_runners_up(sparse: Tuned) -> None:
    text = "\n".join(reasons(sparse))
    assert "The step is bound by" in text
    assert "% slower (of the best step:" in text
    assert f"{sparse.num_valid:,} valid strategies" in text


def test_plan_reports_every_part(sparse: Tuned) -> None:
    plan = make_plan(SPARSE, sparse.best.strategy, 1e12, sparse, iterations=100)
    text = plan_text(plan, layers=True)
    for part in (
        "where a step goes",
        "pipeline ranks",
        "out of memory per 1,000",
        "best interval",
        "--expert-model-parallel-size",
        "experts in",
    ):
        assert part in text
    assert '"terms_s"' in plan_json(plan, sparse.front)


def test_fixed_strategy_that_overflows_is_told_the_chunks_that_fit() -> None:
    request = replace(SPARSE, arch=architecture("deepseek_v3"), gpus=256, global_batch=2048)
    fixed = next(
        s
        for s in space(
            replace(
                request,
                fixed=(
                    ("tp", 1),
                    ("pp", 16),
                    ("vp", 1),
                    ("ep", 16),
                    ("zero", 1),
                    ("micro_batch", 1),
                    ("recompute", "none"),
                    ("cp", 1),
                ),
            )
        )
    )
    plan = make_plan(request, fixed, 1e12, iterations=100)
    assert "rounds of R=" in plan.reasons[-1] and "would fit" in plan.reasons[-1]
    assert dict(plan.risks)["all_to_one"].per_iteration == 1


def test_skew_costs_speed_and_asks_for_recomputation(sparse: Tuned) -> None:
    balanced = tune(replace(SPARSE, routing=Routing("balanced")))
    assert balanced.best.step.tokens_per_s > sparse.best.step.tokens_per_s


def test_too_few_gpus_are_told_how_many_would_do() -> None:
    with pytest.raises(
        StrategyError, match=r"no strategy fits: .* GB usable \(optimizer state .*nearest valid: gpus=\d+"
    ):
        tune(Request(architecture("llama3_70b"), system("A100"), 4, 16, 4096, "BF16"))


def test_batch_that_nothing_divides_is_refused() -> None:
    with pytest.raises(StrategyError, match="global_batch=7"):
        tune(replace(DENSE, global_batch=7, fixed=(("tp", 1), ("pp", 1))))


@pytest.mark.slow
def test_thousand_gpus_take_less_than_a_minute() -> None:
    import time

    start = time.perf_counter()
    tune(Request(architecture("deepseek_v3"), system("H100"), 1024, 8192, 4096, "FP8-CS", Routing("table")))
    assert time.perf_counter() - start < 60
