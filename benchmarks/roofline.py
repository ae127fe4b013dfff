"""A roofline of the GPU kernels and of their peers, as a model: nothing in it was measured.

A launch takes max(FLOPs / rate, bytes / bandwidth), where
    FLOPs    of its products with the tiles' rows to spare, over the filled share of its waves: with p programs in slots
             (units x programs that fit one by registers and shared memory), p / (slots * ceil(p / slots))
    bytes    between memory and L2: different bytes of every tensor (`memfine_fx.kernels.traffic`), except that
             gathered rows count once an expert where all tokens do not fit half of L2, atomic sums of tokens count
             8 bytes for each of the rows' entries where those do not, and an expert's matrix that is larger than half
             of L2 counts once for every group of its tiles of rows (`tile_search.place_of`), or for every wave of its
             programs where those are fewer
    rates    of the data sheets, whole: what products reach of them is not known here, and taken to be the same for all

The time of a layer is the sum over its launches; what starting a launch costs is left out, their number is given.

Peers are what their papers and sources say that they hand from kernel to kernel (`peer_kernels`), under the same rules,
with tiles of 128 rows and columns in groups as ours, one program a unit and full waves. The least bytes of a plan:
    strict   every input read once and every output written once a pass, and what is kept written and read
    handed   besides, what one product hands to the next through memory, written once and read by each that needs it
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from benchmarks.gpu_kernels import RESULTS as KERNELS
from benchmarks.gpu_kernels import TARGETS, Case, launches_of, step_of
from benchmarks.suites.moeblaze import CONFIGS, sizes_of

__all__ = [
    "CHIPS",
    "PEERS",
    "SHAPES",
    "Chip",
    "Kernel",
    "Shape",
    "chip_figures",
    "kernels_of",
    "least_bytes",
    "peer_kernels",
    "total",
]

_BYTES = 2  # of an entry in bf16
_PEER_GROUP = 8  # tiles of rows that go over a matrix together, as ours do


@dataclass(frozen=True)
class Chip:
    """What a device has beside its rate and bandwidth, which planning/hardware has.

    Args:
        target: whose kernels it runs, as in gpu_kernels.json.
        units: multiprocessors.
        cache_bytes: of L2.
        registers, threads, shared_bytes: of a unit.
        granule: registers of a thread are given in multiples of it.
    """

    name: str
    target: str
    units: int
    cache_bytes: int
    registers: int = 65536
    threads: int = 2048
    shared_bytes: int = 228 << 10
    granule: int = 8


# H100 and H200: NVIDIA's architecture paper (132 units, 50 MB, 228 KB, 65,536 registers). B200: 148 units
# (chipsandcheese.com/p/nvidias-b200-keeping-the-cuda-juggernaut), 126 MB (besthub.dev's account of it). MI300X: AMD's
# data sheet from memory (304 units, 4 MB of L2 in each of 8 dies; its 256 MB behind them are taken for the cache here).
CHIPS = (
    Chip("H100", "sm_90", 132, 50_000_000),
    Chip("H200", "sm_90", 132, 50_000_000),
    Chip("B200", "sm_100", 148, 126_000_000),
    Chip("MI300X", "gfx942", 304, 256_000_000, registers=131072, shared_bytes=64 << 10),
)


def chip_figures(chip: Chip) -> tuple[float, float]:
    """(FLOP/s in bf16, bytes/s) of its data sheet; needs memfine-planner."""
    from memfine_planner.hardware.systems import builtin_systems
    from memfine_planner.hardware.vendors import builtin_accelerators

    if chip.name in builtin_systems():
        system = builtin_systems()[chip.name]
        return system.rate("BF16"), system.memory_gb_per_s * 1e9
    sheet = builtin_accelerators()[chip.name]
    return sheet.tflops["BF16"] * 1e12, sheet.memory_gb_per_s * 1e9


@dataclass(frozen=True)
class Shape:
    """T, K, E, H, F of a layer, and where it is published."""

    name: str
    tokens: int
    top_k: int
    experts: int
    hidden: int
    width: int
    source: str
    is_clamped: bool = False  # GPT-OSS's experts, with biases
    rank: int = 0  # of adapters, which alone are trained

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    def case(self, rows_per_window: int, *, saves_products: bool, is_deterministic: bool = False) -> Case:
        form: dict[str, Any] = {}
        if self.is_clamped:
            form = {"layout": "interleaved_in_out", "activation": "clamped", "has_bias": True}
        sizes = (self.name, self.tokens, self.top_k, self.experts, self.hidden, self.width, rows_per_window)
        return Case(*sizes, **form, saves_products=saves_products, is_deterministic=is_deterministic, rank=self.rank)


_PAGE = "Dao-AILab/sonic-moe, assets/2026-04-22-sonicmoe-blackwell.md"
SHAPES = (
    Shape("Qwen3-30B-A3B", 8192, 8, 128, 2048, 768, "its config"),
    Shape("GPT-OSS-120B", 8192, 4, 128, 2880, 2880, "its config", is_clamped=True),
    Shape("DeepSeek-V3", 8192, 8, 256, 7168, 2048, "its config"),
    *(
        Shape(f"MoEBlaze {number}", one.sequence, one.top_k, one.experts, one.hidden, one.width, "arXiv 2601.05296")
        for number, one in enumerate((sizes_of(config, is_full=True) for config in CONFIGS), start=1)
    ),
    Shape("SonicMoE 7B", 32768, 8, 64, 2048, 1024, _PAGE),
    Shape("SonicMoE 7B fine", 32768, 32, 256, 2048, 512, _PAGE),
    Shape("SonicMoE 30B", 32768, 8, 128, 4096, 1024, "Dao-AILab/sonic-moe, README.md"),
    Shape("SonicMoE 235B", 32768, 8, 128, 4096, 1536, _PAGE),
)


@dataclass(frozen=True)
class Kernel:
    """One launch.

    Args:
        flops: with rows to spare.
        num_bytes: between memory and L2.
        distinct: different bytes.
        programs, slots: those that do work, and those that fit at once; 0 where waves are taken to be full.
    """

    name: str
    flops: float
    num_bytes: float
    distinct: float
    programs: int = 0
    slots: int = 0

    @property
    def filled(self) -> float:
        return self.programs / (self.slots * ceil(self.programs / self.slots)) if self.programs else 1.0

    def seconds(self, chip: Chip) -> float:
        rate, bandwidth = chip_figures(chip)
        return max(self.flops / (rate * self.filled), self.num_bytes / bandwidth)

    def bound(self, chip: Chip) -> str:
        rate, bandwidth = chip_figures(chip)
        return "products" if self.flops / (rate * self.filled) >= self.num_bytes / bandwidth else "bytes"


_GATHERED = {"hidden", "grad", "rows"}
_MATRICES = {"gate", "up", "down", "first_matrix", "second_matrix"}


def kernels_of(case: Case, chip: Chip) -> list[Kernel]:
    """A layer's launches, routing even; needs Triton."""
    from memfine_fx.kernels.traffic import even_loads
    from memfine_fx.kernels.windows import windows_of

    rows = case.tokens * case.top_k
    windows = list(windows_of(rows, case.rows_per_window))
    loads = even_loads(rows, case.experts, windows, case.tokens)
    (whole,) = even_loads(rows, case.experts, list(windows_of(rows, rows)), case.tokens)
    found, parts = [], 0
    for launch in (one for part in launches_of(case, chip.target) for one in part):
        parts = launch.grid[0] if launch.name == "down_backward_kernel" else parts
        first = launch.arguments.get("first_row")
        load = whole if first is None else loads[first // case.rows_per_window]
        found.append(_kernel(launch, load, case, chip))
    return [*found, *_around(case, parts)]


def _kernel(launch: Any, load: Any, case: Case, chip: Chip) -> Kernel:
    from memfine_fx.kernels.counting import accesses_of, flops_of

    programs = _working_programs(launch, load)
    slots = chip.units * programs_per_unit(launch, chip)
    distinct = num_bytes = 0.0
    for access in accesses_of(launch, load):
        size = launch.arguments[access.argument].dtype.itemsize * (2 if access.kind == "atomic" else 1)
        distinct += size * access.distinct
        num_bytes += size * _crossing(access, launch, load, case, chip, programs / slots)
    flops = flops_of(launch, load)[1]
    return Kernel(step_of(launch), flops, num_bytes, distinct, programs if flops else 0, slots)


def _crossing(access: Any, launch: Any, load: Any, case: Case, chip: Chip, waves: float) -> float:
    """Entries of a tensor that cross between memory and L2, by the rules above."""
    half = chip.cache_bytes // 2
    if access.kind == "atomic":
        return access.distinct if access.distinct * 4 <= half else access.elements
    if access.argument in _GATHERED and launch.constants["TOP_K"]:  # else rows of the window stand there
        width = case.hidden
        return access.distinct if load.num_tokens * width * _BYTES <= half else load.num_rows * width
    matrices = access.argument in _MATRICES and launch.name != "weight_gradient_kernel"
    if matrices and access.distinct / max(1, load.num_present) * _BYTES > half:
        told = launch.constants
        groups = ceil(load.num_tiles(told["TILE_ROWS"]) / load.num_present / told["GROUP_ROWS"])
        return access.distinct * max(1.0, min(waves / load.num_present, groups))
    return access.distinct


def _working_programs(launch: Any, load: Any) -> int:
    """Programs that find rows."""
    if launch.name == "weight_gradient_kernel":
        return launch.grid[0] * load.num_present
    if "TILE_ROWS" in launch.constants:
        return launch.grid[0] * load.num_tiles(launch.constants["TILE_ROWS"])
    return max(1, launch.grid[0] * (launch.grid[1] if len(launch.grid) > 1 else 1))


_RESOURCES: dict[str, Any] = {}


def programs_per_unit(launch: Any, chip: Chip) -> int:
    """How many programs a unit has at once, by registers, shared memory and threads.

    Resources are those recorded of Qwen3-30B-A3B's kernels, of GPT-OSS-120B's where there are biases; a step that was
    not recorded of them, as one that keeps products, is taken from the case that has it.
    """
    if not _RESOURCES:
        _RESOURCES["rows"] = json.loads(KERNELS.read_text())["rows"]
    here = [row for row in _RESOURCES["rows"] if row["target"] == chip.target]
    of_kernel = [row for row in here if row["step"].split(",")[0] == launch.name.removesuffix("_kernel")]
    row = next((row for row in here if row["step"] == step_of(launch)), of_kernel[0])
    warp = next(target.warp_size for target in TARGETS if target.name == chip.target)
    threads = warp * row["num_warps"]
    registers = ceil(row["registers"] / chip.granule) * chip.granule * threads
    limits = [chip.registers // registers, chip.threads // threads, 32]
    if row["shared_bytes"]:
        limits.append(chip.shared_bytes // (row["shared_bytes"] + 1024))
    return max(1, min(limits))


def _around(case: Case, num_parts: int) -> list[Kernel]:
    """What torch does around the kernels: fp32 sums of tokens set to zero and cast in each pass, the routing weight's
    gradient set to zero and summed over its parts.
    """
    size = case.tokens * case.hidden
    fills = [Kernel(f"zeros, {name}", 0, 4 * size, 4 * size) for name in ("outputs", "tokens' gradient")]
    casts = [Kernel(f"cast, {name}", 0, 6 * size, 6 * size) for name in ("outputs", "tokens' gradient")]
    parts = 4 * num_parts * case.tokens * case.top_k
    weights = [Kernel(f"{name}, weights' gradient", 0, parts, parts) for name in ("zeros", "sum")]
    return [*fills, *casts, *weights]


def least_bytes(shape: Shape, *, saves_products: bool) -> tuple[float, float]:
    """(strict, handed), see the module; bf16."""
    tokens, rows = shape.tokens * shape.hidden, shape.rows * shape.width
    matrices = 3 * shape.experts * shape.hidden * shape.width
    strict = (2 * tokens + matrices) + (3 * tokens + 2 * matrices) + saves_products * 2 * 2 * rows
    activated, gradients = 2 * rows, 3 * 2 * rows  # written and read; written and read by two products
    again = 0 if saves_products else 2 * 2 * rows  # gate's and up's, made again
    return _BYTES * strict, _BYTES * (strict + activated + gradients + 2 * rows + again)


PEERS = ("sonicmoe", "scattermoe", "megablocks", "grouped_mm")


def peer_kernels(name: str, shape: Shape, chip: Chip) -> list[Kernel]:
    """Kernels of a published algorithm, forward then backward, with what each reads and writes.

    sonicmoe    arXiv 2512.14080: gathers inside products; keeps gate's and up's products; outputs of rows in expert
                order, gathered and summed by a kernel of its own; activation and both of its gradients as epilogues
    scattermoe  arXiv 2403.08245: gathers and scatters inside products in forward; keeps the rows' outputs; backward
                groups the tokens and the output's gradients first
    megablocks  arXiv 2211.15841, its grouped layer: gather, product, activation, product, scatter, each on its own
    grouped_mm  transformers' `grouped_mm` under torch.compile: as megablocks, tokens summed by atomics
    """
    gathered, wide, both, narrow, matrix = _sizes(shape, chip)
    tokens, product = shape.tokens * shape.hidden, 2.0 * _padded(shape) * shape.hidden * shape.width
    rows = shape.rows * shape.hidden

    def kernel(what: str, entries: float, products: int = 0, matrices: int = 0, columns: int = 0) -> Kernel:
        """Entries beside the matrices, which a product of so many columns sweeps once or more."""
        sweeps = _sweeps(shape, chip, columns) if matrices else 1.0
        distinct = _BYTES * (entries + matrices * matrix)
        return Kernel(what, products * product, _BYTES * (entries + matrices * matrix * sweeps), distinct)

    if name == "sonicmoe":
        return [
            kernel("up", gathered + both + narrow, 2, 2, 2 * shape.width),
            kernel("down", narrow + wide, 1, 1, shape.hidden),
            kernel("sum", wide + tokens),
            kernel("gradient of products", gathered + both + both + narrow, 1, 1, shape.width),
            kernel("gradient of rows", both + wide, 2, 2, shape.hidden),
            kernel("sum of gradients", wide + tokens),
            kernel("gradient of up", gathered + both + 2 * matrix, 2),
            kernel("gradient of down", gathered + narrow + matrix, 1),
        ]
    last = 0.0
    if name == "grouped_mm":  # fp32 atomics of all rows, and the cast
        last = (4.0 * rows if tokens * 4 > chip.cache_bytes // 2 else 4.0 * tokens) + 3 * tokens
    forward = [
        kernel("up", wide + both, 2, 2, 2 * shape.width),
        kernel("activation", both + narrow),
        kernel("down", narrow + wide, 1, 1, shape.hidden),
        kernel("sum", wide + (last or tokens)),
    ]
    backward = [
        kernel("gather gradients, gradient of weights", gathered + wide + wide),
        kernel("gradient of activated", wide + narrow, 1, 1, shape.width),
        kernel("gradient of down", wide + narrow + matrix, 1),
        kernel("gradient of activation", both + narrow + both),
        kernel("gradient of up", wide + both + 2 * matrix, 2),
        kernel("gradient of rows", both + wide, 2, 2, shape.hidden),
        kernel("sum of gradients", wide + (last or tokens)),
    ]
    if name == "scattermoe":
        forward[0] = kernel("up", gathered + both, 2, 2, 2 * shape.width)
        return [*forward, *backward[:4], kernel("gather tokens", gathered + wide), *backward[4:]]
    return [kernel("gather", gathered + wide), *forward, *backward]


def _sweeps(shape: Shape, chip: Chip, columns: int) -> float:
    """How often an expert's matrix is read from memory."""
    if _BYTES * shape.hidden * shape.width <= chip.cache_bytes // 2:
        return 1.0
    tiles = _padded(shape) // 128
    waves = tiles * ceil(columns / 128) / chip.units
    return max(1.0, min(waves / shape.experts, ceil(tiles / shape.experts / _PEER_GROUP)))


def _sizes(shape: Shape, chip: Chip) -> tuple[float, float, float, float, float]:
    """Entries: tokens as a product gathers them, [N,H], [N,2F], [N,F], one matrix of all experts."""
    tokens, rows = shape.tokens * shape.hidden, shape.rows * shape.hidden
    gathered = tokens if tokens * _BYTES <= chip.cache_bytes // 2 else rows
    narrow = shape.rows * shape.width
    return gathered, rows, 2 * narrow, narrow, shape.experts * shape.hidden * shape.width


def _padded(shape: Shape) -> int:
    """Rows with those to spare in tiles of 128, experts evenly chosen."""
    return shape.experts * ceil(shape.rows / shape.experts / 128) * 128


def total(kernels: Sequence[Kernel], chip: Chip) -> tuple[float, float, float]:
    """(seconds, bytes between memory and L2, different bytes) of a layer."""
    seconds = sum(kernel.seconds(chip) for kernel in kernels)
    return seconds, sum(kernel.num_bytes for kernel in kernels), sum(kernel.distinct for kernel in kernels)
