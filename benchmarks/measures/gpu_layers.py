"""What do the GPU kernels take on this device, layer by layer, beside the roofline and torch's grouped products?

Each of the roofline's layers with random tables and nearly even routing: forward and backward by several plans of the
kernels, in tiles that were timed, and by the grouped layer of model libraries, eager and under torch.compile, whose
outputs and gradients are compared with; where ScatterMoE is installed, in its kernels too. Times are of steps that
follow each other. Peaks are bytes beyond input, parameters, output and gradients, of allocator events. One plan's
launches are also timed one by one. The device's own rates stand beside those of its data sheet, which the roofline
takes.

    python -m benchmarks measure gpu_layers --shapes "Qwen3-30B-A3B,MoEBlaze 2" --json-to layers.json
    python -m benchmarks measure gpu_layers --warms    # only compiles the kernels: in several processes at a time
    python -m benchmarks measure gpu_layers --page     # writes results/gpu_tables.md from results/gpu_layers.json
"""

from __future__ import annotations

import copy
import importlib.util
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kernels import TABLES, Case, step_of
from benchmarks.gpu_peaks import grouped_experts
from benchmarks.machine import matmul_rate, seconds_of, version_of
from benchmarks.measures import RESULTS, Answer, device_here
from benchmarks.peers import find_peer
from benchmarks.roofline import CHIPS, SHAPES, Chip, Kernel, Shape, kernels_of, total
from benchmarks.summaries import with_blocks
from memfine_fx.memory.measure import trace_memory
from memfine_fx.memory.timing import seconds_of as seconds_in_a_queue

__all__ = ["FILE", "PLANS", "filled", "measure", "name_of", "rounded", "rows_of", "written"]

FILE = RESULTS / "gpu_layers.json"
"""A list of sessions on devices, oldest first, each as `--json-to` writes it, with a note on what was run."""
PLANS = {"kept, 1 window": (1, True), "kept, 4 windows": (4, True), "again, 4 windows": (4, False)}
"""Windows, and whether products are kept."""
_BY_LAUNCH = "kept, 1 window"  # also timed launch by launch
_COPIED = 1 << 30  # bytes
_REPEATS, _STEPS = 5, 4  # steps follow each other, as the host goes ahead of a device in training
_HAS_DATA_SHEETS = importlib.util.find_spec("pydantic") is not None
_HAS_SCATTERMOE = importlib.util.find_spec("scattermoe") is not None
_COMPARED = 64  # experts or tokens at a time: tables in fp32 would not fit beside their gradients


def measure(shapes: str | None = None, json_to: str | None = None, warms: bool = False, page: bool = False) -> Answer:
    if page:
        TABLES.write_text(filled(TABLES.read_text(), json.loads(FILE.read_text())))
        return Answer([f"{TABLES.name} written"])
    device, chosen = device_here(), None if shapes is None else shapes.split(",")
    known = [shape for shape in SHAPES if chosen is None or shape.name in chosen]
    rates = {} if warms else _rates(device)
    rows: list[dict[str, Any]] = []
    for shape in known:
        try:
            for row in rows_of(shape, device, warms=warms):
                rows.append(row)
                print(_said(row), file=sys.stderr, flush=True)
                if json_to is not None:  # after every row: the machine may go before the last
                    Path(json_to).write_text(written({**name_of(device), **rates, "rows": rows}))
        except (torch.OutOfMemoryError, ValueError) as error:  # one window may have more entries than 32 bits count
            print(f"{shape.name}: {error}", file=sys.stderr, flush=True)
    return Answer([f"{len(rows)} rows"])


def name_of(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "torch": torch.__version__, "triton": version_of("triton")}


def _rates(device: torch.device) -> dict[str, float]:
    """Of a large product in bf16 and of a copy, read and written bytes counted."""
    size = _COPIED if device.type == "cuda" else 1 << 20
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_in_a_queue([lambda: target.copy_(source)], device)
    flops = matmul_rate(torch.bfloat16, device)
    return {"tflops": round(flops / 1e12, 1), "copied_gb_per_s": round(2 * size / seconds / 1e9)}


@dataclass(frozen=True)
class _Layer:
    """Inputs and experts of a shape."""

    experts: Any
    hidden: Tensor
    index: Tensor
    weight: Tensor
    grad: Tensor

    @staticmethod
    def of(case: Case, device: torch.device) -> _Layer:
        generator = torch.Generator(device).manual_seed(0)
        with torch.device(device):
            experts = grouped_experts(case)

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, device=device, generator=generator)

        dtype, scores = getattr(torch, case.dtype), numbers(case.tokens, case.experts)
        weight, index = scores.softmax(-1).topk(case.top_k, dim=-1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(dtype)
        hidden, grad = (numbers(case.tokens, case.hidden).to(dtype) for _ in range(2))
        return _Layer(experts, hidden.requires_grad_(), index, weight.requires_grad_(), grad)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.weight, *self.experts.parameters()]

    @property
    def params(self) -> list[Tensor]:
        """In the order of the kernels' layouts: tables, then biases."""
        return sorted(self.experts.parameters(), key=lambda one: -one.ndim)

    def gradients(self) -> list[Tensor]:
        return [one.grad for one in self.leaves if one.grad is not None]

    def step(self, forward: Callable[..., Tensor]) -> Tensor:
        """The output; gradients are those of the leaves, made anew."""
        for one in self.leaves:
            one.grad = None
        out = forward(self.hidden, self.index, self.weight)
        out.backward(self.grad)
        return out.detach()


def rows_of(shape: Shape, device: torch.device, *, warms: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each plan and each grouped layer; none of the latter where it only warms up."""
    case = shape.case(shape.rows, saves_products=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    chip = next((one for one in CHIPS if one.name in name), CHIPS[0])
    layer = _Layer.of(case, device)
    tiles = _tiles(layer, case, device)
    expected: list[Tensor] | None = None
    if not warms:
        forwards = {"grouped": layer.experts, "grouped, compiled": torch.compile(layer.experts)}
        for name, forward in forwards.items():
            row, found = _row(layer, forward, device, expected)
            expected = expected or found
            yield {"shape": shape.name, "plan": name, **row}
    for plan, (windows, saves_products) in PLANS.items():
        rows = -(-shape.rows // windows)
        planned = shape.case(rows, saves_products=saves_products)
        kernels = kernels_of(planned, chip)
        row, _ = _row(layer, _in_kernels(layer, planned, tiles), device, expected, is_once=warms)
        told = {"shape": shape.name, "plan": plan, **row}
        if _HAS_DATA_SHEETS:
            told["predicted_ms"] = rounded(1e3 * total(kernels, chip)[0])
        if plan == _BY_LAUNCH and not warms:
            told["kernels"] = _by_launch(layer, planned, tiles, kernels, chip, device)
        yield told
    if _HAS_SCATTERMOE and not warms and case.layout == "halves" and not case.has_bias:
        row, _ = _row(layer, _in_scattermoe(layer, case), device, expected)
        yield {"shape": shape.name, "plan": "scattermoe", **row}


def _options(case: Case, tiles: Any) -> Any:
    from memfine_fx.kernels.layer import LayerOptions

    return LayerOptions(
        case.rows_per_window, case.layout, case.activation, case.has_bias, case.saves_products, tiles=tiles
    )


def _tiles(layer: _Layer, case: Case, device: torch.device) -> Any:
    """Timed ones; in the interpreter those that stand in the code."""
    from memfine_fx.kernels.tuning import kind_of, tune

    if device.type != "cuda":
        return None
    kind = kind_of(case.layout, case.activation, case.has_bias, "ieee", layer.hidden, layer.params, case.top_k)
    return tune(kind, device)


def _in_kernels(layer: _Layer, case: Case, tiles: Any) -> Callable[..., Tensor]:
    from memfine_fx.kernels.swiglu import swiglu_experts

    options = _options(case, tiles)
    return lambda hidden, index, weight: swiglu_experts(hidden, index, weight, layer.params, options)


def _in_scattermoe(layer: _Layer, case: Case) -> Callable[..., Tensor]:
    """The same experts in that project's kernels."""
    block = SimpleNamespace(experts=copy.copy(layer.experts))
    run = find_peer("layer", "scattermoe").wrap(block, SimpleNamespace(experts=case.experts, top_k=case.top_k))
    return run.experts.forward


def _row(
    layer: _Layer,
    forward: Callable[..., Tensor],
    device: torch.device,
    expected: Sequence[Tensor] | None,
    *,
    is_once: bool = False,
) -> tuple[dict[str, Any], list[Tensor]]:
    """(time, bytes, distance to what is expected; output and gradients)."""

    def step() -> Tensor:
        return layer.step(forward)

    out = step()
    found = [out, *layer.gradients()]
    if is_once:
        return {}, found
    error = None if expected is None else max(map(_distance, found, expected))
    seconds = [seconds_of(lambda: [step() for _ in range(_STEPS)], device) / _STEPS for _ in range(_REPEATS)]
    for one in layer.leaves:
        one.grad = None
    trace = trace_memory(step, device, beyond=layer.gradients)
    row = {
        "ms": rounded(1e3 * statistics.median(seconds)),
        "peak_mb": rounded((trace.peak_bytes - out.nbytes) / 1e6),
        "error": None if error is None else float(f"{error:.1e}"),
    }
    return row, found


def _distance(found: Tensor, expected: Tensor) -> float:
    """Relative, of norms."""
    squared = torch.zeros(2, device=found.device)
    for one, other in zip(found.split(_COMPARED), expected.split(_COMPARED), strict=True):
        squared += torch.stack([(one - other).float().square().sum(), other.float().square().sum()])
    return float((squared[0] / squared[1]).sqrt())


def _by_launch(
    layer: _Layer, case: Case, tiles: Any, kernels: Sequence[Kernel], chip: Chip, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Time of each kernel's launches beside the prediction; the down projection's are of both passes."""
    from memfine_fx.kernels.launches import Launch, recording
    from memfine_fx.kernels.layer import run_backward, run_forward
    from memfine_fx.kernels.sorting import sort_assignments

    options, params = _options(case, tiles), [one.detach() for one in layer.params]
    routing = sort_assignments(layer.index, case.experts)
    hidden, weight = layer.hidden.detach(), layer.weight.detach().flatten()
    with recording() as launches:
        _, kept = run_forward(hidden, weight, routing, params, options)
        run_backward(layer.grad, hidden, weight, routing, params, kept, options, [True] * (2 + len(params)))
    by_step: dict[str, list[Launch]] = defaultdict(list)
    for launch in launches:
        by_step[step_of(launch)].append(launch)
    found: dict[str, dict[str, Any]] = {}
    for step, same in by_step.items():
        seconds = sum(seconds_in_a_queue([one.run], device) for one in same)
        counted = [kernel for kernel in kernels if kernel.name == step]
        flops = sum(kernel.flops for kernel in counted)
        tile = [same[0].constants.get(name) for name in ("TILE_ROWS", "TILE_COLUMNS", "TILE_DEPTH")]
        found[step] = {
            "us": rounded(1e6 * seconds),
            **({"predicted_us": rounded(1e6 * sum(one.seconds(chip) for one in counted))} if _HAS_DATA_SHEETS else {}),
            "tflops": rounded(flops / seconds / 1e12),
            "tile": "x".join(map(str, tile))
            + f", {same[0].num_warps} warps, {same[0].num_stages} stages"
            + ", by descriptor" * same[0].constants.get("BY_DESCRIPTOR", False),
        }
    return found


def rounded(number: float) -> float:
    return float(f"{number:.4g}")


def _said(row: dict[str, Any]) -> str:
    told = ", ".join(f"{name} {value}" for name, value in row.items() if name not in ("shape", "plan", "kernels"))
    kernels = [f"\n    {step}: {one}" for step, one in row.get("kernels", {}).items()]
    return f"{row['shape']}, {row['plan']}: {told}" + "".join(kernels)


def written(found: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    lines = ",\n  ".join(json.dumps(row) for row in found["rows"])
    head = json.dumps({name: value for name, value in found.items() if name != "rows"}, indent=1).removesuffix("\n}")
    return f'{head},\n "rows": [\n  {lines}\n ]\n}}\n'


def filled(text: str, sessions: Sequence[dict[str, Any]]) -> str:
    """A page with the tables of each layer's last session on the last device in their place."""
    there = [session for session in sessions if session["device"] == sessions[-1]["device"]]
    return with_blocks(text, "gpu-layers", lambda _: _markdown(there))


def _markdown(sessions: Sequence[dict[str, Any]]) -> str:
    """Layers by plan, with time and bytes over those of the compiled grouped layer; then one plan's kernels."""
    last = {row["shape"]: session for session in sessions for row in session["rows"]}
    rows = [row for shape, session in last.items() for row in session["rows"] if row["shape"] == shape]
    compiled = {row["shape"]: row for row in rows if row["plan"] == "grouped, compiled"}
    lines = [f"{shape}: {session['device']}. {session['note']}" for shape, session in last.items()]
    lines = [*"\n\n".join(lines).splitlines(), ""]
    lines += ["| layer | plan | ms | over compiled | MB | over compiled | roofline ms |", f"|{' --- |' * 7}"]
    for row in rows:
        peer = compiled.get(row["shape"])
        shares = [f"{row[name] / peer[name]:.2f}" if peer else "-" for name in ("ms", "peak_mb")]
        predicted = f"{row['predicted_ms']:.2f}" if "predicted_ms" in row else ""
        cells = [row["shape"], row["plan"], f"{row['ms']:.2f}", shares[0], f"{row['peak_mb']:.0f}", shares[1]]
        cells.append(predicted)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| layer | kernel | us | roofline us | TFLOP/s | tile |", f"|{' --- |' * 6}"]
    for row in rows:
        for step, one in row.get("kernels", {}).items():
            predicted = f"{one['predicted_us']:.0f}" if "predicted_us" in one else ""
            cells = [f"{one['us']:.0f}", predicted, f"{one['tflops']:.0f}", one["tile"]]
            lines.append(f"| {row['shape']} | {step.replace('_', ' ')} | {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)
