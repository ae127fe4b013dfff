"""Bytes by the allocator's own events: what must not exist does not, and the prediction holds."""

from __future__ import annotations

import pytest
import torch

import memfine_fx
from memfine_fx.memory.measure import MemoryTrace, trace_memory
from memfine_fx.models import MixtralConfig, MixtralMoE

T, H, F, E, K = 512, 64, 96, 4, 2
N = T * K


def trace_step(inner: str, dtype: torch.dtype = torch.float32, **fields: object) -> tuple[MemoryTrace, int]:
    """The allocations of one step, and the predicted bytes of its one region."""
    config = memfine_fx.Config(inner_backend=inner, **fields)
    layer = MixtralMoE(MixtralConfig(hidden=H, expert_width=F, num_experts=E, spelling="gathered")).to(dtype)
    optimized = memfine_fx.optimize(layer, inner_backend=inner, config=config)
    hidden = torch.randn(T, H).to(dtype)

    def step() -> None:
        optimized(hidden).float().pow(2).sum().backward()

    step()
    layer.zero_grad()
    trace = trace_memory(step, torch.device("cpu"), beyond=lambda: [p.grad for p in layer.parameters()])
    (region,) = memfine_fx.report(optimized).regions
    assert region.plan is not None
    return trace, region.plan.predicted_bytes


@pytest.mark.parametrize(("inner", "axis"), [("aot_eager", "rows"), ("aot_eager", "tokens"), ("inductor", "rows")])
def test_no_tensor_over_all_routed_rows_is_ever_allocated(inner: str, axis: str) -> None:
    trace, _ = trace_step(inner, axis=axis, rows_per_chunk=64)
    assert not trace.has_allocation_of(N * min(H, F) * 4)


def test_the_check_would_see_such_a_tensor() -> None:
    layer = MixtralMoE(MixtralConfig(hidden=H, expert_width=F, num_experts=E, spelling="gathered"))
    hidden = torch.randn(T, H)
    trace = trace_memory(lambda: layer(hidden).sum().backward(), torch.device("cpu"))
    assert trace.has_allocation_of(N * H * 4)


@pytest.mark.parametrize(("rows", "dtype"), [(16, torch.float32), (16, torch.bfloat16), (512, torch.bfloat16)])
def test_the_measured_peak_stays_under_the_prediction(rows: int, dtype: torch.dtype) -> None:
    trace, predicted = trace_step("inductor", dtype, rows_per_chunk=rows)
    around = 4 * T * H * 4  # what the loss and the router around the region keep
    assert trace.peak_bytes <= predicted + around


def test_smaller_chunks_need_fewer_bytes() -> None:
    large, _ = trace_step("aot_eager", rows_per_chunk=256)
    small, _ = trace_step("aot_eager", rows_per_chunk=16)
    assert small.peak_bytes < large.peak_bytes


def test_skewed_routing_does_not_raise_the_peak() -> None:
    def peak(is_skewed: bool) -> int:
        layer = MixtralMoE(MixtralConfig(hidden=H, expert_width=F, num_experts=E, spelling="gathered"))
        if is_skewed:
            torch.nn.init.zeros_(layer.gate.weight)
        optimized = memfine_fx.optimize(
            layer, inner_backend="aot_eager", config=memfine_fx.Config(inner_backend="aot_eager", rows_per_chunk=32)
        )
        hidden = torch.randn(T, H)
        optimized(hidden).sum().backward()
        layer.zero_grad()
        return trace_memory(lambda: optimized(hidden).sum().backward(), torch.device("cpu")).peak_bytes

    assert peak(is_skewed=True) <= 1.02 * peak(is_skewed=False)
