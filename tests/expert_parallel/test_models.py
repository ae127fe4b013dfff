"""Models on several ranks train as on one: losses and every gradient over 20 steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.expert_parallel.model_cases import Comparison, Plan, run_models
from tests.expert_parallel.ranks import run_ranks

NUM_LAYERS = {"list of experts": 1, "list in nf4 below PEFT": 1}


def check(by_rank: list[list[Comparison]], plan: Plan) -> None:
    for rank, comparisons in enumerate(by_rank):
        for (name, shape, _, _, slots), one in zip(plan, comparisons, strict=True):
            assert (one.num_chunked, one.num_refused) == (NUM_LAYERS.get(name, 2), 0), f"{name} on {shape}"
            assert (one.num_clones > 0) == (slots > 0), f"{name} on {shape}: {one.num_clones} clones"
            assert one.loss < 1e-5, f"{name} on {shape}, rank {rank}: loss off by {one.loss:.1e}"
            assert one.gradient < 1e-4, f"{name} on {shape}, rank {rank}: {one.worst} off by {one.gradient:.1e}"


def test_two_ranks_train_as_one_and_resume_with_another_number_of_them(tmp_path: Path) -> None:
    plan: Plan = [
        ("Qwen3-MoE", (2,), str(tmp_path / "qwen"), False, 0),
    ]
    check(run_ranks(run_models, 2, plan), plan)


@pytest.mark.slow
def test_two_ranks_train_other_spellings_and_under_fsdp_as_one(tmp_path: Path) -> None:
    plan: Plan = [
        ("DeepSeek-like", (2,), None, False, 0),
        ("Qwen3-MoE", (2,), None, True, 0),
        ("DeepSeek-like", (2,), None, True, 0),
        ("list of experts", (2,), str(tmp_path / "list"), False, 0),
        ("Qwen3-MoE", (2,), None, True, 2),
        ("DeepSeek-like", (2,), None, False, 2),
    ]
    check(run_ranks(run_models, 2, plan), plan)


@pytest.mark.slow
def test_four_ranks_and_two_by_two_train_as_one(tmp_path: Path) -> None:
    plan: Plan = [
        ("Qwen3-MoE", (4,), str(tmp_path / "four"), False, 0),
        ("Qwen3-MoE", (2, 2), str(tmp_path / "two by two"), False, 0),
        ("DeepSeek-like", (4,), None, False, 0),
        ("DeepSeek-like", (4,), None, True, 0),
        ("DeepSeek-like", (2, 2), None, False, 0),
    ]
    check(run_ranks(run_models, 4, plan), plan)


@pytest.mark.trainers
def test_adapters_of_tables_are_shared_out_with_their_experts(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    plan: Plan = [
        ("adapted Qwen3-MoE", (2,), str(tmp_path / "adapted"), False, 0),
        ("adapted Qwen3-MoE", (2,), None, True, 0),
        ("adapted Qwen3-MoE", (2,), None, False, 2),
    ]
    check(run_ranks(run_models, 2, plan), plan)
    plan = [("adapted Qwen3-MoE", (4,), None, False, 0)]
    check(run_ranks(run_models, 4, plan), plan)


@pytest.mark.trainers
def test_packed_tables_are_shared_out_with_their_experts(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    plan: Plan = [
        ("nf4", (2,), None, False, 0),
        ("nf4 below PEFT", (2,), None, False, 2),
        ("list in nf4 below PEFT", (2,), None, False, 0),
        ("mxfp4", (2,), str(tmp_path / "mxfp4"), False, 0),
        ("fp8", (2,), None, False, 2),
        ("int8", (2,), None, True, 0),
    ]
    check(run_ranks(run_models, 2, plan), plan)
    plan = [("nf4 below PEFT", (4,), None, False, 0), ("fp8", (2, 2), str(tmp_path / "fp8"), False, 0)]
    check(run_ranks(run_models, 4, plan), plan)
