"""The check behind the reading of gradients: with the reading broken on purpose, nothing is chunked with wrong ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import memfine_fx
from benchmarks.coverage.spellings import SPELLINGS
from memfine_fx.passes.lower import compiled_expert
from memfine_fx.passes.read import reader, removable
from memfine_fx.passes.read.rules import RULES
from memfine_fx.passes.verify import gradient_check
from memfine_fx.passes.verify import region as region_forms
from memfine_fx.passes.verify.gradient_check import narrow_widths
from memfine_fx.passes.verify.reference import ExactRun
from memfine_fx.records import MoERegion
from tests.integration.comparison import assert_same_step, optimized_copy
from tests.integration.test_semantics_kept import (
    DetachedGatheredTable,
    DetachedRows,
    DetachedWeight,
    Gathered,
    H,
    Rounded,
    Stacked,
    StraightThrough,
)
from tests.quantized import dequantized

pytestmark = pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")

WIDE_H, WIDE_F, EXPERTS = 64, 96, 6


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_check, "_known", {})
    monkeypatch.setattr(compiled_expert, "_cache", {})


@pytest.fixture
def detach_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host in which no reading shows what stops gradients."""
    for room in (reader, removable):
        monkeypatch.setattr(room, "gradient_stop", lambda nodes, flow: None)
    monkeypatch.setitem(RULES, torch.ops.aten.detach.default, RULES[torch.ops.aten.alias.default])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[int, int]]:
    """The narrow widths of every comparison that was run."""
    found: list[Mapping[int, int]] = []
    run = gradient_check._run

    def spy(forms: Any, of_experts: Any, inputs: Any, widths: Mapping[int, int]) -> Any:
        found.append(widths)
        return run(forms, of_experts, inputs, widths)

    monkeypatch.setattr(gradient_check, "_run", spy)
    return found


class Wide(nn.Module):
    """A gated layer whose widths stand in the graph as numbers; `stop` acts on the gate."""

    def __init__(self, stop: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.stop = stop
        self.router = nn.Linear(WIDE_H, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDE_H, 2 * WIDE_F) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDE_F, WIDE_H) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.router(x).softmax(-1).topk(2, -1)
        ids = index.reshape(-1)
        h = torch.bmm(x.repeat_interleave(2, 0).unsqueeze(1), self.gate_up[ids]).squeeze(1)
        h = F.silu(self.stop(h[:, :WIDE_F])) * h[:, WIDE_F:]
        y = torch.bmm(h.unsqueeze(1), self.down[ids]).squeeze(1) * weight.reshape(-1, 1)
        return y.view(-1, 2, WIDE_H).sum(1)


@torch._dynamo.allow_in_graph
def rounded(h: torch.Tensor) -> torch.Tensor:
    """Straight through, in a function that Dynamo puts into its graph whole: no node shows that gradients stop."""
    with torch.no_grad():
        change = torch.round(h * 4) / 4 - h
    return h + change


@torch._dynamo.allow_in_graph
def rounded_by_function(h: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Rounded.apply(h)
    return result


def reason_of(optimized: nn.Module) -> str:
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "refused", str(region)
    assert "internal error" not in region.reason
    return region.reason


@pytest.mark.usefixtures("detach_is_lost")
@pytest.mark.parametrize("case", [StraightThrough, DetachedWeight, DetachedRows, DetachedGatheredTable])
def test_a_detach_that_no_reading_shows_is_refused_and_trains_exactly(case: Callable[[], nn.Module]) -> None:
    model = case()
    optimized = optimized_copy(model, inner="aot_eager", rows_per_chunk=3)
    assert_same_step(optimized, model, {"x": torch.randn(10, H)})
    assert "other gradients than autograd finds in the layer as written" in reason_of(optimized)


@pytest.mark.parametrize("function", [rounded, rounded_by_function])
def test_what_stops_gradients_in_a_function_that_dynamo_keeps_whole_is_refused(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    class Whole(Gathered):
        def act(self, h: torch.Tensor) -> torch.Tensor:
            return function(h) * 1.5

    model = Whole()
    optimized = optimized_copy(model, inner="aot_eager", rows_per_chunk=3)
    assert_same_step(optimized, model, {"x": torch.randn(10, H)})
    assert ("other gradients" in reason_of(optimized)) == (function is rounded)


def test_a_broken_derivative_of_the_expert_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    derive = compiled_expert._Vjp.__call__

    def broken(self: Any, grad: torch.Tensor, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, *others = derive(self, grad, *args)
        return (first * 1.01, *others)

    monkeypatch.setattr(compiled_expert._Vjp, "__call__", broken)
    model = Gathered()
    optimized = optimized_copy(model, rows_per_chunk=3)
    assert_same_step(optimized, model, {"x": torch.randn(10, H)})
    assert "d l_x_ differs by 1.0e-02 relative" in reason_of(optimized)


def test_another_output_than_the_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As reading a graph wrong would give it: a residual that is added twice was such a case."""
    lowered = region_forms.lower_region

    def off_by_a_residual(graph_module: fx.GraphModule, region: MoERegion, region_id: str, **options: Any) -> None:
        lowered(graph_module, replace(region, base=region.hidden), region_id, **options)

    monkeypatch.setattr(region_forms, "lower_region", off_by_a_residual)
    model = Gathered()
    optimized = optimized_copy(model, rows_per_chunk=3)
    assert_same_step(optimized, model, {"x": torch.randn(10, H)})
    assert "another output than the layer as written: off by" in reason_of(optimized)
    (region,) = memfine_fx.report(optimized).regions
    assert region.refused_for == "OTHER_OUTPUT"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_wide_layer_is_compared_in_narrow(
    is_stopped: bool, runs: list[Mapping[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_check, "_SMALL_BYTES", 0)
    optimized = optimized_copy(Wide(rounded if is_stopped else torch.tanh), rows_per_chunk=3)
    optimized(torch.randn(10, WIDE_H, requires_grad=True))
    (region,) = memfine_fx.report(optimized).regions
    assert runs == [{64: 2, 96: 3, 192: 6}]
    assert region.status == ("refused" if is_stopped else "chunked")
    assert not region.uncompared


def test_a_layer_that_cannot_be_compared_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_check, "_MOST_BYTES", 0)
    optimized = optimized_copy(Gathered(), rows_per_chunk=3)
    optimized(torch.randn(10, H))
    (region,) = memfine_fx.report(optimized).regions
    assert "gradients not compared when it was compiled (its sizes are too large)" in str(region)


def test_equal_layers_are_compared_once(runs: list[Mapping[int, int]]) -> None:
    optimized = optimized_copy(Stacked(), rows_per_chunk=3)
    optimized(torch.randn(10, H, requires_grad=True))
    assert memfine_fx.report(optimized).num_chunked == 2
    assert len(runs) == 1


def test_an_evaluation_compares_nothing(runs: list[Mapping[int, int]]) -> None:
    with torch.no_grad():
        optimized_copy(Gathered(), rows_per_chunk=3)(torch.randn(10, H))
    assert not runs


def test_comparing_draws_no_random_numbers_and_leaves_no_gradients(caplog: pytest.LogCaptureFixture) -> None:
    optimized = optimized_copy(Gathered(), rows_per_chunk=3)
    x = torch.randn(10, H)
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "memfine_fx"):
        optimized(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in optimized.parameters())
    assert not caplog.records


@pytest.mark.parametrize(
    ("widths", "counts", "narrow"),
    [
        ([2048, 768, 1536], [128, 8], {2048: 8, 768: 3, 1536: 6}),
        ([2048, 768, 1536, 8], [128, 8], {2048: 8, 768: 3, 1536: 6}),
        ([64, 96], [64, 2], {}),
        ([33, 64], [4, 2], {}),
        ([], [4, 2], {}),
    ],
)
def test_widths_are_divided_by_their_common_factor(
    widths: list[int], counts: list[int], narrow: dict[int, int]
) -> None:
    assert narrow_widths(widths, counts) == narrow


def test_an_eps_of_the_dtype_is_that_of_the_layer_and_not_of_the_comparison() -> None:
    """An RMSNorm without eps takes the dtype's, and the layer is compared in fp64, on a few features only."""
    layer, hidden = SPELLINGS["experts, normed"]()
    config = memfine_fx.Config(inner_backend="eager", rows_per_chunk=5)
    optimized = memfine_fx.optimize(layer, config=config)
    optimized(hidden)
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked" and not region.uncompared


def test_what_a_library_makes_in_low_precision_is_not_rounded() -> None:
    """Else packed experts in bf16 would have another output in chunks, whose bodies ask for bf16, than as written."""

    def made(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.ops.bitsandbytes.dequantize_4bit(packed, scales, 32, "nf4", [8, 16], torch.bfloat16)  # type: ignore[no-any-return]

    packed, scales = torch.randint(0, 256, (64, 1), dtype=torch.uint8), torch.rand(4)
    found = ExactRun(fx.symbolic_trace(made)).run(packed, scales)
    assert torch.equal(found, dequantized(packed, scales, 32, (8, 16)).double())
    assert not torch.equal(found.bfloat16().double(), found)


def test_what_is_made_in_fp32_goes_on_in_fp64() -> None:
    def third(x: torch.Tensor) -> torch.Tensor:
        return x.long() / 1 / 3  # a quotient of integers is fp32

    found = ExactRun(fx.symbolic_trace(third)).run(torch.ones(1, dtype=torch.float64))
    assert found.tolist() == [1 / 3]


class Sized(nn.Module):
    """Results are added to zeros of a `torch.Size` that is an input of the region where sizes are dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, H, 6)), nn.Parameter(torch.randn(4, 6, H))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.size()
        tokens = x.reshape(-1, size[-1])
        weights, ids = torch.topk(self.router(tokens).softmax(-1), 2)
        total = torch.zeros(tokens.size(), dtype=tokens.dtype)
        for number in range(4):
            rows, choices = torch.where(ids == number)
            hidden = F.silu(tokens[rows] @ self.up[number]) @ self.down[number]
            total.index_add_(0, rows, hidden * weights[rows, choices, None])
        return total.view(size)


def test_a_region_with_a_size_among_its_inputs_is_compared(runs: list[Mapping[int, int]]) -> None:
    model = Sized()
    chunked = optimized_copy(model, verify=True)
    assert_same_step(chunked, model, {"x": torch.randn(3, 7, H)})
    (region,) = memfine_fx.report(chunked).regions
    assert (region.status, region.uncompared) == ("chunked", "") and runs
