"""Problems for the solver: what a graph may save, and how many rows its chunks may have.

The timeline of a graph has the positions of its forward, one for what comes between forward and backward (later graphs
of the step), and those of its backward. Two moments make problems of it:

a call          the graph is compiled, and has room for what some regions save of their routed rows. Alternatives are
                rows per chunk; items are these regions, and a unit is a row.
a partition     the joint graph is about to be cut into forward and backward. Alternatives are partitions to start from
                and rows per chunk; items are results of matmuls and attentions, and regions.

What is saved lives from where it is computed in forward to where backward reads it last. A region's op needs other
scratch where it saves, and a further chunk where it saves some rows and not the others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memfine_fx.config import Config
from memfine_fx.memory.liveness import Allocation, Call, GraphMemory, Workspace
from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.memory.step import GraphStep, RegionMemory, RunMemory, SizeOf
from memfine_fx.plan.cost import STEP_FLOPS, DeviceRates, rows_seconds
from memfine_fx.plan.peaks import chunk_sizes, unbounded_rows
from memfine_fx.plan.rows import LEAST_ROWS, LEAST_TOKENS, knee_tokens
from memfine_fx.plan.solve import Alternative, Choice, Item, Span, StepPlan, StepProblem
from memfine_fx.records import SavePolicy

__all__ = [
    "MARGIN_PERCENT",
    "Base",
    "SavableRows",
    "SavableTensor",
    "head_tokens",
    "live_bytes",
    "problem_of_partition",
    "problem_within",
    "problem_without_budget",
    "region_items",
    "rows_choices",
    "run_of_plan",
    "saving_nothing",
    "with_margin",
]

SLACK = 64
"""Where rows are saved up to a limit, this share of it stays free: records of bf16 miss up to 1.4%."""
MARGIN_PERCENT = 2
"""What an estimate made before compilation may be short of the compiled code (docs/design/memory.md)."""
_FEWEST = 64
"""Rows of which saving something pays for the further chunk that the border between them and the others makes."""


def problem_without_budget(config: Config, run: RunMemory) -> StepProblem | None:
    """Return the problem of saving what leaves the peak of a run where it is; None where its bytes are not known.

    Gradients pile up while what was saved is consumed, so a step is usually largest at the end of backward, or at its
    head, and most of what would be saved is there at neither. The rows of a chunk depend on the routing of the step,
    which nobody knows before it: so the limit is the peak of the run that saves nothing, with chunks of one row, and
    what comes under it has chunks as large as the plan allows. It holds for any routing. What exists before the step is
    the same in both runs, so that nothing of it need be known.
    """
    unsaved = saving_nothing(run)
    if unsaved.forward is None or unsaved.backward is None:
        return None
    planned = chunk_sizes(config, run.step, None, None)

    def smallest(region_id: str, num_tokens: int) -> ChunkSize:
        return planned(region_id, num_tokens) if region_id in run.step.heads else ChunkSize(1, stages=False)

    limit = max(live_bytes(unsaved, smallest))
    live = live_bytes(unsaved, planned)
    rows = Alternative(None, 0.0, lambda: live, lambda: region_items(run, planned))
    return StepProblem([rows], max(limit, *live), limit - limit // SLACK)


def problem_within(
    config: Config, run: RunMemory, available: int, needs: int, rates: Callable[[], DeviceRates]
) -> StepProblem | None:
    """Return the problem of a run within bytes: rows saved and rows per chunk are bought with the same bytes.

    Args:
        available: bytes beyond what is there before the step.
        needs: bytes that later graphs of the step take while this one's backward is still to come.

    Returns:
        None where the bytes of the run are not known.
    """
    unsaved = saving_nothing(run)
    if unsaved.forward is None or unsaved.backward is None:
        return None

    def alternative(rows: int | None, seconds: float) -> Alternative:
        size_of = chunk_sizes(config, run.step, rows, head_tokens(config, run.step, run.values, rows))
        return Alternative(
            rows, seconds, lambda: live_bytes(unsaved, size_of, needs), lambda: region_items(run, size_of)
        )

    choices = rows_choices(config, run.step, run.values, rates)
    return StepProblem(list(itertools.starmap(alternative, choices)), available, available - available // SLACK)


@dataclass(frozen=True)
class SavableTensor:
    """A result of forward that a partition recomputes in backward.

    Args:
        name: of its node.
        storages: names of the allocations that hold it.
        seconds: spared if it is saved.
    """

    name: str
    storages: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class SavableRows:
    """One of the amounts that a region may save of its routed rows.

    Args:
        region_id: of the region.
        policy: how much.
        row_bytes: of each row.
        copied_row_bytes: of these, the bytes that forward has to write beyond what it writes anyway.
        num_rows, num_experts: N of the captured call, E.
        flops: of the matmuls that backward is spared, in the captured call.
        all_to_all_seconds: of the rows that need not come to this rank again.
        is_divisible: whether a run may save it of some rows: where the rows of no other rank come.
        seconds: spared if it is saved of all rows, once a device's rates are known.
    """

    region_id: str
    policy: SavePolicy
    row_bytes: int
    copied_row_bytes: int
    num_rows: int
    num_experts: int
    flops: int
    all_to_all_seconds: float = 0.0
    is_divisible: bool = False
    seconds: float = 0.0

    @property
    def seconds_per_byte(self) -> float:
        return self.seconds / max(1, self.row_bytes * self.num_rows)


@dataclass(frozen=True)
class Base:
    """A partition that choices start from.

    Args:
        kind: its name.
        seconds: beyond the fastest partition, with nothing further saved.
        forward, backward: its memory, with regions that save nothing.
        tensors: that it recomputes.
        regions: what each region may save, the smaller amounts first.
    """

    kind: str
    seconds: float
    forward: GraphMemory
    backward: GraphMemory
    tensors: Sequence[SavableTensor]
    regions: Sequence[Sequence[SavableRows]]


def problem_of_partition(
    bases: Sequence[Base],
    rows_choices: Sequence[tuple[int | None, float]],
    live_bytes_of: Callable[[Base, int | None], Sequence[int]],
    workspace_of: Callable[[int | None], Workspace],
    sizes: Mapping[str, int],
    available: int,
) -> StepProblem:
    """Return the problem of a joint graph: alternatives have (base, rows per chunk) as key.

    Args:
        rows_choices: (rows, seconds slower than with the first).
        live_bytes_of: returns the live bytes of a base with so many rows per chunk.
        workspace_of: returns the scratch of regions' ops with so many rows per chunk.
        sizes: value of each symbol of the graph.
        available: bytes for the step.
    """
    alternatives = [
        Alternative(
            (base, rows),
            base.seconds + slower,
            functools.partial(live_bytes_of, base, rows),
            functools.partial(_items_of_base, base, workspace_of, rows, sizes),
        )
        for base in bases
        for rows, slower in rows_choices
    ]
    return StepProblem(sorted(alternatives, key=lambda alternative: alternative.seconds), available)


def _items_of_base(
    base: Base, workspace_of: Callable[[int | None], Workspace], rows: int | None, sizes: Mapping[str, int]
) -> list[Item]:
    """Return the items of a base, in the order of forward."""
    behind = base.forward.num_positions + 1
    in_forward, in_backward = (_by_name(memory, sizes) for memory in (base.forward, base.backward))
    placed: list[tuple[int, Item]] = []
    for tensor in base.tensors:
        forward_allocations = [
            own for name in tensor.storages for own in in_forward.get(name, ()) if own[0].stop is not None
        ]
        pieces = [Span(allocation.stop or 0, behind, num_bytes) for allocation, num_bytes in forward_allocations]
        pieces += [
            Span(behind, behind + allocation.start, num_bytes)
            for name in tensor.storages
            for allocation, num_bytes in in_backward.get(name, ())
        ]
        place = min((allocation.start for allocation, _ in forward_allocations), default=0)
        placed.append((place, Item(tensor.name, (Choice(tensor.seconds, tuple(_disjoint(pieces))),))))
    workspace = workspace_of(rows)
    for amounts in base.regions:
        calls = [_call_of(memory, amounts[0].region_id) for memory in (base.forward, base.backward)]
        run, back = calls
        if run is not None and back is not None:
            choices = (_choice_of_rows(amount, run, back, behind, workspace) for amount in amounts)
            placed.append((run.position, Item(amounts[0].region_id, tuple(choices))))
    return [item for _, item in sorted(placed, key=lambda own: own[0])]


def _by_name(memory: GraphMemory, sizes: Mapping[str, int]) -> dict[str, list[tuple[Allocation, int]]]:
    """Return allocations by name, with their bytes and a margin for what their record may be short of."""
    by_name: dict[str, list[tuple[Allocation, int]]] = {}
    for allocation, num_bytes in zip(memory.allocations, memory.bytes_at(sizes), strict=True):
        by_name.setdefault(allocation.name, []).append((allocation, with_margin(num_bytes)))
    return by_name


def _call_of(memory: GraphMemory, region_id: str) -> Call | None:
    return next((call for call in memory.calls if call.region_id == region_id and call.phase != "route"), None)


def _choice_of_rows(amount: SavableRows, run: Call, back: Call, behind: int, workspace: Workspace) -> Choice:
    num_units = amount.num_rows if amount.is_divisible else 1
    row_bytes = with_margin(amount.row_bytes * amount.num_rows // num_units)
    pieces = [Span(run.position, behind, row_bytes), Span(behind, behind + back.position + 1, row_bytes)]
    for call, first in ((run, 0), (back, behind)):
        scratch = workspace(replace(call, policy=amount.policy)) - workspace(replace(call, policy="nothing"))
        place = first + call.position
        pieces.append(Span(place, place + 1, 0, scratch, max(0, scratch)))
    return Choice(amount.seconds, tuple(_disjoint(pieces)), num_units, min(_FEWEST, num_units))


def with_margin(estimated: int) -> int:
    """Return what is held against a budget where a record is an estimate of what compiled code will hold."""
    return estimated + estimated * MARGIN_PERCENT // 100


def run_of_plan(run: RunMemory, plan: StepPlan | None) -> RunMemory:
    """Return the run in which regions save as many rows as a plan says; none without a plan."""
    return (
        saving_nothing(run)
        if plan is None
        else run.with_saved_rows({region_id: rows for region_id, (_, rows) in plan.saved.items()})
    )


def saving_nothing(run: RunMemory) -> RunMemory:
    """Return the same run in which no region saves anything that it need not."""
    return run.with_saved_rows({})


def live_bytes(run: RunMemory, size_of: SizeOf, needs: int = 0) -> list[int]:
    """Return live bytes at each position of a run's timeline, with what is alive beside it.

    Args:
        needs: bytes that later graphs take between forward and backward.
    """
    assert run.forward is not None and run.backward is not None
    workspace = run.step.workspace(size_of, run.values)
    forward, backward = (memory.live_bytes(run.values, workspace) for memory in (run.forward, run.backward))
    beside = run.saved_bytes + run.later_gradient_bytes
    between = run.saved_bytes + run.left_bytes + needs
    return [*(run.saved_bytes + live for live in forward), between, *(beside + live for live in backward)]


def region_items(run: RunMemory, size_of: SizeOf) -> list[Item]:
    """Return what the regions of a run may save, in the order of forward.

    Args:
        run: whose record has room for all rows; it is read as if that were used.
        size_of: chunks.
    """
    full = replace(run, saved=frozenset())
    forward, backward = full.forward, full.backward
    assert forward is not None and backward is not None
    workspace = run.step.workspace(size_of, run.values)
    pieces: dict[str, list[Span]] = {region_id: [] for region_id in run.step.optional}
    for memory, first in ((forward, 0), (backward, forward.num_positions + 1)):
        # What forward leaves is alive at the position behind it, too.
        end = first + memory.num_positions + (memory is forward)
        for region_id, own in _pieces(run, memory, workspace, first, end).items():
            pieces[region_id] += own
    places = {call.region_id: place for place, call in enumerate(forward.calls) if call.phase == "forward"}
    region_ids = sorted(
        (region_id for region_id in pieces if pieces[region_id]), key=lambda region_id: places.get(region_id, 0)
    )
    return [_item(run, region_id, tuple(_disjoint(pieces[region_id]))) for region_id in region_ids]


def _item(run: RunMemory, region_id: str, spans: tuple[Span, ...]) -> Item:
    row_bytes, num_rows = max(span.unit_bytes for span in spans), run.rows_of(region_id)
    seconds = run.step.optional[region_id] * row_bytes * num_rows
    return Item(region_id, (Choice(seconds, spans, num_rows, min(_FEWEST, num_rows)),))


def _pieces(run: RunMemory, memory: GraphMemory, workspace: Workspace, first: int, end: int) -> dict[str, list[Span]]:
    """Return spans, which may overlap, by region id: of a direction from a position to another."""
    rows = {region_id: run.rows_of(region_id) for region_id in run.step.optional}
    pieces: dict[str, list[Span]] = {region_id: [] for region_id, num_rows in rows.items() if num_rows}
    for allocation, num_bytes in zip(memory.allocations, memory.bytes_at(run.values), strict=True):
        if allocation.saved_by in pieces:
            stop = end if allocation.stop is None else first + allocation.stop
            pieces[allocation.saved_by].append(
                Span(first + allocation.start, stop, num_bytes // rows[allocation.saved_by])
            )
    for call in memory.calls:
        if call.region_id in pieces:
            of_all = workspace(replace(call, num_saved_rows=None)) - workspace(replace(call, num_saved_rows=0))
            place = first + call.position
            pieces[call.region_id].append(Span(place, place + 1, 0, of_all, max(0, of_all)))
    return pieces


_BYTES = ("unit_bytes", "whole_bytes", "part_bytes")


def _disjoint(pieces: Sequence[Span]) -> Iterator[Span]:
    """Yield spans none of which overlap, of spans that may."""
    borders = sorted({border for piece in pieces for border in (piece.start, piece.stop)})
    for start, stop in itertools.pairwise(borders):
        own = [piece for piece in pieces if piece.start <= start and stop <= piece.stop]
        if own:
            unit, whole, part = (sum(getattr(piece, name) for piece in own) for name in _BYTES)
            yield Span(start, stop, unit, whole, part)


def rows_choices(
    config: Config, step: GraphStep, sizes: Mapping[str, int], rates: Callable[[], DeviceRates]
) -> list[tuple[int | None, float]]:
    """Return (rows per chunk, seconds that the regions of a step take beyond those with the first choice), most rows
    first; the first choice is as many as time asks for.
    """
    if config.axis != "rows" or config.rows_per_chunk is not None:
        return [(None, 0.0)]
    regions = [(region, _unbounded(config, region, sizes)) for region in step.regions.values()]
    most = max((rows for _, rows in regions), default=1)
    halved = [most >> shift for shift in range(1, most.bit_length()) if most >> shift >= LEAST_ROWS]
    measured = rates()
    fastest = sum(_region_seconds(region, sizes, rows, measured) for region, rows in regions)

    def slower(rows: int) -> float:
        return max(0.0, sum(_region_seconds(region, sizes, rows, measured) for region, _ in regions) - fastest)

    return [(None, 0.0), *((rows, slower(rows)) for rows in halved)]


def head_tokens(config: Config, step: GraphStep, sizes: Mapping[str, int], rows: int | None) -> int | None:
    """Return the tokens of a head's chunk beside so many rows of the experts', fewer in the same proportion."""
    if rows is None:
        return None
    most = max((_unbounded(config, region, sizes) for region in step.regions.values()), default=rows)
    knee = max((knee_tokens(head.terms) for head in step.heads.values()), default=rows)
    return max(LEAST_TOKENS, knee * rows // most)


def _unbounded(config: Config, region: RegionMemory, sizes: Mapping[str, int]) -> int:
    return unbounded_rows(config, region.terms_now("nothing"), region.tokens_at(sizes))


def _region_seconds(region: RegionMemory, sizes: Mapping[str, int], rows: int, rates: DeviceRates) -> float:
    terms = region.terms_now("nothing")
    return rows_seconds(
        rates,
        num_routed=max(1, region.rows_at(sizes)),
        num_experts=terms.num_experts,
        flops_per_row=STEP_FLOPS * terms.flops_per_row,
        param_bytes=terms.param_bytes,
        rows=rows,
        takes_group=terms.takes_group,
    )
