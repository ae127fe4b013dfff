"""From a budget of bytes to plans: what a step may use, whether a partition fits, how many rows a chunk may have."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import fx

from memfine_fx.calibration import device_rates
from memfine_fx.config import Config, parse_budget
from memfine_fx.cost import DeviceRates, rows_seconds
from memfine_fx.head_planner import knee_tokens, plan_head
from memfine_fx.head_records import HeadPlan
from memfine_fx.memory.liveness import GraphMemory
from memfine_fx.memory.region_bytes import ChunkSize, RegionBytes, region_peak
from memfine_fx.memory.step import GraphStep, RegionMemory, StepPeak, step_peak
from memfine_fx.planner import plan_region
from memfine_fx.records import ChunkPlan
from memfine_fx.session import CapturedGraph, Session

__all__ = ["GraphBudget", "budget_bytes", "budget_of_graph", "choose_head_plan", "choose_plan", "unbounded_rows"]

_SCALAR_BYTES = 64
"""Left free for what autograd makes outside the graphs: the loss's gradient and its like."""
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


def budget_of_graph(session: Session, graph: CapturedGraph, hidden: torch.Tensor) -> GraphBudget | None:
    """What the step of this graph may use, or None without a budget of the user: then nothing is computed again
    that the model does not ask for, and regions keep nothing.

    Args:
        hidden: tokens of a region or head, for device and dtype.
    """
    is_limited = session.config.memory_budget is not None and budget_bytes(session.config, hidden.device) is not None
    return GraphBudget(session, graph, hidden) if is_limited else None


class GraphBudget:
    """See `passes.fit.StepBudget`."""

    def __init__(self, session: Session, graph: CapturedGraph, hidden: torch.Tensor) -> None:
        self._session = session
        self._graph = graph
        self._device, self._dtype = hidden.device, hidden.dtype

    @functools.cached_property
    def available_bytes(self) -> int:
        available = _available_bytes(self._session, self._device)
        assert available is not None, "a graph without a limit has no budget"
        return available

    @functools.cached_property
    def rates(self) -> DeviceRates:
        return device_rates(self._device.type, self._dtype)

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._graph.step.sizes

    def add_hints(self, graph: fx.Graph) -> None:
        self._graph.step.add_hints(graph)

    def peak(self, forward: GraphMemory, backward: GraphMemory, rows: int | None) -> int:
        step = self._graph.step
        trial = GraphStep(step.regions, step.sizes, forward, backward, heads=step.heads)
        others = [other.step for other in self._session.latest_graphs() if other is not self._graph]
        peak = step_peak([*others, trial], _size_of(self._session, self._graph, rows, self._head_tokens(rows)))
        return 0 if peak is None else int(peak.num_bytes * _ESTIMATE_MARGIN)

    def timed(self, stage: str) -> AbstractContextManager[None]:
        return self._session.timed(stage)

    def rows_choices(self) -> Sequence[tuple[int | None, float]]:
        config = self._session.config
        if config.axis != "rows" or config.rows_per_chunk is not None:
            return [(None, 0.0)]
        most = max((self._unbounded(region) for region in self._graph.step.regions.values()), default=1)
        halved = [most >> shift for shift in range(1, most.bit_length()) if most >> shift >= config.min_rows]
        fastest = self._seconds(None)
        return [(None, 0.0), *((rows, max(0.0, self._seconds(rows) - fastest)) for rows in halved)]

    def _head_tokens(self, rows: int | None) -> int | None:
        """Tokens of a head's chunk beside so many rows of the experts', fewer in the same proportion."""
        if rows is None:
            return None
        most = max((self._unbounded(region) for region in self._graph.step.regions.values()), default=rows)
        knee = max((knee_tokens(head.terms) for head in self._graph.step.heads.values()), default=rows)
        return max(self._session.config.min_rows, knee * rows // most)

    def _unbounded(self, region: RegionMemory) -> int:
        return unbounded_rows(self._session.config, region.terms("nothing"), region.tokens_at(self.sizes))

    def _seconds(self, rows: int | None) -> float:
        """Of all regions of this graph in one step."""
        seconds = 0.0
        for region in self._graph.step.regions.values():
            terms = region.terms("nothing")
            seconds += rows_seconds(
                self.rates,
                num_routed=max(1, region.tokens_at(self.sizes) * terms.top_k),
                num_experts=terms.num_experts,
                flops_per_row=_STEP_FLOPS * terms.flops_per_row,
                param_bytes=terms.param_bytes,
                rows=self._unbounded(region) if rows is None else rows,
                takes_group=terms.takes_group,
            )
        return seconds


_STEP_FLOPS = 3.5
"""FLOPs of a region's step for each of its forward: backward takes twice as many, and computes some again."""


def choose_plan(site: str, session: Session, graph: CapturedGraph, device: torch.device, num_tokens: int) -> ChunkPlan:
    """The plan of one region for T tokens: as many rows as time asks for, fewer if the step would not fit.

    Raises:
        BudgetInfeasible: not even `Config.min_rows` a chunk fits.
    """
    config, keep = session.config, graph.step.keep_of(site)
    region = graph.step.regions[site].terms(keep)
    available = _available_bytes(session, device)

    def peak_terms(rows: int) -> dict[str, int]:
        peak = _peak_with(session, graph, rows, config.min_rows)
        if peak is None:
            return region_peak(region, num_tokens, rows, config.axis)
        return _as_terms(peak)

    plan = plan_region(
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
    return replace(plan, keeps=keep)


def choose_head_plan(site: str, session: Session, graph: CapturedGraph, device: torch.device, tokens: int) -> HeadPlan:
    """The plan of one head for T tokens; experts are taken at their smallest chunks, since they run at other times.

    Raises:
        BudgetInfeasible: not even `Config.min_rows` tokens a chunk fit.
    """
    config, head = session.config, graph.step.heads[site].terms

    def peak_bytes(rows: int) -> int:
        peak = _peak_with(session, graph, config.min_rows, rows)
        return head.peak(tokens, rows) if peak is None else peak.num_bytes

    return plan_head(
        head,
        tokens,
        tokens_per_chunk=config.tokens_per_head_chunk,
        budget_bytes=budget_bytes(config, device),
        available_bytes=_available_bytes(session, device),
        min_tokens=config.min_rows,
        peak_bytes=peak_bytes,
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


def _peak_with(session: Session, graph: CapturedGraph, rows: int, head_tokens: int) -> StepPeak | None:
    graphs = session.latest_graphs()
    return step_peak([one.step for one in graphs], _size_of(session, graph, rows, head_tokens))


def _size_of(
    session: Session, graph: CapturedGraph, rows: int | None, head_tokens: int | None
) -> Callable[[str, int], ChunkSize]:
    """Rows by site: `rows` or `head_tokens` everywhere if given, else what a plan without a budget has."""
    graphs = (*session.latest_graphs(), graph)
    regions = {site: region for one in graphs for site, region in one.step.regions.items()}
    heads = {site: head for one in graphs for site, head in one.step.heads.items()}
    fixed = session.config.tokens_per_head_chunk

    def size_of(site: str, num_tokens: int) -> ChunkSize:
        if site in heads:
            return ChunkSize(fixed or head_tokens or knee_tokens(heads[site].terms))
        if rows is not None:
            return ChunkSize(rows)
        return ChunkSize(unbounded_rows(session.config, regions[site].terms("nothing"), num_tokens))

    return size_of


def _available_bytes(session: Session, device: torch.device) -> int | None:
    budget = budget_bytes(session.config, device)
    if budget is None:
        return None
    return budget - sum(session.static_terms().values()) - session.foreseen_bytes() - _SCALAR_BYTES


def _as_terms(peak: StepPeak) -> dict[str, int]:
    """The peak's terms by name, and the rest of it under one name, so that they add up."""
    terms: dict[str, int] = {}
    for name, num_bytes in peak.terms:
        terms[name] = terms.get(name, 0) + num_bytes
    terms["everything else alive"] = peak.num_bytes - sum(terms.values())
    return terms


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
