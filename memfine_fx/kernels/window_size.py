"""R: how many rows a window has on a device, by a model of its time, of which a launch's cost alone was measured.

A layer of N rows in n windows of R = ceil(N / n) rows takes, forward and backward,

    n * sum over kernels of ceil(programs / units) * time of a program        waves: the last one is seldom full
    + n * launches * time of a launch
    + bytes / bandwidth, where
        bytes = 2 N F (what a pass hands from kernel to kernel), if R F of it is more than half of L2, else nothing
              + (n - 1) * matrices of one expert, twice: a border cuts an expert, whose matrices are read again and
                whose gradients wait in fp32

A program's time is its FLOPs over a unit's share of the device's rate. Rows are spread evenly over the experts, since
what routing gives is not known on the host; each expert in a window leaves half a tile empty at the mean.
R is never above what the plan allows: memory decides first, and this among what it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfine_fx.kernels.windows import ceil_div

__all__ = ["KNOWN_RATES", "DeviceFigures", "LayerSizes", "rows_per_window", "seconds_of"]

# What a launch more costs, of which starting it is the least: its first programs fill the units and its last ones leave
# them idle. 40 and 77 us where two layers had four windows in place of one (benchmarks/results/gpu_layers.json).
_LAUNCH_SECONDS = 4e-5
_MOST_WINDOWS = 64  # beyond as many as the plan's rows need

KNOWN_RATES: dict[str, tuple[float, float]] = {
    "sm_80": (312e12, 2039e9),
    "sm_90": (989e12, 3350e9),
    "sm_100": (2250e12, 7700e9),
    "gfx942": (1307e12, 5300e9),
}
"""Target -> (FLOP/s in 16 bits, bytes/s of memory) of the data sheets of A100, H100, B200 and MI300X."""


@dataclass(frozen=True)
class DeviceFigures:
    """The figures of a device that the time model uses.

    Args:
        units: multiprocessors, each with one program at a time.
        cache_bytes: of L2.
        flops_per_second, bytes_per_second: of the rows' dtype and of memory.
    """

    units: int
    cache_bytes: int
    flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True)
class LayerSizes:
    """N, E, H, F of a layer, the bytes of an entry of its rows, and rows and columns of its kernels' tiles."""

    num_rows: int
    num_experts: int
    hidden: int
    width: int
    entry_bytes: int
    tile_rows: int = 128
    tile_columns: int = 64
    num_matrices: int = 3

    @property
    def expert_bytes(self) -> int:
        return self.num_matrices * self.hidden * self.width * self.entry_bytes


def rows_per_window(sizes: LayerSizes, figures: DeviceFigures, most: int) -> int:
    """Return the R of least `seconds_of` that is at most `most`.

    The windows of a layer differ by less than their number in rows.

    Args:
        most: rows that the plan allows a window; at least 1.
    """
    most = max(1, min(most, sizes.num_rows))
    if not sizes.num_rows:
        return most
    fewest = ceil_div(sizes.num_rows, most)
    choices = {ceil_div(sizes.num_rows, number) for number in range(fewest, fewest + _MOST_WINDOWS)}
    return min(sorted(choices, reverse=True), key=lambda rows: seconds_of(sizes, figures, rows))


def seconds_of(sizes: LayerSizes, figures: DeviceFigures, rows: int) -> float:
    """Return the predicted seconds of forward and backward, without what does not depend on R."""
    windows = ceil_div(sizes.num_rows, rows)
    return windows * _window_seconds(sizes, figures, rows) + _bytes(sizes, figures, rows) / figures.bytes_per_second


_LAUNCHES = 6  # gate_up and down; gate_up again, down_backward, the tokens' gradient and the matrices'


def _window_seconds(sizes: LayerSizes, figures: DeviceFigures, rows: int) -> float:
    touched = min(sizes.num_experts, max(1, ceil_div(rows * sizes.num_experts, sizes.num_rows)))
    tiles = ceil_div(rows, sizes.tile_rows) + touched // 2
    per_unit = figures.flops_per_second / figures.units
    tile_flops = 2 * sizes.tile_rows * sizes.tile_columns
    num_projections = sizes.num_matrices - 1
    by_rows = [  # (columns, products of a column's length in a program)
        (sizes.width, num_projections * sizes.hidden),
        (sizes.hidden, sizes.width),
        (sizes.width, num_projections * sizes.hidden),
        (sizes.width, sizes.hidden),
        (sizes.hidden, num_projections * sizes.width),
    ]
    seconds = _LAUNCHES * _LAUNCH_SECONDS
    for columns, length in by_rows:
        waves = ceil_div(tiles * ceil_div(columns, sizes.tile_columns), figures.units)
        seconds += waves * tile_flops * length / per_unit
    programs = ceil_div(sizes.width, sizes.tile_rows) * ceil_div(sizes.hidden, sizes.tile_columns) * touched
    length_at_mean = sizes.num_matrices * ceil_div(rows, touched) / 2  # one launch has programs of two lengths
    return seconds + ceil_div(2 * programs, figures.units) * tile_flops * length_at_mean / per_unit


def _bytes(sizes: LayerSizes, figures: DeviceFigures, rows: int) -> int:
    windows = ceil_div(sizes.num_rows, rows)
    handed = 2 * sizes.num_rows * sizes.width * sizes.entry_bytes
    is_in_cache = rows * sizes.width * sizes.entry_bytes <= figures.cache_bytes // 2
    return (0 if is_in_cache else handed) + 2 * (windows - 1) * sizes.expert_bytes
