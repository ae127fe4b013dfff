"""What a user can do about a refusal: a hint for each kind of reason, found by the words the reason uses."""

from __future__ import annotations

__all__ = ["hint_for"]

_HINTS: tuple[tuple[str, str], ...] = (
    (
        "leave the captured graph",
        "something between the router and the experts cannot be captured: TORCH_LOGS=graph_breaks shows what; "
        "in transformers, model.set_experts_implementation('grouped_mm') is captured whole",
    ),
    ("no expert matmul depends on it", "nothing to do: this choice picks no experts (sampling, attention, lookups)"),
    ("shares its dispatch with another region", "the other region is chunked; give this one a dispatch of its own"),
    ("detach", "gradients through a detached value cannot be recomputed in chunks: detach outside the experts"),
    ("autocast or gradient mode changes", "enter autocast or no_grad around the whole MoE layer, not inside it"),
    ("also used outside the region", "compute what reads the routed rows from the combined output instead"),
    ("tokens interact", "a running sum over tokens (capacity) makes chunks depend on one another"),
    ("changed in place", "write into a new tensor instead of an input of the experts"),
    ("verification failed", "a rewrite gave other numbers than your model: please report it with this line"),
    ("internal error", "your model runs as it was; please report it with this line"),
    ("no row-wise rule", "an operation inside the experts is not known to treat rows one by one; please report it"),
    ("no known spelling of experts", "see docs/coverage.md for the spellings that are raised"),
    ("is not raised yet", "see docs/coverage.md for the spellings that are raised"),
)


def hint_for(reason: str) -> str:
    """A hint in one sentence; "" where the reason says it all."""
    return next((hint for words, hint in _HINTS if words in reason), "")
