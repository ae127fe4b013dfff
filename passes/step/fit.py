"""Fit: choose what forward saves for backward, so that a step stays within its budget in the least time.

Terms
    save_all              functorch's plain partition; each region saves all that pays: nothing costly is recomputed
    recompute_pointwise   as without a budget (`costly_results`): elementwise work and a few matmuls are recomputed
    recompute_all         elementwise work is recomputed freely, matmuls and attentions too, layer by layer (`borders`),
                          and regions save nothing

1. Checkpoints of the model are a wish to save memory; the budget says how much is wanted, so their tags go (except
   where a policy of the user demands something), and save_all is tried. Where it fits and new memory is dear,
   so is one that recomputes elementwise work, and the faster one is taken.
2. If it does not fit, the solver chooses among the three, what is saved beside what each saves, and rows per chunk
   (`plan.problem.problem_of_partition`), by the memory of the three: no graph is partitioned to ask. In save_all
   and recompute_pointwise regions may save; in recompute_all costly results too. What is recomputed is counted.
3. The graph is partitioned as chosen. If that turns out not to fit after all, partitions of this base get as many bytes
   less, and the solver chooses again. What code held beyond an earlier estimate counts likewise. Regions get room for
   all their rows; of how many rows they save something, each run decides.
4. If nothing fits, it is recompute_all or recompute_pointwise, whichever holds less; fewer rows a chunk have to do the
   rest. recompute_all need not be the smaller one where layers have no borders.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memfine_fx.compat.settings import RECOMPUTED_POINTWISE
from memfine_fx.memory.liveness import GraphMemory
from memfine_fx.memory.step import GraphStep
from memfine_fx.passes.pass_list import is_disabled
from memfine_fx.passes.step.borders import layer_borders
from memfine_fx.passes.step.costly_results import (
    CostlyResult,
    cheapest,
    costly_results,
    is_attention,
    must_save,
    recomputing_pointwise,
)
from memfine_fx.passes.step.save import save_choices, save_in_regions
from memfine_fx.passes.tracing import copied_module
from memfine_fx.plan.budget import GraphBudget
from memfine_fx.plan.cost import DeviceRates
from memfine_fx.plan.problem import Base, SavableRows, SavableTensor, problem_of_partition
from memfine_fx.plan.solve import solve
from memfine_fx.records import SavePolicy

__all__ = ["Uniform", "fit", "give_room", "uniform"]

Uniform = Literal["recompute_all", "recompute_pointwise"]
"""A partition that treats equal layers alike; its recompute_pointwise recomputes elementwise work alone."""
Pair = tuple[GraphMemory, GraphMemory]
"""Forward and backward."""
_ATTEMPTS = 3
_WITHOUT_RANDOM_STATE = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""The CPU's attention knows no dropout and is recomputed where that saves bytes, wished or not; a wish would make
the partitioner save a random state for it, for nothing."""


Saved = Mapping[str, tuple[int, int]]
"""See `plan.solve.StepPlan`."""


def fit(
    gm: fx.GraphModule, num_forward_outputs: int, partition: Callable[..., GraphStep], budget: GraphBudget
) -> GraphStep:
    """The partition for a budget, see above.

    Args:
        gm: the joint graph; it is not changed but for the tags of the model's checkpoints.
        num_forward_outputs: results of the joint graph that are forward's.
        partition: (copy of `gm` in which things are tagged, decision) -> partition.
        budget: see `GraphBudget`.
    """
    _drop_wishes(gm.graph)
    budget.add_hints(gm.graph)
    partition = functools.partial(_with_hints, partition, budget)
    with budget.timed("fit"):
        regions = _savable_rows(gm.graph, lambda: budget.rates)
    policies = _largest_policies(regions)
    module, added = _with_regions(gm, policies)
    save_all = partition(module, decision=_described(policies, gm.graph))
    tried = functools.partial(_timed, partition, budget)
    # The most common case: no other choice is asked for its peak.
    if _peak(save_all, budget) <= _available(budget, "save_all"):
        with budget.timed("fit"):
            chosen = _faster(gm, replace(save_all, base="save_all"), tried, budget, policies)
        return replace(chosen, saves_all=True, optional=_optional_of(regions, policies))
    plain = [memory.without(added) for memory in _pair(save_all)]
    with budget.timed("fit"):
        return _fit_less(gm, num_forward_outputs, tried, budget, regions, (plain[0], plain[1]))


def uniform(
    gm: fx.GraphModule, num_forward_outputs: int, partition: Callable[..., GraphStep], kind: Uniform
) -> GraphStep:
    """Return a partition whose choices do not depend on the number of layers; regions save nothing.

    Args:
        gm, num_forward_outputs, partition: as for `fit`.
        kind: which.
    """
    _drop_wishes(gm.graph)
    if kind == "recompute_pointwise":
        return recomputing_pointwise(copied_module(gm), (), partition)
    return _recomputing_all(gm, partition, costly_results(gm.graph, num_forward_outputs))


def _with_hints(
    partition: Callable[..., GraphStep], budget: GraphBudget, gm: fx.GraphModule, decision: str = ""
) -> GraphStep:
    """A partition; what it computes again may bring symbols that the joint graph lacks (states of random numbers)."""
    result = partition(gm, decision=decision)
    for module in result.modules:
        budget.add_hints(module.graph)
    return result


def _timed(
    partition: Callable[..., GraphStep], budget: GraphBudget, gm: fx.GraphModule, decision: str = ""
) -> GraphStep:
    """A partition beyond the first, which a compilation without a budget makes too."""
    with budget.timed("further partitions"):
        return partition(gm, decision=decision)


def _faster(
    gm: fx.GraphModule,
    save_all: GraphStep,
    partition: Callable[..., GraphStep],
    budget: GraphBudget,
    policies: Mapping[str, SavePolicy],
) -> GraphStep:
    """Return `save_all`, or a partition that recomputes elementwise work where saving its results takes more time.

    Saved results are newly allocated memory, which costs a CPU more than recomputing them inside kernels that read.
    """
    if math.isinf(budget.rates.save_bytes):
        return save_all
    again = recomputing_pointwise(
        _with_regions(gm, policies)[0], (), partition, of_regions=_described_regions(policies, gm.graph)
    )
    seconds = _seconds_beyond(_pair(again), _pair(save_all), budget)
    is_faster = seconds < 0 and _peak(again, budget) <= _available(budget, "recompute_pointwise")
    return replace(again, base="recompute_pointwise") if is_faster else save_all


def _fit_less(
    gm: fx.GraphModule,
    num_forward_outputs: int,
    partition: Callable[..., GraphStep],
    budget: GraphBudget,
    regions: Sequence[Sequence[SavableRows]],
    plain: Pair,
) -> GraphStep:
    """Return the partition where not all that pays can be saved; `plain` is save_all without what regions save."""
    results = costly_results(gm.graph, num_forward_outputs)
    recompute_pointwise = recomputing_pointwise(
        copied_module(gm), results, partition, of_regions=_described_regions({}, gm.graph)
    )
    recompute_all = _recomputing_all(gm, partition, results)
    bases = _bases(gm, results, plain, recompute_pointwise, recompute_all, regions, budget)
    made_from = {"recompute_pointwise": recompute_pointwise, "recompute_all": recompute_all}
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
    least = min(
        (recompute_all, recompute_pointwise), key=lambda candidate: _peak(candidate, budget, rows_choices[-1][0])
    )
    return replace(least, is_least=True)


def _peak(partition: GraphStep, budget: GraphBudget, rows: int | None = None, without: Collection[str] = ()) -> int:
    return max(budget.live_bytes(*_pair(partition), rows, without), default=0)


def _pair(partition: GraphStep) -> Pair:
    assert partition.forward is not None and partition.backward is not None, "a partitioner records what it makes"
    return partition.forward, partition.backward


def _available(budget: GraphBudget, base: str) -> int:
    """Return the bytes that a partition may hold by its estimate, if it is made from a base."""
    return budget.available_bytes - budget.beyond.get(base, 0)


def _bases(
    gm: fx.GraphModule,
    results: Sequence[CostlyResult],
    plain: Pair,
    recompute_pointwise: GraphStep,
    recompute_all: GraphStep,
    regions: Sequence[Sequence[SavableRows]],
    budget: GraphBudget,
) -> list[Base]:
    """Return the three partitions to start from, each with what may be saved beyond what it saves."""
    again = sum(result.flops for result in cheapest(results)) / budget.rates.peak_flops
    pointwise_seconds = _seconds_beyond(_pair(recompute_pointwise), plain, budget) + again
    all_seconds = _seconds_beyond(_pair(recompute_all), plain, budget)
    tensors = _savable_tensors(gm.graph, results, _pair(recompute_all)[1], budget.rates)
    # Seconds are beyond those of a step that saves everything, of which each base recomputes what may be saved.
    of_regions = sum(max(0.0, *(amount.seconds for amount in amounts)) for amounts in regions)
    of_tensors = sum(max(0.0, tensor.seconds) for tensor in tensors)
    return [
        Base("save_all", of_regions, *plain, (), regions),
        Base("recompute_pointwise", pointwise_seconds + of_regions, *_pair(recompute_pointwise), (), regions),
        Base("recompute_all", all_seconds + of_regions + of_tensors, *_pair(recompute_all), tensors, regions),
    ]


def _seconds_beyond(pair: Pair, save_all: Pair, budget: GraphBudget) -> float:
    """Return the seconds that a partition takes beyond save_all.

    It writes and reads more, and spares new memory between forward and backward.
    """
    left, left_by_save_all = (_left_bytes(memory[0], budget.sizes) for memory in (pair, save_all))
    written, written_by_save_all = (_written(memory, budget.sizes) for memory in (pair, save_all))
    rates = budget.rates
    return 2 * max(0, written - written_by_save_all) / rates.copy_bytes + rates.saving_seconds(
        left - left_by_save_all, 0
    )


def _left_bytes(forward: GraphMemory, sizes: Mapping[str, int]) -> int:
    lives = zip(forward.allocations, forward.bytes_at(sizes), strict=True)
    return sum(num_bytes for allocation, num_bytes in lives if allocation.stop is None)


def _written(pair: Pair, sizes: Mapping[str, int]) -> int:
    lives = [own for memory in pair for own in zip(memory.allocations, memory.bytes_at(sizes), strict=True)]
    return sum(num_bytes for allocation, num_bytes in lives if not allocation.is_input)


def _policies_of(base: Base, saved: Saved) -> dict[str, SavePolicy]:
    """Return what regions save under a plan, by region id."""
    regions = ((amounts[0].region_id, amounts) for amounts in base.regions)
    return {region_id: amounts[saved[region_id][0]].policy for region_id, amounts in regions if region_id in saved}


def _regions_in_part(base: Base, saved: Saved) -> list[str]:
    """Regions that save something of some rows only."""
    amounts = [own[saved[own[0].region_id][0]] for own in base.regions if own[0].region_id in saved]
    return [
        amount.region_id for amount in amounts if amount.is_divisible and saved[amount.region_id][1] < amount.num_rows
    ]


def _realized(
    gm: fx.GraphModule,
    partition: Callable[..., GraphStep],
    base: Base,
    made_from: Mapping[str, GraphStep],
    saved: Saved,
    results: Sequence[CostlyResult],
) -> GraphStep:
    """The joint graph partitioned as a plan says; `made_from` are bases that exist as partitions."""
    if not saved and base.kind in made_from:
        return made_from[base.kind]
    policies = _policies_of(base, saved)
    module, _ = _with_regions(gm, policies)
    of_regions = _described_regions(policies, gm.graph)
    if base.kind == "save_all":
        chosen = partition(module, decision=_described(policies, gm.graph))
    elif base.kind == "recompute_pointwise":
        chosen = recomputing_pointwise(module, results, partition, of_regions=of_regions)
    else:
        names = {tensor.name for tensor in base.tensors if tensor.name in saved}
        decision = (
            f"{len(names)} of {len(base.tensors)} costly results are saved, the others are recomputed in backward; "
            f"{of_regions}"
        )
        chosen = _recomputing_costly(module, partition, names, results, decision)
    return replace(chosen, optional=_optional_of(base.regions, policies))


def _recomputing_all(
    gm: fx.GraphModule, partition: Callable[..., GraphStep], results: Sequence[CostlyResult]
) -> GraphStep:
    decision = f"no costly result is saved, all are recomputed in backward; {_described_regions({}, gm.graph)}"
    return _recomputing_costly(copied_module(gm), partition, set(), results, decision)


def _recomputing_costly(
    module: fx.GraphModule,
    partition: Callable[..., GraphStep],
    saved: set[str],
    results: Sequence[CostlyResult],
    decision: str,
) -> GraphStep:
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
    with RECOMPUTED_POINTWISE.applied():
        return partition(module, decision=decision)


def _savable_rows(joint: fx.Graph, rates_of: Callable[[], DeviceRates]) -> list[list[SavableRows]]:
    """Return what each region may save of its rows, the smaller amounts first."""
    choices = [] if is_disabled("save_rows") else save_choices(joint)
    if not choices:
        return []
    rates = rates_of()
    choices_by_region_id: dict[str, list[SavableRows]] = {}
    for choice in choices:
        num_bytes, smaller = choice.row_bytes * choice.num_rows, choices_by_region_id.setdefault(choice.region_id, [])
        # NOTE: operands spare backward one write of what it then reads, because the kernel that recomputes them reads
        # its arguments anyway: measured, they do not pay.
        # Rows received from other ranks are saved on the receiving rank: they spare a second all-to-all.
        if choice.policy != "operands":
            products = choice.flops / rates.flops_at(choice.num_rows / choice.num_experts)
            costs = rates.saving_seconds(num_bytes, choice.copied_row_bytes * choice.num_rows)
            seconds = products + choice.all_to_all_seconds - costs
        else:
            before = smaller[-1] if smaller else None
            more = num_bytes - (0 if before is None else before.row_bytes * before.num_rows)
            seconds = (0.0 if before is None else before.seconds) - rates.saving_seconds(more, more)
        smaller.append(replace(choice, seconds=seconds, is_divisible=choice.is_divisible and not smaller))
    return list(choices_by_region_id.values())


def _savable_tensors(
    joint: fx.Graph, results: Sequence[CostlyResult], backward: GraphMemory, rates: DeviceRates
) -> list[SavableTensor]:
    """Return the costly results that the backward of recompute_all recomputes."""
    recomputed = {allocation.name for allocation in backward.allocations if not allocation.is_input}
    nodes = {node.name: node for node in joint.nodes}
    savable = []
    for result in results:
        node = nodes[result.name]
        names = (node.name, *(user.name for user in node.users))
        storages = tuple(name for name in names if name in recomputed)
        if storages:
            seconds = result.flops / rates.peak_flops - rates.saving_seconds(result.num_bytes, 0)
            savable.append(SavableTensor(result.name, storages, seconds))
    return savable


def _optional_of(regions: Sequence[Sequence[SavableRows]], policies: Mapping[str, SavePolicy]) -> dict[str, float]:
    """Seconds spared per byte, by region id, of what these regions save of as many rows as a run has room for."""
    saved = (
        next(amount for amount in amounts if amount.policy == policies[amounts[0].region_id])
        for amounts in regions
        if amounts[0].is_divisible and amounts[0].region_id in policies
    )
    return {amount.region_id: amount.seconds_per_byte for amount in saved}


def _largest_policies(regions: Sequence[Sequence[SavableRows]]) -> dict[str, SavePolicy]:
    """Return, by region id, the policy that spares most seconds, of regions where any spares some."""
    best = (max(amounts, key=lambda amount: amount.seconds) for amounts in regions)
    return {amount.region_id: amount.policy for amount in best if amount.seconds > 0}


def _with_regions(gm: fx.GraphModule, policies: Mapping[str, SavePolicy]) -> tuple[fx.GraphModule, set[str]]:
    """Return a copy in which regions save by these policies, and the names of the nodes that they save."""
    module = copied_module(gm)
    return module, save_in_regions(module.graph, policies)


def _described(policies: Mapping[str, SavePolicy], joint: fx.Graph) -> str:
    return f"nothing costly is recomputed; {_described_regions(policies, joint)}"


def _described_regions(policies: Mapping[str, SavePolicy], joint: fx.Graph) -> str:
    if not policies:
        return "regions save nothing"
    num_regions = len({choice.region_id for choice in save_choices(joint)})
    counts = [
        (policy, sum(own == policy for own in policies.values())) for policy in ("received", "projections", "operands")
    ]
    named = {"received": "the rows that come from other ranks"}
    return ", ".join(
        f"{count} of {num_regions} regions save {named.get(policy, f'their {policy}')}"
        for policy, count in counts
        if count
    )


def _drop_wishes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.meta.get("recompute") in (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.PREFER_SAVE):
            del node.meta["recompute"]


def give_room(joint: fx.Graph, rates: Callable[[], DeviceRates]) -> dict[str, float]:
    """Without a budget, give regions of a joint graph room to save rows; return seconds spared per byte by region id.

    How many rows are saved is decided by the plan of each run (`plan.problem`): another batch has another peak. Refused
    are graphs that do not return their loss, since nobody knows what is alive between their forward and backward, and
    regions whose experts live on several ranks, which would have to decide alike.
    """
    if not _returns_loss(joint):
        return {}
    regions = [amounts[:1] for amounts in _savable_rows(joint, rates) if amounts[0].is_divisible]
    policies = _largest_policies(regions)
    save_in_regions(joint, policies)
    return _optional_of(regions, policies)


def _returns_loss(joint: fx.Graph) -> bool:
    """Whether a gradient comes for a single number: backward then begins where forward ended."""
    tangents = (
        node.meta.get("val")
        for node in joint.nodes
        if node.op == "placeholder" and str(node.target).startswith("tangents_")
    )
    return any(getattr(tangent, "ndim", None) == 0 for tangent in tangents)
