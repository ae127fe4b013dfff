"""A compiled graph with chunked regions, as a training loop calls it.

Every call is recorded, and under a budget the graph is partitioned again where the first call's bytes no longer apply:
a graph is split into forward and backward for the bytes that its first call may use, and later calls may have fewer,
for good reasons: gradients to accumulate onto, state of an optimizer that did not exist yet, longer sequences. So there
are several partitions of one graph.

1. The first one made that can keep the budget with some chunk size runs.
2. Where none can, the graph is partitioned and compiled once more for the bytes that there are now; where compiled code
   holds more than the estimate that it was chosen by, once more with that held against its like, and then as for the
   smallest budget.
3. Where no partition can, the call is refused before anything has run.
4. Bytes that stay for the rest of a run (parameters, optimizer state) replace the partitions instead, so that a plan
   does not depend on what an earlier part of the run looked like.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from memfine_fx.compat.inductor import CustomPartitionerFn, captured_copy, captured_inputs, compiling_again
from memfine_fx.compiler.captured_graph import CapturedGraph
from memfine_fx.compiler.inner import BackwardContext, CompileOne, compile_and_read, compile_with_regions
from memfine_fx.compiler.logs import observed_passes
from memfine_fx.compiler.session import Session
from memfine_fx.errors import BudgetInfeasible
from memfine_fx.memory.machine import measurement_key
from memfine_fx.memory.step import GraphStep, RunMemory
from memfine_fx.passes.dataflow import node_value, tensor_of
from memfine_fx.passes.lower.compiled_expert import CompiledExpertFunction
from memfine_fx.passes.step.partition import StepPartitioner
from memfine_fx.plan.budget import (
    GraphBudget,
    budget_of_graph,
    context_of,
    device_of,
    fits_unbounded,
    is_limited,
    refusal_of,
    saving_in,
    smallest_peak,
    with_margin,
)
from memfine_fx.plan.cost import DeviceRates
from memfine_fx.plan.rates import device_rates
from memfine_fx.plan.runs import Caller, Run
from memfine_fx.progress import working
from memfine_fx.runtime.accumulation import Accumulation, adding, can_add, can_be_none, is_added
from memfine_fx.runtime.live import MOST_PLANS, LiveHead
from memfine_fx.units import readable_bytes

__all__ = ["CompiledGraph", "CompiledPartition"]

log = logging.getLogger(__name__)

_MOST_CONTEXTS = 4
"""That one graph has partitions for at a time: without and with gradients there, short and long sequences."""
_LAST_ATTEMPT = 2
"""For one memory context: 0 by estimates, 1 by estimates and what code was seen to hold beyond them, 2 for no bytes."""
_LEAST_CODE = 1.25
"""What is estimated to exceed the budget by more than this is not compiled; the most that an estimate was seen to be
above its code is 1.12 (gpt_oss in fp32, smallest chunks)."""


@dataclass(frozen=True)
class CompiledPartition:
    """One partition of the graph, compiled.

    Args:
        step: its record.
        run: its forward, differentiable.
        persistent_bytes: parameters and optimizer state when it was made.
        partitioned_for: what its bytes were chosen for, the key of a memory context without its record; () without a
            budget.
        attempt: see `_LAST_ATTEMPT`.
        guards: conditions on the graph's symbols that compiling it added, which Dynamo does not check.
    """

    step: GraphStep
    run: Callable[..., Any]
    persistent_bytes: int
    partitioned_for: tuple[object, ...] = ()
    attempt: int = 0
    guards: tuple[sympy.Basic, ...] = ()

    def serves(self, sizes: Mapping[str, int]) -> bool:
        return all(guard.subs(sizes) == sympy.true for guard in self.guards)


class CompiledGraph:
    """One graph and the partitions that were made of it, as the module's docstring tells.

    Args:
        graph_module: rewritten; from Dynamo.
        inputs: of the call that is being compiled.
        session, record: whose it is; something of it was lowered.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[Any],
        session: Session,
        record: CapturedGraph,
    ) -> None:
        self._session, self._record = session, record
        hidden = _tokens_of(record, graph_module.graph)
        self._sizes = _sizes_of_inputs(graph_module.graph)
        record.step.sizes.update({size.name: size.hint for size in self._sizes})
        record.is_limited = is_limited(session.steps, hidden.device, record.step.regions.values())
        budget = budget_of_graph(session.steps, record, inputs, hidden) if record.lowered else None
        self._pristine = None if budget is None else captured_copy(graph_module)
        # By memory context; compiling forgets them.
        self._refusals: dict[tuple[object, ...], BudgetInfeasible | None] = {}
        self._partitions = [self._compile(graph_module, inputs, record.step, budget)]
        # With which the graph can be recompiled under a budget: its fake mode and its inputs as fake tensors.
        self._captured = None if self._pristine is None else captured_inputs(inputs)
        if self._captured is None:
            self._pristine = None

    def __call__(self, *args: Any) -> Any:
        sizes = {size.name: size.of(args) for size in self._sizes}
        session = self._session
        session.hold_graph(self._record, args)
        run = session.steps.history.begin(
            self._record.caller,
            self._record.step,
            sizes,
            self._record.input_bytes(args),
            is_limited=self._record.is_limited,
        )
        # Every partition is cut from one joint graph, so that all of them add the same gradients.
        run.memory = replace(run.memory, added=frozenset(self._adding(self._record.step, run.caller, can_add)))
        compiled = self._partitions[0] if self._captured is None else self._chosen(run)
        self._take(run, compiled)
        results = compiled.run(*args)
        session.steps.history.note_results(run, results, args)
        return results

    def _chosen(self, run: Run) -> CompiledPartition:
        """The partition for a run under a budget.

        Raises:
            BudgetInfeasible: there is none.
        """
        persistent = self._session.steps.persistent_bytes(self._session.steps.history.members())
        current = [partition for partition in self._partitions if not self._is_outdated(partition, run, persistent)]
        serving = [partition for partition in current if partition.serves(run.memory.sizes)]
        refused: list[tuple[CompiledPartition, BudgetInfeasible]] = []
        first = 0  # of the attempts that are left for this memory context
        excess_bytes: dict[str, int] = {}
        for partition in serving:
            refusal = self._refusal_of(run, partition)
            if refusal is None:
                return partition
            refused.append((partition, refusal))
            # NOTE: compiled code may hold a little more than what it was chosen by; chosen again it would be the same.
            if self._context(run, partition).key[1:] == partition.partitioned_for and partition.attempt >= first:
                first = _LAST_ATTEMPT + 1 if partition.step.is_least else partition.attempt + 1
                excess_bytes = self._beyond_estimate(run, partition)
        leanest = [(partition, refusal) for partition, refusal in refused if partition.step.is_least]
        if leanest and not self._session.config.has_budget:
            return leanest[-1][0]
        if first > _LAST_ATTEMPT:
            return self._refused(*refused[-1])
        if first == 0 and len({partition.partitioned_for for partition in serving}) >= _MOST_CONTEXTS:
            if leanest:
                return self._refused(*leanest[-1])
            first = _LAST_ATTEMPT
        for attempt in range(first, _LAST_ATTEMPT + 1):
            try:
                recompiled = self._recompile(run, attempt, excess_bytes)
            except BudgetInfeasible as error:
                return self._refused(self._partitions[-1], error)
            current = self._partitions = [*current, recompiled]
            refusal = self._refusal_of(run, recompiled)
            if refusal is None:
                return recompiled
            if recompiled.step.is_least or attempt == _LAST_ATTEMPT:
                return self._refused(recompiled, refusal)
            excess_bytes = self._beyond_estimate(run, recompiled)
        raise AssertionError("the last partition that is made is the one for the smallest budget")

    def _beyond_estimate(self, run: Run, one: CompiledPartition) -> dict[str, int]:
        """Return by how many bytes a partition's code exceeds its estimate, by the partition's base.

        With this excess (`GraphBudget.beyond`) the same partition is not chosen again.
        """
        peak = smallest_peak(self._session.steps, self._context(run, one))
        return {one.step.base: max(0, (peak or 0) - one.step.chosen_by)}

    def _refused(self, last: CompiledPartition, refusal: BudgetInfeasible) -> CompiledPartition:
        """Raise before anything has run; but let the op do it, which tells the others, where ranks share experts.

        What an accelerator has is no wish of the user: a step that may just fit is tried.
        """
        is_shared = any(live.exchange is not None for live in self._record.live_regions())
        if is_shared or not self._session.config.has_budget:
            return last
        raise refusal

    def _is_outdated(self, one: CompiledPartition, run: Run, persistent: int) -> bool:
        """Whether other bytes are there for good than when it was made, and it would be made otherwise now.

        What was made where there was more room stays while it fits with chunks as large as time asks for, and
        so does what saves all that pays: nothing faster can be made.
        """
        if persistent == one.persistent_bytes:
            return False
        is_best = one.step.saves_all or persistent > one.persistent_bytes
        return not (is_best and fits_unbounded(self._session.steps, self._context(run, one)))

    def _context(self, run: Run, one: CompiledPartition) -> RunMemory:
        run.memory = replace(run.memory, step=one.step)
        return context_of(self._session.steps, run)

    def _refusal_of(self, run: Run, one: CompiledPartition) -> BudgetInfeasible | None:
        context = self._context(run, one)
        if context.key not in self._refusals:
            if len(self._refusals) >= MOST_PLANS:  # a generation has another length at each token
                self._refusals.clear()
            device = device_of(self._record)
            self._refusals[context.key] = refusal_of(self._session.steps, context, device)
        return self._refusals[context.key]

    def _recompile(self, run: Run, attempt: int, beyond: Mapping[str, int]) -> CompiledPartition:
        """The graph partitioned for this run and compiled.

        Args:
            attempt: see `_LAST_ATTEMPT`.
            beyond: see `GraphBudget`.
        """
        assert self._pristine is not None and self._captured is not None
        session, first = self._session, self._record.step
        fake_mode, inputs = self._captured
        step = GraphStep(first.regions, run.memory.values, heads=first.heads, fusible_gradients=first.fusible_gradients)
        run.memory = replace(run.memory, step=step)
        context = context_of(session.steps, run)
        key = ("made", *context.key[1:])
        refused = self._refusals.get(key)
        if refused is not None:
            raise refused
        available = context.available_bytes or 0
        is_asked = session.config.has_budget
        budget_context = replace(context, available_bytes=0) if attempt == _LAST_ATTEMPT else context
        hidden = tensor_of(self._record.lowered[0].region.hidden)
        budget = GraphBudget(session.steps, budget_context, hidden, is_asked=is_asked, beyond=beyond)

        def check() -> None:
            steps, device = session.steps, device_of(self._record)
            refusal = refusal_of(steps, context, device)
            roomier = replace(context, available_bytes=int(available * _LEAST_CODE))
            if is_asked and refusal is not None and refusal_of(steps, roomier, device) is not None:
                self._refusals[key] = refusal
                raise refusal

        log.info("a graph is partitioned again: no partition of it fits in %s", readable_bytes(available))
        self._record.step = step  # compiled functions and records that compiling asks for are this partition's
        try:
            shape_env = fake_mode.shape_env
            known = 0 if shape_env is None else len(shape_env.guards)
            again = working("compiling a graph again: no plan of it fits the memory of this step", "compiled again")
            with again, observed_passes(session), compiling_again(fake_mode), session.diagnostics.timed("recompile"):
                module = captured_copy(self._pristine)
                partition = self._compile(module, inputs, step, budget, partitioned=check)
            # What compiling found out about sizes beyond Dynamo's guards holds for this partition only, see
            # `CompiledPartition.serves`.
            added = () if shape_env is None else tuple(guard.expr for guard in shape_env.guards[known:])
            return replace(partition, guards=added, partitioned_for=context.key[1:], attempt=attempt)
        except BaseException:
            self._record.step = first
            raise

    def _compile(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[Any],
        step: GraphStep,
        budget: GraphBudget | None,
        partitioned: Callable[[], None] | None = None,
    ) -> CompiledPartition:
        """Partition and compile a graph.

        Args:
            partitioned: called once an estimate exists; if given, the graph is not looked up in a cache.
        """
        session = self._session

        def note_estimate() -> None:
            if budget is not None:
                step.chosen_by = with_margin(smallest_peak(session.steps, budget.context) or 0)
            if partitioned is not None:
                partitioned()

        compiled = compile_with_regions(
            graph_module,
            inputs,
            session.config,
            step,
            budget=budget,
            rates=self._rates() if budget is None else None,
            changed=self._forget,
            in_backward=self._in_backward(step),
            partitioned=note_estimate,
            mode=session.mode,
            identity=self._identity(budget) if partitioned is None else "",
            watched=functools.partial(self._watched, step),
            compile_one=self._compile_one,
        )
        members = {*session.steps.history.members(), self._record.caller}
        persistent = 0 if budget is None else session.steps.persistent_bytes(list(members))
        partitioned_for = () if budget is None else budget.context.key[1:]
        return CompiledPartition(step, compiled, persistent, partitioned_for)

    _compile_one: CompileOne = staticmethod(compile_and_read)
    """Compiles a forward or a backward, and reads what it holds."""

    def _watched(self, step: GraphStep, partitioner: StepPartitioner) -> CustomPartitionerFn:
        """Return what partitions the joint graph in the place of the step's partitioner: that itself."""
        return partitioner

    def _in_backward(self, step: GraphStep) -> BackwardContext:
        """Return what each run of a partition's backward happens in."""

        @contextlib.contextmanager
        def in_backward(keeps_graph: bool) -> Iterator[Accumulation]:
            session = self._session
            with session.steps.history.backward(step, keeps_graph=keeps_graph) as run:
                caller = self._record.caller if run is None else run.caller
                parameters = self._adding(step, caller, is_added)
                idle: Collection[tuple[str, int]] = ()
                if session.config.idle_gradients == "none":
                    whole = self._record.parameters_with_sole_gradients(step, caller)
                    idle = [key for key, parameter in whole.items() if can_be_none(parameter)]
                if run is not None:
                    self._record.step = step
                    run.memory = replace(run.memory, added=frozenset(parameters))
                    session.steps.context = context_of(session.steps, run)
                accumulating = Accumulation(step.fusible_gradients, parameters, can_be_none=frozenset(idle))
                with adding(accumulating) as accumulation:
                    yield accumulation

        return in_backward

    def _identity(self, budget: GraphBudget | None) -> str:
        """Return a text that determines a partition; "" where it depends on the user's budget in bytes.

        Few processes have the same budget again. The text describes the regions and heads, which determine the results
        of operators and which weight gradients are fusible; the machine, which determines the scratch inside kernels;
        and its rates, which determine what is cheaper to save than to recompute. The memory of an accelerator is
        rounded, so that similar processes have the same text.
        """
        if self._session.config.has_budget:
            return ""
        rates, device_type = self._rates(), tensor_of(self._record.lowered[0].region.hidden).device.type
        described: list[object] = [measurement_key(device_type), None if rates is None else rates()]
        if budget is not None:
            described.append(budget.rates)
            described += [sorted(part) if isinstance(part, frozenset) else part for part in budget.context.key[1:]]
        for lowered in self._record.lowered:
            live = lowered.live
            if isinstance(live, LiveHead):
                described.append((live.region_id, live.loss, live.out_dtype))
            elif isinstance(live.compiled_expert, CompiledExpertFunction) and live.exchange is None:
                described.append(
                    (live.region_id, live.compiled_expert.key, live.top_k, live.out_dtype, live.kernels is not None)
                )
            else:
                return ""
        return repr(described)

    def _rates(self) -> Callable[[], DeviceRates] | None:
        """Return the device's rates, where regions may save what does not raise the step's peak.

        Not without Inductor's code, which the step's bytes are read from; and on an accelerator the device is the
        budget.
        """
        hidden = tensor_of(self._record.lowered[0].region.hidden)
        session = self._session
        is_asked = session.config.memory_budget is None and session.config.inner_backend == "inductor"
        if not is_asked or hidden.device.type != "cpu":
            return None
        return functools.partial(device_rates, hidden.device.type, hidden.dtype)

    def _adding(
        self, step: GraphStep, caller: Caller, may: Callable[[torch.Tensor], bool]
    ) -> dict[tuple[str, int], torch.Tensor]:
        """Parameters of a caller whose gradients a run of this partition adds to where they are."""
        if not step.fusible_gradients or not caller.has_gradients:
            return {}
        parameters = self._record.parameters_with_sole_gradients(step, caller)
        return {key: parameter for key, parameter in parameters.items() if may(parameter)}

    def _take(self, run: Run, compiled: CompiledPartition) -> None:
        """Plans are made for this run until another begins."""
        self._record.step = compiled.step
        run.memory = replace(run.memory, step=compiled.step, saved=frozenset())
        if compiled.step.optional:
            run.memory = saving_in(self._session.steps, run, tensor_of(self._record.lowered[0].region.hidden))
        self._session.steps.context = context_of(self._session.steps, run)

    def _forget(self) -> None:
        """More is known of a partition's memory than before."""
        self._refusals.clear()
        self._session.forget_plans()


def _tokens_of(record: CapturedGraph, graph: fx.Graph) -> torch.Tensor:
    """Tokens of a region or head, for device and dtype; of a graph without either, its first floating-point input."""
    if record.lowered:
        return tensor_of(record.lowered[0].region.hidden)
    values = (node_value(node) for node in graph.nodes if node.op == "placeholder")
    return next(
        (value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()), torch.empty(0)
    )


@dataclass(frozen=True)
class _Size:
    """A dynamic size and its position among a graph's inputs, where it is an int or a dimension of a tensor."""

    name: str
    position: int
    dimension: int | None
    hint: int

    def of(self, args: Sequence[Any]) -> int:
        value = args[self.position]
        return int(value if self.dimension is None else value.shape[self.dimension])


def _sizes_of_inputs(graph: fx.Graph) -> list[_Size]:
    sizes: dict[str, _Size] = {}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(placeholders):
        value = node_value(node)
        candidates = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for dimension, size in candidates:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.hint is not None:
                name = str(size.node.expr)
                sizes.setdefault(name, _Size(name, position, dimension, int(size.node.hint)))
    return list(sizes.values())
