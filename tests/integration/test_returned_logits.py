"""Logits that a model returns beside its loss: every gradient is there, and no tensor of zeros of their size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfine_fx
from memfine_fx.compiler.sessions import sessions
from memfine_fx.config import Config
from memfine_fx.memory.measure import trace_memory
from tests.integration.comparison import FP32_TOLERANCE, relative_error
from tests.integration.warm_start import HIDDEN, Layer

V = 4096
CONFIG = Config(inner_backend="aot_eager", chunks_head=False)
CHUNKED = Config(inner_backend="aot_eager", tokens_per_head_chunk=50)
LOGITS_BYTES = 2 * 64 * V * 4
Use = Callable[[Tensor, Tensor], Tensor]


class Scored(nn.Module):
    """Experts below a head; it returns its logits as the projection made them, or cast."""

    def __init__(self, head: str = "linear", *, returns: str = "", penalty: float = 0.0, vocab: int = V) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(vocab, HIDDEN)
        self.layer = Layer("silu")
        self.lm_head = nn.Linear(HIDDEN, vocab, bias=head == "bias")
        self.matrix = nn.Parameter(torch.randn(HIDDEN, vocab) * 0.1) if head == "matmul" else None
        if head == "tied":
            self.lm_head.weight = self.table.weight
        if head == "frozen":
            self.lm_head.requires_grad_(False)
        self.returns, self.penalty = returns, penalty

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table(ids)
        with torch.autocast("cpu", enabled=False):  # the layer adds to fp32
            hidden = rows + self.layer(rows.flatten(0, 1)).view_as(rows)
        logits = self.lm_head(hidden[:, :, :]) if self.matrix is None else hidden @ self.matrix
        exact = logits.float()
        loss = F.cross_entropy(exact.flatten(0, 1), ids.roll(-1, 1).flatten())
        if self.penalty:
            loss = loss + self.penalty * torch.logsumexp(exact, -1).square().mean()
        if self.returns == "cast":
            return loss, logits.float()
        return loss, exact if self.returns == "of the loss" else logits


def tokens(batch: int = 2, sequence: int = 64, *, vocab: int = V) -> Tensor:
    return torch.randint(vocab, (batch, sequence), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, use: Use, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    use(*model(ids)).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def of_loss(loss: Tensor, logits: Tensor) -> Tensor:
    return loss


def of_both(loss: Tensor, logits: Tensor) -> Tensor:
    return loss + logits.square().mean()


def of_logits(loss: Tensor, logits: Tensor) -> Tensor:
    return logits.square().mean()


def num_apart() -> int:
    return sum(len(graph.returned) for graph in sessions()[-1].graphs)


@pytest.mark.parametrize(
    ("head", "config"),
    [
        ("linear", CONFIG),
        ("tied", CONFIG),
        *((head, CHUNKED) for head in ("linear", "bias", "matmul", "tied", "frozen")),
    ],
    ids=lambda value: value if isinstance(value, str) else "chunked" if value is CHUNKED else "whole",
)
def test_every_use_has_every_gradient(head: str, config: Config) -> None:
    model = Scored(head)
    chunked = memfine_fx.optimize(copy.deepcopy(model), config=config, dynamic=True)
    for use, ids in ((of_loss, tokens()), (of_both, tokens()), (of_logits, tokens()), (of_both, tokens(3, 40))):
        expected, found = gradients(model, use, ids), gradients(chunked, use, ids)
        assert found.keys() == expected.keys()
        for name, one in found.items():
            assert relative_error(one, expected[name]) < FP32_TOLERANCE, (use.__name__, name)
    report = memfine_fx.report(chunked)
    assert (num_apart(), report.num_graphs) == (1, 1)
    assert [one.status for one in report.heads] == ["chunked"] * (config is CHUNKED)


def test_a_head_of_few_classes_that_is_asked_for_has_every_gradient() -> None:
    model, ids = Scored(vocab=48), tokens(vocab=48)
    asked = memfine_fx.optimize(copy.deepcopy(model), config=replace(CHUNKED, chunks_head=True))
    expected, found = gradients(model, of_both, ids), gradients(asked, of_both, ids)
    assert [one.status for one in memfine_fx.report(asked).heads] == ["chunked"]
    assert found.keys() == expected.keys()
    assert all(relative_error(one, expected[name]) < FP32_TOLERANCE for name, one in found.items())


@pytest.mark.parametrize("returns", ["", "cast", "of the loss"])
def test_autocast_has_the_gradients_that_it_has_in_eager(returns: str) -> None:
    model, ids = Scored("bias", returns=returns), tokens()
    chunked = memfine_fx.optimize(copy.deepcopy(model), config=CONFIG)
    exact = gradients(model, of_both, ids)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = gradients(model, of_both, ids), gradients(chunked, of_both, ids)
    assert num_apart() == 1
    for name, one in found.items():
        assert one.dtype is torch.float32
        assert relative_error(one, exact[name]) <= 1.25 * relative_error(expected[name], exact[name]), name


def test_a_step_holds_no_tangent_of_the_logits() -> None:
    """Nor does its plan."""
    model, ids = memfine_fx.optimize(Scored(), config=CONFIG), tokens()
    gradients(model, of_loss, ids)
    (run,) = sessions()[-1].steps.latest_runs()
    assert run.backward is not None
    sizes = zip(run.backward.allocations, run.backward.bytes_at(run.values), strict=True)
    tangents = [num_bytes for one, num_bytes in sizes if one.name.startswith("tangents_")]
    assert tangents and sum(tangents) < LOGITS_BYTES // 8
    model.zero_grad(set_to_none=True)
    with_loss = trace_memory(lambda: model(ids)[0].backward(), torch.device("cpu")).peak_bytes
    torch._dynamo.reset()
    other = torch.compile(Scored(), backend="aot_eager")
    other(ids)[0].backward()
    other.zero_grad(set_to_none=True)
    plain = trace_memory(lambda: other(ids)[0].backward(), torch.device("cpu")).peak_bytes
    assert with_loss <= plain - LOGITS_BYTES * 0.9


def test_a_chunked_head_holds_its_logits_once_and_its_plan_says_so() -> None:
    """A head that is left whole holds a gradient of their size beside them."""
    peaks, ids = {}, tokens()
    for name, config in (("whole", CONFIG), ("chunked", CHUNKED)):
        torch._dynamo.reset()
        model = memfine_fx.optimize(Scored(), config=config)
        gradients(model, of_loss, ids)
        model.zero_grad(set_to_none=True)
        peaks[name] = trace_memory(lambda: model(ids)[0].backward(), torch.device("cpu")).peak_bytes  # noqa: B023
    assert peaks["chunked"] <= peaks["whole"] - 0.5 * LOGITS_BYTES
    predicted = memfine_fx.report(model).predicted_peak_bytes
    parameters = sum(one.numel() * one.element_size() for one in model.parameters())
    assert predicted is not None and abs(predicted / (peaks["chunked"] + parameters) - 1) < 0.02


def test_a_graph_that_is_kept_gives_its_gradients_again() -> None:
    model, ids = Scored(), tokens()
    chunked = memfine_fx.optimize(copy.deepcopy(model), config=CONFIG)
    for one in (model, chunked):
        total = of_both(*one(ids))
        total.backward(retain_graph=True)
        total.backward()
    expected = dict(model.named_parameters())
    for name, one in chunked.named_parameters():
        assert relative_error(one.grad, expected[name].grad) < FP32_TOLERANCE, name


def test_logits_that_something_else_reads_stay_in_the_graph() -> None:
    model = Scored(penalty=1e-3)
    chunked = memfine_fx.optimize(copy.deepcopy(model), config=CONFIG)
    expected, found = gradients(model, of_both, tokens()), gradients(chunked, of_both, tokens())
    assert num_apart() == 0
    assert all(relative_error(one, expected[name]) < FP32_TOLERANCE for name, one in found.items())


def test_without_gradients_logits_are_what_the_graph_returns() -> None:
    model, ids = memfine_fx.optimize(Scored(), config=CONFIG), tokens()
    with torch.no_grad():
        loss, logits = model(ids)
    assert num_apart() == 0 and not loss.requires_grad and not logits.requires_grad
