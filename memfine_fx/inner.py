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

import torch
from torch import fx
from torch._functorch import config as functorch_config

from memfine_fx.config import Config
from memfine_fx.memory.step import GraphStep
from memfine_fx.memory.wrapper_code import read_wrapper
from memfine_fx.passes.fit import StepBudget
from memfine_fx.passes.kernel_order import KernelOrder
from memfine_fx.passes.partition import StepPartitioner, freed_inputs
from memfine_fx.passes.partitioned import Partition
from memfine_fx.passes.region_distance import RegionDistance

__all__ = ["BackwardContext", "compile_plain", "compile_with_regions"]

BackwardContext = Callable[[bool], AbstractContextManager[None]]


def compile_plain(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], inner_backend: str, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a graph that holds no region, in one of Inductor's modes."""
    if inner_backend == "eager":
        return graph_module
    inputs = list(example_inputs)
    if inner_backend == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph_module, inputs)
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(graph_module, inputs, config_patches=_options_of(mode))
    return compiled  # type: ignore[no-any-return]  # compile_fx has many return types


def compile_with_regions(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    step: GraphStep,
    *,
    budget: StepBudget | None,
    changed: Callable[[], None],
    in_backward: BackwardContext,
    partitioned: Callable[[], None] = lambda: None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph whose regions were lowered.

    Args:
        graph_module, example_inputs: from Dynamo, rewritten.
        config: options; not with the inner backend "eager", which compiles nothing.
        step: told what forward and backward hold.
        budget: see `StepPartitioner`.
        changed: called when more is known of the graph's memory than before.
        in_backward: what each run of the backward happens in; told whether it keeps the graph.
        partitioned: called when the graph is partitioned and an estimate of its memory is there.
        mode: Inductor's mode for the graph around the regions; bodies are compiled in its default mode.
    """
    inputs = list(example_inputs)
    partitioner = StepPartitioner(
        saves_attention=config.saves_attention,
        is_fused=config.inner_backend == "inductor",
        budget=budget,
        report=functools.partial(_take_estimate, step, partitioned),
        key=f"{config.memory_budget} {config.axis} {config.rows_per_chunk} {config.tokens_per_chunk}",
    )
    if config.inner_backend == "aot_eager":
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop

        def backward_nop(backward: fx.GraphModule, saved: list[Any]) -> Callable[..., Any]:
            _take_donated()  # nothing here writes over a saved tensor
            return _backward_call(boxed_nop(backward, saved), (), in_backward)

        compiler = aot_autograd(fw_compiler=boxed_nop, bw_compiler=backward_nop, partition_fn=partitioner)
        unfused: Callable[..., Any] = compiler(graph_module, inputs)
        return unfused
    from torch._inductor.compile_fx import compile_fx

    patches = _options_of(mode) | {
        "custom_partitioner_fn": partitioner,
        "_pre_fusion_custom_pass": RegionDistance(),
        "_post_fusion_custom_pass": KernelOrder(),
    }
    inner_compile = functools.partial(_compile_and_read, step, changed, in_backward)
    # NOTE: a hit in AOT autograd's cache would skip the partitioner and what it learns; Inductor's own cache is used.
    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(graph_module, inputs, inner_compile=inner_compile, config_patches=patches)
    return compiled  # type: ignore[no-any-return]  # compile_fx has many return types


def _options_of(mode: str | None) -> dict[str, Any]:
    """Inductor's options that a mode of `torch.compile` stands for."""
    if mode is None:
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def _compile_and_read(
    step: GraphStep,
    changed: Callable[[], None],
    in_backward: BackwardContext,
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    **kwargs: Any,
) -> Any:
    """Inductor, and what its code allocates; where that cannot be read, the partitioner's estimate stays."""
    from torch._inductor.compile_fx import compile_fx_inner

    is_backward = bool(kwargs.get("is_backward"))
    freed = freed_inputs(graph_module.graph) if is_backward else []
    compiled: Any = compile_fx_inner(graph_module, inputs, **kwargs)
    memory = read_wrapper(getattr(compiled, "source_code", "") or "", graph_module.graph, freed)
    step.add_hints(graph_module.graph)
    if memory is not None:
        if is_backward:
            step.backward = memory
        else:
            step.forward = memory
        changed()
    return _backward_call(compiled, _take_donated(), in_backward) if is_backward else compiled


def _backward_call(
    compiled: Callable[[list[Any]], Any], donated: Sequence[int], in_backward: BackwardContext
) -> Callable[[list[Any]], Any]:
    """A compiled backward that may run again through one forward (`retain_graph=True`, two losses).

    Its code writes over saved tensors that were donated to it, which AOT autograd guards by refusing to keep the graph.
    Here a backward that keeps the graph works on copies of these tensors; any other gets them as they are.
    """

    def call(args: list[Any]) -> Any:
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        if keeps_graph:
            for position in donated:
                args[position] = args[position].clone()
        with in_backward(keeps_graph):
            return compiled(args)

    call._boxed_call = True  # type: ignore[attr-defined]  # how AOT autograd knows who frees the arguments
    return call


def _take_donated() -> tuple[int, ...]:
    """Positions of the saved tensors that the backward being compiled may write over.

    AOT autograd's list is emptied, because a backward that keeps the graph is refused while it names any.
    """
    from torch._inductor.utils import get_donated_idxs

    shared = get_donated_idxs()
    donated = tuple(shared or ())
    if shared:
        shared.clear()
    return donated


def _take_estimate(step: GraphStep, partitioned: Callable[[], None], partition: Partition) -> None:
    step.forward, step.backward = partition.forward_memory, partition.backward_memory
    step.decision, step.keeps_all = partition.decision, partition.keeps_all
    step.add_hints(partition.forward.graph)
    step.add_hints(partition.backward.graph)
    partitioned()
