"""What would the GPU kernels and their peers take of a device by a roofline, of which nothing was measured?

Writes results/gpu_roofline.json and the tables of results/gpu_tables.md with --write, else compares with that file.
Needs Triton (make gpu-kernels), but no device: launches are noted on fake tensors. See `benchmarks.roofline` for the
model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.gpu_kernels import TABLES
from benchmarks.gpu_peaks import StepBytes, bytes_of_grouped, bytes_of_kernels
from benchmarks.measures import RESULTS, Answer
from benchmarks.roofline import CHIPS, PEERS, SHAPES, Chip, Kernel, Shape, kernels_of, least_bytes, peer_kernels, total
from benchmarks.summaries import with_blocks

__all__ = ["FILE", "filled", "measure", "table"]

FILE = RESULTS / "gpu_roofline.json"
BYTES_TARGET, TIME_TARGET = 1.15, 1.10
_WINDOWS, _MANY_WINDOWS = 4, 32
_PLANS = {  # name -> (windows, keeps products, deterministic)
    "kept, 1 window": (1, True, False),
    f"kept, {_WINDOWS} windows": (_WINDOWS, True, False),
    "kept, 1 window, by token": (1, True, True),
    f"again, {_WINDOWS} windows": (_WINDOWS, False, False),
}
_SMALLER = {f"again, {_MANY_WINDOWS} windows": (_MANY_WINDOWS, False, False)}  # the same, of peaks alone
_OF_BYTES = ("kept, 1 window", f"again, {_WINDOWS} windows", *_SMALLER)  # whose peaks are shown
_PEER = "grouped, checkpoint"
_RANK = 16
_ADAPTED = ("Qwen3-30B-A3B", "GPT-OSS-120B")  # with adapters of that rank, which alone are trained
_SHOWN = ("Qwen3-30B-A3B", "H100")  # whose kernels the page shows one by one


def measure(write: bool = False) -> Answer:
    found = json.loads(json.dumps(table()))
    if write:
        FILE.write_text(_written(found))
        TABLES.write_text(filled(TABLES.read_text(), found))
        return Answer([f"{len(found['layers'])} layers, {len(found['kernels'])} kernels"])
    recorded = json.loads(FILE.read_text())
    if recorded == found:
        return Answer(["as recorded"])
    return Answer(["not as recorded: run with --write and look at the difference"], is_met=False)


def table() -> dict[str, Any]:
    """Layers by shape, device and plan; and one layer's kernels."""
    layers = [row for shape in SHAPES for chip in CHIPS for row in _layers(shape, chip)]
    shape = next(one for one in SHAPES if one.name == _SHOWN[0])
    chip = next(one for one in CHIPS if one.name == _SHOWN[1])
    kernels = [_kernel_row(one, chip) for one in kernels_of(_case(shape, f"again, {_WINDOWS} windows"), chip)]
    adapted = [row for one in SHAPES if one.name in _ADAPTED for row in _adapted(one, chip)]
    return {"layers": layers, "kernels": kernels, "adapted": adapted, "peaks": [_peaks(one) for one in SHAPES]}


def _adapted(shape: Shape, chip: Chip) -> Iterator[dict[str, Any]]:
    """A layer whose tables are trained, and one whose adapters are."""
    for rank in (0, _RANK):
        for plan in _OF_BYTES[:2]:
            case = _case(replace(shape, rank=rank), plan)
            kernels = kernels_of(case, chip)
            seconds, num_bytes, _ = total(kernels, chip)
            yield {
                "shape": shape.name,
                "rank": rank,
                "plan": plan,
                "milliseconds": _rounded(seconds * 1e3),
                "gigabytes": _rounded(num_bytes / 1e9),
                "launches": sum(one.slots > 0 for one in kernels),
                "peak_megabytes": _rounded(bytes_of_kernels(case, chip.target).peak / 1e6),
            }


def _peaks(shape: Shape) -> dict[str, Any]:
    """Of one layer by each plan, and of the grouped layer; what is allocated does not depend on the device."""
    found = {plan: bytes_of_kernels(_case(shape, plan), CHIPS[0].target) for plan in _OF_BYTES}
    found[_PEER] = bytes_of_grouped(_case(shape, "kept, 1 window"))
    return {"shape": shape.name, "megabytes": {name: _in_megabytes(one) for name, one in found.items()}}


def _in_megabytes(counted: StepBytes) -> dict[str, float]:
    return {"between": _rounded(counted.between / 1e6), "peak": _rounded(counted.peak / 1e6)}


def _case(shape: Shape, plan: str) -> Any:
    windows, saves_products, is_deterministic = (_PLANS | _SMALLER)[plan]
    rows = -(-shape.rows // windows)
    return shape.case(rows, saves_products=saves_products, is_deterministic=is_deterministic)


def _layers(shape: Shape, chip: Chip) -> Iterator[dict[str, Any]]:
    peers = {name: total(peer_kernels(name, shape, chip), chip) for name in PEERS}
    for plan, (windows, saves_products, _) in _PLANS.items():
        kernels = kernels_of(_case(shape, plan), chip)
        seconds, num_bytes, distinct = total(kernels, chip)
        strict, handed = least_bytes(shape, saves_products=saves_products)
        num_launches = sum(one.slots > 0 for one in kernels)
        yield {
            "shape": shape.name,
            "device": chip.name,
            "plan": plan,
            "milliseconds": _rounded(seconds * 1e3),
            "gigabytes": _rounded(num_bytes / 1e9),
            "distinct_gigabytes": _rounded(distinct / 1e9),
            "over_strict": _rounded(num_bytes / strict),
            "over_handed": _rounded(num_bytes / handed),
            "launches": num_launches,
            "most_launches": 14 + 2 * windows,
            "over_sonicmoe": _rounded(seconds / peers["sonicmoe"][0]),
            "peer_milliseconds": {name: _rounded(one[0] * 1e3) for name, one in peers.items()},
            "peer_gigabytes": {name: _rounded(one[1] / 1e9) for name, one in peers.items()},
        }


def _kernel_row(kernel: Kernel, chip: Chip) -> dict[str, Any]:
    return {
        "kernel": kernel.name,
        "gigaflops": _rounded(kernel.flops / 1e9),
        "megabytes": _rounded(kernel.num_bytes / 1e6),
        "programs": kernel.programs,
        "slots": kernel.slots,
        "filled": _rounded(kernel.filled),
        "microseconds": _rounded(kernel.seconds(chip) * 1e6),
        "bound": kernel.bound(chip),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _written(found: dict[str, Any]) -> str:
    parts = [f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]" for name, rows in found.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def filled(text: str, recorded: dict[str, Any]) -> str:
    """A page with each block named in it written anew."""
    makers = {
        "kernels": _kernels_table,
        "layers": _layers_table,
        "peers": _peers_table,
        "misses": _misses,
        "adapted": _adapted_table,
        "peaks": _peaks_table,
    }
    return with_blocks(text, "roofline", lambda name: makers[name](recorded))


def _markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _kernels_table(recorded: dict[str, Any]) -> str:
    head = ["kernel", "launches", "GFLOP", "MB", "programs", "at once", "filled", "us", "bound by"]
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in recorded["kernels"]:
        rows.setdefault(row["kernel"].replace("_", " "), []).append(row)
    keys = ("gigaflops", "megabytes", "programs", "slots", "filled", "microseconds", "bound")
    return _markdown(head, [[name, len(ones), *(_shown(ones[0][key]) for key in keys)] for name, ones in rows.items()])


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _layers_table(recorded: dict[str, Any]) -> str:
    """One line for a shape and plan: each device's ratio of time, and of bytes, in one cell."""
    head = ["layer", "plan", "launches", *(f"{chip.name}: time, bytes" for chip in CHIPS)]
    lines = []
    for shape in SHAPES:
        for plan in _PLANS:
            here = [row for row in recorded["layers"] if (row["shape"], row["plan"]) == (shape.name, plan)]
            cells = [f"{row['over_sonicmoe']:.2f}, {row['over_handed']:.2f}" for row in here]
            lines.append([shape.name, plan, f"{here[0]['launches']} of {here[0]['most_launches']}", *cells])
    return _markdown(head, lines)


def _peers_table(recorded: dict[str, Any]) -> str:
    head = ["layer", "kept, 1 window", *PEERS]
    lines = []
    for row in recorded["layers"]:
        if row["device"] == "H100" and row["plan"] == "kept, 1 window":
            pairs = [(row["peer_gigabytes"][name], row["peer_milliseconds"][name]) for name in PEERS]
            pairs.insert(0, (row["gigabytes"], row["milliseconds"]))
            lines.append([row["shape"], *(f"{size:g} GB, {time:g} ms" for size, time in pairs)])
    return _markdown(head, lines)


def _adapted_table(recorded: dict[str, Any]) -> str:
    lines = []
    for row in recorded["adapted"]:
        trained = f"adapters of rank {row['rank']}" if row["rank"] else "tables"
        cells = (f"{row[key]:g}" for key in ("milliseconds", "gigabytes", "launches", "peak_megabytes"))
        lines.append([row["shape"], trained, row["plan"], *cells])
    return _markdown(["layer", "trained", "plan", "ms", "GB", "launches", "peak, MB"], lines)


def _peaks_table(recorded: dict[str, Any]) -> str:
    """Peak, bytes between forward and backward, and the ratio of peaks to the grouped layer's with a checkpoint."""
    lines = []
    for row in recorded["peaks"]:
        found = row["megabytes"]
        of_peer = found[_PEER]["peak"]
        ours = ((found[plan], found[plan]["peak"] / of_peer) for plan in _OF_BYTES)
        cells = [f"{one['peak']:g} ({ratio:.2f}), {one['between']:g}" for one, ratio in ours]
        lines.append([row["shape"], f"{of_peer:g}, {found[_PEER]['between']:g}", *cells])
    return _markdown(["layer", _PEER, *_OF_BYTES], lines)


def _misses(recorded: dict[str, Any]) -> str:
    rows = recorded["layers"]
    lines = []
    for plan in _PLANS:
        here = [row for row in rows if row["plan"] == plan]
        slow = sum(row["over_sonicmoe"] > TIME_TARGET for row in here)
        wide = sum(row["over_handed"] > BYTES_TARGET for row in here)
        many = sum(row["launches"] > row["most_launches"] for row in here)
        lines.append([plan, len(here), slow, wide, many])
    return _markdown(["plan", "layers and devices", "time missed", "bytes missed", "launches missed"], lines)
