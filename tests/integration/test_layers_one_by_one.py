"""Equal layers that are compiled one by one share a graph: each keeps its own parameters, and all of them count."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import memfine_fx
from memfine_fx.compiler.session import Session
from memfine_fx.compiler.sessions import sessions
from memfine_fx.memory.measure import trace_memory
from memfine_fx.models.mixtral import MixtralConfig, MixtralMoE

NUM_LAYERS, HIDDEN, TOKENS = 4, 64, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        config = MixtralConfig(hidden=HIDDEN, expert_width=48, num_experts=4, top_k=2, spelling="gathered")
        self.experts = MixtralMoE(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.experts(self.norm(x))
        return result


def stack(**options: object) -> tuple[nn.Sequential, nn.Sequential]:
    """(blocks compiled one by one, the same in eager)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
    model = copy.deepcopy(eager)
    for block in model:
        block.compile(backend="memfine", options=options)
    return model, eager


def own_session(model: nn.Module) -> Session:
    found = next(one for one in reversed(sessions()) if one.steps.reads_any({id(one) for one in model.parameters()}))
    part = found.restricted_to(model.parameters())
    assert part is not None
    return part


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def test_each_layer_adds_to_its_own_gradients() -> None:
    """Micro-batches: tables' gradients are added to where they are, those of every layer."""
    model, eager = stack(inner_backend="aot_eager")
    tables = [block.experts.experts.gate_up_proj for block in model]
    for number in range(3):
        x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
        step(model, x)
        step(eager, x)
        if number == 0:
            there = [table.grad.data_ptr() for table in tables]
    assert [table.grad.data_ptr() for table in tables] == there
    for (name, parameter), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (parameter.grad - other.grad).norm() <= 1e-5 * other.grad.norm(), name
    (graph,) = own_session(model).graphs
    runs = own_session(model).steps.latest_runs()
    assert len(runs) == NUM_LAYERS and all(run.added for run in runs)
    assert len(graph.alive_parameters()) == len(list(model.parameters()))


def test_the_bytes_of_a_step_are_those_of_all_layers() -> None:
    model, _ = stack()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    for _ in range(2):
        step(model, x)
        optimizer.step()
        optimizer.zero_grad()
    measured = trace_memory(lambda: step(model, x), torch.device("cpu")).peak_bytes
    report = memfine_fx.report(model)
    terms = own_session(model).steps.static_terms()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert terms["parameters"] == num_bytes
    assert 2 * num_bytes <= terms["optimizer state"] <= 2.01 * num_bytes
    assert report.step is not None
    assert measured <= report.step.peak.num_bytes <= 1.02 * measured


def test_plans_stay_while_layers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = stack(inner_backend="aot_eager", memory_budget="1GiB")
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    for _ in range(2):
        step(model, x)
        model.zero_grad()
    monkeypatch.setattr(Session, "forget_plans", lambda self: pytest.fail("plans were forgotten"))
    step(model, x)
    assert own_session(model).diagnostics.stage_seconds.get("recompile", 0.0) == 0.0


def test_a_layer_that_is_gone_counts_no_more() -> None:
    model, _ = stack(inner_backend="aot_eager")
    step(model, torch.randn(TOKENS, HIDDEN, requires_grad=True))
    (graph,) = own_session(model).graphs
    own = len(list(model[0].parameters()))
    assert len(graph.alive_parameters()) == NUM_LAYERS * own
    del model[-1]
    gc.collect()  # a module that was compiled refers to itself
    assert len(graph.alive_parameters()) == (NUM_LAYERS - 1) * own


def test_a_budget_is_of_all_layers() -> None:
    model, _ = stack(inner_backend="aot_eager", memory_budget="1GiB")
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    step(model, x)
    model.zero_grad()
    step(model, x)
    report = memfine_fx.report(model)
    assert report.step is not None
    needed = report.step.static_bytes + report.step.peak.num_bytes
    model, _ = stack(inner_backend="aot_eager", memory_budget=needed // 2)
    with pytest.raises(memfine_fx.BudgetInfeasible):
        step(model, x)


def test_a_model_that_shares_code_with_another_counts_its_own_parameters() -> None:
    torch._dynamo.reset()
    models = [Block(), Block()]
    for model in models:
        compiled = torch.compile(model, backend="memfine", options={"inner_backend": "aot_eager"})
        for _ in range(2):
            step(compiled, torch.randn(TOKENS, HIDDEN, requires_grad=True))
    for model in models:
        found = own_session(model)
        assert len(found.graphs[-1].alive_parameters()) == 2 * len(list(model.parameters()))
        assert found.steps.static_terms()["parameters"] == sum(parameter.nbytes for parameter in model.parameters())
