"""Chunks of several experts are run without waiting for the device: only the routing's offsets come to the host."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from benchmarks.gpu_dry.waiting import Waiting
from memfine_fx.records import ChunkPlan
from memfine_fx.runtime.loop import chunks_of, run_backward, run_forward
from memfine_fx.runtime.routing import Routed, sort_assignments
from tests.helpers import HIDDEN, NUM_EXPERTS, compiled_expert_of, mlp, mlp_params

META = torch.device("meta")
TOP_K, TOKENS = 2, 24


@pytest.mark.parametrize("rows_per_chunk", (5, 16, 48))
def test_neither_pass_of_grouped_chunks_waits(rows_per_chunk: int) -> None:
    params = [param.bfloat16() for param in mlp_params()]
    compiled_expert = compiled_expert_of(mlp, params, ["expert", "expert"], takes_group=True)
    order, offsets = sort_assignments(torch.randint(NUM_EXPERTS, (TOKENS, TOP_K)), NUM_EXPERTS)
    hidden = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=META)
    weight = torch.empty(TOKENS, TOP_K, dtype=torch.bfloat16, device=META)
    routed = Routed(hidden, weight, order.to(META), offsets, [(param.to(META),) for param in params], TOP_K)
    plan = ChunkPlan("rows", rows_per_chunk, 0, 0, "given")
    chunks = chunks_of(routed, compiled_expert, plan)
    with Waiting() as mode:
        out = run_forward(routed, compiled_expert, chunks, torch.bfloat16)
        gradients = run_backward(out, routed, compiled_expert, chunks, (True, True), [[True], [True]])
    assert len(gradients) == 4
    assert mode.found == []


def test_the_sort_waits_once_for_its_offsets() -> None:
    with FakeTensorMode(), torch.device("cuda"), Waiting() as mode:
        sort_assignments(torch.empty(TOKENS, TOP_K, dtype=torch.int64), NUM_EXPERTS)
    assert mode.found == ["aten._to_copy.default"]


def test_a_blocking_copy_to_the_device_would_be_seen() -> None:
    with Waiting() as mode:
        torch.arange(3).to(META)
        torch.tensor([1, 2], device=META)
    assert mode.found == ["aten._to_copy.default", "tensor"]
