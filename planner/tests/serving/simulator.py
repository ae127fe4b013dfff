"""One prefill and one decode instance, event by event, against which the closed forms are checked.

Nothing of the planner is used here: prompts wait in order for the first stage of a pipeline, requests join a batch
between two of its steps, each step takes what the batch has grown to.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Observed", "simulate_decode", "simulate_prefill"]

_WARM_UP = 0.1


@dataclass(frozen=True)
class Observed:
    """Samples after the warm-up: seconds of each request (prefill) or of each token (decode); mean batch."""

    seconds: NDArray[np.float64]
    mean_batch: float = 0.0

    def quantile(self, chance: float) -> float:
        return float(np.quantile(self.seconds, chance))


def arrivals(rate: float, requests: int, generator: np.random.Generator) -> NDArray[np.float64]:
    return np.cumsum(generator.exponential(1 / rate, requests))


def simulate_prefill(
    rate: float,
    services: Sequence[float],
    chances: Sequence[float],
    stages: int = 1,
    requests: int = 20_000,
    seed: int = 0,
) -> Observed:
    """Times to first token of Poisson prompts whose seconds alone are drawn from `services`."""
    generator = np.random.default_rng(seed)
    weights = np.asarray(chances) / np.sum(chances)
    drawn = generator.choice(np.asarray(services), requests, p=weights)
    events = [(float(at), 0, index) for index, at in enumerate(arrivals(rate, requests, generator))]
    arrived = [at for at, _, _ in events]
    heapq.heapify(events)
    waiting: deque[int] = deque()
    finished = np.zeros(requests)
    is_free = True
    while events:
        now, kind, index = heapq.heappop(events)
        if kind == 0:
            waiting.append(index)
        else:
            is_free = True
        if is_free and waiting:
            first = waiting.popleft()
            finished[first] = now + drawn[first]
            heapq.heappush(events, (now + drawn[first] / stages, 1, first))
            is_free = False
    return Observed((finished - arrived)[int(_WARM_UP * requests) :])


def simulate_decode(
    rate: float,
    lengths: Sequence[int],
    chances: Sequence[float],
    step_s: Callable[[int], float],
    most: int,
    requests: int = 20_000,
    seed: int = 0,
) -> Observed:
    """Times between tokens of Poisson requests with output lengths drawn from `lengths`, `most` at once."""
    generator = np.random.default_rng(seed)
    drawn = generator.choice(np.asarray(lengths), requests, p=np.asarray(chances) / np.sum(chances))
    arriving = deque(zip(arrivals(rate, requests, generator), drawn, strict=True))
    leaving: list[int] = []  # the step after which each request of the batch is done
    step, now = 0, 0.0
    spent, weights = [], []
    begin = arriving[int(_WARM_UP * requests)][0]
    while arriving:
        if not leaving:
            now = max(now, float(arriving[0][0]))
        while arriving and arriving[0][0] <= now and len(leaving) < most:
            heapq.heappush(leaving, step + int(arriving.popleft()[1]))
        took = step_s(len(leaving))
        now += took
        step += 1
        if now >= begin:
            spent.append(took)
            weights.append(len(leaving))
        while leaving and leaving[0] <= step:
            heapq.heappop(leaving)
    # One sample per token: a step of n requests gives n.
    seconds, counts = np.array(spent), np.array(weights)
    return Observed(np.repeat(seconds, counts), float((seconds * counts).sum() / (now - begin)))
