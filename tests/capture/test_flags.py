"""A call that runs again under other flags: what the first try did is undone, in the first call and in later ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
from torch import nn

import memfine_fx
from benchmarks.campaign.untouched import untouched
from memfine_fx.capture import flags
from memfine_fx.capture.flags import SETTINGS, CapturingCall
from memfine_fx.capture.undo import Generators
from memfine_fx.errors import LeftoverShapes
from memfine_fx.memory.measure import trace_memory
from memfine_fx.models import MixtralConfig, MixtralMoE

HIDDEN = 16


class Noisy(nn.Module):
    """Draws, counts and rebinds before the graph breaks, and once more after."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("rebound", torch.zeros(2))
        self.layer = MixtralMoE(MixtralConfig(HIDDEN, 24, 4, 2, spelling="gathered"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.rebound = self.rebound + 1
        hidden = self.norm(hidden + torch.rand_like(hidden))
        torch._dynamo.graph_break()
        return self.layer(hidden) + torch.rand_like(hidden)


def capturing(model: nn.Module, fails: Callable[[int], bool]) -> tuple[CapturingCall, list[Any]]:
    """A call that compiles nothing, whose n-th graph is a failure where `fails` says so; and what it settled on."""
    numbers = itertools.count()
    settled: list[Any] = []

    def compile_with(setting: tuple[str, ...], note: Callable[[], None]) -> Callable[..., Any]:
        def backend(graph_module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            note()
            if fails(next(numbers)):
                raise LeftoverShapes("injected")
            return graph_module.forward

        return torch.compile(model.forward, backend=backend, dynamic=False)

    return CapturingCall(model, compile_with, lambda *told: settled.append(told), lambda *_: None), settled


def expected_states(model: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What eager gives, call by call: outputs, then buffers and a random number at the end."""
    torch.manual_seed(3)
    outputs = [model(hidden).detach() for hidden in inputs]
    return [*outputs, *model.buffers(), torch.rand(1)]


@pytest.mark.parametrize("number_of_failure", [1, 3])
def test_what_a_failed_compilation_ran_is_undone(number_of_failure: int) -> None:
    """Graph 1 is behind the break of the first call; graph 3 of a second call, at another size."""
    model, reference = Noisy(), Noisy()
    reference.load_state_dict(model.state_dict())
    inputs = [torch.randn(6, HIDDEN), torch.randn(9, HIDDEN)]
    call, settled = capturing(model, lambda number: number == number_of_failure)
    expected = expected_states(reference, inputs)
    torch.manual_seed(3)
    found = [*(call(hidden).detach() for hidden in inputs), *model.buffers(), torch.rand(1)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [setting for setting, _ in settled][-1] == SETTINGS[1]


def test_code_of_earlier_calls_is_undone_when_code_behind_it_fails() -> None:
    """The second call runs the first graph as it was compiled before, and only then has something to compile."""

    class Branches(Noisy):
        has_more = False

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            hidden = self.norm(hidden + torch.rand_like(hidden))
            torch._dynamo.graph_break()
            return self.layer(hidden) * 2 if self.has_more else self.layer(hidden)

    model, reference = Branches(), Branches()
    reference.load_state_dict(model.state_dict())
    hidden = torch.randn(6, HIDDEN)
    call, settled = capturing(model, lambda number: number == 2)
    torch.manual_seed(3)
    for one in (model, reference):
        torch.manual_seed(3)
        for has_more in (False, True):
            one.has_more = has_more
            (call if one is model else reference)(hidden)
    assert len(settled) == 2
    for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_errors_of_the_model_leave_flags_and_methods_as_they_were(failure: type[BaseException]) -> None:
    class Fails(Noisy):
        @torch.compiler.disable
        def fail(self) -> None:
            raise failure("by the model")

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            out = super().forward(hidden)
            self.fail()
            return out

    model = Fails()
    call, settled = capturing(model, lambda number: False)
    changed = ["buffer", "attribute .rebound", "entries ._buffers", "attribute norm", "generator of torch"]
    for _ in range(2):
        with untouched(model, besides=changed), pytest.raises(failure, match="by the model"):
            call(torch.randn(6, HIDDEN))
    assert not settled


def test_later_calls_copy_only_what_calls_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Noisy()
    model.register_buffer("table", torch.zeros(1000))
    call, _ = capturing(model, lambda number: False)
    call(torch.randn(6, HIDDEN))
    copied: list[int] = []
    contents = flags.Contents

    class Counting(contents):  # type: ignore[misc, valid-type]
        def __init__(self, tensors: Any) -> None:
            kept = list(tensors)
            copied.append(sum(tensor.numel() for tensor in kept))
            super().__init__(kept)

    monkeypatch.setattr(flags, "Contents", Counting)
    monkeypatch.setattr(flags, "ModelState", lambda *_, **__: pytest.fail("nothing is compiled"))
    call(torch.randn(6, HIDDEN))
    assert len(copied) == 1 and 0 < copied[0] <= 2 + 2 * HIDDEN + 1


def test_a_buffer_too_large_to_copy_in_each_call_is_not() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(flags._MOST_BYTES // 4 + 1))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.keys.add_(1)
            return hidden * 2

    model = Cached()
    call, _ = capturing(model, lambda number: False)
    call(torch.randn(6, HIDDEN))
    assert not call._written


def test_a_call_that_may_be_undone_holds_no_tensor_of_ours() -> None:
    """It would be in no plan, and break a budget that holds to the byte."""
    held: list[Generators] = []
    trace = trace_memory(lambda: held.append(Generators()), torch.device("cpu"))
    assert trace.peak_bytes > trace.resting_bytes == 0
    expected = torch.rand(3)
    held[0].restore()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
def test_foresight_costs_microseconds_a_call() -> None:
    model = nn.Linear(4, 4)
    call, _ = capturing(model, lambda number: False)
    hidden = torch.randn(2, 4)
    call(hidden)
    begun = call._begun
    started = time.perf_counter()
    for _ in range(1000):
        begun()
    assert (time.perf_counter() - started) / 1000 < 100e-6


def test_config_flags_are_back_after_an_interrupt_in_the_compiler() -> None:
    config = memfine_fx.Config(inner_backend="eager", rows_per_chunk=5)
    model = memfine_fx.optimize(Noisy(), config=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memfine_fx.compiler.regions.read_regions", interrupt)
        besides = ["buffer", "attribute .", "entries ._buffers", "attribute norm", "generator"]
        with untouched(model, besides=besides), pytest.raises(KeyboardInterrupt):
            model(torch.randn(6, HIDDEN))
    model(torch.randn(6, HIDDEN))
    assert memfine_fx.report(model).num_chunked == 1


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt
