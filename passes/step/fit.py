"""Fit: what forward keeps for backward so that a step stays within its budget in the least time.

Terms
    full    functorch's plain partition, and each region keeps all that pays: nothing costly is computed again
    spare   what steps without a budget have (`spare`): elementwise work and a few matmuls are computed again
    lean    elementwise work is computed again freely, matmuls and attentions too, layer by layer (`borders`), and
            regions keep nothing

1. Checkpoints of the model are a wish to save memory; the budget says how much is wanted, so their tags go (except
   where a policy of the user demands something), and the full partition is tried. Where it fits and new memory is dear,
   so is one that computes elementwise work again, and the faster one is taken.
2. If it does not fit, the solver chooses among the three, what is saved beside what each saves, and rows per chunk
   (`plan.problem.problem_of_partition`), by the memory of the three: no graph is partitioned to ask. In full and spare
   regions may save; in lean costly results too. What spare and lean compute again is counted.
3. The graph is partitioned as chosen. If that turns out not to fit after all, partitions of this base get as many bytes
   less, and the solver chooses again. What code held beyond an earlier estimate counts likewise. Regions get room for
   all their rows; of how many rows they save something, each run decides.
4. If nothing fits, it is lean or spare, whichever holds less; fewer rows a chunk have to do the rest. Lean need not be
   the smaller one where layers have no borders.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memfine_fx.compat.functorch import recomputing_elementwise
from memfine_fx.memory.liveness import GraphMemory, Workspace
from memfine_fx.passes.pass_list import is_disabled
from memfine_fx.passes.step.borders import layer_borders
from memfine_fx.passes.step.costly_results import CostlyResult, costly_results, is_attention, must_save
from memfine_fx.passes.step.keep import keep_choices, keep_in_regions
from memfine_fx.passes.step.partitioned import Partition
from memfine_fx.passes.step.spare import cheapest, spared
from memfine_fx.passes.tracing import copied_module
from memfine_fx.plan.cost import DeviceRates
from memfine_fx.plan.problem import Base, SavableRows, SavableTensor, problem_of_partition
from memfine_fx.plan.solve import solve
from memfine_fx.records import Keep

__all__ = ["Even", "StepBudget", "even", "fit", "largest_keeps", "optional_of", "savable_rows"]

Even = Literal["lean", "spare"]
"""A partition that treats equal layers alike; this spare computes nothing again but elementwise work."""
Pair = tuple[GraphMemory, GraphMemory]
"""Forward and backward."""
_ATTEMPTS = 3
_WITHOUT_RANDOM_STATE = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""The CPU's attention knows no dropout and is computed again where that saves bytes, wished or not; a wish would make
the partitioner save a random state for it, for nothing."""


class StepBudget(Protocol):
    """The bytes that the step of a graph may use, and those that it would.

    Args:
        is_asked: whether it is the user's; what an accelerator has overrules no checkpoints of the model's own.
        beyond: by how many bytes compiled code was seen to hold more than the estimate of a partition made from a base.
    """

    is_asked: bool
    beyond: Mapping[str, int]

    @property
    def available_bytes(self) -> int:
        """For the step's peak, beyond what is there before it."""
        ...

    @property
    def rates(self) -> DeviceRates: ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """Values of the graph's symbols in the captured call."""
        ...

    def add_hints(self, graph: fx.Graph) -> None:
        """Learn the values of symbols that no input has."""
        ...

    def live_bytes(
        self, forward: GraphMemory, backward: GraphMemory, rows: int | None, without: Collection[str] = ()
    ) -> list[int]:
        """Live bytes of the whole step with this forward and backward, at each position of their timeline.

        Args:
            rows: per chunk; None for as many as time asks for.
            without: ids of regions that save nothing, though their graph has room for it.
        """
        ...

    def workspace(self, rows: int | None) -> Workspace:
        """Scratch of the regions' ops with so many rows per chunk."""
        ...

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """Counts its time, without that of stages within it."""
        ...

    def rows_choices(self) -> Sequence[tuple[int | None, float]]:
        """(rows, seconds slower than with the first), most rows first."""
        ...


Saved = Mapping[str, tuple[int, int]]
"""See `plan.solve.StepPlan`."""


def fit(
    gm: fx.GraphModule, num_forward_outputs: int, partition: Callable[..., Partition], budget: StepBudget
) -> Partition:
    """The partition for a budget, see above.

    Args:
        gm: the joint graph; it is not changed but for the tags of the model's checkpoints.
        num_forward_outputs: results of the joint graph that are forward's.
        partition: (copy of `gm` in which things are tagged, decision) -> partition.
        budget: see `StepBudget`.
    """
    _drop_wishes(gm.graph)
    budget.add_hints(gm.graph)
    partition = functools.partial(_with_hints, partition, budget)
    with budget.timed("fit"):
        regions = savable_rows(gm.graph, lambda: budget.rates)
    keeps = largest_keeps(regions)
    full_module, added = _with_regions(gm, keeps)
    full = partition(full_module, decision=_described(keeps, gm.graph))
    tried = functools.partial(_timed, partition, budget)
    # The most common case: no other choice is asked for its peak.
    if _peak(full, budget) <= _available(budget, "full"):
        with budget.timed("fit"):
            chosen = _faster(gm, replace(full, base="full"), tried, budget, keeps)
        return replace(chosen, keeps_all=True, optional=optional_of(regions, keeps))
    plain = [memory.without(added) for memory in (full.forward_memory, full.backward_memory)]
    with budget.timed("fit"):
        return _fit_less(gm, num_forward_outputs, tried, budget, regions, (plain[0], plain[1]))


def even(gm: fx.GraphModule, num_forward_outputs: int, partition: Callable[..., Partition], kind: Even) -> Partition:
    """A partition whose choices do not depend on how many layers there are; regions keep nothing.

    Args:
        gm, num_forward_outputs, partition: as for `fit`.
        kind: which.
    """
    _drop_wishes(gm.graph)
    if kind == "spare":
        return spared(copied_module(gm), (), partition)
    return _lean(gm, partition, costly_results(gm.graph, num_forward_outputs))


def _with_hints(
    partition: Callable[..., Partition], budget: StepBudget, gm: fx.GraphModule, decision: str = ""
) -> Partition:
    """A partition; what it computes again may bring symbols that the joint graph lacks (states of random numbers)."""
    result = partition(gm, decision=decision)
    budget.add_hints(result.forward.graph)
    budget.add_hints(result.backward.graph)
    return result


def _timed(
    partition: Callable[..., Partition], budget: StepBudget, gm: fx.GraphModule, decision: str = ""
) -> Partition:
    """A partition beyond the first, which a compilation without a budget makes too."""
    with budget.timed("further partitions"):
        return partition(gm, decision=decision)


def _faster(
    gm: fx.GraphModule,
    full: Partition,
    partition: Callable[..., Partition],
    budget: StepBudget,
    keeps: Mapping[str, Keep],
) -> Partition:
    """The full partition, or one that computes elementwise work again where keeping its results takes more time: what
    is kept is new memory, which a CPU pays more for than for what kernels compute beside reading.
    """
    if math.isinf(budget.rates.keep_bytes):
        return full
    again = spared(_with_regions(gm, keeps)[0], (), partition, of_regions=_described_regions(keeps, gm.graph))
    seconds = _seconds_beyond(_pair(again), _pair(full), budget)
    return replace(again, base="spare") if seconds < 0 and _peak(again, budget) <= _available(budget, "spare") else full


def _fit_less(
    gm: fx.GraphModule,
    num_forward_outputs: int,
    partition: Callable[..., Partition],
    budget: StepBudget,
    regions: Sequence[Sequence[SavableRows]],
    plain: Pair,
) -> Partition:
    """The partition where not all that pays can be saved; `plain` is full without what regions save."""
    results = costly_results(gm.graph, num_forward_outputs)
    spare = spared(copied_module(gm), results, partition, of_regions=_described_regions({}, gm.graph))
    lean = _lean(gm, partition, results)
    bases = _bases(gm, results, plain, spare, lean, regions, budget)
    made_from = {"spare": spare, "lean": lean}
    rows_choices = budget.rows_choices()
    bytes_over_estimate = dict(budget.beyond)

    def live_bytes_of(base: Base, rows: int | None) -> list[int]:
        live = budget.live_bytes(base.forward, base.backward, rows)
        return [num_bytes + bytes_over_estimate.get(base.kind, 0) for num_bytes in live]

    for _ in range(_ATTEMPTS):
        problem = problem_of_partition(
            bases, rows_choices, live_bytes_of, budget.workspace, budget.sizes, budget.available_bytes
        )
        plan = solve(problem)
        if plan is None:
            break
        base, rows = plan.key
        chosen = replace(_realized(gm, partition, base, made_from, plan.saved, results), base=base.kind)
        excess = _peak(chosen, budget, rows, _regions_in_part(base, plan.saved)) - _available(budget, base.kind)
        if excess <= 0:
            return chosen
        # The same plan must not be chosen again.
        unused = budget.available_bytes - plan.peak_bytes + 1
        bytes_over_estimate[base.kind] = bytes_over_estimate.get(base.kind, 0) + max(excess, unused)
    # Compared with the fewest rows, since these are what a step that does not fit will take.
    least = min((lean, spare), key=lambda candidate: _peak(candidate, budget, rows_choices[-1][0]))
    return replace(least, is_least=True)


def _peak(partition: Partition, budget: StepBudget, rows: int | None = None, without: Collection[str] = ()) -> int:
    return max(budget.live_bytes(*_pair(partition), rows, without), default=0)


def _pair(partition: Partition) -> Pair:
    return partition.forward_memory, partition.backward_memory


def _available(budget: StepBudget, base: str) -> int:
    """Return the bytes that a partition may hold by its estimate, if it is made from a base."""
    return budget.available_bytes - budget.beyond.get(base, 0)


def _bases(
    gm: fx.GraphModule,
    results: Sequence[CostlyResult],
    plain: Pair,
    spare: Partition,
    lean: Partition,
    regions: Sequence[Sequence[SavableRows]],
    budget: StepBudget,
) -> list[Base]:
    """Full, spare and lean, each with what may be saved beside what it saves."""
    again = sum(result.flops for result in cheapest(results)) / budget.rates.peak_flops
    spare_seconds = _seconds_beyond(_pair(spare), plain, budget) + again
    lean_seconds = _seconds_beyond(_pair(lean), plain, budget)
    tensors = _savable_tensors(gm.graph, results, lean.backward_memory, budget.rates)
    # Seconds are beyond those of a step that saves everything, of which each base recomputes what may be saved.
    of_regions = sum(max(0.0, *(amount.seconds for amount in amounts)) for amounts in regions)
    of_tensors = sum(max(0.0, tensor.seconds) for tensor in tensors)
    return [
        Base("full", of_regions, *plain, (), regions),
        Base("spare", spare_seconds + of_regions, *_pair(spare), (), regions),
        Base("lean", lean_seconds + of_regions + of_tensors, *_pair(lean), tensors, regions),
    ]


def _seconds_beyond(pair: Pair, full: Pair, budget: StepBudget) -> float:
    """Return the seconds that a partition takes beyond full.

    It writes and reads more, and spares new memory between forward and backward.
    """
    left, left_of_full = (_left_bytes(memory[0], budget.sizes) for memory in (pair, full))
    written, written_by_full = (_written(memory, budget.sizes) for memory in (pair, full))
    rates = budget.rates
    return 2 * max(0, written - written_by_full) / rates.copy_bytes + rates.keeping_seconds(left - left_of_full, 0)


def _left_bytes(forward: GraphMemory, sizes: Mapping[str, int]) -> int:
    lives = zip(forward.allocations, forward.bytes_at(sizes), strict=True)
    return sum(num_bytes for allocation, num_bytes in lives if allocation.stop is None)


def _written(pair: Pair, sizes: Mapping[str, int]) -> int:
    lives = [own for memory in pair for own in zip(memory.allocations, memory.bytes_at(sizes), strict=True)]
    return sum(num_bytes for allocation, num_bytes in lives if not allocation.is_input)


def _keeps(base: Base, saved: Saved) -> dict[str, Keep]:
    """Return what regions save under a plan, by region id."""
    regions = ((amounts[0].region_id, amounts) for amounts in base.regions)
    return {region_id: amounts[saved[region_id][0]].keep for region_id, amounts in regions if region_id in saved}


def _regions_in_part(base: Base, saved: Saved) -> list[str]:
    """Regions that save something of some rows only."""
    amounts = [own[saved[own[0].region_id][0]] for own in base.regions if own[0].region_id in saved]
    return [
        amount.region_id for amount in amounts if amount.is_divisible and saved[amount.region_id][1] < amount.num_rows
    ]


def _realized(
    gm: fx.GraphModule,
    partition: Callable[..., Partition],
    base: Base,
    made_from: Mapping[str, Partition],
    saved: Saved,
    results: Sequence[CostlyResult],
) -> Partition:
    """The joint graph partitioned as a plan says; `made_from` are bases that exist as partitions."""
    if not saved and base.kind in made_from:
        return made_from[base.kind]
    keeps = _keeps(base, saved)
    module, _ = _with_regions(gm, keeps)
    of_regions = _described_regions(keeps, gm.graph)
    if base.kind == "full":
        chosen = partition(module, decision=_described(keeps, gm.graph))
    elif base.kind == "spare":
        chosen = spared(module, results, partition, of_regions=of_regions)
    else:
        names = {tensor.name for tensor in base.tensors if tensor.name in saved}
        decision = (
            f"{len(names)} of {len(base.tensors)} costly results are kept, the others computed again in backward; "
            f"{of_regions}"
        )
        chosen = _leaned(module, partition, names, results, decision)
    return replace(chosen, optional=optional_of(base.regions, keeps))


def _lean(gm: fx.GraphModule, partition: Callable[..., Partition], results: Sequence[CostlyResult]) -> Partition:
    decision = f"no costly result is kept, all are computed again in backward; {_described_regions({}, gm.graph)}"
    return _leaned(copied_module(gm), partition, set(), results, decision)


def _leaned(
    module: fx.GraphModule,
    partition: Callable[..., Partition],
    saved: set[str],
    results: Sequence[CostlyResult],
    decision: str,
) -> Partition:
    wanted = {result.name for result in results if not result.is_returned} - saved
    # A plain matmul that is left untagged is saved by the partitioner; attention it would compute again.
    for node in module.graph.nodes:
        if node.name in saved and is_attention(node):
            must_save(node)
        elif node.name in wanted and node.target is not _WITHOUT_RANDOM_STATE:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    for node in layer_borders(module.graph, {result.name for result in results}):
        if node.meta.get("recompute") is not CheckpointPolicy.MUST_RECOMPUTE:
            must_save(node)
    with recomputing_elementwise():
        return partition(module, decision=decision)


def savable_rows(joint: fx.Graph, rates_of: Callable[[], DeviceRates]) -> list[list[SavableRows]]:
    """Return what each region may save of its rows, the smaller amounts first."""
    choices = [] if is_disabled("save_rows") else keep_choices(joint)
    if not choices:
        return []
    rates = rates_of()
    choices_by_region_id: dict[str, list[SavableRows]] = {}
    for choice in choices:
        num_bytes, smaller = choice.row_bytes * choice.num_rows, choices_by_region_id.setdefault(choice.region_id, [])
        # NOTE: operands spare backward one write of what it then reads, because the kernel that makes them again reads
        # its arguments anyway: measured, they do not pay.
        # Rows that came from other ranks are kept where they came to: what they spare is coming again.
        if choice.keep != "operands":
            products = choice.flops / rates.flops_at(choice.num_rows / choice.num_experts)
            costs = rates.keeping_seconds(num_bytes, choice.copied_row_bytes * choice.num_rows)
            seconds = products + choice.travel_seconds - costs
        else:
            before = smaller[-1] if smaller else None
            more = num_bytes - (0 if before is None else before.row_bytes * before.num_rows)
            seconds = (0.0 if before is None else before.seconds) - rates.keeping_seconds(more, more)
        is_divisible = choice.is_divisible and not smaller
        smaller.append(
            SavableRows(choice.region_id, choice.keep, choice.row_bytes, choice.num_rows, seconds, is_divisible)
        )
    return list(choices_by_region_id.values())


def _savable_tensors(
    joint: fx.Graph, results: Sequence[CostlyResult], backward: GraphMemory, rates: DeviceRates
) -> list[SavableTensor]:
    """Costly results that the lean backward computes again."""
    recomputed = {allocation.name for allocation in backward.allocations if not allocation.is_input}
    nodes = {node.name: node for node in joint.nodes}
    savable = []
    for result in results:
        node = nodes[result.name]
        names = (node.name, *(user.name for user in node.users))
        storages = tuple(name for name in names if name in recomputed)
        if storages:
            seconds = result.flops / rates.peak_flops - rates.keeping_seconds(result.num_bytes, 0)
            savable.append(SavableTensor(result.name, storages, seconds))
    return savable


def optional_of(regions: Sequence[Sequence[SavableRows]], keeps: Mapping[str, Keep]) -> dict[str, float]:
    """Seconds spared per byte, by region id, of what these regions save of as many rows as a run has room for."""
    saved = (
        next(amount for amount in amounts if amount.keep == keeps[amounts[0].region_id])
        for amounts in regions
        if amounts[0].is_divisible and amounts[0].region_id in keeps
    )
    return {amount.region_id: amount.seconds_per_byte for amount in saved}


def largest_keeps(regions: Sequence[Sequence[SavableRows]]) -> dict[str, Keep]:
    """Site -> what spares most seconds, of regions that spare any."""
    best = (max(amounts, key=lambda amount: amount.seconds) for amounts in regions)
    return {amount.region_id: amount.keep for amount in best if amount.seconds > 0}


def _with_regions(gm: fx.GraphModule, keeps: Mapping[str, Keep]) -> tuple[fx.GraphModule, set[str]]:
    """A copy in which regions keep, and the names of what they keep."""
    module = copied_module(gm)
    return module, keep_in_regions(module.graph, keeps)


def _described(keeps: Mapping[str, Keep], joint: fx.Graph) -> str:
    return f"nothing costly is computed again; {_described_regions(keeps, joint)}"


def _described_regions(keeps: Mapping[str, Keep], joint: fx.Graph) -> str:
    if not keeps:
        return "regions keep nothing"
    num_regions = len({choice.region_id for choice in keep_choices(joint)})
    counts = [
        (keep, sum(policy == keep for policy in keeps.values())) for keep in ("received", "projections", "operands")
    ]
    named = {"received": "the rows that come from other ranks"}
    return ", ".join(
        f"{count} of {num_regions} regions keep {named.get(keep, f'their {keep}')}" for keep, count in counts if count
    )


def _drop_wishes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.meta.get("recompute") in (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.PREFER_SAVE):
            del node.meta["recompute"]
