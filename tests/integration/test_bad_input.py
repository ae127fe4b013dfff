"""What is asked for and cannot be had: typed errors, warnings and refusals, never a wrong number."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import memfine_fx
from memfine_fx.models import MixtralConfig, MixtralMoE
from tests.integration.comparison import assert_same_step, optimized_copy


def layer() -> MixtralMoE:
    return MixtralMoE(MixtralConfig(hidden=16, expert_width=24, spelling="gathered"))


def dense() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))


def test_an_impossible_budget_names_the_smallest_that_works() -> None:
    model = layer()
    optimized = memfine_fx.optimize(model, inner_backend="eager", memory_budget=1)
    hidden = torch.randn(200, 16)
    with pytest.raises(memfine_fx.BudgetInfeasible, match="the smallest budget that fits is") as caught:
        optimized(hidden)
    typed = re.search(r'Raise memory_budget to "(.+?)"', str(caught.value))
    assert typed is not None
    for budget in (caught.value.minimum_bytes, typed[1]):
        again = memfine_fx.optimize(layer(), inner_backend="eager", memory_budget=budget)
        again(hidden).sum().backward()
        assert memfine_fx.report(again).num_chunked == 1


@pytest.mark.parametrize("budget", ["lots", 0, -5, 1.5, True, "12 parsecs"])
def test_a_malformed_budget_is_named(budget: object) -> None:
    with pytest.raises(memfine_fx.ConfigError, match="memory_budget="):
        memfine_fx.optimize(layer(), memory_budget=budget)  # type: ignore[arg-type]  # on purpose


def test_an_unknown_backend_option_is_named() -> None:
    compiled = torch.compile(layer(), backend="memfine", options={"chunk_size": 4})
    with pytest.raises(memfine_fx.ConfigError, match="chunk_size"):
        compiled(torch.randn(4, 16))


def test_cuda_graph_modes_are_refused_by_name() -> None:
    compiled = torch.compile(layer(), backend="memfine", mode="reduce-overhead")
    with pytest.raises(memfine_fx.ConfigError, match="reduce-overhead"):
        compiled(torch.randn(4, 16))


def test_a_model_without_experts_runs_as_it_is_with_one_warning() -> None:
    model = dense()
    optimized = optimized_copy(model)
    hidden = torch.randn(5, 8)
    with pytest.warns(UserWarning, match="found nothing to chunk"):
        optimized(hidden)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(optimized(hidden), model(hidden))


def test_the_string_backend_warns_by_the_second_step() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(dense(), backend="memfine", options={"inner_backend": "eager", "rows_per_chunk": 63})
    compiled(torch.randn(5, 8))
    with pytest.warns(UserWarning, match="found nothing to chunk"):
        compiled(torch.randn(5, 8))


def test_a_model_with_experts_hides_no_warning_about_another_of_the_same_options() -> None:
    """Equal options share a session, which has chunked something then."""
    torch._dynamo.reset()
    options = {"inner_backend": "eager", "rows_per_chunk": 61}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunked = torch.compile(layer(), backend="memfine", options=options)
        for _ in range(3):
            chunked(torch.randn(6, 16))
    compiled = torch.compile(dense(), backend="memfine", options=options)
    compiled(torch.randn(5, 8))
    with pytest.warns(UserWarning, match="found nothing to chunk"):
        compiled(torch.randn(5, 8))


class BrokenAround(torch.nn.Module):
    """A module that breaks graphs before and after itself, as the hooks of DeepSpeed's ZeRO-3 do around every one."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        result: torch.Tensor = self.module(hidden)
        torch._dynamo.graph_break()
        return result


def broken_around(*modules: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(*map(BrokenAround, modules))


def norms_and_activations() -> list[torch.nn.Module]:
    """Equal modules, which share graphs within a step."""
    return [torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.GELU()]


def test_equal_modules_before_the_experts_are_no_second_step() -> None:
    torch._dynamo.reset()
    model = broken_around(*norms_and_activations(), layer())
    compiled = torch.compile(model, backend="memfine", options={"inner_backend": "eager", "rows_per_chunk": 59})
    for _ in range(3):
        compiled(torch.randn(6, 16)).sum().backward()  # a warning would be an error here
    assert memfine_fx.report(compiled).num_chunked == 1


def test_equal_modules_without_experts_are_told_of_in_the_second_step() -> None:
    torch._dynamo.reset()
    options = {"inner_backend": "eager", "rows_per_chunk": 57}
    compiled = torch.compile(broken_around(*norms_and_activations()), backend="memfine", options=options)
    compiled(torch.randn(6, 16))
    with pytest.warns(UserWarning, match="found nothing to chunk"):
        compiled(torch.randn(6, 16))


def test_a_second_derivative_is_a_clear_error() -> None:
    optimized = optimized_copy(layer())
    hidden = torch.randn(6, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(optimized(hidden).pow(2).sum(), hidden, create_graph=True)
    with pytest.raises(memfine_fx.DoubleBackwardError, match="double backward"):
        gradient.sum().backward()


@pytest.mark.parametrize("thing", ["a string", None, 3])
def test_only_modules_can_be_optimized(thing: object) -> None:
    with pytest.raises(memfine_fx.ConfigError, match=r"expects a torch\.nn\.Module"):
        memfine_fx.optimize(thing)  # type: ignore[type-var]  # on purpose


def test_a_report_needs_a_compiled_model() -> None:
    with pytest.raises(memfine_fx.MemfineError, match="nothing of this model has been compiled"):
        memfine_fx.report(layer())


class MixesRows(MixtralMoE):
    """Normalises over all routed rows of the layer: not one row's business."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, index = torch.softmax(self.gate(hidden), dim=-1).topk(2, dim=-1)
        flat = index.reshape(-1)
        rows = hidden.repeat_interleave(2, dim=0)
        out = torch.bmm(rows.unsqueeze(1), self.table[flat]).squeeze(1)
        out = out - out.mean(dim=0, keepdim=True)
        return (out * weights.reshape(-1, 1)).view(-1, 2, 16).sum(dim=1)

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(config)
        self.table = torch.nn.Parameter(torch.randn(8, 16, 16) / 4)


def test_an_expert_that_mixes_rows_is_refused_with_the_operation_and_stays_exact() -> None:
    model = MixesRows(MixtralConfig(hidden=16, expert_width=24, spelling="gathered"))
    del model.experts
    optimized = optimized_copy(model)
    with pytest.warns(UserWarning, match="rows are not independent"):
        assert_same_step(optimized, model, {"hidden": torch.randn(12, 16)})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "refused"
    assert "test_bad_input.py" in region.where.source
