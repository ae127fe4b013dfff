"""Rates of a group, measured once when experts are sharded: bytes that travel, and products that a rank computes.

Each is the slowest rank's, one number on every rank, so that what is decided by it is decided alike.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from memfine_fx.expert_parallel.exchange import Place, failing_at
from memfine_fx.expert_parallel.groups import ExpertGroup

__all__ = ["bandwidth_of", "flops_of", "measure_bandwidth"]

_PAYLOAD_BYTES = 1 << 22
_RUNS = 4
_SIDE = 512
_measured: dict[str, tuple[float, float]] = {}


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
        own = [outbox.numel() / max(best, 1e-9), _flops(ranks.device)]
        rates = torch.tensor(own, dtype=torch.float64, device=ranks.device)
        dist.all_reduce(rates, dist.ReduceOp.MIN, group=ranks.group)
    bandwidth, flops = rates.tolist()
    _measured[ranks.key] = (bandwidth, flops)
    return float(bandwidth)


def _flops(device: torch.device) -> float:
    """FLOPs a second of a product here, in bfloat16 on an accelerator and fp32 on a CPU."""
    left = torch.ones(_SIDE, _SIDE, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    best = float("inf")
    for _ in range(_RUNS):
        started = time.perf_counter()
        left @ left
        if left.is_cuda:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return float(2 * _SIDE**3 / max(best, 1e-9))


def bandwidth_of(ranks: ExpertGroup) -> float:
    """What was measured when the experts were sharded."""
    return _measured[ranks.key][0]


def flops_of(ranks: ExpertGroup) -> float:
    """FLOPs a second of the slowest rank, as measured when the experts were sharded."""
    return _measured[ranks.key][1]
