"""Run the demo: the same training three ways, then one table, one chart and a verdict.

1. Train in each mode in a process of its own, with an empty compile cache, so that compile times are cold.
2. Compare the losses step by step with those of plain ``torch.compile``.
3. Write ``memfine_demo.svg`` and ``memfine_demo.json``, print the table, and return 0 if the losses agree.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import memfine_fx
from memfine_fx.demo.training import MODES, QUICK_SIZES, DemoSizes, ModeResult
from memfine_fx.errors import MissingPackage
from memfine_fx.progress import stages
from memfine_fx.report.chart import Axis, Chart, Line, Mark, Note, moment, write_charts
from memfine_fx.units import readable_bytes

# fp32 rounding differs between the modes' kernels, and AdamW's division feeds it back into every later step.
RELATIVE_TOLERANCE = 1e-3
_ERROR_LINES = 15


class DemoFailed(RuntimeError):
    """A failure of a training process without a result; the message holds the end of its log."""


def run_demo(*, steps: int = 8, layers: int = 4, out: str = ".", quick: bool = False) -> int:
    """Train, compare and draw; return an exit status: 0 when every mode ran and the losses agree."""
    if find_spec("transformers") is None:
        print(f"memfine demo: {MissingPackage('transformers', 'hf', 'the demo')}", file=sys.stderr)
        return 2
    if steps < 2:
        print(f"memfine demo: steps is {steps}, but the first step compiles; use 2 or more", file=sys.stderr)
        return 2
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = QUICK_SIZES if quick else DemoSizes(layers=layers)
    results, failures = _train_every_mode(sizes, steps)
    for failure in failures:
        print(f"\n{failure}", file=sys.stderr)
    if not results:
        return 1
    title = "Memory over one training step of the same MoE model"
    write_charts(folder / "memfine_demo.svg", [[(title, memory_chart(results))]], width=860)
    difference = largest_relative_difference(results)
    agrees = not failures and difference <= RELATIVE_TOLERANCE
    document = {
        "torch": torch.__version__,
        "memfine_fx": memfine_fx.__version__,
        "sizes": asdict(sizes),
        "largest_relative_loss_difference": difference,
        "verdict": "PASS" if agrees else "FAIL",
        "modes": [asdict(result) for result in results],
    }
    (folder / "memfine_demo.json").write_text(json.dumps(document, indent=1))
    print(format_table(results))
    print(f"\n{verdict_line(difference, agrees, bool(failures))}")
    print(f"wrote {folder / 'memfine_demo.svg'} and {folder / 'memfine_demo.json'}")
    return 0 if agrees else 1


def largest_relative_difference(results: Sequence[ModeResult]) -> float:
    """Return the largest relative difference of any step's loss from the first mode's."""
    reference = results[0].losses
    return max(
        abs(loss - expected) / abs(expected)
        for result in results
        for loss, expected in zip(result.losses, reference, strict=True)
    )


def verdict_line(difference: float, agrees: bool, has_failures: bool) -> str:
    word = "PASS" if agrees else "FAIL"
    if has_failures:
        return f"{word}: not every mode finished"
    return f"{word}: losses differ by at most {difference:.1e} relative (tolerance {RELATIVE_TOLERANCE:.0e})"


def format_table(results: Sequence[ModeResult]) -> str:
    """Return a table of peak, times and losses, one column per mode."""
    rows: list[tuple[str, ...]] = [("", *(result.mode for result in results))]
    rows.append(("peak activations (MiB)", *(f"{result.peak_bytes / MIB:.1f}" for result in results)))
    rows.append(("median step (s)", *(f"{result.median_step_seconds:.3f}" for result in results)))
    rows.append(("compile (s)", *(f"{result.compile_seconds:.1f}" for result in results)))
    for step in range(len(results[0].losses)):
        rows.append((f"loss, step {step + 1}", *(f"{result.losses[step]:.6f}" for result in results)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def _train_every_mode(sizes: DemoSizes, steps: int) -> tuple[list[ModeResult], list[DemoFailed]]:
    results: list[ModeResult] = []
    failures: list[DemoFailed] = []
    with tempfile.TemporaryDirectory(prefix="memfine_demo_") as scratch:
        for number, mode in enumerate(MODES, start=1):
            stages.info("way %d of %d, %s: compiling in a process of its own", number, len(MODES), mode)
            try:
                results.append(_train_one_mode(mode, sizes, steps, Path(scratch)))
            except DemoFailed as failure:
                failures.append(failure)
    return results, failures


def _train_one_mode(mode: str, sizes: DemoSizes, steps: int, scratch: Path) -> ModeResult:
    result_file, log_file = scratch / f"{mode}.json", scratch / f"{mode}.log"
    command = [sys.executable, "-m", "memfine_fx.demo.training", "--mode", mode]
    command += ["--json", str(result_file), "--steps", str(steps), "--sizes", json.dumps(asdict(sizes))]
    with (
        log_file.open("w") as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=_environment(scratch / f"{mode}_cache"),
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            _log_event(json.loads(line), mode, steps)
    if process.returncode != 0 or not result_file.exists():
        log_tail = "\n".join(log_file.read_text().splitlines()[-_ERROR_LINES:])
        raise DemoFailed(f"mode {mode!r} ended with exit status {process.returncode}:\n{log_tail}")
    return replace(ModeResult.from_json(result_file.read_text()), mode=mode)


def _environment(cache: Path) -> dict[str, str]:
    root = str(Path(memfine_fx.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def _log_event(event: dict[str, Any], mode: str, steps: int) -> None:
    if event["event"] == "step":
        stages.info("%s: step %d of %d, loss %.4f", mode, event["step"], steps, event["loss"])
    else:
        stages.info("%s: peak %s", mode, readable_bytes(event["peak_bytes"]))


MIB = 2**20

_LABELS = {
    "compile": "torch.compile",
    "checkpoint": "torch.compile + gradient checkpointing",
    "memfine": "memfine_fx.optimize",
}
_COLOURS = {"compile": "soft", "checkpoint": "series4", "memfine": "accent"}


def memory_chart(results: Sequence[ModeResult]) -> Chart:
    """Return live memory over the step in every mode.

    Every mode takes its own time, so forward and backward are each stretched to the same width: the
    boundary between them is one line for all curves.
    """
    top = 1.1 * max(1e-3, *(result.peak_bytes / MIB for result in results))
    marks: list[Mark] = [moment(1), Note(0.5, top, "forward", "middle"), Note(1.5, top, "backward", "middle")]
    for result in results:
        points = [(time, live / MIB) for time, live in zip(stretch_time(result), result.live_bytes, strict=True)]
        label = f"{_LABELS[result.mode]}: peak {result.peak_bytes / MIB:.0f} MiB"
        colour = _COLOURS[result.mode]
        marks.append(Line(points, label, colour, "steps"))
        marks.append(Line([max(points, key=lambda point: point[1])], colour=colour, form="dots"))
    ticks = [(0, "step begins"), (1, "backward begins"), (2, "gradients ready")]
    y = Axis("live memory beyond parameters, gradients and optimizer state, MiB", 0, top)
    return Chart(Axis("forward and backward, each on its own clock", 0, 2, ticks=ticks), y, marks, height=320)


def stretch_time(result: ModeResult) -> list[float]:
    """Return event times with the forward on [0, 1] and the backward on [1, 2]."""
    boundary = max(result.backward_begins_us, 1e-9)
    length = max(result.times_us[-1] - boundary, 1e-9)
    return [
        max(0.0, time / boundary) if time < boundary else 1 + (time - boundary) / length for time in result.times_us
    ]
