"""Fit: what forward keeps for backward so that a step stays within its budget in the least time.

Terms
    full    functorch's plain partition, and each region keeps all that pays: nothing costly is computed again
    spare   what steps without a budget have (`spare`): elementwise work and a few matmuls are computed again
    lean    elementwise work is computed again freely, matmuls and attentions too, layer by layer (`borders`), and
            regions keep nothing

1. Checkpoints of the model are a wish to save memory; the budget says how much is wanted, so their tags go (except
   where a policy of the user demands something), and the full partition is tried. Where it fits and new memory is dear,
   so is one that computes elementwise work again, and the faster one is taken.
2. If it does not fit, the planner asks for the step's peak under other choices. The answers come from records of the
   three partitions, edited (`memory.edits`), so that no graph is partitioned to ask. To full and to spare, what regions
   keep is added; to lean, costly results too. What spare and lean compute again is counted.
3. The graph is partitioned as chosen. If that turns out not to fit after all, less is kept. What code held beyond an
   earlier estimate counts for partitions made from the same one of the three: the others may be exact. Regions get room
   for all their rows, one more region among them than fit; of how many rows they keep something, each run decides
   (`plan.kept`).
4. If nothing fits, it is lean or spare, whichever holds less; fewer rows a chunk have to do the rest. Lean need not be
   the smaller one where layers have no borders.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memfine_fx.compat.functorch import recomputing_elementwise
from memfine_fx.memory.edits import Pair, keeping_in_region, keeping_results, sized
from memfine_fx.memory.liveness import GraphMemory
from memfine_fx.passes.step.borders import layer_borders
from memfine_fx.passes.step.costly_results import CostlyResult, costly_results, is_attention, must_save
from memfine_fx.passes.step.keep import keep_choices, keep_in_regions
from memfine_fx.passes.step.partitioned import Partition
from memfine_fx.passes.step.spare import cheapest, spared
from memfine_fx.plan.cost import DeviceRates
from memfine_fx.plan.keeping import Keepable, StepChoice, choose_step, ranked
from memfine_fx.records import Keep

__all__ = ["Even", "StepBudget", "even", "fit", "largest_keeps", "optional_of", "region_keepables"]

Even = Literal["lean", "spare"]
"""A partition that treats equal layers alike; this spare computes nothing again but elementwise work."""
_ATTEMPTS = 3
_WITHOUT_RANDOM_STATE = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""The CPU's attention knows no dropout and is computed again where that saves bytes, wished or not; a wish would make
the partitioner save a random state for it, for nothing."""


class StepBudget(Protocol):
    """What a graph's step may use, and what it would.

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

    def peak(self, forward: GraphMemory, backward: GraphMemory, rows: int | None, without: str = "") -> int:
        """Bytes of the whole step with this forward and backward; rows a chunk, or as many as time asks for.

        Args:
            without: site of a region that keeps nothing, though its graph has room for it.
        """
        ...

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """Counts its time, without that of stages within it."""
        ...

    def rows_choices(self) -> Sequence[tuple[int | None, float]]:
        """(rows, seconds slower than with the first), most rows first."""
        ...


@dataclass(frozen=True)
class _Base:
    """A partition that choices start from: its record, what can be added to it, seconds it takes beyond full.

    `partition` has nothing added; of full there is none, because the one that was made keeps all that pays. The last is
    how many costly results it computes again.
    """

    kind: Literal["full", "spare", "lean"]
    partition: Partition | None
    pair: Pair
    ranking: list[Keepable]
    seconds: float
    num_costly: int = 0

    def keeps(self, choice: StepChoice) -> dict[str, Keep]:
        """What regions keep, by site; of one a part."""
        kept = self.ranking[: choice.num_kept]
        return largest_keeps(kept if choice.part is None else [*kept, choice.part])

    def with_kept(self, count: int) -> Pair:
        pair = self.pair
        for one in self.ranking[:count]:
            if one.keep == "nothing":
                pair = keeping_results(pair, one.storages)
            else:
                pair = keeping_in_region(pair, one.name, one.keep, one.num_bytes)
        return pair


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
        regions = region_keepables(gm.graph, lambda: budget.rates)
    keeps = largest_keeps(regions)
    full_module, added = _with_regions(gm, keeps)
    full = partition(full_module, decision=_described(keeps, gm.graph))
    tried = functools.partial(_timed, partition, budget)
    # The most common case: no other choice is asked for its peak.
    if budget.peak(full.forward_memory, full.backward_memory, None) <= _available(budget, "full"):
        with budget.timed("fit"):
            made = _faster(gm, replace(full, base="full"), tried, budget, keeps)
        return replace(made, keeps_all=True, optional=optional_of(regions, keeps))
    with budget.timed("fit"):
        return _fit_less(gm, num_forward_outputs, tried, budget, regions, _without(_sized(full, budget), added))


def even(gm: fx.GraphModule, num_forward_outputs: int, partition: Callable[..., Partition], kind: Even) -> Partition:
    """A partition whose choices do not depend on how many layers there are; regions keep nothing.

    Args:
        gm, num_forward_outputs, partition: as for `fit`.
        kind: which.
    """
    _drop_wishes(gm.graph)
    if kind == "spare":
        return spared(_copied(gm), (), partition)
    return _lean(gm, partition, costly_results(gm.graph, num_forward_outputs))


def _with_hints(
    partition: Callable[..., Partition], budget: StepBudget, gm: fx.GraphModule, decision: str = ""
) -> Partition:
    """A partition; what it computes again may bring symbols that the joint graph lacks (states of random numbers)."""
    found = partition(gm, decision=decision)
    budget.add_hints(found.forward.graph)
    budget.add_hints(found.backward.graph)
    return found


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
    kept_pair, again_pair = _sized(full, budget), _sized(again, budget)
    fits = budget.peak(again.forward_memory, again.backward_memory, None) <= _available(budget, "spare")
    pays = _seconds_beyond(again_pair, kept_pair, budget.rates) < 0
    return replace(again, base="spare") if fits and pays else full


def _fit_less(
    gm: fx.GraphModule,
    num_forward_outputs: int,
    partition: Callable[..., Partition],
    budget: StepBudget,
    regions: list[Keepable],
    plain: Pair,
) -> Partition:
    """Where not all that pays can be kept; `plain` is the full partition without what regions keep."""
    results = costly_results(gm.graph, num_forward_outputs)
    spare = spared(_copied(gm), results, partition, of_regions=_described_regions({}, gm.graph))
    lean = _lean(gm, partition, results)
    bases = _bases(gm, results, plain, spare, lean, regions, budget)
    for base, choice in itertools.islice(_by_time(bases, budget), _ATTEMPTS):
        made = _realized(gm, partition, base, choice, results)
        chosen = replace(made, optional=optional_of(base.ranking, base.keeps(choice)))
        part = "" if choice.part is None else choice.part.name
        peak = budget.peak(chosen.forward_memory, chosen.backward_memory, choice.rows, part)
        if peak <= _available(budget, base.kind):
            return replace(chosen, base=base.kind)
    # Compared with the fewest rows, since these are what a step that does not fit will take.
    smallest_rows = budget.rows_choices()[-1][0]
    least = min((lean, spare), key=lambda one: budget.peak(one.forward_memory, one.backward_memory, smallest_rows))
    return replace(least, is_least=True)


def _bases(
    gm: fx.GraphModule,
    results: Sequence[CostlyResult],
    plain: Pair,
    spare: Partition,
    lean: Partition,
    regions: list[Keepable],
    budget: StepBudget,
) -> list[_Base]:
    """Full, spare and lean, each with what is not kept in it."""
    spare_pair, lean_pair = _sized(spare, budget), _sized(lean, budget)
    costly = _costly_keepables(gm.graph, results, lean_pair[1], budget.rates)

    beyond_full = functools.partial(_seconds_beyond, full=plain, rates=budget.rates)
    again = sum(result.flops for result in cheapest(results)) / budget.rates.peak_flops
    return [
        _Base("full", None, plain, ranked(regions), 0.0),
        _Base("spare", spare, spare_pair, ranked(regions), beyond_full(spare_pair) + again),
        _Base("lean", lean, lean_pair, ranked([*costly, *regions]), beyond_full(lean_pair), len(costly)),
    ]


def _seconds_beyond(pair: Pair, full: Pair, rates: DeviceRates) -> float:
    """What a partition takes longer than full: for what it writes once more, and reads, less the new memory that it
    spares between forward and backward.
    """
    more_left = int(pair[0].left_bytes) - int(full[0].left_bytes)
    return 2 * max(0, _written(pair) - _written(full)) / rates.copy_bytes + rates.keeping_seconds(more_left, 0)


def _by_time(bases: Sequence[_Base], budget: StepBudget) -> list[tuple[_Base, StepChoice]]:
    """The best choice from each base, fastest first, each followed by the same with less kept."""
    found: list[tuple[_Base, StepChoice]] = []
    for base in bases:
        peaks = functools.lru_cache(maxsize=None)(functools.partial(_peak_of, base, budget))
        choice = choose_step(base.ranking, budget.rows_choices(), peaks, _available(budget, base.kind))
        if choice is not None:
            found.append((base, choice))
    found.sort(key=lambda one: one[0].seconds + one[1].seconds)
    # Records of edited partitions miss a buffer now and then; less kept is the cheaper second try.
    return [retry for base, choice in found for retry in ((base, choice), (base, _with_less(choice)))]


def _with_less(choice: StepChoice) -> StepChoice:
    return replace(choice, num_kept=choice.num_kept * 3 // 4, part=None)


def _available(budget: StepBudget, base: str) -> int:
    """What the estimate of a partition may use that is made from a base."""
    return budget.available_bytes - budget.beyond.get(base, 0)


def _peak_of(base: _Base, budget: StepBudget, count: int, rows: int | None) -> int:
    return budget.peak(*base.with_kept(count), rows)


def _realized(
    gm: fx.GraphModule,
    partition: Callable[..., Partition],
    base: _Base,
    choice: StepChoice,
    results: Sequence[CostlyResult],
) -> Partition:
    if base.partition is not None and choice.num_kept == 0 and choice.part is None:
        return base.partition
    kept = base.ranking[: choice.num_kept]
    keeps = base.keeps(choice)
    module, _ = _with_regions(gm, keeps)
    of_regions = _described_regions(keeps, gm.graph)
    if base.kind == "full":
        return partition(module, decision=_described(keeps, gm.graph))
    if base.kind == "spare":
        return spared(module, results, partition, of_regions=of_regions)
    saved = {one.name for one in kept if one.keep == "nothing"}
    decision = (
        f"{len(saved)} of {base.num_costly} costly results are kept, the others computed again in backward; "
        f"{of_regions}"
    )
    return _leaned(module, partition, saved, results, decision)


def _lean(gm: fx.GraphModule, partition: Callable[..., Partition], results: Sequence[CostlyResult]) -> Partition:
    decision = f"no costly result is kept, all are computed again in backward; {_described_regions({}, gm.graph)}"
    return _leaned(_copied(gm), partition, set(), results, decision)


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


def region_keepables(joint: fx.Graph, rates_of: Callable[[], DeviceRates]) -> list[Keepable]:
    """What regions may keep, each choice beyond the smaller ones of its region."""
    choices = keep_choices(joint)
    if not choices:
        return []
    rates, last = rates_of(), choices[-1].site
    found: list[Keepable] = []
    before = {choice.site: (0, 0.0, float("inf")) for choice in choices}  # bytes, seconds, seconds a byte
    for choice in choices:
        num_bytes = choice.row_bytes * choice.num_rows
        had_bytes, had_seconds, had_ratio = before[choice.site]
        is_first, more_bytes = had_bytes == 0, num_bytes - had_bytes
        # NOTE: operands spare backward one write of what it then reads, because the kernel that makes them again reads
        # its arguments anyway: measured, they do not pay.
        # Rows that came from other ranks are kept where they came to: what they spare is coming again.
        if choice.keep != "operands":
            products = choice.flops / rates.flops_at(choice.num_rows / choice.num_experts)
            costs = rates.keeping_seconds(num_bytes, choice.copied_row_bytes * choice.num_rows)
            spared = products + choice.travel_seconds - costs
        else:
            spared = had_seconds - rates.keeping_seconds(more_bytes, more_bytes)
        more_seconds = spared - had_seconds
        # A larger choice contains the smaller ones of its region, so it must rank behind them: its seconds a byte are
        # held at theirs or below.
        ratio = min(had_ratio, more_seconds / max(1, more_bytes))
        before[choice.site] = (num_bytes, spared, ratio)
        is_divisible = choice.is_divisible and is_first
        more = (more_bytes, ratio * more_bytes, choice.site == last, choice.keep)
        found.append(Keepable(choice.site, *more, is_divisible=is_divisible))
    return found


def _costly_keepables(
    joint: fx.Graph, results: Sequence[CostlyResult], backward: GraphMemory, rates: DeviceRates
) -> list[Keepable]:
    """Costly results that the lean backward computes again."""
    made = {one.name for one in backward.allocations if not one.is_input}
    nodes = {node.name: node for node in joint.nodes}
    found = []
    for result in results:
        node = nodes[result.name]
        names = (node.name, *(user.name for user in node.users))
        storages = tuple(name for name in names if name in made)
        if storages:
            seconds = result.flops / rates.peak_flops - rates.keeping_seconds(result.num_bytes, 0)
            found.append(Keepable(result.name, result.num_bytes, seconds, result.is_in_last_layer, storages=storages))
    return found


def optional_of(keepables: Sequence[Keepable], keeps: Mapping[str, Keep]) -> dict[str, float]:
    """Seconds spared per byte, by site, of what these regions keep of as many rows as a run has room for."""
    found = {}
    for site in keeps:
        own = [one for one in keepables if one.name == site and one.seconds > 0]
        if own[0].is_divisible:
            found[site] = sum(one.seconds for one in own) / max(1, sum(one.num_bytes for one in own))
    return found


def largest_keeps(kept: Sequence[Keepable]) -> dict[str, Keep]:
    """Site -> the largest of its choices that is kept and pays."""
    return {one.name: one.keep for one in kept if one.keep != "nothing" and one.seconds > 0}


def _with_regions(gm: fx.GraphModule, keeps: Mapping[str, Keep]) -> tuple[fx.GraphModule, set[str]]:
    """A copy in which regions keep, and the names of what they keep."""
    module = _copied(gm)
    return module, keep_in_regions(module.graph, keeps)


def _described(keeps: Mapping[str, Keep], joint: fx.Graph) -> str:
    return f"nothing costly is computed again; {_described_regions(keeps, joint)}"


def _described_regions(keeps: Mapping[str, Keep], joint: fx.Graph) -> str:
    if not keeps:
        return "regions keep nothing"
    num_regions = len({choice.site for choice in keep_choices(joint)})
    counts = [(keep, sum(one == keep for one in keeps.values())) for keep in ("received", "projections", "operands")]
    named = {"received": "the rows that come from other ranks"}
    return ", ".join(
        f"{count} of {num_regions} regions keep {named.get(keep, f'their {keep}')}" for keep, count in counts if count
    )


def _sized(partition: Partition, budget: StepBudget) -> Pair:
    return sized(partition.forward_memory, budget.sizes), sized(partition.backward_memory, budget.sizes)


def _without(pair: Pair, names: set[str]) -> Pair:
    """The record without these storages, and regions that keep nothing."""
    forward, backward = (memory.without(names) for memory in pair)
    return forward, backward


def _written(pair: Pair) -> int:
    return sum(int(one.num_bytes) for memory in pair for one in memory.allocations if not one.is_input)


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph in nodes of its own, under the same names."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(gm, graph)


def _drop_wishes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.meta.get("recompute") in (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.PREFER_SAVE):
            del node.meta["recompute"]
