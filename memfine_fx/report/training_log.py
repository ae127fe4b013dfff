"""A training run's chunks, rows, imbalance and bytes as named numbers, for TensorBoard or any other log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from memfine_fx.api import report
from memfine_fx.report.reports import RegionReport

__all__ = ["ScalarWriter", "log_scalars", "scalars"]


class ScalarWriter(Protocol):
    """What is asked of a writer; TensorBoard's `SummaryWriter` is one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...


def scalars(model: torch.nn.Module | Callable[..., Any]) -> dict[str, float]:
    """Named numbers of the latest steps.

    Args:
        model: optimized, or compiled with backend="memfine", and run.

    Returns:
        Per chunked layer `memfine/LAYER/...`: chunks, largest_chunk_rows, tokens, imbalance (rows of the fullest expert
        over the mean) and its p50, p95 and max over the latest steps; of the step `memfine/predicted_peak_bytes`, and
        on CUDA `memfine/measured_peak_bytes`, the allocator's peak since it was last reset.

    Raises:
        MemfineError: memfine_fx has compiled nothing of this model.
    """
    found = report(model)
    named: dict[str, float] = {}
    for region in found.regions:
        if region.status == "chunked" and region.imbalance is not None:
            named.update(_of_region(region))
    if found.predicted_peak_bytes is not None:
        named["memfine/predicted_peak_bytes"] = float(found.predicted_peak_bytes)
    if torch.cuda.is_available():
        named["memfine/measured_peak_bytes"] = float(torch.cuda.max_memory_allocated())
    return named


def log_scalars(writer: ScalarWriter, model: torch.nn.Module | Callable[..., Any], step: int) -> None:
    """Write `scalars(model)`, e.g. with `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        MemfineError: memfine_fx has compiled nothing of this model.
    """
    for name, value in scalars(model).items():
        writer.add_scalar(name, value, step)


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
