"""Loops over an nn.ModuleList of experts or over stacked weights: chunked, exact, without stacking the weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfine_fx
from memfine_fx.memory.measure import trace_memory
from memfine_fx.models import LoopConfig, LoopMoE
from tests.integration.comparison import (
    assert_no_worse_than_eager,
    assert_same_step,
    assert_same_step_up_to_zeros,
    optimized_copy,
    run_step,
)

SPELLINGS = ("where", "one_hot", "add", "any", "flat", "split")
SKIPPING = ("guarded", "hit")  # eager leaves the gradient of an expert without tokens at None


def loop_layer(spelling: str, **sizes: int) -> LoopMoE:
    torch.manual_seed(0)
    config = LoopConfig(**{"hidden": 16, "expert_width": 24, "num_experts": 4, **sizes}, spelling=spelling)  # type: ignore[arg-type]
    return LoopMoE(config)


def hidden_states(*shape: int) -> dict[str, Tensor]:
    return {"hidden": torch.randn(*shape, 16)}


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layer, hidden, use_reentrant=False)
        return hidden + out


def tie(model: nn.Module) -> None:
    """Every token to the same experts, the others empty."""
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            nn.init.zeros_(parameter)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("spelling", SKIPPING)
def test_loops_that_skip_experts_without_tokens(spelling: str, is_checkpointed: bool) -> None:
    layer = loop_layer(spelling)
    model = Checkpointed(layer) if is_checkpointed else layer
    optimized = optimized_copy(model, rows_per_chunk=5)
    for num_tokens in (19, 2):
        assert_same_step_up_to_zeros(optimized, model, hidden_states(num_tokens))
    tie(model), tie(optimized)
    assert_same_step_up_to_zeros(optimized, model, hidden_states(19))
    assert memfine_fx.report(optimized).num_chunked == 1
    assert "_memfine_forward" not in vars(optimized) and "run_hit" not in vars(layer)


@pytest.mark.parametrize(("spelling", "top_k"), list(zip(SPELLINGS, (2, 3, 4, 2, 3, 4), strict=True)))
def test_loops_are_chunked_exactly_in_every_shape_and_when_tied(spelling: str, top_k: int) -> None:
    """Tied scores send every token to the same experts and leave the others empty."""
    layer = loop_layer(spelling, top_k=top_k)
    optimized = optimized_copy(layer, axis="tokens" if spelling in ("where", "split") else "rows", rows_per_chunk=5)
    for shape in ((19,), (2, 7), (1,)):
        assert_same_step(optimized, layer, hidden_states(*shape))
    tie(layer), tie(optimized)
    assert_same_step(optimized, layer, hidden_states(13))
    assert memfine_fx.report(optimized).num_chunked == 1


def test_a_loop_with_splits_inside_a_checkpoint_is_chunked_exactly() -> None:
    model = Checkpointed(loop_layer("split"))
    optimized = optimized_copy(model, rows_per_chunk=5)
    assert_same_step(optimized, model, hidden_states(19))
    assert memfine_fx.report(optimized).num_chunked == 1


class StackedLoop(nn.Module):
    """Weights and biases stacked over experts, taken apart by index."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.top_k = top_k
        self.gate = nn.Linear(16, 4)
        self.up = nn.Parameter(torch.randn(4, 24, 16) / 4)
        self.up_bias = nn.Parameter(torch.randn(4, 24))
        self.down = nn.Parameter(torch.randn(4, 24, 16) / 5)

    def forward(self, hidden: Tensor) -> Tensor:
        weight, index = self.gate(hidden).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(hidden)
        for expert in range(4):
            token, choice = torch.where(index == expert)
            rows = F.relu(F.linear(hidden[token], self.up[expert], self.up_bias[expert])) @ self.down[expert]
            out.index_add_(0, token, rows * weight[token, choice, None])
        return out


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_loop_over_stacked_weights_keeps_their_tables(top_k: int) -> None:
    layer = StackedLoop(top_k)
    optimized = optimized_copy(layer, rows_per_chunk=5)
    assert_same_step(optimized, layer, hidden_states(21))
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked" and region.family == "loops"


def test_frozen_experts_get_no_gradient() -> None:
    layer = loop_layer("where")
    layer.experts[1].requires_grad_(False)
    layer.experts[3].w2.requires_grad_(False)
    optimized = optimized_copy(layer, rows_per_chunk=5)
    assert_same_step(optimized, layer, hidden_states(19))
    assert memfine_fx.report(optimized).num_chunked == 1
    assert all(parameter.grad is None for parameter in optimized.experts[1].parameters())


def test_no_stack_of_the_experts_weights_is_ever_made() -> None:
    layer = loop_layer("where", num_experts=8, expert_width=256)
    optimized = optimized_copy(layer, rows_per_chunk=16)
    inputs = hidden_states(32)
    run_step(optimized, inputs)
    one_weight = layer.experts[0].w1.weight.nbytes
    trace = trace_memory(lambda: run_step(optimized, inputs), torch.device("cpu"))
    assert trace.has_allocation_of(one_weight)
    assert not trace.has_allocation_of(2 * one_weight)


def test_a_bf16_loop_is_no_further_from_fp32_than_eager() -> None:
    layer = loop_layer("where", hidden=32, expert_width=64).to(torch.bfloat16)
    optimized = optimized_copy(layer, rows_per_chunk=7)
    inputs = {"hidden": torch.randn(64, 32).to(torch.bfloat16)}
    assert_no_worse_than_eager(optimized, layer, copy.deepcopy(layer).float(), inputs)
    assert memfine_fx.report(optimized).num_chunked == 1


class Centered(nn.Module):
    """Takes the mean of an expert's rows away: no row can be computed alone."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows - rows.sum(0) / (rows.shape[0] + 1)


class MixedExperts(nn.Module):
    """Two experts: a Linear and what follows it."""

    def __init__(self, *after: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(16, len(after))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), one) for one in after)

    def forward(self, hidden: Tensor) -> Tensor:
        weight, index = self.gate(hidden).softmax(-1).topk(1)
        out = torch.zeros_like(hidden)
        for expert_id, expert in enumerate(self.experts):
            token, choice = torch.where(index == expert_id)
            out.index_add_(0, token, expert(hidden[token]) * weight[token, choice, None])
        return out


def test_of_experts_that_differ_those_before_the_first_other_one_are_chunked() -> None:
    model = MixedExperts(nn.ReLU(), nn.ReLU(), nn.Tanh())
    optimized = optimized_copy(model)
    assert_same_step(optimized, model, hidden_states(9))
    (region,) = memfine_fx.report(optimized).regions
    assert region.dims is not None and region.dims.num_experts == 2


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
def test_experts_whose_rows_depend_on_each_other_are_refused_and_stay_exact() -> None:
    model = MixedExperts(Centered(), Centered())
    optimized = optimized_copy(model)
    assert_same_step(optimized, model, hidden_states(9))
    assert memfine_fx.report(optimized).num_chunked == 0


class MetricBesideLoop(nn.Module):
    """A loop that is not raised, beside another shape that only the data knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MixedExperts(Centered(), Centered())
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor) -> Tensor:
        self.num_calls += 1
        positive = hidden[hidden > 0]
        return F.dropout(self.layer(hidden), 0.5) + positive.mean()


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
def test_flags_are_taken_back_where_no_loop_is_raised() -> None:
    """Random numbers and buffers of abandoned attempts are put back, so that the step is eager's."""
    model = MetricBesideLoop()
    optimized = optimized_copy(model)
    inputs = hidden_states(9)
    torch.manual_seed(3)
    step = run_step(optimized, inputs)
    torch.manual_seed(3)
    reference = run_step(model, inputs)
    assert max(step.error_from(reference).values()) < 1e-5
    assert optimized.num_calls == model.num_calls == 1


class CountBesideLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = loop_layer("where")

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) + hidden[hidden > 0].sum()


def test_a_raised_loop_keeps_its_flags_beside_other_data_dependent_shapes() -> None:
    model = CountBesideLoop()
    optimized = optimized_copy(model, inner="inductor", rows_per_chunk=5)
    for num_tokens in (19, 8):
        assert_same_step(optimized, model, hidden_states(num_tokens))
    assert memfine_fx.report(optimized).num_chunked == 1


def test_capturing_can_be_switched_off() -> None:
    layer = loop_layer("where")
    optimized = memfine_fx.optimize(
        copy.deepcopy(layer), config=memfine_fx.Config(inner_backend="eager", captures_loops=False)
    )
    with pytest.warns(UserWarning, match="found nothing to chunk"):
        assert_same_step(optimized, layer, hidden_states(9))
        optimized(**hidden_states(9))


def test_explain_says_which_flags_were_switched_on() -> None:
    report = memfine_fx.explain(loop_layer("where"), **hidden_states(9))
    assert report.num_chunked == 1
    assert "capture_dynamic_output_shape_ops" in str(report)


class GuardedByOther(nn.Module):
    """Experts are skipped for a flag of their own, not for having no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("enabled", torch.tensor([True, False, True, True]))

    def forward(self, hidden: Tensor) -> Tensor:
        weight, index = self.gate(hidden).softmax(-1).topk(2)
        out = torch.zeros_like(hidden)
        for expert_id, expert in enumerate(self.experts):
            is_on = self.enabled[expert_id]
            token, choice = torch.where(index == expert_id)
            if not is_on.any():
                continue
            out.index_add_(0, token, expert(hidden[token]) * weight[token, choice, None])
        return out


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
def test_experts_skipped_for_another_reason_stay_skipped() -> None:
    model = GuardedByOther()
    optimized = optimized_copy(model)
    assert_same_step(optimized, model, hidden_states(11))
    assert memfine_fx.report(optimized).num_chunked == 0


def test_dropout_in_experts_of_a_list_is_told_as_such() -> None:
    """Without the flags that let the loop into a graph, all that shows is a graph break before the experts."""
    layer = loop_layer("where")
    layer.experts = nn.ModuleList(nn.Sequential(expert, nn.Dropout(0.1)) for expert in layer.experts)
    optimized = optimized_copy(layer, rows_per_chunk=5)
    with pytest.warns(UserWarning, match="random numbers are drawn inside the experts"):
        optimized(**hidden_states(12)).sum().backward()
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "refused" and region.refused_for == "RANDOM_NUMBERS", str(region)
    assert "lora_dropout=0" in str(region) and region.where.module.startswith("experts.0")
