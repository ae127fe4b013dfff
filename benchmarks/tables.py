"""Rows to readable tables: medians over rounds, ratios against named baselines, checks against a baseline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.peers import Recompute, find_peer
from benchmarks.records import Job, Row, Sizes
from benchmarks.suites import SUITES
from benchmarks.summaries import MIB, Summary, align, by_key, summaries_of, tokens_of

BASELINES = ("eager", "compile")
# Against the first baseline that has figures. Losses and outputs must agree; in bfloat16 a checksum
# of gradients carries the rounding of every tensor.
VALUE_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
GRADIENT_TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-1}
_ERROR_CHARACTERS = 110
Column = Callable[[Summary], str]


def format_tables(rows: Sequence[Row]) -> str:
    """All tables as text, and the machines they come from."""
    return "\n\n".join([*map(str, tables_of(rows)), *machine_lines(rows)])


@dataclass(frozen=True)
class Table:
    """Cells as text, ready for a terminal or a page."""

    title: str
    header: list[str]
    cells: list[list[str]]
    failures: list[str]

    def __str__(self) -> str:
        return "\n".join([self.title, align([self.header, *self.cells]), *self.failures])


def tables_of(rows: Sequence[Row]) -> list[Table]:
    """One table per workload and sizes, in the order of the rows."""
    titles = list(dict.fromkeys(row.job.table for row in rows))
    return [_table(title, [row for row in rows if row.job.table == title]) for title in titles]


def disagreements(rows: Sequence[Row]) -> list[str]:
    """Peers that computed something else than their table's reference: those are no peers."""
    found = [(table.title, cells) for table in tables_of(rows) for cells in table.cells]
    return [f"{title}: {cells[0]}: {cells[-1]}" for title, cells in found if cells[-1] != "ok"]


def conclusions(rows: Sequence[Row]) -> list[str]:
    """What each suite says about its rows."""
    texts = []
    for name in dict.fromkeys(row.job.suite for row in rows):
        conclude = SUITES[name].conclude if name in SUITES else None
        if conclude is not None:
            texts.append(conclude([row for row in rows if row.job.suite == name]))
    return texts


def _table(title: str, rows: Sequence[Row]) -> Table:
    present = summaries_of(rows)
    summaries = {summary.job.key: summary for summary in present}
    baselines = {one.job.peer: one for one in present if one.job.peer in BASELINES}
    reference = next((baselines[name] for name in BASELINES if name in baselines), next(iter(present), None))
    columns = _columns(rows[0].job, baselines, reference)
    cells = [[cell(summaries[key]) for cell in columns.values()] for key in by_key(rows) if key in summaries]
    failures = [_failure_line(same[-1]) for key, same in by_key(rows).items() if key not in summaries]
    return Table(title, list(columns), cells, failures)


def _columns(job: Job, baselines: dict[str, Summary], reference: Summary | None) -> dict[str, Column]:
    """Names and cells, from left to right."""
    columns: dict[str, Column] = {
        "peer": lambda one: one.job.peer,
        "peak MiB": lambda one: _mib(one.peak_bytes),
        "whole MiB": lambda one: _mib(one.last.whole_peak_bytes),
        "accum MiB": lambda one: _mib(one.last.accumulating_peak_bytes),
        "step s": lambda one: f"{one.step_seconds:.4g}",
        "min-max s": lambda one: f"{one.step_seconds_min:.4g}-{one.step_seconds_max:.4g}",
        "tokens/s": lambda one: f"{tokens_of(one) / one.step_seconds:,.0f}",
    }
    for name in BASELINES:
        base = baselines.get(name)
        columns[f"peak/{name}"] = lambda one, base=base: _ratio(one.peak_bytes, base and base.peak_bytes)
        columns[f"time/{name}"] = lambda one, base=base: _ratio(one.step_seconds, base and base.step_seconds)
    columns["compile s"] = _cold_compile
    if job.device == "cuda":
        columns["allocated MiB"] = lambda one: _mib(one.last.allocated_bytes, 0)
        columns["reserved MiB"] = lambda one: _mib(one.last.reserved_bytes, 0)
    columns |= _OF_WORKLOAD.get(job.kind, {})
    columns["check"] = lambda one: check(one, reference or one)
    return columns


def _mib(num_bytes: int | None, digits: int = 1) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:.{digits}f}"


def _ratio(figure: float, base: float | None) -> str:
    return "-" if base is None else f"{figure / base if base else float('nan'):.2f}"


def _cold_compile(one: Summary) -> str:
    is_compiled = find_peer(one.job.workload, one.job.peer).is_compiled
    return f"{one.cold_compile_seconds:.1f}" if one.cold_compile_seconds and is_compiled else "-"


def fraction_of_matmul_rate(summary: Summary) -> float:
    """Operations executed per second, as a share of one large matrix product's on the same machine."""
    recompute = find_peer(summary.job.workload, summary.job.peer).recompute
    rate = expert_flops(summary.job.sizes, recompute) / summary.step_seconds
    return rate / summary.matmul_flops_per_second


def expert_flops(sizes: Sizes, recompute: Recompute) -> int:
    """Of one forward and backward of all layers, recomputation included.

    Each routed row goes through the first projection (H to 2F: ``2 * H * 2F``) and the second (F to H: ``2 * F * H``).
    Backward does twice the forward's work: one product for the input's gradient, one for the weight's. Recomputation
    adds the first projection again, or the whole forward. Router, activation and combination are not counted.
    """
    first_projection = 2 * sizes.hidden * 2 * sizes.width
    forward = first_projection + 2 * sizes.width * sizes.hidden
    again = {"nothing": 0, "first projection": first_projection, "forward": forward}[recompute]
    return sizes.layers * sizes.routed_rows * (3 * forward + again)


_OF_WORKLOAD: dict[str, dict[str, Column]] = {
    "layer": {"of matmul": lambda one: f"{fraction_of_matmul_rate(one):.0%}"},
    "model": {
        "loss": lambda one: f"{one.last.value:.6f}",
        "graphs": lambda one: str(one.last.graphs),
        "recompiled": lambda one: "-" if one.last.recompilations is None else str(one.last.recompilations),
    },
    "gradients": {
        "gradient error": lambda one: "-" if one.last.gradient_error is None else f"{one.last.gradient_error:.2e}"
    },
    "longest": {"longest T": lambda one: f"{one.last.series['tokens'][0]:.0f}"},
}


def check(summary: Summary, reference: Summary) -> str:
    """ "ok", or what differs from the reference peer and by how much."""
    dtype = summary.job.dtype
    faults = []
    value = _difference(summary.last.value, reference.last.value)
    if not value <= VALUE_TOLERANCE[dtype]:
        faults.append(f"VALUE DIFFERS {value:.1e}")
    gradients = max(
        _difference(summary.last.gradient_checksum, reference.last.gradient_checksum),
        abs(summary.last.gradient_norm / reference.last.gradient_norm - 1),
    )
    if not gradients <= GRADIENT_TOLERANCE[dtype]:
        faults.append(f"GRADIENTS DIFFER {gradients:.1e}")
    return ", ".join(faults) or "ok"


def _difference(found: float, expected: float) -> float:
    # Checksums are of order one and may be near zero; losses are larger, and compared relatively.
    return abs(found - expected) / max(1.0, abs(expected))


def _failure_line(row: Row) -> str:
    if row.is_unavailable:
        return f"{row.job.peer}: {row.error}"
    word = "OUT OF MEMORY" if row.is_out_of_memory else "FAILED"
    return f"{row.job.peer}: {word}: {(row.error or '')[:_ERROR_CHARACTERS]}"


def machine_lines(rows: Sequence[Row]) -> list[str]:
    return [str(one) for one in dict.fromkeys(row.machine for row in rows if row.machine is not None)]
