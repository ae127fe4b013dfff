"""One layer of experts on several ranks: peak bytes of every rank and time, by how rows fall on ranks.

Peers
    rounds        memfine_fx, R received rows a round
    overlapping   the same, rows of the next round on their way while one computes
    one round     memfine_fx with R above all rows: the same bodies, nothing bounded
    unchunked     plain torch: one exchange of all rows, experts one by one, autograd, one exchange back
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

import memfine_fx
from benchmarks.loads import choose_experts, expert_counts
from benchmarks.ranks import run_ranks
from memfine_fx.expert_parallel import walk
from memfine_fx.expert_parallel.exchange import Exchange, Place, Table, gather_table
from memfine_fx.expert_parallel.groups import expert_group
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.schedule import Rounds
from memfine_fx.memory.measure import trace_memory
from memfine_fx.models._experts import GatedExperts

LOADS = ("balanced", "zipf:1", "paper:15", "one")
PEERS = ("rounds", "overlapping", "one round", "unchunked")


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of the layer; T tokens on each rank, R rows a round."""

    ranks: int = 4
    tokens: int = 2048
    hidden: int = 256
    width: int = 512
    experts: int = 16
    top_k: int = 4
    rows: int = 1024
    steps: int = 3

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks, T={self.tokens} a rank, H={self.hidden} F={self.width} E={self.experts} "
            f"K={self.top_k} R={self.rows}, float32"
        )


@dataclass(frozen=True)
class LayerRow:
    """One peer under one load: of each rank the rows received and the peak beyond parameters and gradients."""

    peer: str
    load: str
    received_rows: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    step_seconds: tuple[float, ...]
    schedule_seconds: float
    output_norm: float
    gradient_norm: float

    @property
    def seconds(self) -> float:
        return statistics.median(self.step_seconds)


class UnchunkedExperts(nn.Module):
    """Expert parallelism as it is usually written; this rank's experts of a whole layer."""

    def __init__(self, whole: GatedExperts, placement: Placement, rank: int) -> None:
        super().__init__()
        owned = placement.owned(rank)
        self.placement, self.num_experts = placement, whole.num_experts
        self.gate_up_proj = nn.Parameter(whole.gate_up_proj[owned.start : owned.stop].detach().clone())
        self.down_proj = nn.Parameter(whole.down_proj[owned.start : owned.stop].detach().clone())

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        flat, order = index.flatten().sort(stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts)
        table = counts.new_empty((dist.get_world_size(), self.num_experts))
        dist.all_gather(list(table.unbind()), counts)
        owned = self.placement.owned(dist.get_rank())
        sent: list[int] = self.placement.by_rank(counts).tolist()
        mine = table[:, owned.start : owned.stop]
        received: list[int] = mine.sum(dim=1).tolist()
        tokens = order // index.shape[1]
        rows = all_to_all_single_autograd(hidden[tokens], received, sent, dist.group.WORLD)
        experts = torch.repeat_interleave(torch.arange(len(owned)).repeat(len(table)), mine.flatten())
        by_expert = experts.argsort(stable=True)
        parts = rows[by_expert].split(mine.sum(dim=0).tolist())
        results = torch.cat([self._expert(expert, part) for expert, part in enumerate(parts)])
        back = torch.empty_like(results).index_copy(0, by_expert, results)
        back = all_to_all_single_autograd(back, sent, received, dist.group.WORLD)
        weighted = back * weight.flatten()[order].unsqueeze(1)
        return torch.zeros_like(hidden).index_add(0, tokens, weighted)

    def _expert(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(rows, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[expert])


def measure(sizes: LayerSizes, peers: Sequence[str] = PEERS, loads: Sequence[str] = LOADS) -> list[LayerRow]:
    """Rows of every peer under every load."""
    by_rank = run_ranks(_measure_rank, sizes.ranks, sizes, tuple(peers), tuple(loads))
    return [_joined(rows) for rows in zip(*by_rank, strict=True)]


def _joined(rows: Sequence[dict[str, Any]]) -> LayerRow:
    first = rows[0]
    return LayerRow(
        first["peer"],
        first["load"],
        tuple(row["received"] for row in rows),
        tuple(row["peak"] for row in rows),
        first["seconds"],
        max(row["schedule"] for row in rows),
        first["output"],
        first["gradient"],
    )


def _measure_rank(rank: int, sizes: LayerSizes, peers: tuple[str, ...], loads: tuple[str, ...]) -> list[dict[str, Any]]:
    found = []
    for peer in peers:
        layer = _layer(peer, sizes, rank)
        for load in loads:
            found.append({"peer": peer, "load": load, **_measure_one(rank, sizes, layer, load)})
    return found


def _layer(peer: str, sizes: LayerSizes, rank: int) -> nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    whole = GatedExperts(sizes.experts, sizes.hidden, sizes.width, "gathered")
    placement = Placement(sizes.experts, sizes.ranks)
    if peer == "unchunked":
        return UnchunkedExperts(whole, placement, rank)
    mesh = dist.device_mesh.init_device_mesh("cpu", (sizes.ranks,))
    rows = sizes.ranks * sizes.tokens * sizes.top_k if peer == "one round" else sizes.rows
    config = memfine_fx.Config(rows_per_chunk=rows)
    group = expert_group(mesh, overlaps=peer == "overlapping")
    return memfine_fx.optimize(whole, expert_parallel=group, config=config)


def _measure_one(rank: int, sizes: LayerSizes, layer: nn.Module, load: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7 + rank)
    counts = expert_counts(load, sizes.tokens, sizes.experts, sizes.top_k)
    index = choose_experts(counts, sizes.tokens, generator)
    torch._dynamo.mark_static(index, 1)
    hidden = torch.randn(sizes.tokens, sizes.hidden, generator=generator).requires_grad_()
    weight = torch.rand(sizes.tokens, sizes.top_k, generator=generator).requires_grad_()
    torch._dynamo.mark_static(weight, 1)
    probe = torch.randn(sizes.tokens, sizes.hidden, generator=generator)
    leaves = [hidden, weight, *layer.parameters()]

    def step() -> torch.Tensor:
        out: torch.Tensor = layer(hidden, index, weight)
        out.backward(probe)
        return out.detach()

    def drop() -> None:
        for leaf in leaves:
            leaf.grad = None

    step()
    drop()
    step()
    norms = {
        "output": _group_norm([step()]),
        "gradient": _group_norm([leaf.grad for leaf in layer.parameters() if leaf.grad is not None]),
    }
    seconds = tuple(_timed(step, drop) for _ in range(sizes.steps))
    drop()
    with letting_go():
        trace = trace_memory(step, torch.device("cpu"), lambda: [leaf.grad for leaf in leaves if leaf.grad is not None])
    drop()
    received = Placement(sizes.experts, sizes.ranks).by_rank(torch.tensor(counts) * sizes.ranks)[rank]
    return {
        "received": int(received),
        "peak": trace.peak_bytes,
        "seconds": seconds,
        "schedule": _schedule_seconds(rank, sizes, counts),
        **norms,
    }


@contextmanager
def letting_go() -> Iterator[None]:
    """Give gloo's threads a moment after each exchange to drop the buffers that they hold.

    A buffer whose last owner is such a thread is freed where no profiler sees it, and would count as alive.
    """
    wait = walk._wait

    def wait_longer(work: dist.Work | None) -> None:
        wait(work)
        time.sleep(0.003)

    walk._wait = wait_longer
    try:
        yield
    finally:
        walk._wait = wait


def _group_norm(tensors: Sequence[torch.Tensor]) -> float:
    total = torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()
    dist.all_reduce(total)
    return float(total.sqrt())


def _timed(step: Callable[[], object], drop: Callable[[], None]) -> float:
    drop()
    dist.barrier()
    started = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - started


def _schedule_seconds(rank: int, sizes: LayerSizes, counts: list[int]) -> float:
    """Seconds to gather counts, and to schedule a forward and a backward, when all ranks begin together."""
    exchange = Exchange(dist.group.WORLD, torch.device("cpu"))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(counts).cumsum(0)])
    placement = Placement(sizes.experts, sizes.ranks)
    times = []
    for _ in range(5):
        dist.barrier()
        started = time.perf_counter()
        table = Table(gather_table(exchange, offsets, sizes.rows, 0, Place("a layer", "counting")))
        for _ in range(2):
            schedule = Rounds(table.counts, placement, table.limits, 2 * sizes.rows)
            for number in range(schedule.num_rounds):
                schedule.legs(rank, number)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def as_json(sizes: LayerSizes, rows: Sequence[LayerRow]) -> dict[str, Any]:
    return {"sizes": asdict(sizes), "rows": [asdict(row) for row in rows]}
