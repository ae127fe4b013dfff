"""Measure the bandwidth between the ranks of a group, and a rank's FLOPs per second, once when experts are sharded.

Each rate is the slowest rank's, the same number on every rank, so that all ranks decide alike. Where the group
spans several nodes, bytes to ranks of a rank's own node and to those of others are measured apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from memfine_fx.expert_parallel.exchange import Exchange, Place, failing_at, gather_rows
from memfine_fx.expert_parallel.groups import ExpertGroup

__all__ = ["Links", "bandwidth_of", "flops_of", "links_of", "measure_bandwidth"]

_PAYLOAD_BYTES = 1 << 22
_RUNS = 4
_SIDE = 512


@dataclass(frozen=True)
class Links:
    """The bandwidth of the links between ranks.

    Args:
        near, far: bytes per second to and from ranks of the same node, and of other nodes.
        node_ranks: ranks of a node; all ranks where they do not agree on that number.
    """

    near: float
    far: float
    node_ranks: int


@dataclass(frozen=True)
class _Rates:
    """The measured rates: bytes per second in an all-to-all of the group, links, and FLOPs per second."""

    everyone: float
    links: Links
    flops: float


_measured: dict[str, _Rates] = {}


def measure_bandwidth(ranks: ExpertGroup) -> float:
    """Return the bytes per second that each rank receives in an all-to-all of the group; a collective call.

    The rate is the best of a few runs, and the slowest rank's: the same number on every rank.
    """
    place = Place("the model", "measuring")
    node_sizes: list[int] = gather_rows(
        Exchange(ranks.group, ranks.device), torch.tensor([ranks.node_ranks]), place
    ).tolist()
    node_ranks = ranks.node_ranks if node_sizes == node_sizes[:1] * len(node_sizes) else ranks.num_ranks
    node = [rank // node_ranks == ranks.rank // node_ranks for rank in range(ranks.num_ranks)]
    is_one_node = node_ranks == ranks.num_ranks
    with failing_at(place, ranks.group):
        rate = _exchanged(ranks, [True] * ranks.num_ranks)
        near = rate if is_one_node else _exchanged(ranks, node)
        far = rate if is_one_node else _exchanged(ranks, [not is_near for is_near in node])
        own = torch.tensor([rate, near, far, _flops(ranks.device)], dtype=torch.float64, device=ranks.device)
        dist.all_reduce(own, dist.ReduceOp.MIN, group=ranks.group)
    rate, near, far, flops = own.tolist()
    _measured[ranks.key] = _Rates(rate, Links(near, far, node_ranks), flops)
    return float(rate)


def _exchanged(ranks: ExpertGroup, partners: list[bool]) -> float:
    """Return the bytes per second of an all-to-all with some ranks, with equal shares of at least one byte."""
    share = max(1, _PAYLOAD_BYTES // max(1, sum(partners)))
    splits = [share if is_partner else 0 for is_partner in partners]
    outbox = torch.zeros(sum(splits), dtype=torch.uint8, device=ranks.device)
    inbox = torch.empty_like(outbox)
    exchange = partial(dist.all_to_all_single, inbox, outbox, splits, splits, group=ranks.group)
    return outbox.numel() / _seconds(exchange, ranks.device, lambda: dist.barrier(ranks.group))


def _flops(device: torch.device) -> float:
    """Return the FLOPs per second of a matmul on this device, in bfloat16 on an accelerator and fp32 on a CPU."""
    left = torch.ones(_SIDE, _SIDE, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    return 2 * _SIDE**3 / _seconds(lambda: left @ left, device)


def _seconds(run: Callable[[], object], device: torch.device, begin: Callable[[], object] = lambda: None) -> float:
    """Return the seconds of the fastest of a few runs; `begin` is called before each and not counted."""
    best = float("inf")
    for _ in range(_RUNS):
        begin()
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return max(best, 1e-9)


def bandwidth_of(ranks: ExpertGroup) -> float:
    """Return the bytes per second of an all-to-all, as measured when the experts were sharded."""
    return _measured[ranks.key].everyone


def links_of(ranks: ExpertGroup) -> Links:
    """Return the bandwidth of the links, as measured when the experts were sharded."""
    return _measured[ranks.key].links


def flops_of(ranks: ExpertGroup) -> float:
    """Return the FLOPs per second of the slowest rank, as measured when the experts were sharded."""
    return _measured[ranks.key].flops
