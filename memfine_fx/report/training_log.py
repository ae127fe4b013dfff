"""A training run's chunks, rows, imbalance and bytes as named numbers, for TensorBoard or any other log."""

from __future__ import annotations

from typing import Protocol

import torch

from memfine_fx.report.entries import RegionReport
from memfine_fx.report.reports import Report

__all__ = ["ScalarWriter", "scalars_of"]


class ScalarWriter(Protocol):
    """A writer of named numbers; TensorBoard's `SummaryWriter` is one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...


def scalars_of(report: Report) -> dict[str, float]:
    """A report's numbers by name, and the allocator's peak on CUDA; see `memfine_fx.scalars`."""
    named: dict[str, float] = {}
    for region in report.regions:
        if region.status == "chunked" and region.imbalance is not None:
            named.update(_of_region(region))
    if report.predicted_peak_bytes is not None:
        named["memfine/predicted_peak_bytes"] = float(report.predicted_peak_bytes)
    if torch.cuda.is_available():
        named["memfine/measured_peak_bytes"] = float(torch.cuda.max_memory_allocated())
    return named


def _of_region(region: RegionReport) -> dict[str, float]:
    imbalance = region.imbalance
    assert imbalance is not None
    layer = f"memfine/{region.where.module or region.where.source}"
    return {
        f"{layer}/chunks": float(region.num_chunks),
        f"{layer}/largest_chunk_rows": float(region.largest_chunk),
        f"{layer}/tokens": float(region.num_tokens),
        f"{layer}/imbalance": imbalance.latest,
        f"{layer}/imbalance_p50": imbalance.p50,
        f"{layer}/imbalance_p95": imbalance.p95,
        f"{layer}/imbalance_max": imbalance.largest,
    }
