"""The compiler behind ours: what turns the rewritten graph into a callable.

Graphs with regions go to Inductor with two passes of ours (the partitioner and the order of kernels); graphs
without any are compiled as if memfine_fx were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memfine_fx.config import Config
from memfine_fx.passes.kernel_order import KernelOrder
from memfine_fx.passes.partition import StepPartitioner

__all__ = ["compile_outer"]


def compile_outer(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], config: Config, *, has_regions: bool
) -> Callable[..., Any]:
    """Compile a captured, possibly rewritten graph with the configured inner compiler."""
    inputs = list(example_inputs)
    if config.inner_backend == "eager":
        return graph_module
    partitioner = StepPartitioner(saves_attention=config.saves_attention)
    if config.inner_backend == "aot_eager":
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import aot_eager, boxed_nop

        if not has_regions:
            return aot_eager(graph_module, inputs)
        return aot_autograd(fw_compiler=boxed_nop, partition_fn=partitioner)(graph_module, inputs)
    from torch._inductor.compile_fx import compile_fx

    patches = {"custom_partitioner_fn": partitioner, "_post_fusion_custom_pass": KernelOrder()} if has_regions else None
    compiled: Any = compile_fx(graph_module, inputs, config_patches=patches)
    return compiled  # type: ignore[no-any-return]  # compile_fx has many return types
