"""What the market's plan is measured against: the optimum of small instances, and five plain ways.

    exhaustive      every choice of cuts, each with its best shares
    random          cuts at random, equal shares; the mean over draws
    all_local       every device trains alone; the link carries parameters
    all_offloaded   every device keeps as little as its leakage bound permits
    equal_share     1/N of everything to everyone, who then picks the best cut

The first is exact: with cuts fixed the problem is convex (see `market`), and all choices are solved at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from memfine_fx.errors import ConfigError
from memfine_planner.splitting.latency import Offers, seconds
from memfine_planner.splitting.market import Plan, settle

__all__ = ["all_local", "all_offloaded", "equal_share", "exhaustive", "random_cuts"]

_MOST_CHOICES = 50_000
Numbers = NDArray[np.float64]


def exhaustive(devices: Sequence[Offers]) -> Plan:
    """The optimum over all choices of cuts and shares.

    Raises:
        ConfigError: there are too many choices to try.
    """
    num_choices = prod(len(own.cuts) for own in devices)
    if num_choices > _MOST_CHOICES:
        raise ConfigError(f"{num_choices:,} choices of cuts; exhaustive search takes at most {_MOST_CHOICES:,}")
    choices = np.array(list(product(*(range(len(own.cuts)) for own in devices))))
    a, b, c = (np.stack([getattr(own, name)[choices[:, i]] for i, own in enumerate(devices)], 1) for name in "abc")
    deadlines = _deadlines(a, b, c, np.array([own.cap for own in devices]))
    return settle(devices, tuple(int(at) for at in choices[int(np.argmin(deadlines))]))


def random_cuts(devices: Sequence[Offers], seed: int = 0, draws: int = 100) -> float:
    """Mean seconds of a round over random choices with equal shares."""
    generator = np.random.default_rng(seed)
    chosen = [tuple(int(generator.integers(len(own.cuts))) for own in devices) for _ in range(draws)]
    return float(np.mean([_equal(devices, positions).round_s for positions in chosen]))


def all_local(devices: Sequence[Offers]) -> Plan:
    """The last permitted cut everywhere, shares settled."""
    return settle(devices, tuple(len(own.cuts) - 1 for own in devices))


def all_offloaded(devices: Sequence[Offers]) -> Plan:
    """The first permitted cut everywhere, shares settled."""
    return settle(devices, (0,) * len(devices))


def equal_share(devices: Sequence[Offers]) -> Plan:
    """Equal shares; every device picks its fastest cut under them."""
    share = 1 / len(devices)
    times = [[seconds(own, position, share, share) for position in range(len(own.cuts))] for own in devices]
    return _equal(devices, tuple(int(np.argmin(row)) for row in times))


def _equal(devices: Sequence[Offers], positions: tuple[int, ...]) -> Plan:
    shares = (1 / len(devices),) * len(devices)
    times = [seconds(own, position, shares[0], shares[0]) for own, position in zip(devices, positions, strict=True)]
    return Plan(positions, shares, shares, max(times))


def _deadlines(a: Numbers, b: Numbers, c: Numbers, cap: Numbers) -> Numbers:
    """Best round time of every choice [choices, devices], by halving deadlines and prices side by side."""

    def bought(price: Numbers, deadline: Numbers) -> tuple[Numbers, Numbers]:
        """Sums of the shares bought in every choice."""
        p, q, left = price[:, None], 1 - price[:, None], deadline[:, None] - a
        with np.errstate(divide="ignore", invalid="ignore"):
            root = np.sqrt(b * p) + np.sqrt(c * q)
            link = np.minimum(np.where(c > 0, np.sqrt(c / q) * root / left, 0.0), cap)
            server = np.where(b > 0, b / (left - np.where(c > 0, c / link, 0.0)), 0.0)
        short = (left <= 0) | (server < 0) | (left * cap < c)
        return np.where(short, np.inf, server).sum(1), np.where(short, np.inf, link).sum(1)

    low_price, high_price, best = np.zeros(len(a)), np.ones(len(a)), np.zeros(len(a))
    for _ in range(30):
        price = (low_price + high_price) / 2
        low = np.max(a + c / cap, axis=1)
        high = low + np.sum(b + c, axis=1) * 4 / np.minimum(price, 1 - price) + 1e-12
        for _ in range(50):
            middle = (low + high) / 2
            server, link = bought(price, middle)
            met = price * server + (1 - price) * link <= 1
            low, high = np.where(met, low, middle), np.where(met, middle, high)
        best = np.maximum(best, high)
        server, link = bought(price, high)
        low_price, high_price = np.where(server > link, price, low_price), np.where(server > link, high_price, price)
    return best
