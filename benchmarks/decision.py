"""What deciding chunks costs: its share of a step, ``python -m benchmarks.decision``.

One layer is trained with other routing in each step, and with another number of tokens in each where asked: then the
plan is made anew as well. What is timed as the decision is all that a step does between knowing its routing and
walking its chunks: the plan for T, the number of chunks from the rows that came, the schedule; in forward and in
backward. Nothing else is wrapped, and no body may be compiled after the first step.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

import memfine_fx
from benchmarks.machine import describe_machine
from memfine_fx.models import MixtralConfig, MixtralMoE
from memfine_fx.passes.lower.bodies import num_body_compilations
from memfine_fx.runtime import op
from memfine_fx.runtime.store import LiveRegion


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decision", description=__doc__.split("\n")[0])
    for name, default in (("tokens", 4096), ("hidden", 512), ("width", 1024), ("experts", 16), ("top-k", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--budget", help="memory budget of the step, so that plans are solved for")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{describe_machine(device)}, {options.dtype}, T={options.tokens} H={options.hidden} F={options.width}")
    modes = {
        "rows": memfine_fx.Config(),
        "rows, bins": memfine_fx.Config(bins=(1, 2, 4, 8)),
        "tokens": memfine_fx.Config(axis="tokens"),
        "tokens, bins": memfine_fx.Config(axis="tokens", bins=(1, 2, 4, 8)),
    }
    worst = 0.0
    for name, config in modes.items():
        for varies in (False, True):
            shares, milliseconds = measure(options, config, device, varies=varies)
            worst = max(worst, statistics.median(shares))
            tokens = "other T each step" if varies else "same T"
            print(
                f"{name:14}{tokens:20}decision {statistics.median(milliseconds):7.3f} ms, "
                f"{statistics.median(shares):8.4%} of the step (largest {max(shares):.4%})"
            )
    print(f"largest median share {worst:.4%}: {'within' if worst < 0.005 else 'NOT within'} 0.5%")
    return 0 if worst < 0.005 else 1


def measure(
    options: argparse.Namespace, config: memfine_fx.Config, device: torch.device, *, varies: bool
) -> tuple[list[float], list[float]]:
    """(share of the step, milliseconds) of the decisions of each step."""
    torch._dynamo.reset()
    dtype = getattr(torch, options.dtype)
    sizes = MixtralConfig(options.hidden, options.width, options.experts, options.top_k, spelling="gathered")
    model = MixtralMoE(sizes).to(device, dtype)
    layer = memfine_fx.optimize(model, config=config, memory_budget=options.budget, dynamic=True)
    clock = Clock()
    shares: list[float] = []
    milliseconds: list[float] = []
    with clock.watching(op, "chunks_of"), clock.watching(LiveRegion, "plan_for"):
        compiled = 0
        for number in range(options.steps + 1):
            hidden = inputs(options.tokens - (17 * number if varies else 0), options.hidden, number, device, dtype)
            layer.zero_grad()
            clock.seconds = 0.0
            started = time.perf_counter()
            layer(hidden).backward(hidden.detach())
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            if number:
                assert num_body_compilations() == compiled, "a body was compiled after the first step"
                shares.append(clock.seconds / seconds)
                milliseconds.append(1e3 * clock.seconds)
            compiled = num_body_compilations()
    return shares, milliseconds


def inputs(num_tokens: int, hidden: int, seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Tokens that lean towards another direction for each seed, so that experts are loaded unevenly."""
    torch.manual_seed(seed)
    leaning = torch.randn(num_tokens, hidden) + 0.5 * torch.randn(hidden)
    return leaning.to(device, dtype).requires_grad_()


class Clock:
    """Adds up the time spent in the functions that it watches; calls within calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_running = False

    def watching(self, owner: Any, name: str) -> "Watch":
        return Watch(self, owner, name)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
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


class Watch:
    """Replaces a function by its timed self for a while."""

    def __init__(self, clock: Clock, owner: Any, name: str) -> None:
        self._clock, self._owner, self._name = clock, owner, name
        self._original = getattr(owner, name)

    def __enter__(self) -> None:
        setattr(self._owner, self._name, self._clock.timed(self._original))

    def __exit__(self, *error: object) -> None:
        setattr(self._owner, self._name, self._original)


if __name__ == "__main__":
    sys.exit(main())
