"""One layer of experts on several ranks: peak bytes of every rank and time, by how rows fall on ranks.

Peers
    rounds          memfine_fx, T K received rows a round, in chunks of R; nothing is kept, backward sends and computes
                    again
    kept            the same under an ample budget: what came is kept for backward, with the first projection's results,
                    of as many rows as a rank has of its own
    overlapping     rounds, with rows of the next round on their way while one computes
    slices          the paper's token slices, s'_max = R, c from the bins 1, 2, 4, 8
    eight slices    the same, c = 8 in all layers
    help S          rounds, with S slots a rank for clones of hot experts
    kept and help S both
    rounds of N     rounds of N rows, each one chunk
    one round       memfine_fx with all rows in one round and chunk an expert: the same bodies, nothing bounded
    unchunked       plain torch: one exchange of all rows, experts one by one, autograd, one exchange back
    experts again   the same, with the experts' first projection recomputed in backward: the FLOPs of rounds
    layer again     the same, with the whole layer recomputed in backward, exchanges too: what rounds send

Loads are those of `benchmarks.loads`, tokens in random order, and
    in turn         even in all: the first half of every rank's tokens chooses the experts of the first half of the
                    ranks, the second half the others
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.utils.checkpoint import checkpoint

import memfine_fx
from benchmarks.loads import choose_experts, expert_counts
from benchmarks.machine import describe_machine
from benchmarks.records import Machine
from memfine_fx.expert_parallel import all_to_all
from memfine_fx.expert_parallel.exchange import Announcement, Exchange, Place, Table, gather_table
from memfine_fx.expert_parallel.groups import expert_group
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.schedule import Rounds
from memfine_fx.memory.closed_form import PAPER_BINS
from memfine_fx.memory.measure import trace_memory
from memfine_fx.memory.region_bytes import AllToAllSizes
from memfine_fx.models._experts import GatedExperts

LOADS = ("balanced", "zipf:1", "paper:15", "one", "in turn")
PEERS = (
    "rounds", "kept", "help 2", "kept and help 2", "overlapping", "slices", "one round", "unchunked", "experts again",
    "layer again",
)  # fmt: skip
AGAIN = {"unchunked": "nothing", "experts again": "experts", "layer again": "layer"}
PEERS_IN_TURN = ("rounds", "slices", "unchunked")
AMPLE_BUDGET = "4GiB"
_BINS = {"slices": PAPER_BINS, "eight slices": (8,)}
_ROUNDS_OF = "rounds of "
_HELP = "help "


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of the layer; T tokens on each rank, R rows a chunk."""

    ranks: int = 4
    tokens: int = 2048
    hidden: int = 256
    width: int = 512
    experts: int = 16
    top_k: int = 4
    rows: int = 1024
    steps: int = 3

    @property
    def layer(self) -> str:
        return f"T={self.tokens} a rank, H={self.hidden} F={self.width} E={self.experts} K={self.top_k}"

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.layer} R={self.rows}, float32"


@dataclass(frozen=True)
class LayerRow:
    """One peer under one load: of each rank the rows received without help, the peak beyond parameters and gradients.

    Seconds of each step by the clock, of all ranks' processors, and of the busiest rank's, which is what a step takes
    at least where each rank has a processor of its own. Rows computed are those of a step with help.
    """

    peer: str
    load: str
    received_rows: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    step_seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    schedule_seconds: float
    output_norm: float
    gradient_norm: float
    computed_rows: tuple[int, ...] = ()
    busiest_cpu_seconds: tuple[float, ...] = ()

    @property
    def peak(self) -> int:
        return max(self.peak_bytes)

    @property
    def seconds(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def all_cpu_seconds(self) -> float:
        return statistics.median(self.cpu_seconds)

    @property
    def busiest_cpu(self) -> float:
        return statistics.median(self.busiest_cpu_seconds)

    @property
    def busiest_over_mean(self) -> float:
        """Rows that the busiest rank computes over the mean."""
        return max(self.computed_rows) * len(self.computed_rows) / sum(self.computed_rows)


@dataclass(frozen=True)
class Findings:
    """All rows, with the machine that they were measured on."""

    machine: Machine
    sizes: LayerSizes
    rows: tuple[LayerRow, ...]

    def row(self, peer: str, load: str) -> LayerRow:
        return next(row for row in self.rows if (row.peer, row.load) == (peer, load))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Findings":
        found = json.loads(text)
        rows = tuple(LayerRow(**row) for row in found["rows"])
        return cls(Machine(**found["machine"]), LayerSizes(**found["sizes"]), rows)


class UnchunkedExperts(nn.Module):
    """Expert parallelism as it is usually written; this rank's experts of a whole layer."""

    def __init__(self, whole: GatedExperts, placement: Placement, rank: int, again: str) -> None:
        super().__init__()
        self.again = again
        owned = placement.owned(rank)
        self.placement, self.num_experts = placement, whole.num_experts
        self.gate_up_proj = nn.Parameter(whole.gate_up_proj[owned.start : owned.stop].detach().clone())
        self.down_proj = nn.Parameter(whole.down_proj[owned.start : owned.stop].detach().clone())

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._run("layer", self._layer, hidden, index, weight)

    def _run(self, what: str, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """Under checkpoint where that is what backward computes again."""
        if self.again != what:
            return function(*args)
        out: torch.Tensor = checkpoint(function, *args, use_reentrant=False)
        return out

    def _layer(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
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
        results = torch.cat([self._run("experts", self._expert, expert, part) for expert, part in enumerate(parts)])
        back = torch.empty_like(results).index_copy(0, by_expert, results)
        back = all_to_all_single_autograd(back, sent, received, dist.group.WORLD)
        weighted = back * weight.flatten()[order].unsqueeze(1)
        return torch.zeros_like(hidden).index_add(0, tokens, weighted)

    def _expert(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(rows, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[expert])


def measure(sizes: LayerSizes, peers: Sequence[str], loads: Sequence[str]) -> Findings:
    """Rows of every peer under every load."""
    by_rank = run_ranks(_measure_rank, sizes.ranks, sizes, tuple(peers), tuple(loads))
    rows = tuple(_joined(rows) for rows in zip(*by_rank, strict=True))
    return Findings(describe_machine(torch.device("cpu")), sizes, rows)


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """`function(rank, *args)` on every rank of a gloo group of processes here; what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run_rank, (function, num_ranks, folder, args), nprocs=num_ranks)
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(num_ranks)]


def _run_rank(rank: int, function: Callable[..., Any], num_ranks: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    torch.save(function(rank, *args), Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()


def _joined(rows: Sequence[LayerRow]) -> LayerRow:
    """Of one row a rank."""
    cpu_seconds = list(zip(*(row.cpu_seconds for row in rows), strict=True))
    return replace(
        rows[0],
        received_rows=tuple(row.received_rows[0] for row in rows),
        computed_rows=tuple(row.computed_rows[0] for row in rows),
        peak_bytes=tuple(row.peak_bytes[0] for row in rows),
        cpu_seconds=tuple(map(sum, cpu_seconds)),
        busiest_cpu_seconds=tuple(map(max, cpu_seconds)),
        schedule_seconds=max(row.schedule_seconds for row in rows),
    )


def _measure_rank(rank: int, sizes: LayerSizes, peers: tuple[str, ...], loads: tuple[str, ...]) -> list[LayerRow]:
    torch._dynamo.config.recompile_limit = 64  # the layers share their code
    layers = {peer: _layer(peer, sizes, rank) for peer in peers}
    found = []
    for load in loads:
        wanted = [peer for peer in peers if load != "in turn" or peer in PEERS_IN_TURN]
        steps = {peer: _LayerStep(rank, sizes, layers[peer], load) for peer in wanted}
        norms = {peer: step.warmed_up() for peer, step in steps.items()}
        times = [{peer: step.timed() for peer, step in steps.items()} for _ in range(sizes.steps)]
        schedule = _schedule_seconds(rank, sizes, load)
        for peer, step in steps.items():
            seconds, cpu = zip(*(one[peer] for one in times), strict=True)
            figures = (step.received,), (step.peak_bytes(),), seconds, cpu
            found.append(LayerRow(peer, load, *figures, schedule, *norms[peer], (step.computed,)))
    return found


def _layer(peer: str, sizes: LayerSizes, rank: int) -> nn.Module:
    torch.manual_seed(0)
    whole = GatedExperts(sizes.experts, sizes.hidden, sizes.width, "gathered")
    placement = Placement(sizes.experts, sizes.ranks)
    if peer in AGAIN:
        return UnchunkedExperts(whole, placement, rank, AGAIN[peer])
    mesh = dist.device_mesh.init_device_mesh("cpu", (sizes.ranks,))
    config = _config(peer, sizes)
    slots = int(peer.partition(_HELP)[2] or 0)
    rows_per_round = config.rows_per_chunk if peer == "one round" or peer.startswith(_ROUNDS_OF) else None
    group = expert_group(mesh, overlaps=peer == "overlapping", rows_per_round=rows_per_round, slots=slots)
    return memfine_fx.optimize(whole, expert_parallel=group, config=config)


def _config(peer: str, sizes: LayerSizes) -> memfine_fx.Config:
    config = memfine_fx.Config(rows_per_chunk=sizes.rows)
    if peer == "one round":
        return replace(config, rows_per_chunk=sizes.ranks * sizes.tokens * sizes.top_k)
    if peer.startswith(_ROUNDS_OF):
        return replace(config, rows_per_chunk=int(peer.removeprefix(_ROUNDS_OF)))
    if peer.startswith("kept"):
        return replace(config, memory_budget=AMPLE_BUDGET)
    if peer in _BINS:
        return replace(config, axis="tokens", bins=_BINS[peer])
    return config


class _LayerStep:
    """Forward and backward of one layer under one load, on this rank."""

    def __init__(self, rank: int, sizes: LayerSizes, layer: nn.Module, load: str) -> None:
        generator = torch.Generator().manual_seed(7 + rank)
        counts = counts_of(load, sizes)
        index = choose_in_turn(sizes) if load == "in turn" else choose_experts(counts, sizes.tokens, generator)
        hidden = torch.randn(sizes.tokens, sizes.hidden, generator=generator).requires_grad_()
        weight = torch.rand(sizes.tokens, sizes.top_k, generator=generator).requires_grad_()
        for one in (index, weight):
            torch._dynamo.mark_static(one, 1)
        self.received = int(Placement(sizes.experts, sizes.ranks).by_rank(torch.tensor(counts) * sizes.ranks)[rank])
        self._layer, self._inputs = layer, (hidden, index, weight)
        self._probe = torch.randn(sizes.tokens, sizes.hidden, generator=generator)
        self._leaves = [hidden, weight, *layer.parameters()]

    def __call__(self) -> torch.Tensor:
        out: torch.Tensor = self._layer(*self._inputs)
        out.backward(self._probe)
        return out.detach()

    @property
    def computed(self) -> int:
        """Rows that this rank's experts and clones computed in the latest step."""
        if isinstance(self._layer, UnchunkedExperts):
            return self.received
        (region,) = memfine_fx.report(self._layer).regions
        assert region.rounds is not None, "a layer on several ranks runs in rounds"
        return region.rounds.received

    def drop(self) -> None:
        for leaf in self._leaves:
            leaf.grad = None

    def warmed_up(self) -> tuple[float, float]:
        """Norms over all ranks of the output and of the experts' gradients, once everything is compiled and planned."""
        self()
        self.drop()
        out = self()
        gradients = [leaf.grad for leaf in self._layer.parameters() if leaf.grad is not None]
        norms = _group_norm([out]), _group_norm(gradients)
        self.drop()
        return norms

    def timed(self) -> tuple[float, float]:
        """Seconds by the clock, until the last rank is done, and of this rank's processor."""
        self.drop()
        dist.barrier()
        started, spent = time.perf_counter(), time.process_time()
        self()
        used = time.process_time() - spent
        dist.barrier()
        return time.perf_counter() - started, used

    def peak_bytes(self) -> int:
        self.drop()
        with letting_go():
            trace = trace_memory(
                self, torch.device("cpu"), lambda: [leaf.grad for leaf in self._leaves if leaf.grad is not None]
            )
        self.drop()
        return trace.peak_bytes


def counts_of(load: str, sizes: LayerSizes) -> list[int]:
    """Rows of each expert from one rank."""
    return expert_counts("balanced" if load == "in turn" else load, sizes.tokens, sizes.experts, sizes.top_k)


def choose_in_turn(sizes: LayerSizes) -> torch.Tensor:
    """[T,K]: each expert as often as any other, the first half of them by the first half of the tokens."""
    token, choice = torch.arange(sizes.tokens).unsqueeze(1), torch.arange(sizes.top_k)
    half = sizes.experts // 2
    return (token * sizes.top_k + choice) % half + half * (token >= sizes.tokens // 2)


@contextmanager
def letting_go() -> Iterator[None]:
    """Give gloo's threads a moment after each exchange to drop the buffers that they hold.

    A buffer whose last owner is such a thread is freed where no profiler sees it, and would count as alive.
    """
    wait = all_to_all.wait_for

    def wait_longer(work: dist.Work | None) -> None:
        wait(work)
        time.sleep(0.01)  # other processes may be at work

    all_to_all.wait_for = wait_longer
    try:
        yield
    finally:
        all_to_all.wait_for = wait


def _group_norm(tensors: Sequence[torch.Tensor]) -> float:
    total = torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()
    dist.all_reduce(total)
    return float(total.sqrt())


def _schedule_seconds(rank: int, sizes: LayerSizes, load: str) -> float:
    """Seconds to gather counts and to schedule a step, whose backward has forward's, when all ranks begin together."""
    exchange = Exchange(dist.group.WORLD, torch.device("cpu"))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(counts_of(load, sizes)).cumsum(0)])
    placement, rows = Placement(sizes.experts, sizes.ranks), max(sizes.rows, sizes.tokens * sizes.top_k)
    staged_rows = AllToAllSizes(sizes.ranks, 1).staged_rows(rows)
    times = []
    for _ in range(20):
        dist.barrier()
        started = time.perf_counter()
        table = Table(gather_table(exchange, offsets, Announcement("counts", rows=rows), Place("a layer", "counting")))
        schedule = Rounds(table.counts, placement, table.limits, staged_rows)
        for number in range(schedule.num_rounds):
            schedule.all_to_alls(rank, number)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
