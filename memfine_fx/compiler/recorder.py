"""Recording: what graphs would hold is read of what would be compiled, and the graphs run on fake tensors.

A `Recorder` observes the pipeline and puts a `RecordedGraph` in the place of each graph: the graphs that AOT autograd
makes of it run as they are. Beside the plan of the session's own budget, other plans of the same graph are recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import sympy
import torch
from torch import fx

from memfine_fx.compat.functorch import (
    min_cut_partition,
    run_boxed,
    take_donated,
)
from memfine_fx.compat.inductor import CustomPartitionerFn, captured_copy, compile_on_inductor, written_code
from memfine_fx.compat.settings import ACTIVATION_BUDGET, AUTOGRAD_CACHE
from memfine_fx.compiler.captured_graph import CapturedGraph
from memfine_fx.compiler.compiled_graph import CompiledGraph, CompiledPartition
from memfine_fx.compiler.inner import BackwardContext, backward_call, record_memory, take_estimate
from memfine_fx.compiler.session import Observer, Session
from memfine_fx.memory.graph_peak import read_graph
from memfine_fx.memory.step import GraphStep, RunMemory
from memfine_fx.memory.wrapper_code import read_wrapper
from memfine_fx.passes.dataflow import tensor_of
from memfine_fx.passes.step.fit import Uniform
from memfine_fx.passes.step.partition import StepPartitioner, counted_inputs, give_values, partitioned_as_is
from memfine_fx.passes.step.save import save_all_rows
from memfine_fx.passes.tracing import copied_module
from memfine_fx.plan.budget import GraphBudget
from memfine_fx.plan.cost import DeviceRates
from memfine_fx.plan.runs import Run
from memfine_fx.progress import stages

__all__ = ["PlainRecorder", "Reads", "Recorder", "record_plain"]

Reads = Literal["graph", "code"]
"""What a record is read of: the graph alone, which is quicker, or the code that Inductor would write."""

_BUDGETS = {"least": 0, "most": 1 << 62}
"""Plans by the bytes in the place of a budget: fewer and more than any step takes. The others treat layers alike."""


class Recorder(Observer):
    """Records the graphs of a session.

    Args:
        reads: what records are read of.
        plans: recorded beside the session's own: under the smallest budget that works ("least"), under one that nothing
            exceeds ("most"), and partitions that are the same for every layer ("recompute_all",
            "recompute_pointwise"). Where code is read,
            NAME + " estimated" is the estimate that a plan was chosen by.
        runs_here: whether the step is to run on this machine; else rates of this one decide nothing.
    """

    compiles = False

    def __init__(self, reads: Reads, plans: Sequence[str], *, runs_here: bool) -> None:
        super().__init__(runs_here=runs_here)
        self.reads, self.plans = reads, tuple(plans)
        self.recorded: dict[CapturedGraph, dict[str, GraphStep]] = {}
        self._inputs: dict[CapturedGraph, Sequence[Any]] = {}

    def guards_on_sizes(self, step: GraphStep) -> tuple[sympy.Basic, ...]:
        """Return the conditions on a graph's symbols under which its record holds, as far as they are known by now."""
        inputs = next((inputs for record, inputs in self._inputs.items() if record.step is step), ())
        size = next((size for size in inputs if isinstance(size, torch.SymInt)), None)
        return () if size is None else tuple(guard.expr for guard in size.node.shape_env.guards)

    def on_lowered(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], session: Session, record: CapturedGraph
    ) -> Callable[..., Any] | None:
        stages.info("graph captured: %d layers chunked", len(record.lowered))
        self._inputs[record] = inputs
        graph = RecordedGraph if record.lowered else _PlainGraph
        return graph(graph_module, inputs, session, record, self).__call__

    def step_under(self, plan: str, step: GraphStep) -> GraphStep:
        """Return a graph's step under one of the plans; itself where the plan does not change the graph."""
        plans = (plans for graph, plans in self.recorded.items() if graph.step is step)
        return next((steps[plan] for steps in plans if plan in steps), step)

    def note(self, record: CapturedGraph, plan: str, step: GraphStep) -> None:
        self.recorded.setdefault(record, {})[plan] = step

    def note_partition(self, record: CapturedGraph, step: GraphStep, plan: str, partition: GraphStep) -> None:
        """Note the estimate of a graph's step under a plan, from the partition that the plan chooses."""
        other = GraphStep(step.regions, step.sizes, heads=step.heads)
        take_estimate(other, lambda: None, partition)
        self.note(record, plan, other)


class PlainRecorder(Recorder):
    """Records graphs as torch.compile takes them, in which nothing is looked for.

    Args:
        shares: values of functorch's `activation_memory_budget` beside 1; their plans have the share's text as name.
    """

    def __init__(self, reads: Reads, shares: Sequence[float], *, runs_here: bool) -> None:
        super().__init__(reads, tuple(map(str, shares)), runs_here=runs_here)

    def on_capture(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], session: Session, record: CapturedGraph
    ) -> Callable[..., Any] | None:
        stages.info("graph captured, as torch.compile takes it")
        self._inputs[record] = inputs
        return _PlainGraph(graph_module, inputs, session, record, self).__call__


class RecordedGraph(CompiledGraph):
    """A graph with chunked regions that is read and not built, under each of the recorder's plans."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[Any],
        session: Session,
        record: CapturedGraph,
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._compile_one = functools.partial(_read_alone, recorder.reads)
        super().__init__(graph_module, inputs, session, record)

    def _chosen(self, run: Run) -> CompiledPartition:
        return self._partitions[0]  # whoever reads the record refuses

    def _compile(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> CompiledPartition:
        if self._recorder.reads == "code":
            self._record_code(graph_module, inputs)
        return super()._compile(graph_module, inputs, *args, **kwargs)

    def _record_code(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Read the code that the graph would have under the other plans, as far as code is written here at all."""
        record, recorder = self._record, self._recorder
        for plan in recorder.plans:
            step = GraphStep(record.step.regions, record.step.sizes, heads=record.step.heads)

            def note_estimate(plan: str = plan, step: GraphStep = step) -> None:
                recorder.note(record, f"{plan} estimated", replace(step))

            budget = self._budget(plan, step)
            super()._compile(captured_copy(graph_module), inputs, step, budget, partitioned=note_estimate)
            recorder.note(record, plan, step)

    def _watched(self, step: GraphStep, partitioner: StepPartitioner) -> CustomPartitionerFn:
        recorder = self._recorder
        if recorder.reads == "code":
            return partitioner
        others: list[CustomPartitionerFn] = []
        uniform_plans: dict[str, Uniform] = {kind: kind for kind in get_args(Uniform)}
        for plan in recorder.plans:
            note = functools.partial(recorder.note_partition, self._record, step, plan)
            if plan in uniform_plans:
                others.append(StepPartitioner(kind=uniform_plans[plan], report=note))
            else:
                others.append(StepPartitioner(budget=self._budget(plan, step), report=note))
        return _WatchedPartitioner(partitioner, others)

    def _budget(self, plan: str, step: GraphStep) -> GraphBudget:
        context = RunMemory(step, dict(step.sizes), available_bytes=_BUDGETS[plan])
        return GraphBudget(self._session.steps, context, tensor_of(self._record.lowered[0].region.hidden))

    def _rates(self) -> Callable[[], DeviceRates] | None:
        return super()._rates() if self._recorder.reads == "code" and self._recorder.runs_here else None

    def _identity(self, budget: GraphBudget | None) -> str:
        return ""  # a record is never taken from a cache


class _PlainGraph(RecordedGraph):
    """A graph in which nothing is chunked, as torch.compile takes it."""

    def _compile(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> CompiledPartition:
        recorder, step = self._recorder, self._record.step
        shares = {plan: float(plan) for plan in recorder.plans} if isinstance(recorder, PlainRecorder) else {}
        note = functools.partial(recorder.note_partition, self._record, step)
        run = record_plain(graph_module, inputs, recorder.reads, step, self._in_backward(step), shares, note)
        return CompiledPartition(step, run, 0)


def record_plain(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    reads: Reads,
    step: GraphStep,
    in_backward: BackwardContext,
    shares: Mapping[str, float] = MappingProxyType({}),
    note: Callable[[str, GraphStep], None] = lambda name, partition: None,
) -> Callable[..., Any]:
    """Record what torch.compile makes of a graph, and return what runs the graph without building code.

    Args:
        step: gets what forward and backward hold.
        in_backward: what each run of the backward happens in.
        shares: other values of functorch's `activation_memory_budget` than 1, by name.
        note: called with a name of `shares` and the partition of that share.
    """

    def partition_for(
        name: str, share: float, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> None:
        with ACTIVATION_BUDGET.applied({"activation_memory_budget": share}):
            note(name, partitioned_as_is(gm, joint_inputs, kwargs))

    others = [functools.partial(partition_for, name, share) for name, share in shares.items()]
    options: dict[str, Any] = {}
    if others:
        options["custom_partitioner_fn"] = _WatchedPartitioner(min_cut_partition, others)
    inner_compile = functools.partial(_read_alone, reads, step, lambda: None, in_backward)
    compiled: Callable[..., Any]
    with AUTOGRAD_CACHE.applied():  # a hit in AOT autograd's cache would read nothing
        compiled = compile_on_inductor(graph_module, list(example_inputs), options, inner_compile)
    return compiled


class _WatchedPartitioner(CustomPartitionerFn):
    """A partitioner before which others partition copies of the same joint graph.

    Args:
        chosen: whose partition is used.
        others: partitioners that get a copy each, and record what they choose.
    """

    def __init__(
        self, chosen: Callable[..., tuple[fx.GraphModule, fx.GraphModule]], others: Sequence[Callable[..., Any]]
    ) -> None:
        self._chosen, self._others = chosen, others

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        for other in self._others:
            other(copied_module(gm), joint_inputs, **kwargs)
        return self._chosen(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> _WatchedPartitioner:
        return self  # Inductor copies its options; a record is cached nowhere


def _read_alone(
    reads: Reads,
    step: GraphStep,
    changed: Callable[[], None],
    in_backward: BackwardContext,
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    **kwargs: Any,
) -> Any:
    """Record what a forward or backward graph would hold, and return the graph itself in the place of its code."""
    is_backward = bool(kwargs.get("is_backward"))
    counted = counted_inputs(graph_module.graph) if is_backward else None
    give_values(graph_module.graph)  # a plain graph's partitioner is not ours
    unchanged = copied_module(graph_module)  # Inductor rewrites the one that it is given
    memory = None
    stages.info("reading the memory of the %s", "backward" if is_backward else "forward")
    if reads == "code":
        memory = read_wrapper(written_code(graph_module, inputs, **kwargs), graph_module.graph, counted)
    step.add_hints(graph_module.graph)
    if memory is None:
        memory = read_graph(unchanged.graph, is_fused=True, inputs=counted, marks=not step.regions)
    record_memory(step, is_backward, memory)
    changed()
    save_all_rows(unchanged)
    run = run_boxed(unchanged, inputs)
    return backward_call(take_donated(), in_backward, run) if is_backward else run
