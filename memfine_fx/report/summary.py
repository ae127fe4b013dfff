"""The line that is logged after a model's first optimizer step: how much of it was chunked."""

from __future__ import annotations

from collections.abc import Iterable

from memfine_fx.report.entries import RegionReport
from memfine_fx.report.reports import Report

__all__ = ["by_reason", "first_step_line", "unchunked_layers"]


def first_step_line(report: Report, budget: object = None) -> str:
    """Return one line: layers chunked of layers found, the predicted peak of the step, the budget.

    Args:
        report: of the model, after its first step.
        budget: as the user gave it: bytes, text such as "20GiB", or None.
    """
    num_chunked, num_left = len(_chunked_layers(report)), len(unchunked_layers(report))
    line = f"{num_chunked} of {num_chunked + num_left} MoE layers chunked"
    if report.predicted_peak_bytes is not None:
        line += f", {_readable(report.predicted_peak_bytes)} predicted"
    return line + f", budget {_readable_budget(budget)}"


def unchunked_layers(report: Report) -> list[RegionReport]:
    """Return the refused regions of layers that are chunked in no graph; a choice without experts is no layer."""
    chunked = _chunked_layers(report)
    refused = (region for region in report.regions if region.status == "refused" and region.has_experts)
    return list({_layer_of(region): region for region in refused if _layer_of(region) not in chunked}.values())


def by_reason(refused: Iterable[RegionReport]) -> str:
    """Return refusals in one text: each reason once, with the layers that it is the reason of."""
    layers: dict[str, list[str]] = {}
    for region in refused:
        layers.setdefault(region.reason, []).append(str(region.where))
    return "; ".join(f"{', '.join(map(str, names))}: {reason}" for reason, names in layers.items())


def _chunked_layers(report: Report) -> set[object]:
    return {_layer_of(region) for region in report.regions if region.status == "chunked"}


def _layer_of(region: RegionReport) -> object:
    """Return the region's module, which training, evaluation and recompiled graphs have in common."""
    return region.where.module or id(region)


def _readable_budget(budget: object) -> str:
    if budget is None:
        return "automatic"
    return _readable(budget) if isinstance(budget, int) else str(budget)


def _readable(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
