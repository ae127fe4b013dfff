"""Chunked heads in whole models: losses, gradients, bytes, plans and reports."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfine_fx
from memfine_fx.config import Config
from memfine_fx.demo.training import ModelSizes, build_causal_lm
from memfine_fx.errors import BudgetInfeasible
from memfine_fx.memory.head_bytes import HeadBytes
from memfine_fx.memory.measure import trace_memory
from memfine_fx.plan.rows import plan_head
from tests.integration.comparison import relative_error

CPU = torch.device("cpu")
V = 6000
SIZES = ModelSizes(
    layers=1, hidden=32, width=32, experts=4, top_k=2, heads=2, kv_heads=1, head_dim=16, vocab=V, positions=512
)
EAGER = Config(inner_backend="eager", returns_logits=False, tokens_per_head_chunk=50)


class Dense(nn.Module):
    """A language model without layers that returns its logits beside the loss, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(V, SIZES.hidden)
        self.body = nn.Linear(SIZES.hidden, SIZES.hidden)
        self.lm_head = nn.Linear(SIZES.hidden, V, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        logits = self.lm_head(self.body(self.table(ids)).tanh())
        if labels is None:
            return None, logits
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.float().view(-1, V), shifted.reshape(-1)), logits


def language_model() -> nn.Module:
    return build_causal_lm(SIZES, seed=0, dtype=torch.float32, device=CPU)


def tokens(batch: int = 2, sequence: int = 80) -> Tensor:
    return torch.randint(V, (batch, sequence), generator=torch.Generator().manual_seed(1))


def optimized(config: Config = EAGER) -> nn.Module:
    return memfine_fx.optimize(Dense(), config=config, dynamic=True)


def step(model: nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    is_dense = isinstance(model, Dense)
    loss = model(ids, ids)[0] if is_dense else model(input_ids=ids, labels=ids, **kwargs).loss
    loss.backward()
    found: Tensor = loss.detach()
    return found


def assert_same_step(model: nn.Module, reference: nn.Module, ids: Tensor, **kwargs: Any) -> None:
    expected, found = step(reference, ids, **kwargs), step(model, ids, **kwargs)
    assert relative_error(found, expected) < 1e-5
    gradients = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, gradients[name].grad) < 1e-5, name
    model.zero_grad(set_to_none=True)


def test_a_transformers_model_has_its_loss_and_every_gradient() -> None:
    model = memfine_fx.optimize(language_model(), config=EAGER, dynamic=True)
    assert_same_step(model, language_model(), tokens(), num_items_in_batch=torch.tensor(70))
    report = memfine_fx.report(model)
    (head,) = report.heads
    assert report.num_chunked == 1
    assert (head.status, head.num_tokens, head.num_chunks) == ("chunked", 160, 4)
    assert head.where.module == "lm_head" and "modeling_qwen3_moe.py:" in head.where.source


def test_sizes_change_without_compiling_again() -> None:
    model = optimized()
    for batch, sequence in ((2, 80), (3, 33), (2, 120)):
        assert_same_step(model, Dense(), tokens(batch, sequence))
    assert memfine_fx.report(model).num_graphs == 1


def test_logits_are_none_in_training_and_there_in_evaluation() -> None:
    model, ids = optimized(), tokens()
    assert model(ids, ids)[1] is None
    with torch.no_grad():
        assert model(ids, ids)[1].shape == (2, 80, V)
    assert model(ids)[1].shape == (2, 80, V)
    trained, evaluated = memfine_fx.report(model).heads
    assert (trained.status, evaluated.status) == ("chunked", "refused")
    assert evaluated.reason == "the logits are returned, as no gradients are wanted in this graph"


def test_returned_logits_are_made_chunk_by_chunk_by_default() -> None:
    model, ids = optimized(replace(EAGER, returns_logits=True)), tokens()
    assert_same_step(model, Dense(), ids)
    assert relative_error(model(ids, ids)[1], Dense()(ids, ids)[1]) < 1e-5
    (head,) = memfine_fx.report(model).heads
    assert (head.status, head.num_chunks) == ("chunked", 4)


def test_logits_that_stay_whole_are_refused_with_how_to_give_them_up() -> None:
    report = memfine_fx.explain(Dense().bfloat16(), tokens(), tokens())
    (head,) = report.heads
    assert (head.status, head.reason) == ("refused", "the logits are returned beside the loss")
    assert "Config(returns_logits=False)" in str(report)
    assert json.loads(report.to_json())["heads"][0]["status"] == "refused"


def test_explain_tells_the_plan() -> None:
    config = Config(returns_logits=False, tokens_per_head_chunk=50)
    report = memfine_fx.explain(Dense(), tokens(), tokens(), config=config)
    (head,) = report.heads
    assert head.plan is not None and head.plan.tokens_per_chunk == 50
    assert f"T=160 H=32 V={V}, logits are not returned; 50 tokens a chunk" in str(head)
    assert json.loads(report.to_json())["heads"][0]["plan"]["predicted_bytes"] == head.plan.predicted_bytes


def test_bf16_under_autocast_is_no_further_from_fp32_than_eager() -> None:
    ids = tokens()
    exact, plain, model = Dense(), Dense(), optimized()
    step(exact, ids)
    with torch.autocast("cpu", torch.bfloat16):
        step(plain, ids)
        step(model, ids)
    truth, theirs = dict(exact.named_parameters()), dict(plain.named_parameters())
    for name, ours in model.named_parameters():
        limit = 1.25 * relative_error(theirs[name].grad, truth[name].grad)
        assert relative_error(ours.grad, truth[name].grad) <= limit, name
    assert [head.status for head in memfine_fx.report(model).heads] == ["chunked"]


class Tied(nn.Module):
    """One table for embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(V, 32)
        self.body = nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(self.table(ids))
        logits = F.linear(hidden[:, :-1], self.table.weight)
        return F.cross_entropy(logits.reshape(-1, V), ids[:, 1:].reshape(-1))


@pytest.mark.parametrize("frozen", [False, True])
def test_tied_and_frozen_tables(frozen: bool) -> None:
    ids, expected, model = tokens(), Tied(), Tied()
    for one in (expected, model):
        one.table.requires_grad_(not frozen)
    memfine_fx.optimize(model, config=EAGER, dynamic=True)
    expected(ids).backward()
    model(ids).backward()
    assert relative_error(model.body.weight.grad, expected.body.weight.grad) < 1e-5
    if frozen:
        assert model.table.weight.grad is None
    else:
        assert relative_error(model.table.weight.grad, expected.table.weight.grad) < 1e-5
    (head,) = memfine_fx.report(model).heads
    assert head.status == "chunked"


def test_no_tensor_of_all_logits_is_made() -> None:
    ids = tokens(4, 120)
    all_logits = 4 * ids.numel() * V  # more than the table's gradient, which is made
    model, reference = optimized(replace(EAGER, inner_backend="aot_eager")), Dense()
    step(model, ids)
    assert not trace_memory(lambda: step(model, ids), CPU).has_allocation_of(all_logits)
    assert trace_memory(lambda: step(reference, ids), CPU).has_allocation_of(all_logits)


@pytest.mark.slow
def test_a_budget_makes_the_chunks_smaller_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfine_fx.plan.budget.LEAST_TOKENS", 4)
    monkeypatch.setattr("memfine_fx.plan.budget.LEAST_ROWS", 4)
    ids = tokens(4, 120)

    def trained(budget: int | None) -> tuple[memfine_fx.Report, int]:
        torch._dynamo.reset()
        config = Config(inner_backend="aot_eager", returns_logits=False, memory_budget=budget)
        model = optimized(config)
        step(model, ids)
        model.zero_grad(set_to_none=True)
        measured = trace_memory(lambda: step(model, ids), CPU).peak_bytes
        return memfine_fx.report(model), measured

    free, measured = trained(None)
    assert free.step is not None
    budget = free.step.static_bytes + measured - 3_000_000
    report, held = trained(budget)
    plan, free_plan = report.heads[0].plan, free.heads[0].plan
    assert plan is not None and free_plan is not None and plan.tokens_per_chunk < free_plan.tokens_per_chunk
    assert free.step.static_bytes + held <= budget
    assert "largest chunk with which the step keeps within" in plan.reason


def test_the_plan_of_a_head_is_pure() -> None:
    head = HeadBytes(hidden=32, vocab=V, item_bytes=4, has_softcap=False, wanted=(True, True, False), device_type="cpu")
    knee = plan_head(head, 10_000)
    least = plan_head(head, 10_000, tokens_per_chunk=1)
    half = plan_head(head, 10_000, available_bytes=(knee.predicted_bytes + least.predicted_bytes) // 2)
    assert half.tokens_per_chunk < knee.tokens_per_chunk
    assert plan_head(head, 3).tokens_per_chunk == 3
    with pytest.raises(BudgetInfeasible, match="working set of head"):
        plan_head(head, 10_000, available_bytes=1000)


def test_verify_compares_a_head_with_its_original() -> None:
    config = replace(EAGER, verify=True)
    with torch.autocast("cpu", torch.bfloat16):
        half = memfine_fx.verify(Dense(), tokens(), tokens(), config=config)
    full = memfine_fx.verify(Dense(), tokens(), tokens(), config=config)
    for report, limit in ((full, 1e-5), (half, 4e-3)):
        (head,) = report.regions
        assert head.has_passed and head.family == "head" and head.identity_error == 0.0
        assert head.corrupted_error is not None and head.corrupted_error > limit
    assert full.worst_error < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
def test_with_inductor_the_prediction_is_the_measured_peak(checkpoints: bool) -> None:
    def made() -> Any:
        model: Any = build_causal_lm(replace(SIZES, layers=2), seed=0, dtype=torch.float32, device=CPU)
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    model, ids, config = made(), tokens(4, 120), replace(EAGER, inner_backend="inductor")
    report = memfine_fx.explain(model, input_ids=ids, labels=ids, measure=True, config=config)
    assert [head.status for head in report.heads] == ["chunked"]
    assert report.predicted_peak_bytes is not None and report.measured_peak_bytes is not None
    assert report.measured_peak_bytes * 0.98 <= report.predicted_peak_bytes <= report.measured_peak_bytes * 1.06
    memfine_fx.optimize(model, config=config, dynamic=True)
    assert_same_step(model, made(), ids)
    assert_same_step(model, made(), tokens(3, 50))
    assert memfine_fx.report(model).num_graphs == 1


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductors_auto_chunker_takes_sizes_that_are_fixed_and_refuses_symbolic_ones(dynamic: bool) -> None:
    """Why heads are always chunked by ours; when this fails, docs/design/head.md has to be written anew."""
    from torch._inductor import config, metrics

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden.tanh(), weight).view(-1, 4096), labels.view(-1))

    hidden, weight = torch.randn(2, 1024, 64, requires_grad=True), torch.randn(4096, 64, requires_grad=True)
    metrics.reset()
    with config.patch({"auto_chunker.enable": True}), torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(loss, dynamic=dynamic)(hidden, weight, torch.randint(4096, (2, 1024))).backward()
    assert (metrics.num_auto_chunking == 0) is dynamic
