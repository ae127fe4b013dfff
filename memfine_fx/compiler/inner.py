"""The compiler behind ours: what turns the rewritten graph into a callable.

Graphs with regions go to Inductor with two passes of ours (the partitioner and the order of kernels), and the
wrapper that Inductor writes is read for what it allocates; graphs without any are compiled as if memfine_fx were
not there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

from memfine_fx.compat.autograd import is_graph_kept
from memfine_fx.compat.dynamo import plain_compiler
from memfine_fx.compat.functorch import (
    CacheHit,
    compile_on_aot_autograd,
    compile_through_cache,
    store_record,
    take_donated,
)
from memfine_fx.compat.inductor import (
    CustomPartitionerFn,
    compile_inner,
    compile_on_inductor,
    mark_boxed,
    mode_options,
    pass_options,
    wrapper_of,
)
from memfine_fx.compat.settings import AUTOGRAD_CACHE
from memfine_fx.compiler.tensor_names import with_labels
from memfine_fx.config import Config
from memfine_fx.memory.liveness import GraphMemory
from memfine_fx.memory.step import GraphStep
from memfine_fx.memory.wrapper_code import read_wrapper
from memfine_fx.passes.pass_list import is_disabled
from memfine_fx.passes.step.partition import StepPartitioner, counted_inputs
from memfine_fx.passes.step.save import saving_ops, trace_saving
from memfine_fx.passes.step.scheduler_passes import KernelOrder, RegionDistance
from memfine_fx.plan.budget import GraphBudget
from memfine_fx.plan.cost import DeviceRates
from memfine_fx.runtime.accumulation import Accumulation

__all__ = [
    "BackwardContext",
    "CompileOne",
    "backward_call",
    "compile_and_read",
    "compile_plain",
    "compile_with_regions",
    "partition_key",
    "record_memory",
    "take_estimate",
]

BackwardContext = Callable[[bool], AbstractContextManager[Accumulation]]
CompileOne = Callable[..., Any]
"""(step, changed, in_backward, graph module, inputs, **options of Inductor's `compile_fx_inner`) -> compiled code.

It records in `step` what the graph holds, and calls `changed`.
"""


def compile_plain(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], inner_backend: str, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a graph that holds no region, in one of Inductor's modes."""
    inputs = list(example_inputs)
    if inner_backend == "aot_eager":
        unfused: Callable[..., Any] = plain_compiler(inner_backend)(graph_module, inputs)
        return unfused
    compiled: Callable[..., Any] = compile_on_inductor(graph_module, inputs, mode_options(mode))
    return compiled


def compile_with_regions(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    step: GraphStep,
    *,
    budget: GraphBudget | None,
    rates: Callable[[], DeviceRates] | None,
    changed: Callable[[], None],
    in_backward: BackwardContext,
    partitioned: Callable[[], None] = lambda: None,
    mode: str | None = None,
    identity: str = "",
    watched: Callable[[StepPartitioner], CustomPartitionerFn],
    compile_one: CompileOne,
) -> Callable[..., Any]:
    """Compile a graph whose regions were lowered.

    Args:
        graph_module, example_inputs: from Dynamo, rewritten.
        config: options; not with the inner backend "eager", which compiles nothing.
        step: its record of forward and backward is set.
        budget, rates: see `StepPartitioner`.
        changed: called when more is known of the graph's memory than before.
        in_backward: returns a context manager for each run of the backward, given whether the graph is retained.
        partitioned: called when the graph is partitioned and an estimate of its memory is there.
        mode: Inductor's mode for the graph around the regions; compiled functions are compiled in its default mode.
        identity: what the partition follows from beside the graph and the config, as text; "" where that is not known,
            and the graph is never taken from AOT autograd's cache.
        watched: given the step's partitioner, returns what partitions the joint graph in its place.
        compile_one: compiles a forward or a backward graph.
    """
    inputs = list(example_inputs)
    partitioner = StepPartitioner(
        is_fused=config.inner_backend == "inductor",
        budget=budget,
        rates=rates,
        report=functools.partial(take_estimate, step, partitioned),
        key=partition_key(config, identity),
    )
    if config.inner_backend == "aot_eager":
        with AUTOGRAD_CACHE.applied():
            unfused: Callable[..., Any] = compile_on_aot_autograd(
                graph_module, inputs, partitioner, functools.partial(backward_call, (), in_backward)
            )
        return unfused
    options = mode_options(mode) | pass_options(
        watched(partitioner),
        # Decided here: Inductor may compile a backward later, when nobody observes passes.
        None if is_disabled("region_distance") else RegionDistance(),
        None if is_disabled("kernel_order") else KernelOrder(),
    )
    inner_compile = functools.partial(compile_one, step, changed, in_backward)

    def compiled() -> Callable[..., Any]:
        result: Callable[..., Any] = compile_on_inductor(graph_module, inputs, options, inner_compile)
        return result

    if identity:
        return compile_through_cache(compiled, functools.partial(_take_learned, step, changed, in_backward))
    with AUTOGRAD_CACHE.applied():
        return compiled()


def partition_key(config: Config, identity: str) -> str:
    """Return the text by which cached code of one partition differs from that of others: every option is in it."""
    return f"{config} {identity}"


def _take_learned(step: GraphStep, changed: Callable[[], None], in_backward: BackwardContext, found: CacheHit) -> bool:
    """Whether a graph from the cache came with its record: step and backward are then as if it had been compiled."""
    if not isinstance(found.record, GraphStep):
        return False
    step.take(found.record)
    trace_saving(step.saving)
    changed()
    if found.backward is not None:
        _call_in(found.backward, step.donated, in_backward)
    return True


def compile_and_read(
    step: GraphStep,
    changed: Callable[[], None],
    in_backward: BackwardContext,
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    **kwargs: Any,
) -> Any:
    """Inductor, and what its code allocates; where that cannot be read, the partitioner's estimate stays."""
    is_backward = bool(kwargs.get("is_backward"))
    counted = counted_inputs(graph_module.graph) if is_backward else None
    if is_backward:
        step.saving = saving_ops(graph_module.graph)
    compiled: Any = compile_inner(graph_module, inputs, **kwargs)
    memory = read_wrapper(wrapper_of(compiled), graph_module.graph, counted)
    step.add_hints(graph_module.graph)
    if memory is not None:
        record_memory(step, is_backward, with_labels(memory, graph_module.graph))
        step.estimated.discard("backward" if is_backward else "forward")
        changed()
    if is_backward:
        step.donated = take_donated()
    store_record(step.learned())
    return _call_in(compiled, step.donated, in_backward) if is_backward else compiled


def _call_in(compiled: Any, donated: Sequence[int], in_backward: BackwardContext) -> Any:
    """Have Inductor's compiled backward called as `backward_call` does; itself, so that AOT autograd can cache it."""
    compiled.current_callable = backward_call(donated, in_backward, compiled.current_callable)
    return compiled


def record_memory(step: GraphStep, is_backward: bool, memory: GraphMemory) -> None:
    if is_backward:
        step.backward = memory
    else:
        step.forward = memory


def backward_call(
    donated: Sequence[int], in_backward: BackwardContext, compiled: Callable[[list[Any]], Any]
) -> Callable[[list[Any]], Any]:
    """A compiled backward that may run again through one forward (`retain_graph=True`, two losses).

    Its code writes over saved tensors that were donated to it, which AOT autograd guards by refusing to keep the graph.
    Here a backward that keeps the graph works on copies of these tensors; any other gets them as they are.
    """

    def call(args: list[Any]) -> Any:
        keeps_graph = is_graph_kept()
        if keeps_graph:
            for position in donated:
                args[position] = args[position].clone()
        with in_backward(keeps_graph) as accumulation:
            return accumulation.left_to_add(compiled(args))

    return mark_boxed(call)


def take_estimate(step: GraphStep, partitioned: Callable[[], None], partition: GraphStep) -> None:
    """A partition was made: what it would hold is the step's record until there is a better one."""
    step.take(partition)
    step.estimated = {"forward", "backward"}
    for module in partition.modules:
        step.add_hints(module.graph)
    for module, direction in zip(partition.modules, ("forward", "backward"), strict=False):
        memory: GraphMemory | None = getattr(step, direction)
        if memory is not None:
            record_memory(step, direction == "backward", with_labels(memory, module.graph))
    partitioned()
