"""Which share of a step does deciding its chunks take?

One layer is trained with other routing in each step, and with another number of tokens in each where asked: then the
plan is made anew as well. What is timed as the decision is all that a step does between knowing its routing and
walking its chunks: the plan for T, the number of chunks from the rows that came, the schedule; in forward and in
backward. Nothing else is wrapped, and no body may be compiled after the first step.
"""

import statistics
import time
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import nn

import memfine_fx
from benchmarks.machine import seconds_of
from benchmarks.measures import Answer, Dtype, device_here
from memfine_fx.models import MixtralConfig, MixtralMoE
from memfine_fx.passes.lower.compiled_function import num_compilations
from memfine_fx.runtime import op
from memfine_fx.runtime.store import LiveRegion

TARGET = 0.005
_BINS = (1, 2, 4, 8)
MODES = {
    "rows": memfine_fx.Config(),
    "rows, bins": memfine_fx.Config(bins=_BINS),
    "tokens": memfine_fx.Config(axis="tokens"),
    "tokens, bins": memfine_fx.Config(axis="tokens", bins=_BINS),
}


def measure(
    tokens: int = 4096,
    hidden: int = 512,
    width: int = 1024,
    experts: int = 16,
    top_k: int = 4,
    dtype: Dtype = "float32",
    budget: str | None = None,
    steps: int = 5,
) -> Answer:
    device = device_here()
    lines, medians = [], {}
    for name, config in MODES.items():
        for varies in (False, True):
            torch._dynamo.reset()
            sizes = MixtralConfig(hidden, width, experts, top_k, spelling="gathered")
            model = MixtralMoE(sizes).to(device, getattr(torch, dtype))
            layer = memfine_fx.optimize(model, config=config, memory_budget=budget, dynamic=True)
            counts = [tokens - (17 * number if varies else 0) for number in range(steps + 1)]
            found = _decisions(layer, [_inputs(count, hidden, seed, model) for seed, count in enumerate(counts)])
            shares = [decision / step for decision, step in found]
            case = f"{name}, {'other T each step' if varies else 'same T'}"
            medians[case] = statistics.median(shares)
            decision = 1e3 * statistics.median(seconds for seconds, _ in found)
            lines.append(
                f"{case:32}decision {decision:7.3f} ms, {medians[case]:8.4%} of the step (largest {max(shares):.4%})"
            )
    worst = max(medians.values())
    lines.append(f"largest median share {worst:.4%}: {'within' if worst < TARGET else 'NOT within'} {TARGET:.1%}")
    return Answer(lines, {"shares": {case: round(share, 6) for case, share in medians.items()}}, worst < TARGET)


def _decisions(layer: nn.Module, inputs: list[torch.Tensor]) -> list[tuple[float, float]]:
    """Seconds of (the decisions, the step) for each input after the first, which compiles."""
    clock = Clock()
    found = []
    with clock.watching(op, "chunks_of"), clock.watching(LiveRegion, "plan_for"):
        for number, hidden in enumerate(inputs):
            compiled, clock.seconds = num_compilations(), 0.0
            layer.zero_grad()
            seconds = seconds_of(lambda hidden=hidden: layer(hidden).backward(hidden.detach()), hidden.device)
            if number:
                assert num_compilations() == compiled, "a body was compiled after the first step"
                found.append((clock.seconds, seconds))
    return found


def _inputs(num_tokens: int, hidden: int, seed: int, model: nn.Module) -> torch.Tensor:
    """Tokens [T,H] that lean towards another direction for each seed, so that experts are loaded unevenly."""
    torch.manual_seed(seed)
    leaning = torch.randn(num_tokens, hidden) + 0.5 * torch.randn(hidden)
    return leaning.to(next(model.parameters())).requires_grad_()


class Clock:
    """Adds up the time spent in the functions that it watches; calls within calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_running = False

    def watching(self, owner: Any, name: str) -> Any:
        """A context in which a function is replaced by its timed self."""
        return mock.patch.object(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return function(*args, **kwargs)
            self._is_running = True
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self._is_running = False

        return call
