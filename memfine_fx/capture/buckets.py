"""DistributedDataParallel: graphs that are not cut at its buckets.

Under DDP Dynamo cuts a graph where the gradients of a bucket (25 MiB) are complete. One table of expert weights is
larger than that, so the cut goes through every MoE region, and neither half can be chunked.
"""

from __future__ import annotations

import contextlib

import torch

__all__ = ["hint_for_cut_graphs", "kept_whole"]


def kept_whole() -> contextlib.AbstractContextManager[object]:
    """For compilations inside: one graph. Gradients are still reduced bucket by bucket, after the graph's backward."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return contextlib.nullcontext()
    from torch._dynamo import config

    patched: contextlib.AbstractContextManager[object] = config.patch(optimize_ddp=False)
    return patched


def hint_for_cut_graphs() -> str:
    """What to do about graphs that were cut, "" where none is: asked while the model runs."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ""
    from torch._dynamo import config

    active = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if active is None or not config.optimize_ddp:
        return ""
    return (
        "; DistributedDataParallel had the graph cut at its buckets, through the experts: call "
        "memfine_fx.optimize(model), or set torch._dynamo.config.optimize_ddp = False"
    )
