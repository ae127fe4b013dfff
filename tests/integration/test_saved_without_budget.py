"""Without a budget regions keep what is free: gradients stay exact, and a step takes no more bytes than the leanest."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memfine_fx
from memfine_fx.compiler import compiled_graph
from memfine_fx.compiler.compiled_graph import CompiledGraph
from memfine_fx.compiler.reporting import largest_chunk
from memfine_fx.compiler.sessions import sessions
from memfine_fx.demo.training import ModelSizes, build_causal_lm
from memfine_fx.memory.measure import trace_memory
from memfine_fx.memory.step import RunMemory, step_peak_bytes
from memfine_fx.plan.cost import DeviceRates
from memfine_fx.plan.problem import saving_nothing
from memfine_fx.plan.runs import Run
from memfine_fx.runtime.compiled_expert import SavingFunctions
from memfine_fx.runtime.loop import SavedRows
from tests.integration.comparison import relative_error

CPU = torch.device("cpu")
SIZES = ModelSizes(
    layers=2, hidden=128, width=128, experts=16, top_k=2, heads=4, kv_heads=2, head_dim=32, vocab=512, positions=1024
)
LENGTHS = {torch.float32: 256, torch.bfloat16: 64}
"""With which gradients are more than what is kept."""
RATES = DeviceRates(((32, 1e9), (2048, 1e9)), copy_bytes=1e10, launch_seconds=1e-6)
Budget = str | None


def model_of(dtype: torch.dtype = torch.float32, sizes: ModelSizes = SIZES) -> nn.Module:
    return build_causal_lm(sizes, seed=0, dtype=dtype, device=CPU)


def batch(sequence: int = 256) -> torch.Tensor:
    return torch.randint(SIZES.vocab, (2, sequence), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, tokens: torch.Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def measured(model: nn.Module, tokens: torch.Tensor, *, accumulates: bool = False) -> int:
    """All bytes that a step allocates, its new gradients among them."""
    if not accumulates:
        model.zero_grad(set_to_none=True)
    return trace_memory(lambda: step(model, tokens), CPU).peak_bytes


@functools.lru_cache(maxsize=4)
def trained(budget: Budget, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """A compiled model after its steps, and what was found of each."""
    torch.compiler.reset()
    model = model_of(dtype)
    memfine_fx.optimize(model, dynamic=True, memory_budget=budget)
    tokens = batch(LENGTHS[dtype])
    step(model, tokens)
    found: dict[str, Any] = {"standard": measured(model, tokens), "gradients": gradients(model)}
    found["report"] = memfine_fx.report(model)
    found["accumulated"] = measured(model, tokens, accumulates=True)
    found["accumulated lean"] = lean_peak()
    found["longer"] = measured(model, batch(4 * LENGTHS[dtype]))
    found["longer lean"] = lean_peak()
    return model, found


def lean_peak() -> int:
    """Predicted of the latest step, had its regions kept nothing."""
    session = sessions()[-1]
    (run,) = session.steps.latest_runs()
    peak = step_peak_bytes([saving_nothing(run)], functools.partial(largest_chunk, session))
    assert peak is not None
    return peak


def num_saving(report: memfine_fx.Report) -> int:
    return sum(region.plan is not None and region.plan.policy != "nothing" for region in report.regions)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_free_is_kept_and_costs_no_byte_of_the_step(dtype: torch.dtype) -> None:
    (_, free), (_, least) = trained(None, dtype), trained("least", dtype)
    assert num_saving(free["report"]) > 0
    assert num_saving(least["report"]) == 0
    assert free["standard"] <= least["standard"]
    # NOTE: no gradient of the experts is made there, and which kernels are fused around them decides the peak.
    assert free["accumulated"] <= 1.001 * free["accumulated lean"]
    assert free["standard"] <= least["report"].step.peak.num_bytes
    # NOTE: kernels around the experts are fused otherwise, and in low precision round elsewhere; what is kept is exact
    # (see `test_one_compiled_graph_keeps_or_does_not`).
    exact = reference(dtype)
    for name, gradient in free["gradients"].items():
        error, leanest = relative_error(gradient, exact[name]), relative_error(least["gradients"][name], exact[name])
        assert error <= max(1e-5, 1.25 * leanest), name


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_length_costs_hardly_more_than_keeping_nothing(dtype: torch.dtype) -> None:
    """Not in the gate: by rates measured on a loaded machine it once took 13% more, and nobody knows why yet."""
    (_, free), (_, least) = trained(None, dtype), trained("least", dtype)
    # NOTE: compiled at another length, kernels stand in another order, which is worth 2% there in either direction.
    assert free["longer"] <= 1.001 * free["longer lean"]
    assert free["longer"] <= 1.02 * least["longer"]


def reference(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gradients in fp32 of a model with the same weights."""
    model = model_of(dtype).float()
    step(model, batch(LENGTHS[dtype]))
    return gradients(model)


@pytest.mark.slow
def test_reports_say_which_plan_it_was() -> None:
    (_, free), (_, least) = trained(None, torch.float32), trained("least", torch.float32)
    count = num_saving(free["report"])
    assert f"{count} of 2 regions save what does not raise the step's peak" in str(free["report"])
    assert 'memory_budget="least": regions save nothing' in str(least["report"])
    assert abs(free["report"].step.peak.num_bytes / free["standard"] - 1) < 0.02


class Dropping:
    """Stands in for the plan: saves such a share of the rows as the test says; None: of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share: float | None = None
        self.num_of_none = self.num_parts = 0
        empty, of_rows = SavedRows.empty, SavedRows.of_rows

        def counted(compiled_expert: SavingFunctions, hidden: torch.Tensor, num_rows: int) -> SavedRows:
            if not isinstance(num_rows, torch.SymInt):  # a call, not its fake implementation
                self.num_of_none += num_rows == 0
                self.num_parts += 0 < num_rows < 2 * hidden.shape[0]
            return empty(compiled_expert, hidden, num_rows)

        def checked(saved: SavedRows, total: int) -> SavedRows | None:
            for tensor in saved.tensors:
                assert tensor.shape[0] == saved.num_rows and tensor.untyped_storage().nbytes() == tensor.nbytes
            return of_rows(saved, total)

        monkeypatch.setattr(CompiledGraph, "_rates", lambda graph: lambda: RATES)
        monkeypatch.setattr(compiled_graph, "saving_in", self.of)
        monkeypatch.setattr(SavedRows, "empty", staticmethod(counted))
        monkeypatch.setattr(SavedRows, "of_rows", checked)

    def of(self, session: object, run: Run, hidden: torch.Tensor) -> RunMemory:
        if self.share is None:
            return run.memory
        region_ids = run.memory.step.optional
        return run.memory.with_saved_rows(
            {region_id: int(run.memory.rows_of(region_id) * self.share) for region_id in region_ids}
        )


@pytest.fixture
def dropping(monkeypatch: pytest.MonkeyPatch) -> Dropping:
    return Dropping(monkeypatch)


def unfused(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.compiler.reset()
    model = model_of(dtype, replace(SIZES, experts=4))
    memfine_fx.optimize(model, inner_backend="aot_eager", **options)
    return model


def plainly(model: nn.Module) -> None:
    step(model, batch(32))


def keeping_the_graph(model: nn.Module) -> None:
    loss = model(input_ids=batch(32), labels=batch(32)).loss
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()


def under_hooks(model: nn.Module) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = model(input_ids=batch(32), labels=batch(32)).loss
    loss.backward()


@pytest.mark.parametrize(
    ("run", "dtype"),
    [(plainly, torch.float32), (keeping_the_graph, torch.float32), (under_hooks, torch.bfloat16)],
)
def test_one_compiled_graph_keeps_or_does_not(
    dropping: Dropping, run: Callable[[nn.Module], None], dtype: torch.dtype
) -> None:
    model = unfused(dtype)
    found = []
    for share in (None, 0.0, 0.3, 0.8):
        dropping.share = share
        model.zero_grad()
        run(model)
        found.append(gradients(model))
    assert (dropping.num_of_none, dropping.num_parts) == (2, 4)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    for part, name in itertools.product(found[2:], found[0]):  # an expert at the border has its gradient in two parts
        assert relative_error(part[name], found[0][name]) <= (1e-6 if dtype == torch.float32 else 4e-3), name


def test_two_runs_under_one_backward_each_find_what_they_kept(dropping: Dropping) -> None:
    model = unfused()
    for shares in ((None, None), (0.0, None), (None, 0.0), (0.5, None), (0.7, 0.2)):
        losses = []
        for share, length in zip(shares, (32, 24), strict=True):
            dropping.share = share
            tokens = batch(length)
            losses.append(model(input_ids=tokens, labels=tokens).loss)
        model.zero_grad()
        sum(losses).backward()
        found = gradients(model)
        if shares == (None, None):
            expected = found
        assert all(relative_error(found[name], expected[name]) <= 1e-6 for name in found)


def test_where_the_loss_is_made_outside_of_the_graph_nothing_is_kept(dropping: Dropping) -> None:
    model = unfused()
    model(input_ids=batch(32)).logits.square().mean().backward()
    assert num_saving(memfine_fx.report(model)) == 0
