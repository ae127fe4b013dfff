"""Errors and refusals of memfine_fx.

`ConfigError`, `BudgetInfeasible` and `ChunkOutOfMemory` reach the user. `CannotChunk` never does: it is raised where a
graph leaves what a pass can prove, caught once per region by the pipeline, and printed by the report;
the user's graph stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = [
    "BudgetInfeasible",
    "CannotChunk",
    "ChunkOutOfMemory",
    "CompatibilityWarning",
    "ConfigError",
    "DoubleBackwardError",
    "ExchangeFailed",
    "LeftoverShapes",
    "MemfineError",
    "MissingPackage",
    "RanksDisagree",
]


class MemfineError(Exception):
    """Base of every error that memfine_fx raises on purpose."""


class ConfigError(MemfineError, ValueError):
    """An option, budget or argument is malformed; the message names the value and what is accepted."""


class MissingPackage(MemfineError, ImportError):
    """A package outside the core dependencies is needed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed; "
            f"install it with: pip install 'memfine-fx[{extra}]'"
        )


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


class LeftoverShapes(MemfineError):
    """A capture flag let something into a graph that no region swallows; never reaches the user."""


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


class ChunkOutOfMemory(MemfineError, torch.OutOfMemoryError):
    """Memory ran out in a chunk of a single row; what handles `torch.OutOfMemoryError` handles this.

    Args:
        terms: (name, bytes) of what one row needs beyond what is already alive.
        cause: what the allocator said.
    """

    def __init__(self, terms: Sequence[tuple[str, int]], cause: str) -> None:
        self.terms = tuple(sorted(terms, key=lambda term: -term[1]))
        self.needed_bytes = sum(num_bytes for _, num_bytes in self.terms)
        self.cause = cause
        listed = ", ".join(f"{name} {num_bytes:,} B" for name, num_bytes in self.terms)
        super().__init__(
            f"out of memory in a chunk of a single row, after halving its rows down to that: one row needs about "
            f"{self.needed_bytes:,} B ({listed}). Free memory outside the experts: make the batch or sequence "
            f"smaller, or checkpoint the layers. The allocator said: {cause}"
        )


class ExchangeFailed(MemfineError, RuntimeError):
    """A rank of an expert parallel group did not take part in an exchange of rows: it died, hangs or left the step.

    Args:
        place: round, pass and layer.
        rank: of this process in the group.
        num_ranks: of the group.
        cause: what torch.distributed said.
    """

    def __init__(self, place: str, rank: int, num_ranks: int, cause: str) -> None:
        self.place = place
        self.cause = cause
        super().__init__(
            f"expert parallel exchange failed on rank {rank} of {num_ranks} in {place}: another rank died, hangs, or "
            f"raised an error of its own; look at the other ranks' output first. torch.distributed said: {cause}"
        )


class RanksDisagree(MemfineError, RuntimeError):
    """Ranks of an expert parallel group run different models, configs or layers; the message says what differs.

    Every rank of the group raises it at the same place, and the process group can be used further. A rank that could
    not go on raises its own error instead, which the others are told.
    """


class CompatibilityWarning(UserWarning):
    """A host (torch, transformers, accelerate, PEFT) differs from what was tested; the message says what is lost."""
