"""Step time: the roofline, collectives, overlap, pipeline, and what must never get faster."""

import itertools
from dataclasses import replace

import pytest

from memfine_planner.costs.calibration import Calibration
from memfine_planner.costs.collectives import all_gather, all_to_all
from memfine_planner.costs.model_configs import architecture
from memfine_planner.costs.strategy import Strategy
from memfine_planner.costs.timing import gemm_seconds
from memfine_planner.hardware.links import Group
from memfine_planner.hardware.systems import system
from memfine_planner.training.pipeline import timeline
from memfine_planner.training.step import step_time

H100, CAL = system("H100"), Calibration()
MOE = architecture("qwen3_30b_a3b")
BASE = Strategy(gpus=16, pp=2, ep=8, global_batch=64)


def test_large_product_reaches_its_fraction_of_the_rate() -> None:
    seconds = gemm_seconds(65536, 16384, 16384, 1, "BF16", H100, CAL)
    reached = 2 * 65536 * 16384 * 16384 / seconds / 989e12
    assert 0.97 * CAL.gemm_hopper_16 < reached < CAL.gemm_hopper_16


def test_small_products_saturate_less() -> None:
    whole = gemm_seconds(8192, 2048, 2048, 1, "BF16", H100, CAL)
    pieces = gemm_seconds(64, 2048, 2048, 128, "BF16", H100, CAL)
    assert pieces > 2 * whole


def test_thin_product_is_bound_by_memory() -> None:
    seconds = gemm_seconds(1, 8192, 8192, 1, "BF16", H100, CAL)
    assert seconds >= 2 * 8192 * 8192 / (3350e9 * CAL.memory)


def test_gather_across_nodes_is_slower_and_scales_with_the_links_of_a_node() -> None:
    inside, across, strided = (all_gather(1e9, group, H100, CAL) for group in (Group(8), Group(16), Group(16, 8)))
    assert inside < across < strided


def test_all_to_all_pays_for_what_leaves_the_domain() -> None:
    assert all_to_all(1e8, 0.75, Group(32), H100, CAL) > 3 * all_to_all(1e8, 0.0, Group(8), H100, CAL)


@pytest.mark.parametrize(
    "slower",
    [
        {"recompute": "full"},
        {"recompute": "experts", "chunks": 8},
        {"recompute": "selective"},
        {"overlap_pp": False},
        {"overlap_dp": False},
    ],
)
def test_what_costs_work_or_overlap_never_makes_a_step_faster(slower: dict[str, object]) -> None:
    plain = step_time(MOE, H100, BASE)
    assert step_time(MOE, H100, replace(BASE, **slower)).seconds >= plain.seconds  # type: ignore[arg-type]


def test_chunks_cost_more_the_more_there_are_and_rounds_less_than_chunks() -> None:
    recomputed = replace(BASE, recompute="experts")
    chunked = [step_time(MOE, H100, replace(recomputed, chunks=c)).seconds for c in (1, 2, 4, 8)]
    assert chunked == sorted(chunked)
    rounds = step_time(MOE, H100, replace(recomputed, rows_per_round=4096)).seconds
    assert chunked[0] < rounds < chunked[3]


def test_terms_add_up_to_the_step() -> None:
    step = step_time(MOE, H100, replace(BASE, recompute="full"))
    assert sum(seconds for _, seconds in step.terms) == pytest.approx(step.seconds, rel=1e-9)


def test_base_model_hides_nothing() -> None:
    s = replace(BASE, tp=2, gpus=32)
    assert step_time(MOE, H100, s, model="base").seconds > step_time(MOE, H100, replace(s, cuda_graphs="full")).seconds


def test_skewed_routing_slows_the_fullest_rank() -> None:
    s = replace(BASE, cuda_graphs="full")
    balanced = s.local_tokens * MOE.top_k
    assert step_time(MOE, H100, s, rows=4 * balanced).seconds > 1.3 * step_time(MOE, H100, s).seconds


@pytest.mark.parametrize(("pp", "vp", "micro_batches"), [(4, 1, 8), (4, 2, 8), (8, 3, 16)])
@pytest.mark.parametrize("last", [1.0, 1.5])
def test_formula_of_the_bubble_agrees_with_the_schedule(pp: int, vp: int, micro_batches: int, last: float) -> None:
    forward = [1.0] * (pp - 1) + [last]
    backward = [2.0 * seconds for seconds in forward]
    end = max(event.end for event in timeline(forward, backward, vp, micro_batches))
    totals = [f + b for f, b in zip(forward, backward, strict=True)]
    assert end == pytest.approx(micro_batches * max(totals) + (sum(totals) - max(totals)) / vp)


def test_no_rank_does_two_things_at_once() -> None:
    events = timeline([1.0] * 4, [2.0] * 4, 2, 8, send=0.1)
    assert len(events) == 4 * 2 * 8 * 2
    for rank in range(4):
        own = sorted((e.start, e.end) for e in events if e.rank == rank)
        assert all(earlier[1] <= later[0] + 1e-9 for earlier, later in itertools.pairwise(own))


def test_exchange_by_copies_keeps_pace_only_with_links_up_to_hoppers() -> None:
    cal, group = Calibration(), Group(64)
    hopper, rack, faster = system("H100"), system("GB300"), system("B300")
    for sent, one, other in ((0.0, hopper, rack), (1.0, system("B200"), faster)):
        copied = [all_to_all(1e9, sent, group, sys, cal, is_fused=False) for sys in (one, other)]
        fused = [all_to_all(1e9, sent, group, sys, cal) for sys in (one, other)]
        assert copied[0] == pytest.approx(copied[1], rel=0.02)
        assert fused[1] == pytest.approx(fused[0] / 2, rel=0.05)


def test_overlapped_exchange_costs_the_host_time_for_every_chunk_of_the_pipeline() -> None:
    def waiting(vp: int, overlap: bool) -> float:
        s = replace(BASE, vp=vp, overlap_ep=overlap)
        return sum(layer.host_s for _, layer in step_time(MOE, H100, s).layers)

    assert waiting(1, False) == waiting(4, False)
    each = waiting(1, True) - waiting(1, False)
    assert each > 0
    assert waiting(4, True) - waiting(4, False) == pytest.approx(4 * each)
