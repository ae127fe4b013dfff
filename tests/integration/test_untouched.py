"""Nothing is left changed, by any public entry, where it succeeds and where it fails on the way."""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import memfine_fx
from benchmarks.campaign.untouched import changes, untouched
from memfine_fx.models import MixtralConfig, MixtralMoE
from memfine_fx.passes.lower import compiled_expert
from tests.integration.comparison import assert_same_step

pytestmark = pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")

HIDDEN = 16
CONFIG = memfine_fx.Config(rows_per_chunk=8, inner_backend="aot_eager")


class Net(nn.Module):
    """One MoE layer between what changes state: a norm with running statistics, dropout, a counter, a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.drop = nn.Dropout(0.2)
        self.layer = MixtralMoE(MixtralConfig(HIDDEN, 24, 4, 2, spelling="gathered"))
        self.head, self.tied = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.register_buffer("offset", torch.zeros(HIDDEN))
        self.num_calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.offset = self.offset + 0.5
        hidden = self.layer(self.frozen(self.drop(self.norm(hidden)))) + self.offset
        return self.tied(self.head(hidden))


def net() -> Net:
    """In training, with gradients of a step before, and hooks of the user."""
    model = Net()
    model(torch.randn(9, HIDDEN)).sum().backward()
    model.layer.register_forward_hook(lambda *_: None)
    model.head.weight.register_hook(lambda gradient: gradient * 1.0)
    return model


ENTRIES: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "explain": lambda model, hidden: memfine_fx.explain(model, hidden, config=CONFIG),
    "explain and measure": lambda model, hidden: memfine_fx.explain(model, hidden, measure=True, config=CONFIG),
    "verify": lambda model, hidden: memfine_fx.verify(model, hidden, config=CONFIG),
}
STAGES = {
    "read": "memfine_fx.compiler.regions:read_regions",
    "plan": "memfine_fx.compiler.regions:compiled_expert_for",
    "plan of the call": "memfine_fx.runtime.store:LiveRegion.plan_for",
    "inner compile": "memfine_fx.compiler.compiled_graph:compile_with_regions",
    "partition": "memfine_fx.passes.step.partition:StepPartitioner.__call__",
    "body compile": "memfine_fx.passes.lower.compiled_function:CompiledFunction._compile",
    "forward op": "memfine_fx.runtime.op:run_forward",
    "backward op": "memfine_fx.runtime.op:run_backward",
    "measuring": "memfine_fx.api:trace_memory",
}
FAILURES = (KeyboardInterrupt("injected"), torch.OutOfMemoryError("injected"), ValueError("injected"))


@contextmanager
def failing(place: str, failure: BaseException) -> Iterator[None]:
    """The function at MODULE:NAME raises, once."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    is_done = False

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_done
        if is_done:
            return original(*args, **kwargs)
        is_done = True
        raise failure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield


def run_quietly(call: Callable[[], object]) -> None:
    """A failure may reach the caller, or become a refusal."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as failure:
        assert "injected" in str(failure), failure


@pytest.mark.parametrize("entry", ENTRIES)
def test_success_leaves_nothing_changed(entry: str) -> None:
    model, hidden = net(), torch.randn(12, HIDDEN, requires_grad=True)
    with untouched(model, [hidden]):
        assert "1 of 1" in str(ENTRIES[entry](model, hidden))


def _in_turn(firsts: Iterable[str], stages: Iterable[str]) -> list[Any]:
    """Every stage of every entry, each with one of the failures, so that each meets every stage and every entry."""
    places = itertools.product(enumerate(firsts), enumerate(stages))
    cases = [(first, stage, FAILURES[(number + place) % len(FAILURES)]) for (number, first), (place, stage) in places]
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}-{type(case[2]).__name__}") for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "stage", "failure"), _in_turn(ENTRIES, STAGES))
def test_failures_leave_nothing_changed(entry: str, stage: str, failure: BaseException) -> None:
    model, hidden = net(), torch.randn(12, HIDDEN, requires_grad=True)
    with untouched(model, [hidden]), failing(STAGES[stage], failure):
        run_quietly(lambda: ENTRIES[entry](model, hidden))


@pytest.mark.parametrize(("stage", "entry"), [("read", "explain"), ("backward op", "explain and measure")])
def test_an_interrupt_leaves_nothing_changed(stage: str, entry: str) -> None:
    model, hidden = net(), torch.randn(12, HIDDEN, requires_grad=True)
    failure = KeyboardInterrupt("injected")
    with untouched(model, [hidden]), failing(STAGES[stage], failure), pytest.raises(KeyboardInterrupt):
        ENTRIES[entry](model, hidden)


FORWARD_STAGES = [stage for stage in STAGES if stage not in ("measuring", "backward op")]


class Plain(nn.Module):
    """A layer whose steps can be compared: nothing in it is random or counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MixtralMoE(MixtralConfig(HIDDEN, 24, 4, 2, spelling="gathered"))
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden + self.layer(hidden))


def optimized(way: str, model: nn.Module) -> Any:
    if way == "optimize":
        return memfine_fx.optimize(model, config=CONFIG)
    model.compile(backend="memfine", options={"config": CONFIG})
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("way", "stage", "failure"), _in_turn(["optimize", "compile"], FORWARD_STAGES))
def test_a_step_that_fails_leaves_the_next_one_exact(way: str, stage: str, failure: BaseException) -> None:
    check_failing_step(way, stage, failure)


@pytest.mark.parametrize(("way", "stage"), [("optimize", "inner compile"), ("compile", "forward op")])
def test_a_step_that_is_interrupted_leaves_the_next_one_exact(way: str, stage: str) -> None:
    check_failing_step(way, stage, KeyboardInterrupt("injected"))


def check_failing_step(way: str, stage: str, failure: BaseException) -> None:
    model, reference = Plain(), Plain()
    reference.load_state_dict(model.state_dict())
    model(torch.randn(3, HIDDEN)).sum().backward()
    call, hidden = optimized(way, model), torch.randn(12, HIDDEN)
    with untouched(model, [hidden]), failing(STAGES[stage], failure):
        run_quietly(lambda: call(hidden))
    assert_same_step(call, reference, {"hidden": hidden})


@pytest.mark.parametrize("way", ["optimize", "compile"])
def test_a_backward_that_fails_leaves_the_next_step_exact(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_expert, "_cache", {})  # a body that another test has compiled would compile no more
    model, reference = Plain(), Plain()
    reference.load_state_dict(model.state_dict())
    call, hidden = optimized(way, model), torch.randn(12, HIDDEN)
    for stage in ("backward op", "body compile"):
        loss = call(hidden).sum()
        with (
            untouched(model, [hidden], besides=["grad of head", "bits of grad of head"]),
            failing(STAGES[stage], KeyboardInterrupt("injected")),
            pytest.raises(KeyboardInterrupt),
        ):
            loss.backward()
        assert_same_step(call, reference, {"hidden": hidden})


def test_a_successful_step_changes_gradients_alone() -> None:
    model = memfine_fx.optimize(Plain(), config=CONFIG)
    hidden = torch.randn(12, HIDDEN)
    with untouched(model, [hidden], besides=["grad of", "bits of grad of"]):
        model(hidden).sum().backward()
        memfine_fx.report(model)


def test_the_snapshot_sees_what_it_must_see() -> None:
    """Each of these would be a defect, and is found."""

    def of_hook(model: Net) -> None:
        model.layer.register_forward_pre_hook(lambda *_: None)

    spoils: dict[str, Callable[[Net], object]] = {
        "grad of head.weight": lambda model: setattr(model.head.weight, "grad", model.head.weight.grad.clone()),  # type: ignore[union-attr]
        "bits of grad of head.weight": lambda model: model.head.weight.grad.add_(1),  # type: ignore[union-attr]
        "buffer norm.running_mean": lambda model: model.norm.running_mean.add_(1),  # type: ignore[union-attr]
        "entries layer._forward_pre_hooks": of_hook,
        "attribute layer.forward": lambda model: setattr(model.layer, "forward", model.layer.forward),
        "attribute .training": lambda model: setattr(model, "training", False),
        "requires_grad of head.weight": lambda model: model.head.weight.requires_grad_(False),
        "generator of torch": lambda model: torch.rand(1),
        "generator of python": lambda model: random.random(),
        "_backward_hooks of head.weight": lambda model: model.head.weight.register_hook(lambda gradient: gradient),
    }
    for name, spoil in spoils.items():
        model = net()
        with pytest.raises(AssertionError) as caught, untouched(model):
            spoil(model)
        assert name in str(caught.value)
    with pytest.raises(AssertionError), untouched(net()):
        torch._dynamo.config.cache_size_limit += 1
    torch._dynamo.config.cache_size_limit -= 1
    assert changes({"a": 1}, {"b": 1}) == ["a", "b"]
