"""Who cuts where and gets what share, settled by prices.

The round time T is to be smallest under sum(s) <= 1 and sum(w) <= 1. The server knows no device's speed, samples or
leakage bound. It posts a deadline T, a price p of its arithmetic and 1 - p of its link; every device answers with the
shares it would buy: over its permitted cuts, those that meet the deadline for the least payment p * s + (1 - p) * w.
Only the sums of the answers matter for the next posting.

Why it converges. At a fixed T a device's payment is a minimum of functions linear in p, so their sum V(p, T) is concave
in p, and sum(s) - sum(w) is a supergradient: it falls from positive to negative as p grows. V decreases in T. Whenever
T can be met, V(p, T) <= p + (1 - p) = 1 for every p; so the T at which V(p, T) = 1 is a lower bound of the best round
time, by whatever means it may be found. That bound is quasiconcave in p, and the sign of sum(s) - sum(w) says on which
side its maximum lies: halving the interval of p finds it, to 2^-n after n prices, with a few dozen deadlines each.

With cuts fixed the shares of that maximum are optimal: the problem is convex and the bound is met. With free cuts one
or two devices may be torn between cuts at the final price. So the cuts answered on the way are frozen, the shares
settled for them, and each device in turn proposes the cuts that it would pay least for at those prices; a proposal
stands if the deadline falls. There are finitely many choices and T falls with each: it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from memfine_planner.splitting.latency import Offers, seconds

__all__ = ["Answer", "Plan", "answer", "choose", "settle"]

_PRICE_EDGE = 1e-9
_PRICE_HALVINGS = 40
_TOLERANCE = 1e-6
_ROUNDING = 1e-9
_SHORTEST_S = 1e-12
_PROPOSALS = 3


@dataclass(frozen=True)
class Answer:
    """What a device buys at posted prices: the position of its cut, its shares and its payment."""

    position: int
    server_share: float
    link_share: float
    payment: float


@dataclass(frozen=True)
class Plan:
    """Cuts and shares of every device.

    Args:
        positions: of each device's cut in its own offers.
        round_s: time of the slowest device.
        bound_s: no plan is faster than this; 0 where no bound was computed.
        postings: how often prices were posted.
    """

    positions: tuple[int, ...]
    server_shares: tuple[float, ...]
    link_shares: tuple[float, ...]
    round_s: float
    bound_s: float = 0.0
    postings: int = 0


def answer(own: Offers, price: float, deadline: float) -> Answer | None:
    """A device's answer, from its own offers alone; None where no cut of it can meet the deadline.

    Minimising p s + q w under b/s + c/w = t gives s = sqrt(b/p) r/t and w = sqrt(c/q) r/t with r = sqrt(bp) + sqrt(cq);
    where w would exceed what the device's own link can use, w stays there and s follows.
    """
    other = 1.0 - price
    left = deadline - own.a
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(own.b * price) + np.sqrt(own.c * other)
        server = np.sqrt(own.b / price) * root / left
        link = np.sqrt(own.c / other) * root / left
        capped = link > own.cap
        link = np.where(capped, own.cap, link)
        server = np.where(capped, np.where(own.b > 0, own.b / (left - own.c / own.cap), 0.0), server)
        payment = np.where(
            (left > 0) & (left * own.cap >= own.c) & (server >= 0), price * server + other * link, np.inf
        )
    best = int(np.argmin(payment))
    if not np.isfinite(payment[best]):
        return None
    return Answer(best, float(server[best]), float(link[best]), float(payment[best]))


def choose(devices: Sequence[Offers]) -> Plan:
    """Cuts and shares by the market of the module's text, with the bound that it proves."""
    market = _Market(devices)
    bound, candidates = market.clear()
    plans = {positions: settle(devices, positions, market) for positions in candidates}
    best = min(plans.values(), key=lambda plan: plan.round_s)
    improved = True
    while improved:
        improved = False
        for index in range(len(devices)):
            for position in _proposals(devices, best, index):
                positions = (*best.positions[:index], position, *best.positions[index + 1 :])
                if positions not in plans:
                    plans[positions] = settle(devices, positions, market)
                if plans[positions].round_s < best.round_s * (1 - _TOLERANCE):
                    best, improved = plans[positions], True
    return Plan(best.positions, best.server_shares, best.link_shares, best.round_s, bound, market.postings)


def settle(devices: Sequence[Offers], positions: Sequence[int], counter: _Market | None = None) -> Plan:
    """The best shares for fixed cuts, by the same postings."""
    market = _Market([own.only(position) for own, position in zip(devices, positions, strict=True)])
    deadline, _ = market.clear()
    if counter is not None:
        counter.postings += market.postings
    bought = market.last
    # The answers fill both resources but for rounding; where only one is scarce the other has something left.
    scale = [max(1.0, sum(shares)) for shares in ([a.server_share for a in bought], [a.link_share for a in bought])]
    server = tuple(one.server_share / scale[0] for one in bought)
    link = tuple(one.link_share / scale[1] for one in bought)
    times = [seconds(*four) for four in zip(devices, positions, server, link, strict=True)]
    return Plan(tuple(positions), server, link, max(times), deadline)


def _proposals(devices: Sequence[Offers], plan: Plan, index: int) -> list[int]:
    """Other cuts of a device, those first that are cheapest at the plan's deadline and the prices of its shares."""
    own = devices[index]
    # Prices in proportion to what a little more of either would save this device.
    b, c = own.b[plan.positions[index]], own.c[plan.positions[index]]
    server, link = plan.server_shares[index], plan.link_shares[index]
    gains = (b / server**2 if server > 0 else 0.0, c / link**2 if link > 0 else 0.0)
    price = gains[0] / sum(gains) if sum(gains) > 0 else 0.5
    price = min(max(price, 0.05), 0.95)
    singles = [answer(own.only(position), price, plan.round_s) for position in range(len(own.cuts))]
    payments = [np.inf if one is None else one.payment for one in singles]
    order = [int(position) for position in np.argsort(payments) if position != plan.positions[index]]
    return [position for position in order if np.isfinite(payments[position])][:_PROPOSALS]


class _Market:
    """The server's side: posts deadlines and prices, sees sums, remembers how often it asked."""

    def __init__(self, devices: Sequence[Offers]) -> None:
        self.devices = devices
        self.postings = 0
        self.guess = 1.0
        self.last: list[Answer] = []

    def clear(self) -> tuple[float, list[tuple[int, ...]]]:
        """The largest lower bound over prices, and the choices of cuts seen on the way."""
        low, high = _PRICE_EDGE, 1.0 - _PRICE_EDGE
        seen: dict[tuple[int, ...], None] = {}
        bound = 0.0
        for _ in range(_PRICE_HALVINGS):
            price = (low + high) / 2
            deadline = self._deadline(price)
            excess = sum(one.server_share for one in self.last) - sum(one.link_share for one in self.last)
            seen[tuple(one.position for one in self.last)] = None
            bound = max(bound, deadline)
            low, high = (price, high) if excess > 0 else (low, price)
            if abs(excess) < _TOLERANCE or high - low < _PRICE_EDGE:
                break
        # The last answers are kept, not those of the largest deadline: where a device's own speed sets it, it is the
        # same over a range of prices, and only near the last of them do the answers fit together.
        return bound, list(seen)

    def _deadline(self, price: float) -> float:
        """The deadline at which all payments together are 1, bracketed by answers alone."""
        high = self.guess
        while self._payments(price, high) > 1:
            high *= 2
        low = high / 2
        while self._payments(price, low) <= 1 and low > _SHORTEST_S:
            low, high = low / 2, low

        def excess(deadline: float) -> float:
            return min(self._payments(price, deadline), 10.0) - 1

        # Payments jump where a cut becomes possible that no share makes faster: the root may be the jump, from below.
        found = brentq(excess, low, high, rtol=_ROUNDING / 10, xtol=low * _ROUNDING) if low > _SHORTEST_S else high
        deadline = float(found)
        while self._payments(price, deadline) > 1 + _TOLERANCE:
            deadline *= 1 + _ROUNDING
        self.guess = deadline
        return deadline

    def _payments(self, price: float, deadline: float) -> float:
        self.postings += 1
        answers = [answer(own, price, deadline) for own in self.devices]
        self.last = [one for one in answers if one is not None]
        return sum(one.payment for one in self.last) if len(self.last) == len(answers) else np.inf
