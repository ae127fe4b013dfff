"""A local search for what-if questions, where `tuner.tune` at every point would take minutes.

From a few diverse strategies, or from the answer of a neighbouring question, it moves to the first better strategy that
differs in one or two sizes by a step, until none is better. Evaluated strategies are remembered. It does not see the
front and may stop at a local best: the tests hold it within 3% of the full search on
five requests, on some of which the starts were chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product
from typing import Any

from memfine_planner.costs.calibration import fitted
from memfine_planner.costs.strategy import Strategy
from memfine_planner.training.faults import best_interval, checkpoint_cost
from memfine_planner.training.memory import ALPHA
from memfine_planner.training.tuner import Candidate, Request, bad_peak, space, time_candidate, variants

__all__ = ["LocalSearch", "quick_best"]

_FIELDS = ("tp", "pp", "vp", "cp", "ep", "zero", "micro_batch", "recompute")
_RECOMPUTE = ("none", "selective", "experts", "full")
_CLIMBED = 6

Key = tuple[Any, ...]


def quick_best(request: Request, near: Iterable[Strategy] = ()) -> Candidate | None:
    """The best strategy that local search finds; None where none of its starts leads to one that fits.

    Args:
        near: answers of similar questions, climbed from first.
    """
    return LocalSearch(request).best(near)


@dataclass
class LocalSearch:
    """The valid strategies of a request by their sizes, and what is known of those that were evaluated."""

    request: Request
    _known: dict[Key, tuple[float, Candidate | None]] = field(default_factory=dict)

    @cached_property
    def _valid(self) -> dict[Key, Strategy]:
        return {_key(s): s for s in space(self.request)}

    @cached_property
    def _values(self) -> list[list[Any]]:
        columns = zip(*self._valid, strict=True)
        return [sorted(set(column), key=_RECOMPUTE.index if name == "recompute" else None) for name, column in
                zip(_FIELDS, columns, strict=True)]  # fmt: skip

    def best(self, near: Iterable[Strategy]) -> Candidate | None:
        if not self._valid:
            return None
        starts = [key for s in near if (key := self._nearest(_key(s))) is not None]
        # A neighbour's answer may be a summit of its own: starts from elsewhere show a higher one. The best of each
        # kind of pipeline and of expert parallelism, because the best of all are alike.
        leaders: dict[Key, Key] = {}
        for key in sorted(self._diverse(), key=lambda key: -self._score(key)):
            leaders.setdefault((key[_FIELDS.index("pp")], key[_FIELDS.index("ep")]), key)
        starts += list(leaders.values())[:_CLIMBED]
        tops = [self._climb(key) for key in dict.fromkeys(starts)]
        return max((self._known[top] for top in tops), key=lambda entry: entry[0])[1]

    def _diverse(self) -> Iterator[Key]:
        """The ends and the middle of every size, the two strongest recomputations, no interleaving."""
        chosen = [[values[0], values[len(values) // 2], values[-1]] for values in self._values]
        for index, name in enumerate(_FIELDS):
            if name == "recompute":
                chosen[index] = self._values[index][-2:]
            elif name == "vp":
                chosen[index] = self._values[index][:1]
        for key in dict.fromkeys(product(*chosen)):
            if key in self._valid:
                yield key

    def _nearest(self, key: Key) -> Key | None:
        """The same sizes where they are valid, else those with the fewest steps in between."""
        if key in self._valid:
            return key
        steps = [
            {value: position for position, value in enumerate(values)} for values in self._values
        ]  # values that are not offered here count as far away

        def distance(other: Key) -> int:
            return sum(abs(table.get(a, 9) - table[b]) for a, b, table in zip(key, other, steps, strict=True) if a != b)

        return min(self._valid, key=distance)

    def _climb(self, key: Key) -> Key:
        while True:
            here = self._score(key)
            better = next((other for other in self._neighbours(key) if self._score(other) > here * (1 + 1e-6)), None)
            if better is None:
                return key
            key = better

    def _neighbours(self, key: Key) -> Iterator[Key]:
        moves: list[Sequence[Any]] = []
        for value, values in zip(key, self._values, strict=True):
            at = values.index(value)
            moves.append([values[i] for i in (at - 1, at + 1) if 0 <= i < len(values)])
        for count in (1, 2):
            for places in combinations(range(len(key)), count):
                for changed in product(*(moves[place] for place in places)):
                    other = list(key)
                    for place, value in zip(places, changed, strict=True):
                        other[place] = value
                    if (found := tuple(other)) in self._valid:
                        yield found

    def _score(self, key: Key) -> float:
        """Useful tokens per second; negative, the more bytes are missing, for what does not fit."""
        if key not in self._known:
            self._known[key] = self._evaluate(self._valid[key])
        return self._known[key][0]

    def _evaluate(self, s: Strategy) -> tuple[float, Candidate | None]:
        usable = ALPHA * self.request.system.memory_bytes
        best: tuple[float, Candidate | None] = (-float("inf"), None)
        for variant in variants(self.request, s, usable):
            peak, rank = bad_peak(self.request, variant)
            if peak > usable:
                best = max(best, (-peak, None), key=lambda entry: entry[0])
                continue
            found = time_candidate(self.request, variant, peak, rank, fitted(), self._cost, self._plain)
            best = max(best, (found.useful_tokens_per_s, found), key=lambda entry: entry[0])
        return best

    @cached_property
    def _cost(self) -> Any:
        any_ = next(iter(self._valid.values()))
        return checkpoint_cost(
            self.request.arch.params, any_, self.request.system, asynchronous=self.request.asynchronous
        )

    @cached_property
    def _plain(self) -> Any:
        return best_interval(self._cost, self.request.faults, self.request.gpus)


def _key(s: Strategy) -> Key:
    return tuple(getattr(s, name) for name in _FIELDS)
