"""From a budget of bytes to plans: what a step may use, whether a partition fits, how many rows a chunk may have."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from memfine_fx.config import Config, parse_budget
from memfine_fx.memory.liveness import GraphMemory
from memfine_fx.memory.region_bytes import RegionBytes, region_peak
from memfine_fx.memory.step import GraphStep, StepPeak, step_peak
from memfine_fx.planner import plan_region
from memfine_fx.records import ChunkPlan
from memfine_fx.session import CapturedGraph, Session

__all__ = ["budget_bytes", "choose_plan", "fits_budget", "unbounded_rows"]

_ESTIMATE_MARGIN = 1.02
"""What an estimate made before compilation may be short of the compiled code (docs/design.md, "The step's peak")."""


def budget_bytes(config: Config, device: torch.device) -> int | None:
    """Bytes of the budget on this device; automatic means 0.9 of free CUDA memory, no limit on CPU."""
    if device.type != "cuda":
        return parse_budget(config.memory_budget, _host_bytes())
    free, total = torch.cuda.mem_get_info(device)
    if config.memory_budget is None:
        return int(0.9 * (free + torch.cuda.memory_reserved(device)))
    return parse_budget(config.memory_budget, total)


def fits_budget(
    session: Session, graph: CapturedGraph, device: torch.device
) -> Callable[[GraphMemory, GraphMemory], bool] | None:
    """Whether a partition of this graph keeps the step within the budget, with as many rows as time asks for.

    None without a budget of the user: then nothing dense is computed again that the model does not ask for.
    """
    if session.config.memory_budget is None:
        return None

    def fits(forward: GraphMemory, backward: GraphMemory) -> bool:
        available = _available_bytes(session, device)
        trial = GraphStep(graph.step.regions, graph.step.sizes, forward, backward)
        others = [other.step for other in session.latest_graphs() if other is not graph]
        peak = step_peak([*others, trial], _rows_of(session, graph, None))
        return peak is None or available is None or peak.num_bytes * _ESTIMATE_MARGIN <= available

    return fits


def choose_plan(
    region_now: Callable[[], RegionBytes], session: Session, graph: CapturedGraph, device: torch.device, num_tokens: int
) -> ChunkPlan:
    """The plan of one region for T tokens: as many rows as time asks for, fewer if the step would not fit.

    Raises:
        BudgetInfeasible: not even `Config.min_rows` a chunk fits.
    """
    config, region = session.config, region_now()
    available = _available_bytes(session, device)

    def peak_terms(rows: int) -> dict[str, int]:
        peak = _peak_with(session, graph, rows)
        if peak is None:
            return region_peak(region, num_tokens, rows, config.axis)
        return _as_terms(peak)

    return plan_region(
        region,
        num_tokens,
        axis=config.axis,
        rows_per_chunk=config.rows_per_chunk,
        tokens_per_chunk=config.tokens_per_chunk,
        budget_bytes=budget_bytes(config, device),
        available_bytes=available,
        min_rows=config.min_rows,
        peak_terms=peak_terms,
    )


def unbounded_rows(config: Config, region: RegionBytes, num_tokens: int) -> int:
    """Rows a chunk (a slice's rows, on the tokens axis) that a plan without a budget has."""
    return plan_region(
        region,
        num_tokens,
        axis=config.axis,
        rows_per_chunk=config.rows_per_chunk,
        tokens_per_chunk=config.tokens_per_chunk,
    ).rows_per_chunk


def _peak_with(session: Session, graph: CapturedGraph, rows: int | None) -> StepPeak | None:
    graphs = session.latest_graphs()
    return step_peak([one.step for one in graphs], _rows_of(session, graph, rows))


def _rows_of(session: Session, graph: CapturedGraph, rows: int | None) -> Callable[[str, int], int]:
    """Rows by site: `rows` everywhere if given, else what a plan without a budget has."""
    regions = {site: region for one in (*session.latest_graphs(), graph) for site, region in one.step.regions.items()}

    def rows_of(site: str, num_tokens: int) -> int:
        return unbounded_rows(session.config, regions[site].terms, num_tokens) if rows is None else rows

    return rows_of


def _available_bytes(session: Session, device: torch.device) -> int | None:
    budget = budget_bytes(session.config, device)
    return None if budget is None else budget - sum(session.static_terms().values())


def _as_terms(peak: StepPeak) -> dict[str, int]:
    """The peak's terms by name, and the rest of it under one name, so that they add up."""
    terms: dict[str, int] = {}
    for name, num_bytes in peak.terms:
        terms[name] = terms.get(name, 0) + num_bytes
    terms["everything else alive"] = peak.num_bytes - sum(terms.values())
    return terms


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
