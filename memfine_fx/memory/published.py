"""The figures that the MemFine paper prints (arXiv 2511.21431), beside those of its closed form.

Printed: the setup (DeepSeek-V3 cut to 16 and 8 layers, 32 GPUs of 64 GB, BF16, s=4096, b=1, EP 32), static and
active memory of three methods, p99, maximum and minimum of the tokens per expert of layers 4-15 in iteration 7.

Left open by the paper, and how it is set here:
    h_d     192, DeepSeek-V3's query and key heads (128 + 64 rotary); k_a = a = 128, as its attention expands them.
            Then what (1) takes for the sequence is 0.90 GB, the constant that the three printed figures share.
    t, c    1, and m_g = 1: full recomputation, as all three methods use it.
    GB      1e9 bytes.
    M_sta   the printed 43.0 and 39.5 GB: stages, shards and optimizer bytes behind them are not printed.
    s'      not printed; solved from the printed 22.9 GB at one chunk. The figures at 2 and 8 chunks follow.
    alpha   0.86. Model I at two chunks needs at least 0.858; model II at one chunk would need 0.975.
    ranks   which experts share a GPU is not printed. The hottest do, here: only then does a GPU receive the rows
            that 22.9 GB stand for (see `rank_rows`; spread evenly it would receive a fifth of them).
"""

from __future__ import annotations

from dataclasses import dataclass

from memfine_fx.memory.closed_form import (
    PAPER_BINS,
    Architecture,
    Parallel,
    activation_bytes,
    chunk_count,
    max_rows,
    row_bytes,
    sequence_bytes,
)

__all__ = [
    "ALPHA",
    "GB",
    "IMBALANCE",
    "METHODS",
    "MODEL",
    "M_GPU",
    "PARALLEL",
    "Imbalance",
    "Method",
    "expert_loads",
    "layer_chunks",
    "rank_rows",
    "received_rows",
    "render",
]

GB = 10**9
M_GPU = 64 * GB
ALPHA = 0.86
MODEL = Architecture(s=4096, h=7168, a=128, h_d=192, k_a=128, g_e=2048, e_n=256, t_k=8)
PARALLEL = Parallel(e=32)
NUM_GPUS = 32


@dataclass(frozen=True)
class Method:
    """One printed row: model, chunks at the peak, static and active GB, whether it trains."""

    model: str
    name: str
    chunks: int
    static_gb: float
    active_gb: float
    trains: bool


METHODS = (
    Method("I", "full recomputation", 1, 43.0, 22.9, False),
    Method("I", "8 chunks", 8, 43.0, 3.7, True),
    Method("I", "MACT", 2, 43.0, 11.9, True),
    Method("II", "full recomputation", 1, 39.5, 22.9, True),
    Method("II", "8 chunks", 8, 39.5, 3.7, True),
    Method("II", "MACT", 2, 39.5, 11.9, True),
)


@dataclass(frozen=True)
class Imbalance:
    """Tokens per expert of one layer in iteration 7; the mean is 4096."""

    layer: int
    p99: int
    largest: int
    smallest: int


IMBALANCE = (
    Imbalance(4, 19352, 31702, 15),
    Imbalance(5, 26981, 35313, 38),
    Imbalance(6, 33391, 46104, 4),
    Imbalance(7, 35881, 50780, 0),
    Imbalance(8, 41529, 73130, 0),
    Imbalance(9, 40685, 84049, 0),
    Imbalance(10, 76459, 119728, 0),
    Imbalance(11, 76315, 126887, 0),
    Imbalance(12, 82480, 105174, 0),
    Imbalance(13, 70353, 121822, 0),
    Imbalance(14, 73427, 93234, 0),
    Imbalance(15, 80488, 129170, 0),
)


def received_rows() -> float:
    """s' at the printed 22.9 GB of active memory with one chunk."""
    return (22.9 * GB - sequence_bytes(MODEL, PARALLEL)) / row_bytes(MODEL, PARALLEL)


def expert_loads(imbalance: Imbalance) -> list[float]:
    """Rows of each of the e_n experts, largest first, that meet all that is printed of a layer.

    The curve falls geometrically from the largest to the 99th percentile, and from there at the one rate that
    makes the sum N = s t_k GPUs; no expert is below the smallest printed.
    """
    total = MODEL.s * MODEL.t_k * NUM_GPUS
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (low, rate) if sum(_curve(imbalance, rate)) > total else (rate, high)
    return _curve(imbalance, low)


def _curve(imbalance: Imbalance, rate: float) -> list[float]:
    place = 0.01 * (MODEL.e_n - 1)  # of the 99th percentile, between the third and the fourth largest
    head = imbalance.p99 / imbalance.largest
    curve = [
        imbalance.largest * head ** (rank / place) if rank <= place else imbalance.p99 * rate ** (rank - place)
        for rank in range(MODEL.e_n)
    ]
    return [*(max(load, imbalance.smallest) for load in curve[:-1]), imbalance.smallest]


def rank_rows(imbalance: Imbalance, *, shares_hottest: bool = True) -> float:
    """s'' of the fullest GPU: its e_n / e experts are the hottest, or one of each 32 in order of heat."""
    loads = expert_loads(imbalance)
    num_local = MODEL.e_n // PARALLEL.e
    return sum(loads[:num_local] if shares_hottest else loads[:: PARALLEL.e])


def layer_chunks(M_sta: float, *, alpha: float = ALPHA, bins: tuple[int, ...] | None = PAPER_BINS) -> dict[int, int]:
    """Chunks by (4) of each printed layer, from its imbalance."""
    s_max = max_rows(MODEL, PARALLEL, M_sta=M_sta, M_GPU=M_GPU, alpha=alpha)
    return {imbalance.layer: chunk_count(rank_rows(imbalance), s_max, bins) for imbalance in IMBALANCE}


def render() -> str:
    """The paper's table and its map of chunks, printed beside the closed form's."""
    s_prime = received_rows()
    whole = activation_bytes(MODEL, PARALLEL, s_prime)
    lines = [
        "MemFine's table (arXiv 2511.21431) by its closed form, GB = 1e9 bytes",
        f"sequence {sequence_bytes(MODEL, PARALLEL) / GB:.3f} GB, s' = {s_prime:,.0f} rows at one chunk "
        f"({s_prime * PARALLEL.e / (MODEL.s * MODEL.t_k * NUM_GPUS):.1f} x balanced)",
        f"{'model':6}{'method':20}{'chunks':>7}{'static':>8}{'printed':>9}{'ours':>7}{'saved':>9}{'total':>7}  of 64",
    ]
    for method in METHODS:
        active = activation_bytes(MODEL, PARALLEL, s_prime, chunks=method.chunks)
        total = method.static_gb * GB + active
        lines.append(
            f"{method.model:6}{method.name:20}{method.chunks:7}{method.static_gb:8.1f}{method.active_gb:9.1f}"
            f"{active / GB:7.2f}{1 - active / whole:9.2%}{total / GB:7.1f}  {'fits' if total <= M_GPU else 'OOM'}"
        )
    lines.append("chunks by layer in iteration 7, model I, from the printed imbalance")
    lines.append("layer             " + "".join(f"{imbalance.layer:5}" for imbalance in IMBALANCE))
    rows = [rank_rows(imbalance) for imbalance in IMBALANCE]
    lines.append("rows, thousands   " + "".join(f"{row / 1e3:5.0f}" for row in rows))
    for alpha in (0.80, ALPHA, 0.90, 0.95):
        chosen = layer_chunks(43.0 * GB, alpha=alpha).values()
        lines.append(f"alpha {alpha:.2f}, bins  " + "".join(f"{chunks:5}" for chunks in chosen))
    exact = layer_chunks(43.0 * GB, bins=None).values()
    lines.append(f"alpha {ALPHA:.2f}, exact " + "".join(f"{chunks:5}" for chunks in exact))
    return "\n".join(lines)
