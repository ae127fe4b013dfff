"""Propose changes to a setup that does not fit, each alone, with the smallest budget that it would need."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memfine_fx.errors import MissingPackage
from memfine_fx.fitting.analysis import Analysis
from memfine_fx.fitting.setup import Train
from memfine_fx.plan.solve import largest

__all__ = ["Change", "Changed", "changes"]

_LEANER = {"adamw": ("adamw8bit", "adafactor", "sgd"), "adamw8bit": ("adafactor", "sgd"), "adafactor": ("sgd",)}
_MOST_RANKS = 1024
_SMALLER: dict[Train, tuple[Train, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}


@dataclass(frozen=True)
class Change:
    """A change of the setup, the smallest budget with it, and whether it would fit then; None without a memory."""

    what: str
    least_bytes: int
    fits: bool | None


@dataclass(frozen=True)
class Changed:
    """A step that does not fit, and functions that analyse it with other setups.

    Args:
        analysis: of the setup as it is.
        with_optimizer: name of another optimizer -> analysis with it.
        of_training: "lora" or "qlora" -> analysis with adapters; None where that is not to be recorded.
    """

    analysis: Analysis
    with_optimizer: Callable[[str], Analysis]
    of_training: Callable[[Train], Analysis] | None = None


def changes(changed: Changed, available: int) -> tuple[Change, ...]:
    """Return the changes: those that fit first, and among equals those with the fewest bytes first."""
    candidates = [Change(what, least, least <= available) for what, least in _tried(changed, available)]
    return tuple(sorted(candidates, key=lambda change: (not change.fits, change.least_bytes)))


def _tried(changed: Changed, available: int) -> Iterator[tuple[str, int]]:
    analysis, setup = changed.analysis, changed.analysis.setup
    leaner = [changed.with_optimizer(name) for name in _LEANER.get(setup.optimizer, ())]
    for other in leaner:
        yield f"optimizer={other.setup.optimizer!r}", _least(other)
    if analysis.has_seq:
        shorter = _length_that_fits(analysis, available)
        yield f"seq={shorter}", _least(analysis, seq=shorter)
    if setup.batch > 1 and analysis.has_batch:
        yield "batch=1", _least(analysis, batch=1)
    if setup.expert_parallel == 1:
        ranks = _ranks_that_fit(analysis, available)
        yield f"fsdp={ranks} (an estimate)", _least(_on_ranks(analysis, ranks))
    if changed.of_training is None:
        return
    for train in _SMALLER[setup.train]:
        with contextlib.suppress(MissingPackage):  # without PEFT or bitsandbytes it is one change less
            yield f"train={train!r}", _least(changed.of_training(train))


def _least(analysis: Analysis, batch: int | None = None, seq: int | None = None) -> int:
    setup = analysis.setup
    return analysis.lightest(batch or setup.batch, seq or setup.seq).num_bytes


def _length_that_fits(analysis: Analysis, available: int) -> int:
    """Return the longest sequence that fits, or half of the setup's where none fits."""
    setup = analysis.setup
    if _least(analysis, seq=2) > available:
        return max(2, setup.seq // 2)
    return largest(2, setup.seq, lambda length: _least(analysis, seq=length) <= available)


def _ranks_that_fit(analysis: Analysis, available: int) -> int:
    """Return the fewest ranks that fit, doubled from those of the setup, or the most that are tried."""
    ranks = max(2, 2 * analysis.setup.fsdp)
    while ranks < _MOST_RANKS and _least(_on_ranks(analysis, ranks)) > available:
        ranks *= 2
    return ranks


def _on_ranks(analysis: Analysis, ranks: int) -> Analysis:
    return dataclasses.replace(analysis, setup=dataclasses.replace(analysis.setup, fsdp=ranks))
