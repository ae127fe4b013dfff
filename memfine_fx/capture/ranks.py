"""Dynamo settings under which a model of several ranks is captured.

Under DistributedDataParallel Dynamo cuts a graph where the gradients of a bucket (25 MiB) are complete. One table of
expert weights is larger than that, so the cut goes through every MoE region, and neither half can be chunked.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from memfine_fx.compat.interpreter import running_modules
from memfine_fx.compat.settings import CONSTANT_INTEGERS, EVERY_SIZE, WHOLE_GRAPHS

__all__ = ["captured_on_ranks", "hint_for_cut_graphs", "is_fully_sharded", "kept_whole"]


def captured_on_ranks(model: torch.nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A model's compiled call with its captures under the settings that ranks need.

    A rank may have no token at all: a size of 0 or 1 is captured as any other. A graph made for 0 tokens would lack the
    region, and the other ranks would wait for its part in the exchange.

    Integers are constants in a model that FSDP2 shards. Sizes vary between ranks, so the model is captured with dynamic
    shapes; Dynamo then takes integer attributes of modules for constants unless FSDP manages the module, where the
    number of expert groups or of heads would become a size that varies too, and no T be the same as any other.
    """
    is_sharded = functools.cache(functools.partial(is_fully_sharded, model))

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(EVERY_SIZE.applied())
            if is_sharded():
                stack.enter_context(CONSTANT_INTEGERS.applied())
            return compiled(*args, **kwargs)

    return call


def is_fully_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2 manages parameters of a model."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def kept_whole() -> contextlib.AbstractContextManager[object]:
    """For compilations inside: one graph. Gradients are still reduced bucket by bucket, after the graph's backward."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return contextlib.nullcontext()
    return WHOLE_GRAPHS.applied()


def hint_for_cut_graphs() -> str:
    """Return a hint about graphs that Dynamo cuts at the buckets of DistributedDataParallel; "" if it cuts none.

    Call it while the model runs.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ""
    is_wrapped = any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in running_modules())
    if not is_wrapped or not WHOLE_GRAPHS.holds() or not WHOLE_GRAPHS.config.optimize_ddp:
        return ""
    return (
        "; DistributedDataParallel had the graph cut at its buckets, through the experts: call "
        "memfine_fx.optimize(model), or set torch._dynamo.config.optimize_ddp = False"
    )
