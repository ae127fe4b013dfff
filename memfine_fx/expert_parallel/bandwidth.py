"""Bytes a second that rows travel between the ranks of a group, measured once when experts are sharded."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from memfine_fx.expert_parallel.exchange import Place, failing_at
from memfine_fx.expert_parallel.groups import ExpertGroup

__all__ = ["bandwidth_of", "measure_bandwidth"]

_PAYLOAD_BYTES = 1 << 22
_RUNS = 4
_measured: dict[str, float] = {}


def measure_bandwidth(ranks: ExpertGroup) -> float:
    """Bytes a second that each rank receives in an exchange of all with all; a collective call.

    The best of a few runs, and of the ranks the slowest: the same number on every rank.
    """
    per_rank = max(1, _PAYLOAD_BYTES // ranks.num_ranks)
    outbox = torch.zeros(per_rank * ranks.num_ranks, dtype=torch.uint8, device=ranks.device)
    inbox = torch.empty_like(outbox)
    best = float("inf")
    with failing_at(Place("the model", "measuring"), ranks.group):
        for _ in range(_RUNS):
            dist.barrier(ranks.group)
            started = time.perf_counter()
            dist.all_to_all_single(inbox, outbox, group=ranks.group)
            if outbox.is_cuda:
                torch.cuda.synchronize(outbox.device)
            best = min(best, time.perf_counter() - started)
        rate = torch.tensor([outbox.numel() / max(best, 1e-9)], dtype=torch.float64, device=ranks.device)
        dist.all_reduce(rate, dist.ReduceOp.MIN, group=ranks.group)
    _measured[ranks.key] = float(rate)
    return float(rate)


def bandwidth_of(ranks: ExpertGroup) -> float:
    """What was measured when the experts were sharded."""
    return _measured[ranks.key]
