"""DistributedDataParallel: graphs that are not cut at its buckets.

Under DDP Dynamo cuts a graph where the gradients of a bucket (25 MiB) are complete. One table of expert weights is
larger than that, so the cut goes through every MoE region, and neither half can be chunked.
"""

from __future__ import annotations

import contextlib

import torch

from memfine_fx.compat.interpreter import running_modules
from memfine_fx.compat.settings import WHOLE_GRAPHS

__all__ = ["hint_for_cut_graphs", "kept_whole"]


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
