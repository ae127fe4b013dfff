"""Waiting in closed form: prompts for a prefill instance, tokens for their batch, both under Poisson arrivals.

Prefill is a queue with one server and the service times of the length distribution (M/G/1), in order of arrival. The
waiting time is a geometric sum of residual services (Pollaczek-Khinchine); on a grid its distribution is one division
of Fourier transforms, so quantiles of the time to first token are exact but for the grid.

Decode is a batch that requests join and leave between steps. With n of them a step takes t(n), so each is served at
rate 1/t(n): processor sharing with a rate that depends on the state, whose stationary distribution is a product,
pi(n) ~ prod lambda E[tokens] t(i)/i, the same for any distribution of output lengths as long as nobody waits for a
place. A batch that is full makes others wait; that share is bounded, not modelled beyond exponential lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Batch", "Waiting", "batch_sizes", "first_token"]

_GRID = 1 << 13
_GRID_PER_MEAN_SERVICE = 60


@dataclass(frozen=True)
class Waiting:
    """Times to first token at one prefill instance: cumulative chances on a grid of `step_s`."""

    step_s: float
    cumulative: NDArray[np.float64]
    mean_s: float

    def quantile(self, chance: float) -> float:
        """The time within which this fraction is served; infinite beyond the grid."""
        at = int(np.searchsorted(self.cumulative, chance))
        return at * self.step_s if at < len(self.cumulative) else np.inf


def first_token(rate: float, services: Sequence[float], chances: Sequence[float], stages: int = 1) -> Waiting | None:
    """Times to first token of prompts that take `services` seconds alone; None where the queue grows without end.

    Args:
        rate: arrivals per second.
        stages: of the pipeline; a stage is free after its part, so prompts follow each other sooner than one takes.
    """
    alone, weights = np.asarray(services), np.asarray(chances) / np.sum(chances)
    busy = alone / stages
    mean = float(weights @ busy)
    load = rate * mean
    # The grid ends where the queue would be a million services long.
    if load >= 1 - 1e-6:
        return None
    step = mean / _GRID_PER_MEAN_SERVICE / max(1.0, 1 / (1 - load) / 8)
    step = max(step, float(alone.max()) / (_GRID / 8), 12 * mean / (1 - load) / _GRID)
    density = np.zeros(_GRID)
    # A residual service is uniform within a service, which is met in proportion to its length.
    for length, weight in zip(busy, weights * busy / mean, strict=True):
        edges = np.clip((np.arange(_GRID + 1) * step) / length, 0, 1)
        density += weight * np.diff(edges)
    transform = np.fft.rfft(density)
    waiting = np.fft.irfft((1 - load) / (1 - load * transform), _GRID)
    services_density = np.bincount((alone / step).round().astype(int), weights, _GRID)
    total = np.fft.irfft(np.fft.rfft(waiting) * np.fft.rfft(services_density), _GRID)
    second = float(weights @ busy**2)
    mean_s = rate * second / (2 * (1 - load)) + float(weights @ alone)
    return Waiting(step, np.cumsum(np.maximum(total, 0)), mean_s)


@dataclass(frozen=True)
class Batch:
    """The stationary batch of a decode instance: chances of 0, 1, ... requests in it, and the seconds of a step."""

    chances: NDArray[np.float64]
    steps: NDArray[np.float64]
    most: int

    @property
    def mean(self) -> float:
        return float(self.chances @ np.arange(len(self.chances)))

    @property
    def waits(self) -> float:
        """Fraction of time in which someone waits for a place."""
        return float(self.chances[self.most + 1 :].sum())

    def _token_chances(self) -> NDArray[np.float64]:
        served = np.minimum(np.arange(len(self.chances)), self.most)
        produced: NDArray[np.float64] = self.chances * served / self.steps
        return np.asarray(produced / produced.sum())

    @property
    def mean_step_s(self) -> float:
        """Mean time between tokens, over tokens."""
        return float(self._token_chances() @ self.steps)

    def step_quantile(self, chance: float) -> float:
        """The time between tokens that this fraction of tokens keeps."""
        order = np.argsort(self.steps, kind="stable")
        cumulative = np.cumsum(self._token_chances()[order])
        return float(self.steps[order][min(int(np.searchsorted(cumulative, chance)), len(order) - 1)])


def batch_sizes(rate: float, tokens: float, step_s: Sequence[float]) -> Batch | None:
    """The batch under `rate` requests per second of `tokens` output tokens each; None where it grows without end.

    Args:
        step_s: seconds of a step with 1, 2, ... requests, up to the most whose cache fits.
    """
    most = len(step_s)
    steps = np.array([step_s[0], *step_s])
    if rate * tokens * steps[most] / most >= 1 - 1e-6:
        return None
    tail = 4 * most + 64
    steps = np.concatenate([steps, np.full(tail, steps[most])])
    served = np.minimum(np.arange(len(steps)), most)
    ratios = np.log(rate * tokens * steps[1:] / served[1:])
    logs = np.concatenate([[0.0], np.cumsum(ratios)])
    chances = np.exp(logs - logs.max())
    return Batch(chances / chances.sum(), steps, most)
