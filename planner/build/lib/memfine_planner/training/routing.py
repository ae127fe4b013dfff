"""How many rows a rank's experts receive: distributions of routing, sampled.

    balanced     every expert the same, with the noise of random tokens
    zipf         the k-th most popular expert gets k^-alpha, another order in every layer and iteration
    table        MemFine's published layer-by-layer imbalance of one bad iteration (`memory.published`), a milder
                 state in the other iterations
    all_to_one   every token picks experts of one rank

A sample is the number of rows that the fullest rank of the expert parallel group receives, per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memfine_fx.errors import ConfigError
from memfine_fx.memory.published import IMBALANCE, expert_loads
from memfine_planner.costs.architectures import Architecture
from memfine_planner.costs.strategy import Strategy

__all__ = ["ROUTINGS", "Routing", "sample_rank_rows"]

ROUTINGS = ("balanced", "zipf", "table", "all_to_one")


@dataclass(frozen=True)
class Routing:
    """A distribution of routing.

    Args:
        kind: see the module's text.
        alpha: exponent of "zipf".
        bad_share: fraction of iterations in the table's bad state; the paper's chunk counts peak in about 4 of its
            25 iterations. In the others an expert's share is raised to the power `calm`, 0 for balanced, 1 for as bad.
        hottest_together: whether a bad iteration's hottest experts lie on one rank. The paper's memory figures say
            so (18 to 20 times the balanced rows); with experts in random order a rank gets about a quarter of that.
    """

    kind: Literal["balanced", "zipf", "table", "all_to_one"] = "balanced"
    alpha: float = 0.8
    bad_share: float = 0.16
    calm: float = 0.5
    hottest_together: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ROUTINGS:
            raise ConfigError(f"unknown routing {self.kind!r}; known: {', '.join(ROUTINGS)}")
        if not (0 <= self.bad_share <= 1 and 0 <= self.calm <= 1 and self.alpha >= 0):
            raise ConfigError("routing: expected bad_share and calm in [0, 1] and alpha >= 0")


def sample_rank_rows(
    arch: Architecture, s: Strategy, routing: Routing, iterations: int, seed: int = 0
) -> NDArray[np.float64]:
    """Rows that the fullest rank receives, [iterations, MoE layers].

    All ranks of the expert parallel group send their tokens; experts lie on ranks in a random order, another one in
    every iteration and layer, because which experts are popular is not known beforehand.
    """
    generator = np.random.default_rng(seed)
    num_layers = len(arch.moe_layers)
    total = float(s.local_tokens // s.tp * arch.top_k * s.ep)
    per_rank = arch.experts // s.ep
    # A token's top_k experts differ: a rank that holds fewer cannot receive all of its rows.
    most = total * min(arch.top_k, per_rank) / arch.top_k
    if routing.kind == "all_to_one" or s.ep == 1:
        return np.full((iterations, num_layers), most)
    rows = np.empty((iterations, num_layers))
    # A bad iteration is bad in all layers.
    is_calm = generator.random(iterations) >= routing.bad_share
    for index in range(num_layers):
        # Depth in proportion: the first MoE layer is the table's first, the last its last.
        position = round(index * (len(IMBALANCE) - 1) / max(1, num_layers - 1))
        shares = _layer_shares(arch.experts, routing, position if routing.kind == "table" else 0)
        loads = np.broadcast_to(shares, (iterations, arch.experts)).copy()
        shuffled = np.ones(iterations, dtype=bool)
        if routing.kind == "table":
            milder = shares**routing.calm
            loads[is_calm] = milder / milder.sum()
            shuffled = is_calm if routing.hottest_together else shuffled
        loads[shuffled] = generator.permuted(loads[shuffled], axis=1)
        loads = loads.reshape(iterations, s.ep, per_rank).sum(axis=2)
        # Random tokens: the variance of a count is about its mean.
        expected = loads * total
        noisy = expected + np.sqrt(expected) * generator.standard_normal(expected.shape)
        rows[:, index] = np.minimum(noisy.max(axis=1), most)
    return rows


@lru_cache(maxsize=256)
def _layer_shares(experts: int, routing: Routing, position: int) -> NDArray[np.float64]:
    """Each expert's share of a layer's rows in a bad iteration; `position` is the table's layer."""
    if routing.kind == "balanced":
        return np.full(experts, 1.0 / experts)
    if routing.kind == "zipf":
        weights = np.arange(1, experts + 1, dtype=np.float64) ** -routing.alpha
        return np.asarray(weights / weights.sum())
    loads = np.array(expert_loads(IMBALANCE[position]))
    if experts == len(loads):
        return np.asarray(loads / loads.sum())
    # Another number of experts: the same shares over the relative rank.
    grid = (np.arange(experts) + 0.5) / experts
    known = (np.arange(len(loads)) + 0.5) / len(loads)
    resampled = np.exp(np.interp(grid, known, np.log(np.maximum(loads, 1e-3))))
    return np.asarray(resampled / resampled.sum())
