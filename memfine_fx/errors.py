"""Errors and refusals of memfine_fx.

`ConfigError` and `BudgetInfeasible` reach the user. `CannotChunk` never does: it is raised where a
graph leaves what a pass can prove, caught once per region by the pipeline, and printed by the report;
the user's graph stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BudgetInfeasible", "CannotChunk", "ConfigError", "DoubleBackwardError", "MemfineError"]


class MemfineError(Exception):
    """Base of every error that memfine_fx raises on purpose."""


class ConfigError(MemfineError, ValueError):
    """An option, budget or argument is malformed; the message names the value and what is accepted."""


class DoubleBackwardError(MemfineError, RuntimeError):
    """A second derivative was asked for through a chunked region."""


class CannotChunk(MemfineError):
    """A region cannot be rewritten.

    Args:
        reason: what was seen and what was expected, in words.
        node: the graph node (its text) where the proof stopped, if there is one.
    """

    def __init__(self, reason: str, node: object | None = None) -> None:
        self.reason = reason
        self.node = None if node is None else str(node)
        super().__init__(reason if node is None else f"{reason} [at {node}]")


class BudgetInfeasible(MemfineError):
    """No plan fits the memory budget.

    Args:
        budget_bytes: what was asked for.
        minimum_bytes: the smallest budget with a plan that fits.
        largest_terms: (name, bytes) of what fills it, largest first.
    """

    def __init__(self, budget_bytes: int, minimum_bytes: int, largest_terms: Sequence[tuple[str, int]]) -> None:
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.largest_terms = tuple(largest_terms)
        terms = ", ".join(f"{name} {num_bytes:,} B" for name, num_bytes in self.largest_terms)
        super().__init__(
            f"memory_budget={budget_bytes:,} B cannot be met: the smallest budget that fits is "
            f"{minimum_bytes:,} B. Largest terms: {terms}. Raise memory_budget to at least {minimum_bytes}, "
            f"or make the batch or sequence smaller."
        )
