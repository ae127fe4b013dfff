"""Plans within a budget of bytes: what a step may use, whether a partition fits, how many rows a chunk may have."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import fx

from memfine_fx.config import LEAST, Config, parse_budget
from memfine_fx.errors import BudgetInfeasible
from memfine_fx.memory.liveness import GraphMemory, Workspace
from memfine_fx.memory.machine import host_bytes
from memfine_fx.memory.region_bytes import ChunkSize, region_peak
from memfine_fx.memory.step import GraphStep, RegionMemory, RunMemory, StepPeak, step_peak_bytes
from memfine_fx.plan.cost import DeviceRates
from memfine_fx.plan.peaks import chunk_sizes, peak_of_run, unbounded_rows
from memfine_fx.plan.problem import (
    MARGIN_PERCENT,
    head_tokens,
    live_bytes,
    problem_within,
    problem_without_budget,
    rows_choices,
    run_of_plan,
    saving_nothing,
    with_margin,
)
from memfine_fx.plan.rates import device_rates
from memfine_fx.plan.rows import LEAST_ROWS, LEAST_TOKENS, infeasible, plan_head, plan_region
from memfine_fx.plan.runs import CalledGraph, Owner, Run, gradient_bytes
from memfine_fx.plan.solve import StepProblem, solve
from memfine_fx.plan.step_state import StepState
from memfine_fx.records import ChunkPlan, SavePolicy
from memfine_fx.records.heads import HeadPlan
from memfine_fx.units import readable_bytes

__all__ = [
    "MARGIN_PERCENT",
    "SCALAR_BYTES",
    "GraphBudget",
    "automatic_bytes",
    "budget_bytes",
    "budget_of_graph",
    "choose_head_plan",
    "choose_plan",
    "context_of",
    "describe_budget",
    "device_of",
    "fits_unbounded",
    "is_accelerator",
    "is_limited",
    "refusal_of",
    "saving_in",
    "smallest_peak",
    "unbounded_rows",
    "with_margin",
]

SCALAR_BYTES = 64
"""Left free for what autograd makes outside the graphs: the loss's gradient and its like."""
_LIMIT_STEPS = 64
_LEAST_RESERVE = 1 << 30


def budget_bytes(state: StepState, device: torch.device) -> int | None:
    """Bytes of the budget on this device; without one, what an accelerator has (`automatic_bytes`), no limit on CPU."""
    config = state.config
    if isinstance(config.memory_budget, (int, str)) and config.has_budget:  # asked at every call, nothing of the device
        return parse_budget(config.memory_budget)
    if not is_accelerator(device):
        return parse_budget(config.memory_budget, host_bytes())
    if config.has_budget:
        _, total = torch.cuda.mem_get_info(device)
        return parse_budget(config.memory_budget, total)
    if device not in state.device_limits:
        state.device_limits[device] = _device_limit(state, device)
    return state.device_limits[device]


def is_limited(state: StepState, device: torch.device, regions: Iterable[RegionMemory]) -> bool:
    """Return whether a byte limit (the user's budget, or an accelerator's free memory) constrains what a graph saves.

    Ranks that share experts must send the same in backward, and without a budget each would choose for itself.
    """
    if state.config.has_budget:
        return True
    is_alone = all(region.terms_now("nothing").all_to_all is None for region in regions)
    return state.config.memory_budget is None and state.runs_here and is_alone and is_accelerator(device)


def is_accelerator(device: torch.device) -> bool:
    """Whether the device has memory of its own, which ends without a swap file."""
    return device.type == "cuda"


def _device_limit(state: StepState, device: torch.device) -> int:
    """Return the bytes that steps may use of an accelerator, parameters and optimizer state included.

    It is a multiple of a 64th of the device: partitions are found in a cache where the limit is the same.
    """
    free, total = torch.cuda.mem_get_info(device)
    own, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    counted = state.held_bytes() + sum(run.memory.left_bytes for run in state.history.opened())
    others = max(0, allocated - counted)  # of this process: another model, copies of weights
    limit = max(0, automatic_bytes(free, own, total) - others)
    return limit - limit % max(1, total // _LIMIT_STEPS)


def automatic_bytes(free: int, own: int, total: int) -> int:
    """Bytes that this process may use of a device: what others do not hold, less a reserve.

    The reserve, a twentieth of the device and at least 1 GiB, is for what no allocator event shows: the libraries'
    handles and workspaces, and gaps between blocks.

    Args:
        free: bytes that nobody holds.
        own: bytes that this process holds for tensors, also those of its allocator's cache.
        total: bytes of the device.
    """
    return max(0, free + own - max(_LEAST_RESERVE, total // 20))


def budget_of_graph(
    state: StepState, graph: CalledGraph, inputs: Sequence[object], hidden: torch.Tensor
) -> GraphBudget | None:
    """Return the budget of a graph that is compiled for the call at hand; None where no byte limit applies to it.

    Args:
        inputs: of the call.
        hidden: tokens of a region or head, for device and dtype.
    """
    if not graph.is_limited or budget_bytes(state, hidden.device) is None:
        return None
    opened = state.history.opened()
    members: list[Owner] = [*state.history.members(), graph]
    available = _available_bytes(
        state,
        hidden.device,
        members,
        gradient_bytes(members) + sum(run.input_bytes for run in opened) + graph.input_bytes(inputs),
    )
    assert available is not None, "a graph without a limit has no budget"
    saved_bytes = sum(run.memory.left_bytes for run in opened)
    context = RunMemory(graph.step, dict(graph.step.sizes), saved_bytes, available_bytes=available)
    return GraphBudget(state, context, hidden, is_asked=state.config.has_budget)


def context_of(state: StepState, run: Run) -> RunMemory:
    """Return the memory record of a run with the bytes that it may use now."""
    if not run.graph.is_limited:
        return run.memory
    device = device_of(run.graph)
    existing_bytes = run.gradient_bytes + sum(other.input_bytes for other in run.concurrent_runs)
    return replace(run.memory, available_bytes=_available_bytes(state, device, state.history.members(), existing_bytes))


class GraphBudget:
    """The bytes that the step of a graph may use while it is partitioned, and those that it would use.

    Args:
        context: the run that the graph is partitioned for.
        hidden: tokens of a region or head, for device and dtype.
        is_asked: whether it is the user's; what an accelerator has overrules no checkpoints of the model's own.
        beyond: by how many bytes compiled code was seen to hold more than the estimate of a partition made from a base.
    """

    def __init__(
        self,
        state: StepState,
        context: RunMemory,
        hidden: torch.Tensor,
        *,
        is_asked: bool = True,
        beyond: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._state = state
        self.context, self.is_asked, self.beyond = context, is_asked, beyond
        self._step = context.step
        self._device, self._dtype = hidden.device, hidden.dtype

    @property
    def available_bytes(self) -> int:
        """Return the bytes for the step's peak, beyond what is there before it."""
        available = self.context.available_bytes
        assert available is not None, "a run without a limit has no budget"
        return available

    @functools.cached_property
    def rates(self) -> DeviceRates:
        measured = device_rates(self._device.type, self._dtype)
        # Graphs that will run on an accelerator are recorded on this CPU, and memory is at hand there.
        return measured if self._state.runs_here else replace(measured, save_bytes=math.inf)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the values of the graph's symbols in the captured call."""
        return self._step.sizes

    def add_hints(self, graph: fx.Graph) -> None:
        """Record the values of symbols that no input has."""
        self._step.add_hints(graph)

    def live_bytes(
        self, forward: GraphMemory, backward: GraphMemory, rows: int | None, without: Collection[str] = ()
    ) -> list[int]:
        """Return the live bytes of the whole step with this forward and backward, at each position of their timeline.

        Args:
            rows: per chunk; None for as many as time asks for.
            without: ids of regions that save nothing, though their graph has room for it.
        """
        step = self._step
        trial = GraphStep(step.regions, step.sizes, forward, backward, heads=step.heads)
        trial.optional = dict.fromkeys(without, 0.0)
        memory = replace(self.context, step=trial, sizes=step.sizes, saved=frozenset())
        return [with_margin(num_bytes) for num_bytes in live_bytes(saving_nothing(memory), self._size_of(rows))]

    def workspace(self, rows: int | None) -> Workspace:
        """Return the scratch of the regions' ops with so many rows per chunk."""
        return self._step.workspace(self._size_of(rows), self.sizes)

    def _size_of(self, rows: int | None) -> Callable[[str, int], ChunkSize]:
        config = self._state.config
        return chunk_sizes(config, self._step, rows, head_tokens(config, self._step, self.sizes, rows))

    def timed(self, stage: str) -> AbstractContextManager[None]:
        return self._state.timed(stage)

    def rows_choices(self) -> Sequence[tuple[int | None, float]]:
        """Return (rows per chunk, seconds slower than with the first), most rows first."""
        return rows_choices(self._state.config, self._step, self.sizes, lambda: self.rates)


def choose_plan(
    region_id: str, state: StepState, graph: CalledGraph, device: torch.device, num_tokens: int
) -> ChunkPlan:
    """The plan of one region for T tokens: as many rows as time asks for, fewer if the step would not fit.

    Raises:
        BudgetInfeasible: not even `LEAST_ROWS` a chunk fit in a budget of the user; what an accelerator has is tried.
    """
    config, context = state.config, _context_in(state, graph)
    policy, num_saved, is_all = _saved_of(region_id, graph.step, context, num_tokens)
    region = graph.step.regions[region_id].terms_now(policy if is_all else "nothing")
    solved = None if context is None else state.peaks.peak_of(config, context)

    def peak_terms(rows: int) -> dict[str, int]:
        peak = None if context is None else peak_of_run(config, context, rows, LEAST_TOKENS)
        if peak is None:
            return region_peak(region, num_tokens, rows, config.axis)
        return _as_terms(peak)

    def peak_bytes(rows: int) -> int:
        solved_bytes = None if solved is None else solved(rows, LEAST_TOKENS)
        return sum(peak_terms(rows).values()) if solved_bytes is None else solved_bytes

    plan = plan_region(
        region,
        num_tokens,
        axis=config.axis,
        rows_per_chunk=config.rows_per_chunk,
        tokens_per_chunk=config.tokens_per_chunk,
        budget_bytes=budget_bytes(state, device),
        available_bytes=_available_in(context, state, graph, device),
        min_rows=LEAST_ROWS,
        peak_terms=peak_terms,
        peak_bytes=peak_bytes,
        refuses=config.has_budget,
    )
    return replace(plan, policy=policy, num_saved_rows=num_saved)


def saving_in(state: StepState, run: Run, hidden: torch.Tensor) -> RunMemory:
    """Return a run of a graph that may save rows, with as many rows saved as the run itself has room for.

    Without a budget nothing is saved where the step's bytes are not known: records are estimates, or later runs of the
    step are expected, to whose peaks the saved rows would add. With one, these runs are asked what they need.

    Args:
        hidden: tokens of a region or head, for device and dtype.
    """
    config, memory = state.config, run.memory
    if not run.graph.is_limited:
        if memory.step.estimated or state.history.is_followed(run):
            return saving_nothing(memory)
        without = functools.partial(problem_without_budget, config, memory)
        return state.peaks.run_with_saved_rows(memory, 0, lambda: _solved(without(), memory))
    later = state.history.expected_after(run)
    if not later and state.history.is_followed(run):
        return saving_nothing(memory)
    context, needs = context_of(state, run), _needs_of(config, later)
    rates = functools.partial(device_rates, hidden.device.type, hidden.dtype)
    return state.peaks.run_with_saved_rows(context, needs, lambda: _saving_within(config, context, needs, rates))


def _needs_of(config: Config, runs: Sequence[Run]) -> int:
    """The most bytes that runs one after another take, each with what the earlier ones saved, beside all else."""
    most = saved = 0
    for run in runs:
        unsaved = replace(saving_nothing(run.memory), saved_bytes=0)
        most = max(most, saved + (step_peak_bytes([unsaved], chunk_sizes(config, unsaved.step, None, None)) or 0))
        saved += unsaved.left_bytes
    return most


def _solved(problem: StepProblem | None, run: RunMemory) -> RunMemory:
    return run_of_plan(run, None if problem is None else solve(problem))


def _saving_within(config: Config, run: RunMemory, needs: int, rates: Callable[[], DeviceRates]) -> RunMemory:
    """Return the run that saves everything, if that fits with as many rows per chunk as time asks for; else the run of
    the solver's plan.
    """
    available = run.available_bytes
    if available is None:
        return run
    if run.step.estimated:
        available = available * 100 // (100 + MARGIN_PERCENT)
    peak = step_peak_bytes([run], chunk_sizes(config, run.step, None, None)) or 0
    if max(peak, run.saved_bytes + run.left_bytes + needs) <= available:
        return run
    problem = problem_within(config, run, available, needs, rates)
    return run if problem is None else _solved(problem, run)


def _saved_of(
    region_id: str, step: GraphStep, context: RunMemory | None, num_tokens: int
) -> tuple[SavePolicy, int, bool]:
    """Return what a region saves in a run with T tokens, of how many rows, and whether of all rows."""
    policy = step.policy_of(region_id)
    if policy == "nothing":
        return policy, 0, False
    saved_rows = () if context is None else context.saved
    parts = [num_saved for other_id, num_saved, _ in saved_rows if other_id == region_id]
    if not parts:  # of all, also where this rank has no rows itself and saves what comes
        return policy, num_tokens * step.regions[region_id].terms_now("nothing").top_k, True
    return (policy, parts[0], False) if parts[0] else ("nothing", 0, False)


def choose_head_plan(
    region_id: str, state: StepState, graph: CalledGraph, device: torch.device, tokens: int
) -> HeadPlan:
    """The plan of one head for T tokens; experts are taken at their smallest chunks, since they run at other times.

    Raises:
        BudgetInfeasible: not even `LEAST_TOKENS` a chunk fit in a budget of the user.
    """
    config, head = state.config, graph.step.heads[region_id].terms
    context = _context_in(state, graph)
    solved = None if context is None else state.peaks.peak_of(config, context)

    def peak_bytes(rows: int) -> int:
        solved_bytes = None if solved is None else solved(LEAST_ROWS, rows)
        return head.peak(tokens, rows) if solved_bytes is None else solved_bytes

    return plan_head(
        head,
        tokens,
        tokens_per_chunk=config.tokens_per_head_chunk,
        budget_bytes=budget_bytes(state, device),
        available_bytes=_available_in(context, state, graph, device),
        min_tokens=LEAST_TOKENS,
        peak_bytes=peak_bytes,
        refuses=config.has_budget,
    )


def refusal_of(state: StepState, context: RunMemory, device: torch.device) -> BudgetInfeasible | None:
    """Why a run cannot keep the user's budget, even with the smallest chunks; None where it can."""
    config = state.config
    available, budget = context.available_bytes, budget_bytes(state, device)
    if available is None or budget is None:
        return None
    smallest = smallest_peak(state, context)
    if smallest is None or smallest <= available:
        return None
    context = saving_nothing(context)
    peak = peak_of_run(config, context, _fewest_rows(config, context), LEAST_TOKENS)
    assert peak is not None, "a run of known bytes has a peak"
    return infeasible(_as_terms(peak), budget, available)


def smallest_peak(state: StepState, context: RunMemory) -> int | None:
    """Return the bytes of a run with the smallest chunks that saves nothing it need not; None where nothing is known of
    it.
    """
    context = saving_nothing(context)
    return state.peaks.peak_of(state.config, context)(_fewest_rows(state.config, context), LEAST_TOKENS)


def _fewest_rows(config: Config, memory: RunMemory) -> int:
    rows = [
        unbounded_rows(config, region.terms_now("nothing"), region.tokens_at(memory.values))
        for region in memory.step.regions.values()
    ]
    return min(LEAST_ROWS, max(rows, default=1))


def fits_unbounded(state: StepState, context: RunMemory) -> bool:
    """Whether a run keeps its budget with as many rows a chunk as time asks for."""
    available = context.available_bytes
    peak = None if available is None else state.peaks.peak_of(state.config, context)(None, None)
    return available is None or peak is None or peak <= available


def describe_budget(config: Config, runs: Sequence[RunMemory], device_bytes: int | None = None) -> str:
    """Return by which budget the runs of a step were planned, in words.

    Args:
        device_bytes: what bounds them without a budget, None where nothing does.
    """
    if config.has_budget:
        return f"memory_budget={config.memory_budget!r} bounds the bytes of a step"
    if config.memory_budget == LEAST:
        return 'memory_budget="least": regions save nothing'
    if device_bytes is not None:
        return f"no memory_budget: what the device has for the step bounds it, {readable_bytes(device_bytes)}"
    steps = {id(run.step): run for run in runs}.values()
    num_optional = sum(len(run.step.optional) for run in steps)
    if not num_optional:
        return (
            "no memory_budget: regions save nothing (where Inductor compiles a graph that returns its loss for a CPU, "
            "they save what does not raise the step's peak)"
        )
    num_saving = sum(run.num_saved_rows(region_id) > 0 for run in steps for region_id in run.step.optional)
    return f"no memory_budget: {num_saving} of {num_optional} regions save what does not raise the step's peak"


def device_of(graph: CalledGraph) -> torch.device:
    """Return the device of the graph's parameters; the CPU where none is alive."""
    return next((parameter.device for parameter in graph.alive_parameters()), torch.device("cpu"))


def _context_in(state: StepState, graph: CalledGraph) -> RunMemory | None:
    """The run at work, where it is one of this graph's."""
    context = state.context
    return context if context is not None and context.step is graph.step else None


def _available_in(context: RunMemory | None, state: StepState, graph: CalledGraph, device: torch.device) -> int | None:
    if context is not None and graph.is_limited:
        return context.available_bytes
    if budget_bytes(state, device) is None:  # else every region would ask every parameter for its gradient
        return None
    members: list[Owner] = [*state.history.members(), graph]
    return _available_bytes(state, device, members, gradient_bytes(members))


def _available_bytes(state: StepState, device: torch.device, members: Sequence[Owner], there: int) -> int | None:
    """Return the bytes that a run may use beyond what exists before it, `there` bytes of gradients and inputs included;
    None without a limit.
    """
    budget = budget_bytes(state, device)
    if budget is None:
        return None
    return budget - state.persistent_bytes(members) - there - SCALAR_BYTES


def _as_terms(peak: StepPeak) -> dict[str, int]:
    """The peak's terms by name, and the rest of it under one name, so that they add up."""
    terms: dict[str, int] = {}
    for name, num_bytes in peak.terms:
        terms[name] = terms.get(name, 0) + num_bytes
    terms["everything else alive"] = peak.num_bytes - sum(terms.values())
    return terms
