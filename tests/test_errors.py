"""Message texts and fields of the typed errors."""

from __future__ import annotations

import pytest

from memfine_fx.errors import BudgetInfeasible, CannotChunk, ConfigError, DoubleBackwardError, MemfineError, Reason


def test_an_infeasible_budget_says_what_would_fit_and_what_fills_it() -> None:
    error = BudgetInfeasible(1_000, 2_501, [("expert weight grads", 2_001), ("chunk", 500)])
    assert str(error) == (
        "memory_budget=1000 (1000 B) cannot be met: the smallest budget that fits is 2501 (2.44 KiB). Largest terms: "
        'expert weight grads 1.95 KiB, chunk 500 B. Raise memory_budget to "2.45KiB", '
        "or make the batch or sequence smaller."
    )


def test_an_infeasible_budget_carries_its_numbers() -> None:
    error = BudgetInfeasible(1_000, 2_500, [("chunk", 500)])
    assert (error.budget_bytes, error.minimum_bytes, error.largest_terms) == (1_000, 2_500, (("chunk", 500),))


def test_a_refusal_names_its_node() -> None:
    error = CannotChunk(Reason.TOKENS_INTERACT, "rows meet", "softmax_1")
    assert str(error) == "rows meet [at softmax_1]"
    assert (error.reason, error.details, error.node) == (Reason.TOKENS_INTERACT, "rows meet", "softmax_1")


def test_a_refusal_without_a_node_is_its_reason() -> None:
    error = CannotChunk(Reason.TOKENS_INTERACT, "rows meet")
    assert (str(error), error.details, error.node) == ("rows meet", "rows meet", None)


@pytest.mark.parametrize(
    ("error", "standard"),
    [(ConfigError, ValueError), (DoubleBackwardError, RuntimeError), (CannotChunk, Exception)],
)
def test_errors_are_ours_and_of_the_standard_kind(error: type[Exception], standard: type[Exception]) -> None:
    assert issubclass(error, MemfineError)
    assert issubclass(error, standard)
