"""DDP and FSDP2 on two gloo processes: gradients, hooks, buckets, and what happens while chunks run."""

from __future__ import annotations

import pytest
import torch

from tests.expert_parallel.ranks import run_ranks
from tests.trainers.distributed_cases import (
    NUM_LAYERS,
    cut_graph_warnings,
    ddp_run,
    experts_function_run,
    fsdp2_adapters_run,
    fsdp2_run,
    head_run,
)

pytest.importorskip("transformers")


@pytest.mark.trainers
@pytest.mark.parametrize(
    ("inner", "takes_bf16"), [("eager", False), ("eager", True), ("inductor", False)], ids=["eager", "bf16", "inductor"]
)
def test_fsdp2_gathers_around_chunk_loops_and_never_inside(inner: str, takes_bf16: bool) -> None:
    for run in run_ranks(fsdp2_run, 2, inner, takes_bf16, timeout_s=500):
        assert run.num_chunked >= 1
        assert run.num_chunks >= 2 * 2 * NUM_LAYERS  # forward and backward, several chunks each
        assert run.num_gathers == 2 * NUM_LAYERS + 1  # layers for forward and for backward, the rest once
        assert run.inside_chunk_loops == ()
        assert run.step.hook_counts == {1}
        assert run.step.gradient_dtypes == {torch.float32}
        assert run.step.loss == pytest.approx(run.reference_loss, rel=1e-2 if takes_bf16 else 1e-5)
        assert run.step.error < (3e-2 if takes_bf16 else 1e-5)


@pytest.mark.trainers
def test_adapters_that_fsdp2_shards_have_the_gradients_of_whole_ones() -> None:
    pytest.importorskip("peft")
    for error, why_expanded in run_ranks(fsdp2_adapters_run, 2):
        assert error < 1e-5
        assert why_expanded and not any(why_expanded), "a table was made whole"


@pytest.mark.trainers
def test_ddp_reduces_the_same_buckets_in_the_same_order() -> None:
    for run in run_ranks(ddp_run, 2):
        assert run.num_chunked == NUM_LAYERS
        assert len(run.buckets) > 1
        assert run.buckets == run.reference_buckets
        assert run.step.hook_counts == {1}
        assert run.step.loss == pytest.approx(run.reference_loss, rel=1e-5)
        assert run.step.error < 1e-5


@pytest.mark.trainers
@pytest.mark.parametrize("takes_fsdp2", [False, True], ids=["DDP", "FSDP2"])
def test_a_chunked_head_has_the_gradients_of_the_whole_one(takes_fsdp2: bool) -> None:
    for run in run_ranks(head_run, 2, takes_fsdp2, timeout_s=500):
        assert run.num_chunks == 4  # of 2 x 32 tokens, at most 20 each
        assert run.step.hook_counts == {1}
        assert run.step.loss == pytest.approx(run.reference_loss, rel=1e-5)
        assert run.step.error < 1e-5


@pytest.mark.trainers
def test_a_graph_that_ddp_cut_is_named_once() -> None:
    for caught in run_ranks(cut_graph_warnings, 2):
        assert len(caught) == 1
        assert "found nothing to chunk" in caught[0]
        assert "memfine_fx.optimize(model)" in caught[0]
        assert "torch._dynamo.config.optimize_ddp = False" in caught[0]


@pytest.mark.trainers
@pytest.mark.parametrize("takes_fsdp2", [False, True], ids=["DDP", "FSDP2"])
def test_the_experts_function_has_the_gradients_of_the_eager_loop(takes_fsdp2: bool) -> None:
    for error in run_ranks(experts_function_run, 2, takes_fsdp2):
        assert error < 1e-5
