"""Graph breaks: what Dynamo says of code that it runs eagerly between graphs, or in their place."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from typing import Any

from memfine_fx.compat.checks import Feature, expect

__all__ = ["GRAPH_BREAKS", "graph_breaks", "graph_breaks_since"]

_SKIPPED = re.compile(r"frame skipped: (\w+) \((.+) line (\d+)\)")


def graph_breaks() -> Counter[str]:
    """Return how often Dynamo has broken a graph in this process, by reason and place: "reason at file:line"."""
    if not GRAPH_BREAKS.holds():
        return Counter()
    utils = _utils()
    reasons = [_first_line(reason.reason) for reason in utils.graph_break_reasons]
    places = [reason.user_stack[-1] if reason.user_stack else None for reason in utils.graph_break_reasons]
    breaks = Counter(
        f"{reason} at {place.filename}:{place.lineno}"
        for reason, place in zip(reasons, places, strict=True)
        if place is not None
    )
    for text, count in utils.counters["unimplemented"].items():
        skipped = _SKIPPED.search(text)
        if skipped is not None:  # such a frame has no graph, and stands in no other list
            breaks[f"{_first_line(text)} in {skipped[1]} at {skipped[2]}:{skipped[3]}"] += count
    return breaks


def graph_breaks_since(before: Counter[str]) -> list[str]:
    """Return the breaks that came after `before` was counted, each once, in their order."""
    return [text for text, count in graph_breaks().items() if count > before[text]]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _utils() -> Any:
    return importlib.import_module("torch._dynamo.utils")


def _check_graph_breaks() -> None:
    utils = _utils()
    expect(isinstance(utils.graph_break_reasons, list), "reasons of graph breaks are no list")
    expect(hasattr(utils.counters["unimplemented"], "items"), "what breaks a graph is not counted by its text")
    reason = importlib.import_module("torch._dynamo.output_graph").GraphCompileReason
    fields = getattr(reason, "__dataclass_fields__", {})
    expect({"reason", "user_stack"} <= set(fields), f"a reason has {', '.join(fields)}")


GRAPH_BREAKS = Feature(
    name="torch._dynamo.utils.graph_break_reasons",
    package="torch",
    purpose="reports that say where a graph breaks",
    seen=("2.13", "2.13"),
    fallback="Reports do not say where a graph breaks; TORCH_LOGS=graph_breaks shows it.",
    check=_check_graph_breaks,
)
