"""Analyse the training step without memfine_fx: plain, with checkpointing, and under torch.compile's own ratio.

Each is recorded as torch.compile would take the model as it is written, from the graph's operations: the partition is
functorch's, nothing is looked for and nothing rewritten. `activation_memory_budget` is that of functorch, a share of
what forward would save; what it chooses depends on the number of layers, so where layers were extended it is an
estimate, and so is everything where layers were not found to be even.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from memfine_fx.errors import ConfigError, MemfineError
from memfine_fx.fitting.analysis import Analysis, StepTotal

__all__ = ["SHARES", "Alternative", "alternatives"]

SHARES = (0.5, 0.0)


@dataclass(frozen=True)
class Alternative:
    """A way to train without memfine_fx, and the memory that it needs.

    Args:
        what: the way, in words.
        total: its peak, None where it could not be recorded.
        longest_seq: that fits in the memory, 0 for none or where there is no memory; None where it is not known.
        remark: what the number leaves open, "" where nothing.
        analysis, plan: what the total comes from, for other sizes.
    """

    what: str
    total: StepTotal | None
    longest_seq: int | None = 0
    remark: str = ""
    analysis: Analysis | None = field(default=None, repr=False, compare=False)
    plan: str = "asked"


def alternatives(
    record: Callable[[bool], tuple[Analysis, bool]], longest: Callable[[Callable[[int], int]], int]
) -> tuple[Alternative, ...]:
    """Return plain training, then torch.compile under each of `SHARES`, then gradient checkpointing of layers.

    Args:
        record: whether layers are checkpointed -> the records of plain training, and whether they are exact.
        longest: a function from length to bytes -> the longest sequence that fits.
    """
    results = []
    for checkpoints, what in ((False, "plain training (torch.compile)"), (True, "gradient checkpointing of layers")):
        try:
            analysis, is_exact = record(checkpoints)
        except (ConfigError, MemfineError) as error:
            results.append(Alternative(what, None, remark=f"could not be recorded: {error}"))
            continue
        plans = {"asked": what}
        if not checkpoints:
            plans |= {str(share): f"torch.compile with activation_memory_budget={share}" for share in SHARES}
        for plan, name in plans.items():
            remark = "" if is_exact and plan == "asked" else "an estimate"
            bytes_at = functools.partial(_bytes_at, analysis, plan)
            seq = longest(bytes_at) if analysis.has_seq else None
            total = analysis.total(plan, analysis.setup.batch, analysis.setup.seq)
            results.append(Alternative(name, total, seq, remark, analysis, plan))
    return tuple(results)


def _bytes_at(analysis: Analysis, plan: str, seq: int) -> int:
    return analysis.total(plan, analysis.setup.batch, seq).num_bytes
