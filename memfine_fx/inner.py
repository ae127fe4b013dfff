"""The compiler behind ours: what turns the rewritten graph into a callable.

Graphs with regions go to Inductor with two passes of ours (the partitioner and the order of kernels), and the
wrapper that Inductor writes is read for what it allocates; graphs without any are compiled as if memfine_fx were
not there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.autograd import is_graph_kept
from memfine_fx.compat.dynamo import plain_compiler
from memfine_fx.compat.functorch import compile_on_aot_autograd, compiling_regions, take_donated
from memfine_fx.compat.inductor import (
    compile_inner,
    compile_on_inductor,
    mark_boxed,
    mode_options,
    pass_options,
    wrapper_of,
)
from memfine_fx.config import Config
from memfine_fx.memory.step import GraphStep
from memfine_fx.memory.wrapper_code import read_wrapper
from memfine_fx.passes.dataflow import node_value
from memfine_fx.passes.fit import StepBudget
from memfine_fx.passes.kernel_order import KernelOrder
from memfine_fx.passes.partition import StepPartitioner, freed_inputs
from memfine_fx.passes.partitioned import Partition
from memfine_fx.passes.region_distance import RegionDistance

__all__ = ["compile_plain", "compile_with_regions"]


def compile_plain(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], inner_backend: str, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a graph that holds no region, in one of Inductor's modes."""
    if inner_backend == "eager":
        return graph_module
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
    budget: StepBudget | None,
    changed: Callable[[], None],
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph whose regions were lowered.

    Args:
        graph_module, example_inputs: from Dynamo, rewritten.
        config: options.
        step: told the sizes of each call, and what forward and backward hold.
        budget: see `StepPartitioner`.
        changed: called when more is known of the graph's memory than before.
        mode: Inductor's mode for the graph around the regions; bodies are compiled in its default mode.
    """
    if config.inner_backend == "eager":
        return graph_module
    inputs = list(example_inputs)
    partitioner = StepPartitioner(
        saves_attention=config.saves_attention,
        is_fused=config.inner_backend == "inductor",
        budget=budget,
        report=functools.partial(_take_estimate, step),
        key=f"{config.memory_budget} {config.axis} {config.rows_per_chunk} {config.tokens_per_chunk}",
    )
    sizes = _sizes_of_inputs(graph_module.graph)
    step.sizes = {size.name: size.hint for size in sizes}
    step.note_gradients(inputs)
    if config.inner_backend == "aot_eager":
        with compiling_regions():
            unfused = compile_on_aot_autograd(graph_module, inputs, partitioner)
        return _told_of_calls(unfused, sizes, step, changed)
    options = mode_options(mode) | pass_options(partitioner, RegionDistance(), KernelOrder())
    inner_compile = functools.partial(_compile_and_read, step, changed)
    with compiling_regions():
        compiled = compile_on_inductor(graph_module, inputs, options, inner_compile)
    return _told_of_calls(compiled, sizes, step, changed)


def _compile_and_read(
    step: GraphStep, changed: Callable[[], None], graph_module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
) -> Any:
    """Inductor, and what its code allocates; where that cannot be read, the partitioner's estimate stays."""
    is_backward = bool(kwargs.get("is_backward"))
    freed = freed_inputs(graph_module.graph) if is_backward else []
    compiled: Any = compile_inner(graph_module, inputs, **kwargs)
    memory = read_wrapper(wrapper_of(compiled), graph_module.graph, freed)
    step.add_hints(graph_module.graph)
    if memory is not None:
        if is_backward:
            step.backward = memory
        else:
            step.forward = memory
        changed()
    return _repeatable(compiled) if is_backward else compiled


def _repeatable(compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A compiled backward that may run again through one forward (`retain_graph=True`, two losses).

    Its code writes over saved tensors that were donated to it, which AOT autograd guards by refusing to keep the graph.
    Here a backward that keeps the graph works on copies of these tensors; any other gets them as they are.
    """
    donated = take_donated()
    if not donated:
        return compiled

    def call(args: list[Any]) -> Any:
        if is_graph_kept():
            for position in donated:
                args[position] = args[position].clone()
        return compiled(args)

    return mark_boxed(call)


def _take_estimate(step: GraphStep, partition: Partition) -> None:
    step.forward, step.backward = partition.forward_memory, partition.backward_memory
    step.decision = partition.decision
    step.add_hints(partition.forward.graph)
    step.add_hints(partition.backward.graph)


@dataclass(frozen=True)
class _Size:
    """Where a size that varies is found among a graph's inputs: an int, or a dimension of a tensor."""

    name: str
    position: int
    dimension: int | None
    hint: int

    def of(self, args: Sequence[Any]) -> int:
        value = args[self.position]
        return int(value if self.dimension is None else value.shape[self.dimension])


def _sizes_of_inputs(graph: fx.Graph) -> list[_Size]:
    found: dict[str, _Size] = {}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(placeholders):
        value = node_value(node)
        candidates = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for dimension, size in candidates:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.hint is not None:
                name = str(size.node.expr)
                found.setdefault(name, _Size(name, position, dimension, int(size.node.hint)))
    return list(found.values())


def _told_of_calls(
    compiled: Callable[..., Any], sizes: Sequence[_Size], step: GraphStep, changed: Callable[[], None]
) -> Callable[..., Any]:
    """The callable, which notes the sizes of each call and whether gradients are there when it begins."""

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        for size in sizes:
            step.sizes[size.name] = size.of(args)
        if step.note_gradients(args):
            changed()
        return compiled(*args)

    return call
