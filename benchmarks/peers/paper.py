"""MemFine's methods by hand, in eager PyTorch, as the paper's own run was.

    fcda-cC        Method 2: token chunks, a fixed number C, each dispatched, computed and recomputed in turn
    fcda-mactS     Method 3: c = ceil(s'' / S), snapped up to {1, 2, 4, 8}, anew for every layer's rows s''


Method 1 is eager+checkpoint.
"""

import re
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.peers.base import Forward, Peer, Wrap
from benchmarks.records import Sizes
from memfine_fx.memory.closed_form import chunk_count


def _fcda(fixed: int | None = None, most_rows: int = 0) -> Wrap:
    def wrap(module: Any, sizes: Sizes) -> Forward:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            rows = hidden.shape[0] * hidden.shape[1] * sizes.top_k
            chunks = hidden.chunk(fixed or chunk_count(rows, most_rows), dim=1)
            return torch.cat([checkpoint(module, chunk, use_reentrant=False) for chunk in chunks], dim=1)

        return forward

    return wrap


def family_member(name: str) -> Peer | None:
    if match := re.fullmatch(r"fcda-c(\d+)", name):
        return Peer(name, _fcda(fixed=int(match[1])), "forward")
    if match := re.fullmatch(r"fcda-mact(\d+)", name):
        return Peer(name, _fcda(most_rows=int(match[1])), "forward")
    return None
