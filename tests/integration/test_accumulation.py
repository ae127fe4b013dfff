"""A micro-batch adds to gradients that are there where they are: no second set of tables, and the same sums."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfine_fx
from memfine_fx.compat import checks
from memfine_fx.compat.autograd import ACCUMULATED
from memfine_fx.demo.training import ModelSizes, build_causal_lm
from memfine_fx.errors import BudgetInfeasible, CompatibilityWarning
from memfine_fx.memory.measure import MemoryTrace, trace_memory
from memfine_fx.models.mixtral import MixtralConfig, MixtralMoE
from tests.integration.comparison import relative_error

CPU = torch.device("cpu")
SIZES = ModelSizes(
    layers=2, hidden=64, width=64, experts=16, top_k=2, heads=4, kv_heads=2, head_dim=16, vocab=128, positions=256
)
TABLE_ELEMENTS = SIZES.experts * 2 * SIZES.width * SIZES.hidden
INNER = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
SLOW = pytest.mark.slow


class Layer(nn.Module):
    """One layer of experts with a loss, as the causal language models are called: quick to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SIZES.vocab, SIZES.hidden)
        config = MixtralConfig(hidden=SIZES.hidden, expert_width=SIZES.width, num_experts=SIZES.experts, top_k=2)
        self.experts = MixtralMoE(dataclasses.replace(config, spelling="gathered"))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return SimpleNamespace(loss=self.experts(self.embedding(input_ids)).square().mean())


def batch(seed: int, length: int = 48) -> torch.Tensor:
    return torch.randint(SIZES.vocab, (2, length), generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, tokens: torch.Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()


def optimized(model: nn.Module, inner: str = "aot_eager", **config: Any) -> tuple[nn.Module, nn.Module]:
    """The model, optimized, and its twin without memfine_fx."""
    twin = copy.deepcopy(model)
    memfine_fx.optimize(model, dynamic=True, config=memfine_fx.Config(inner_backend=inner, **config))  # type: ignore[arg-type]
    return model, twin


def models(inner: str = "aot_eager", **config: Any) -> tuple[nn.Module, nn.Module]:
    return optimized(build_causal_lm(SIZES, seed=0, dtype=torch.float32, device=CPU), inner, **config)


def layers(dtype: torch.dtype = torch.float32, **config: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return optimized(Layer().to(dtype), **config)


def tables(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.ndim == 3]


def traced(model: nn.Module, tokens: torch.Tensor) -> MemoryTrace:
    return trace_memory(lambda: step(model, tokens), CPU)


def num_added(model: nn.Module) -> list[int]:
    return [one.num_added for one in memfine_fx.report(model).regions]


def errors(model: nn.Module, reference: nn.Module) -> list[float]:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return [relative_error(one.grad, other.grad) for one, other in pairs if one.grad is not None]  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [None, pytest.param(5, marks=SLOW)])
@pytest.mark.parametrize("inner", INNER)
def test_micro_batches_sum_and_make_no_table(inner: str, rows: int | None) -> None:
    model, twin = models(inner=inner, rows_per_chunk=rows)
    for seed in range(3):
        step(model, batch(seed, 48 + seed))
        step(twin, batch(seed, 48 + seed))
    first = num_added(model)
    trace = traced(model, batch(3))
    step(twin, batch(3))
    assert first == num_added(model) == [2, 2]
    assert max(errors(model, twin)) <= 1e-5
    assert not trace.has_allocation_of(4 * TABLE_ELEMENTS // 2)
    report = memfine_fx.report(model)
    assert report.step is not None
    assert trace.peak_bytes <= report.step.peak.num_bytes + 64  # numbers that autograd makes outside of the graphs
    if inner == "inductor":  # the record of uncompiled graphs counts tables that backward sees as views twice
        assert report.step.peak.num_bytes <= 1.02 * trace.peak_bytes
    assert "2 gradients added to where they were" in str(report)


@pytest.mark.parametrize("rows", [None, 5])
def test_low_precision_sums_are_no_further_off_than_autograds(rows: int | None) -> None:
    model, _ = layers(torch.bfloat16, rows_per_chunk=rows)
    exact = [torch.zeros_like(one, dtype=torch.float64) for one in tables(model)]
    rounded = [torch.zeros_like(one) for one in tables(model)]
    for seed in range(4):
        model.zero_grad(set_to_none=True)
        step(model, batch(seed))
        for one, total, summed in zip(tables(model), exact, rounded, strict=True):
            total += one.grad  # type: ignore[arg-type]  # it is there
            summed += one.grad  # type: ignore[arg-type]
    model.zero_grad(set_to_none=True)
    for seed in range(4):
        step(model, batch(seed))
    assert num_added(model) == [2]
    for one, total, summed in zip(tables(model), exact, rounded, strict=True):
        assert relative_error(one.grad, total) <= 1.25 * relative_error(summed, total)  # type: ignore[arg-type]


def test_without_the_hook_a_second_set_is_made_and_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks._failures, ACCUMULATED.name, "broken on purpose")
    monkeypatch.setattr(checks, "_warned", set())
    model, twin = layers()
    with pytest.warns(CompatibilityWarning) as caught:
        for seed in range(3):
            step(model, batch(seed))
            step(twin, batch(seed))
    assert [str(one.message).endswith(ACCUMULATED.fallback) for one in caught] == [True]
    assert num_added(model) == [0]
    assert max(errors(model, twin)) <= 1e-5


@pytest.mark.slow
def test_a_budget_that_only_this_keeps() -> None:
    """It holds the tables' gradients once."""
    model, _ = models()
    for seed in range(2):
        step(model, batch(seed))
    one_set = sum(one.nbytes for one in tables(model))
    there = 2 * sum(one.nbytes for one in model.parameters())
    budget = there + traced(model, batch(3)).peak_bytes + one_set // 4
    model, twin = models(memory_budget=budget)
    for seed in range(3):
        static = sum(one.nbytes + (0 if one.grad is None else one.grad.nbytes) for one in model.parameters())
        assert static + traced(model, batch(seed)).peak_bytes <= budget
        step(twin, batch(seed))
    assert max(errors(model, twin)) <= 1e-5
    for table in tables(model):
        table.register_hook(lambda gradient: None)
    with pytest.raises(BudgetInfeasible):  # a hook asks for a gradient of its own
        step(model, batch(3))


def hooked(model: nn.Module, tokens: torch.Tensor) -> None:
    handles = [one.register_hook(lambda gradient: 2 * gradient) for one in tables(model)]  # type: ignore[no-untyped-call]
    step(model, tokens)
    for handle in handles:
        handle.remove()


def hooked_after(model: nn.Module, tokens: torch.Tensor) -> None:
    def double(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    handles = [one.register_post_accumulate_grad_hook(double) for one in tables(model)]  # type: ignore[no-untyped-call]
    step(model, tokens)
    for handle in handles:
        handle.remove()


def returned(model: nn.Module, tokens: torch.Tensor) -> None:
    """`torch.autograd.grad` leaves what is there alone."""
    own = tables(model)
    found = torch.autograd.grad(model(input_ids=tokens, labels=tokens).loss, own)
    with torch.no_grad():
        for table, gradient in zip(own, found, strict=True):
            assert table.grad is not None
            table.grad += 3 * gradient


def left_out(model: nn.Module, tokens: torch.Tensor) -> None:
    others = [one for one in model.parameters() if one.ndim != 3]
    model(input_ids=tokens, labels=tokens).loss.backward(inputs=others)


def in_shared_storage(model: nn.Module, tokens: torch.Tensor) -> None:
    """As buckets of DDP hold them."""
    own = tables(model)
    bucket = torch.cat([one.grad.flatten() for one in own if one.grad is not None])
    for one, part in zip(own, bucket.split([one.numel() for one in own]), strict=True):
        one.grad = part.view_as(one)
    step(model, tokens)


def twice_through_a_graph(model: nn.Module, tokens: torch.Tensor) -> None:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward(retain_graph=True)
    loss.backward()


def cleared_before_backward(model: nn.Module, tokens: torch.Tensor) -> None:
    loss = model(input_ids=tokens, labels=tokens).loss
    model.zero_grad(set_to_none=True)
    loss.backward()


def zeroed_before_backward(model: nn.Module, tokens: torch.Tensor) -> None:
    loss = model(input_ids=tokens, labels=tokens).loss
    model.zero_grad(set_to_none=False)
    loss.backward()


def with_one_frozen(model: nn.Module, tokens: torch.Tensor) -> None:
    tables(model)[0].requires_grad_(False)
    step(model, tokens)
    tables(model)[0].requires_grad_()


def with_one_cleared(model: nn.Module, tokens: torch.Tensor) -> None:
    tables(model)[1].grad = None
    step(model, tokens)


def under_saved_tensor_hooks(model: nn.Module, tokens: torch.Tensor) -> None:
    """What backward finds saved is a copy."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda one: one):
        step(model, tokens)


WAYS: list[tuple[Callable[[nn.Module, torch.Tensor], None], int]] = [
    (hooked, 0),
    (hooked_after, 0),
    (returned, 0),
    (left_out, 0),
    (in_shared_storage, 0),
    (twice_through_a_graph, 2),
    (cleared_before_backward, 0),
    (zeroed_before_backward, 2),
    (with_one_cleared, 1),
    (with_one_frozen, 1),
    (under_saved_tensor_hooks, 0),
]


@pytest.mark.parametrize(("way", "expected"), WAYS, ids=[way.__name__ for way, _ in WAYS])
def test_whichever_way_a_backward_runs(way: Callable[[nn.Module, torch.Tensor], None], expected: int) -> None:
    model, twin = layers()
    for one in (model, twin):
        step(one, batch(0))
        way(one, batch(1))
    assert sum(num_added(model)) == expected
    assert max(errors(model, twin)) <= 1e-5


def test_whoever_waits_for_a_gradient_is_called() -> None:
    """Hooks of the node that accumulates, as those of DDP, which nobody can see."""
    model, _ = layers()
    step(model, batch(0))
    table, called = tables(model)[0], []
    node = torch.autograd.graph.get_gradient_edge(table).node
    before = torch.empty(0) if table.grad is None else table.grad.clone()
    node.register_hook(lambda *_: called.append(table.grad))
    step(model, batch(1))
    assert num_added(model) == [2]
    assert len(called) == 1 and called[0] is table.grad
    assert not torch.equal(before, table.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "expected"), [({}, 2), ({"gradient_as_bucket_view": True}, 0)])
def test_data_parallel_averages_what_was_added(options: dict[str, Any], expected: int, tmp_path: Path) -> None:
    """Its reducer reads a gradient once the node that accumulates has run, which it has to be told of."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model, twin = layers()
        ours, theirs = (nn.parallel.DistributedDataParallel(one, **options) for one in (model, twin))
        for seed in range(4):
            for one in (ours, theirs):
                with one.no_sync() if seed == 1 else contextlib.nullcontext():
                    step(one, batch(seed))
    finally:
        torch.distributed.destroy_process_group()
    assert num_added(model) == [expected]
    assert max(errors(model, twin)) <= 1e-5
