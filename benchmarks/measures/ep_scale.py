"""What does the busiest of 64 to 1,024 ranks hold and wait for? On paper.

Counts come from a share of rows per expert, the same on every rank; rounds, all-to-alls, split sizes and messages from
the schedule that the op runs. Nothing is sent. Seconds are a latency for every message that the busiest rank receives
and its bytes over its bandwidth; they say where messages become too small, not how long a step takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.loads import shares_of
from benchmarks.measures import Answer
from benchmarks.summaries import markdown
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.schedule import Rounds, TokenSlices
from memfine_fx.memory.closed_form import PAPER_BINS, snap_to_bins
from memfine_fx.memory.region_bytes import AllToAllSizes
from memfine_fx.report.chart import SERIES, Axis, Chart, Line, Mark, write_charts

RANKS = (64, 128, 256, 512, 1024)
ROWS = (8192, 32768, 131072)
LOADS = ("balanced", "zipf:1", "paper:15", "one")
SLICE_LIMIT = 131072
GIB = 2**30
_POINT_HEADER = (
    "load | ranks | rows of the busiest | R | rounds | all-to-alls | messages each | latency | bounded | unchunked"
)
_SLICE_HEADER = "hot tokens | c required | c of the bins | most rows in a slice | limit s'_max"


@dataclass(frozen=True)
class Model:
    """DeepSeek-V3's layer and one micro-batch; one 400 Gb/s link a rank, 3 us a message (both assumed)."""

    tokens: int = 4096
    top_k: int = 8
    hidden: int = 7168
    width: int = 2048
    item_bytes: int = 2
    latency_us: float = 3.0
    gb_per_s: float = 50.0

    @property
    def round_row_bytes(self) -> int:
        """Of a received row in a round of backward: row, gradient, result, and the body's [R,2F] and [R,F] tensors."""
        return self.item_bytes * (3 * self.hidden + 6 * self.width)


@dataclass(frozen=True)
class Point:
    """One group size under one load and R."""

    load: str
    ranks: int
    busiest: int
    rows: int
    rounds: int
    all_to_alls: int
    messages: int
    latency_share: float
    bytes_bounded: int
    bytes_unchunked: int

    @property
    def cells(self) -> list[str]:
        bounded, unchunked = (f"{number / GIB:.1f} GiB" for number in (self.bytes_bounded, self.bytes_unchunked))
        counts = [str(self.rounds), str(self.all_to_alls), str(self.messages)]
        return [
            self.load, str(self.ranks), f"{self.busiest:,}", f"{self.rows:,}", *counts, f"{self.latency_share:.0%}",
            bounded, unchunked,
        ]  # fmt: skip


@dataclass(frozen=True)
class SliceCheck:
    """The paper's c token slices: the most that a rank receives in one, against its limit s'_max."""

    where: str
    required: int
    chosen: int
    most: int
    limit: int

    @property
    def cells(self) -> list[str]:
        return [self.where, str(self.required), str(self.chosen), f"{self.most:,}", f"{self.limit:,}"]


def measure(figure: Path | None = None) -> Answer:
    model = Model()
    points = [point(ranks, load, rows, model) for load in LOADS for ranks in RANKS for rows in ROWS]
    slices = [slices_of(64, SLICE_LIMIT, part, model) for part in (1.0, 0.5, 0.25)]
    if figure is not None:
        draw(points, figure)
    return Answer(
        [markdown(_POINT_HEADER, [one.cells for one in points]), "", markdown(_SLICE_HEADER, [s.cells for s in slices])]
    )


def shares(load: str, num_experts: int) -> torch.Tensor:
    """Each expert's part of the rows, hottest first; at most 1 / K each, as a token chooses an expert once."""
    found = torch.tensor(shares_of(load, num_experts, Model.top_k), dtype=torch.float64)
    found = found.repeat_interleave(-(-num_experts // len(found)))[:num_experts]  # fewer are printed of the paper's
    found = found / found.sum()
    for _ in range(8):
        capped = found.clamp(max=1 / Model.top_k)
        found = capped / capped.sum()
    return found


def counts_of(load: str, num_ranks: int, model: Model) -> torch.Tensor:
    """[ep,E]; as many experts as DeepSeek-V3 has, or one a rank where there are more ranks."""
    num_experts = max(256, num_ranks)
    rows = (shares(load, num_experts) * model.tokens * model.top_k).round().to(torch.int64)
    return rows.expand(num_ranks, num_experts).contiguous()


def point(num_ranks: int, load: str, rows: int, model: Model) -> Point:
    counts = counts_of(load, num_ranks, model)
    placement = Placement(counts.shape[1], num_ranks)
    schedule = Rounds(counts, placement, rows, AllToAllSizes(num_ranks, 1).staged_rows(rows))
    all_to_alls = [schedule.all_to_alls(0, number) for number in range(schedule.num_rounds)]
    messages = [sum(size > 0 for size in a2a.received_splits) for one in all_to_alls for a2a in one]
    busiest = int(schedule.received.max())
    latency = sum(messages) * model.latency_us * 1e-6
    transfer = busiest * model.hidden * model.item_bytes / (model.gb_per_s * 1e9)
    return Point(
        load,
        num_ranks,
        busiest,
        rows,
        schedule.num_rounds,
        len(messages),
        max(messages),
        latency / (latency + transfer),
        min(rows, busiest) * model.round_row_bytes,
        busiest * model.round_row_bytes,
    )


def slices_of(num_ranks: int, limit: int, hot_part: float, model: Model) -> SliceCheck:
    """c = ceil(s'' / s'_max) in the bins, where the tokens that choose rank 0's experts are the first `hot_part`.

    They are a quarter of all tokens, evenly spread where `hot_part` is 1.
    """
    num_experts = max(256, num_ranks)
    placement = Placement(num_experts, num_ranks)
    own = len(placement.owned(0))
    hot_rows = model.tokens * min(own, model.top_k) // 4
    received = hot_rows * num_ranks
    required = -(-received // limit)
    chosen = snap_to_bins(required, PAPER_BINS)
    ends = torch.linspace(0, 1, chosen + 1, dtype=torch.float64)
    gone = ((ends / hot_part).clamp(max=1) * (hot_rows // own)).round().to(torch.int64)
    bounds = torch.zeros(chosen + 1, num_ranks, num_experts, dtype=torch.int64)
    bounds[:, :, :own] = gone.view(-1, 1, 1)
    schedule = TokenSlices(bounds, placement)
    most = max(schedule.all_to_alls(0, number)[0].num_received for number in range(chosen))
    where = "spread over the sequence" if hot_part == 1 else f"in the first {hot_part:.0%} of the sequence"
    return SliceCheck(where, required, chosen, most, limit)


def draw(points: Sequence[Point], file: Path) -> None:
    rows = ROWS[1]
    ranks = Axis("ranks", is_log=True, ticks=[(ranks, str(ranks)) for ranks in RANKS])
    received, latency = list[Mark](), list[Mark]()
    for load, colour in zip(LOADS, SERIES[::3], strict=False):
        own = [point for point in points if point.load == load and point.rows == rows]
        line = [(point.ranks, point.bytes_unchunked / GIB) for point in own]
        received.append(Line(line, f"{load}, all at once", colour, has_dots=True))
    own = [point for point in points if point.load == "one" and point.rows == rows]
    bounded = [(point.ranks, point.bytes_bounded / GIB) for point in own]
    received.append(Line(bounded, f"rounds, R={rows:,}", "ink", is_dashed=True))
    for size, colour in zip(ROWS, SERIES[::3], strict=False):
        own = [point for point in points if point.load == "balanced" and point.rows == size]
        line = [(point.ranks, 100 * point.latency_share) for point in own]
        latency.append(Line(line, f"R={size:,}", colour, has_dots=True))
    left = Chart(ranks, Axis("received rows of the busiest rank, GiB", is_log=True), received)
    right = Chart(ranks, Axis("latency's part of the exchange, %"), latency)
    write_charts(file, [[("Received at once and in rounds", left), ("Latency, balanced routing", right)]])
