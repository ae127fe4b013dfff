"""Allocation failures in whole optimized steps: the step completes, the plan is lowered, one warning says so."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import memfine_fx
from memfine_fx.models import MixtralConfig, MixtralMoE
from memfine_fx.runtime.halving import ChunkOutOfMemory
from tests.helpers import largest_error
from tests.runtime.injection import injecting

SIZES = MixtralConfig(16, 32, 4, 2, spelling="gathered")
CONFIG = memfine_fx.Config(rows_per_chunk=16, inner_backend="aot_eager")
NUM_TOKENS = 40


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MixtralMoE(SIZES), MixtralMoE(SIZES)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(hidden + self.first(hidden))


def step(model: torch.nn.Module, num_tokens: int = NUM_TOKENS) -> list[torch.Tensor]:
    """Output and all gradients."""
    torch.manual_seed(1)
    hidden = torch.randn(num_tokens, 16, requires_grad=True)
    model.zero_grad()
    out = model(hidden)
    out.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert hidden.grad is not None and all(gradient is not None for gradient in gradients)
    return [out.detach(), hidden.grad, *(gradient.clone() for gradient in gradients if gradient is not None)]


def assert_close(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for got, wanted in zip(results, expected, strict=True):
        assert largest_error(got, wanted) < 1e-5


def sizes_of(model: torch.nn.Module) -> list[int]:
    return [region.plan.rows_per_chunk for region in memfine_fx.report(model).regions if region.plan is not None]


def test_a_step_survives_failures_with_one_warning_and_lower_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoLayers()
    expected = step(model)
    memfine_fx.optimize(model, config=CONFIG)
    step(model)
    with (
        injecting(monkeypatch, lambda number, chunk: chunk.num_rows > 6),
        pytest.warns(RuntimeWarning, match=r"Rows per chunk go from 16 to \d for 40 tokens and more") as caught,
    ):
        assert_close(step(model), expected)
    assert len(caught) == 1
    assert all(3 <= size <= 6 for size in sizes_of(model))
    assert "after an allocation failure" in str(memfine_fx.report(model))
    with injecting(monkeypatch, lambda number, chunk: chunk.num_rows > 6) as injector, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(step(model), expected)
    assert injector.num_failures == 0


def test_fewer_tokens_keep_their_larger_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = memfine_fx.optimize(TwoLayers(), config=CONFIG, dynamic=True)
    step(model)
    with injecting(monkeypatch, lambda number, chunk: chunk.num_rows > 6), pytest.warns(RuntimeWarning):
        step(model)
    step(model, num_tokens=20)
    assert sizes_of(model) == [16, 16]
    step(model, num_tokens=60)
    assert all(size <= 6 for size in sizes_of(model))


def test_a_step_that_cannot_go_on_raises_what_training_loops_catch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoLayers()
    expected = step(model)
    memfine_fx.optimize(model, config=CONFIG)
    step(model)
    for number_of_chunk in (0, 9):  # in forward and in backward
        with (
            injecting(monkeypatch, lambda number, chunk, least=40 * number_of_chunk: number >= least),
            pytest.raises(torch.OutOfMemoryError) as caught,
        ):
            step(model)
        assert isinstance(caught.value, ChunkOutOfMemory)
        assert_close(step(model), expected)
        assert sizes_of(model) == [16, 16]


REAL_FAILURE = """
import resource, sys, warnings
import torch
from memfine_fx.records import ChunkPlan
from memfine_fx.runtime.loop import chunks_of, run_backward, run_forward
from memfine_fx.runtime.routing import Routed, sort_assignments
from tests.helpers import compiled_expert_of, largest_error, mlp

H, F, E, T = 64, 8192, 2, 4096
torch.manual_seed(0)
params = [torch.randn(E, H, F) / 8, torch.randn(E, F, H) / 90]
compiled_expert = compiled_expert_of(mlp, params, ["expert", "expert"], hidden=H)
hidden, grad = torch.randn(T, H), torch.randn(T, H)
tables = [[param] for param in params]
routed = Routed(hidden, torch.rand(T, 1), *sort_assignments(torch.zeros(T, 1, dtype=torch.int64), E), tables, 1)

def step(rows, told):
    chunks = chunks_of(routed, compiled_expert, ChunkPlan("rows", rows, 0, 0, ""))
    with torch.no_grad():
        out = run_forward(routed, compiled_expert, chunks, torch.float32, told)
        return [out, *run_backward(grad, routed, compiled_expert, chunks, (True, True), [[True], [True]], told)]

expected = step(128, lambda rows: sys.exit("failed without a limit"))
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 110 * 2**20, resource.RLIM_INFINITY))
limits = []
results = step(4096, limits.append)  # one [4096, 8192] tensor has 128 MiB
assert limits and max(limits) < 4096, limits
assert all(largest_error(a, b) < 1e-5 for a, b in zip(results, expected))
print("rows", limits)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_real_failures_of_the_cpu_allocator_are_survived() -> None:
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", REAL_FAILURE], cwd=root, env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.startswith("rows [")


@pytest.mark.cuda
def test_real_failures_of_the_cuda_allocator_are_survived() -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    layer = MixtralMoE(MixtralConfig(1024, 4096, 8, 2, spelling="gathered")).to(device)
    hidden = torch.randn(16384, 1024, device=device)
    config = memfine_fx.Config(rows_per_chunk=512, inner_backend="aot_eager")
    expected = memfine_fx.optimize(layer, config=config)(hidden)
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
    layer.zero_grad(set_to_none=False)
    _, total = torch.cuda.mem_get_info()
    room = torch.cuda.memory_allocated() + 5 * hidden.numel() * 4 + 3 * sum(p.numel() * 4 for p in layer.parameters())
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / total))
    try:
        torch._dynamo.reset()
        large = memfine_fx.Config(rows_per_chunk=32768, inner_backend="aot_eager")
        memfine_fx.optimize(layer, config=large)
        with pytest.warns(RuntimeWarning, match="an allocation failed"):
            out = layer(hidden)
            out.square().sum().backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert largest_error(out, expected) < 1e-5
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        assert parameter.grad is not None and largest_error(parameter.grad, gradient) < 1e-4
