"""From a head's byte terms and a budget to its chunk plan; pure functions, no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable

from memfine_fx.errors import BudgetInfeasible
from memfine_fx.memory.head_bytes import HeadBytes
from memfine_fx.plan.rows import largest, tried_anyway
from memfine_fx.records.heads import HeadPlan

__all__ = ["LEAST_TOKENS", "knee_tokens", "plan_head"]

_KNEE_TOKENS = {"cpu": 256, "cuda": 1024}
"""Tokens a chunk from which on time hardly falls; docs/head.md says how sure that is."""
LEAST_TOKENS = 64
"""Tokens below which no budget pushes a head's chunk: each chunk reads and writes the whole gradient of the table once,
which at 64 tokens makes a step a third slower than at the knee already (docs/head.md)."""


def knee_tokens(head: HeadBytes) -> int:
    """R without a budget."""
    return _KNEE_TOKENS.get(head.device_type, _KNEE_TOKENS["cuda"])


def plan_head(
    head: HeadBytes,
    num_tokens: int,
    *,
    tokens_per_chunk: int | None = None,
    budget_bytes: int | None = None,
    available_bytes: int | None = None,
    min_tokens: int = LEAST_TOKENS,
    peak_bytes: Callable[[int], int] | None = None,
    refuses: bool = True,
) -> HeadPlan:
    """The plan of a head in one step.

    Args:
        head: its byte terms.
        num_tokens: T of this step.
        tokens_per_chunk: fixed by the user, or None.
        budget_bytes: what the user asked for, for the message.
        available_bytes: what of it `peak_bytes` may use, or None without a limit.
        min_tokens: smallest chunk worth planning.
        peak_bytes: of the whole step with R tokens a chunk, increasing in R; by default of the op alone.
        refuses: whether what fits no chunk is an error; else the smallest is tried.

    Raises:
        BudgetInfeasible: not even `min_tokens` a chunk fit.
    """
    most = max(1, num_tokens)
    if tokens_per_chunk is not None:
        rows, reason = min(tokens_per_chunk, most), "tokens per chunk fixed by the config"
    else:
        rows, reason = min(knee_tokens(head), most), f"default on {head.device_type}"

    peak = peak_bytes or functools.partial(head.peak, num_tokens)
    if available_bytes is not None and peak(rows) > available_bytes:
        low = min(min_tokens, rows)
        needed = peak(low)
        if needed > available_bytes:
            terms = [
                ("working set of head", head.workspace(low)),
                ("everything else alive", needed - head.workspace(low)),
            ]
            budget = available_bytes if budget_bytes is None else budget_bytes
            error = BudgetInfeasible(budget, budget + needed - available_bytes, terms)
            if refuses:
                raise error
            rows, reason = low, tried_anyway(error)
        else:
            rows = largest(low, rows, lambda candidate: peak(candidate) <= available_bytes)
            reason = f"largest chunk with which the step keeps within {available_bytes:,} B"
    elif available_bytes is not None:
        reason = f"{reason}, within the budget"
    return HeadPlan(rows, head.peak(num_tokens, rows), reason)
