"""What does a whole model's step take on this device: eager, under torch.compile, and chunked, in the kernels or not?

Layers of a published model with random weights in bf16, or in fp32 under autocast, on the device alone: time of steps
that follow each other, the peak beyond parameters beside what the report predicts, seconds until the second step is
done, and how far outputs and gradients are from the same model's in fp32. Ways to train are processes of their own,
four of which compile together and are measured one after the other.

    python -m benchmarks measure gpu_model --layers 4 --json-to model.json
    python -m benchmarks measure gpu_model --page   # writes the table of docs/gpu.md from results/gpu_model.json
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import memfine_fx
from benchmarks.gpu_kernels import PAGE
from benchmarks.known_models import known_config, with_adapters
from benchmarks.machine import seconds_of, synchronize
from benchmarks.measures import RESULTS, Answer, device_here
from benchmarks.measures.gpu_layers import name_of, rounded, written
from benchmarks.summaries import with_blocks
from memfine_fx.memory.measure import trace_memory

__all__ = ["FILE", "WAYS", "Sizes", "Way", "filled", "measure", "work"]

FILE = RESULTS / "gpu_model.json"
"""A list of sessions on devices, oldest first, each as `--json-to` writes it, with a note on what was run."""
_REPEATS, _STEPS = 5, 4
_COMPARED = 1 << 20  # entries of each gradient, from all over it
_AT_ONCE = 4  # processes that compile beside each other: all have a step's memory then
_LONGEST, _NAME = 12, 80  # kernels told by name, and how much of it: templates differ behind that
_OF_EXPERTS = re.compile(r"_(narrow|gate_up|down(_backward)?|weight_gradient|combine|count|scan|offsets|place)_kernel")
_TOLD = 20  # lines of a failure
_READY, _GO = "ready", "go"


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    Args:
        backend: of torch.compile; eager without.
        budget: of memfine.
        has_kernels: whether regions run in the GPU kernels; None leaves that to the project.
        has_checkpoints: whether each layer is checkpointed, by transformers.
        is_reference: in fp32 and not measured: what the others are compared with.
    """

    name: str
    backend: str | None = None
    budget: str | None = None
    has_kernels: bool | None = False
    has_checkpoints: bool = False
    is_reference: bool = False


_REFERENCE = Way("fp32", is_reference=True)
WAYS = {
    way.name: way
    for way in (
        Way("eager"),
        Way("compile", "inductor"),
        Way("compile, checkpoints", "inductor", has_checkpoints=True),
        Way("memfine", "memfine", has_kernels=None),
        Way("memfine, bodies", "memfine"),
        Way("memfine, kernels", "memfine", has_kernels=True),
        Way("memfine, kernels, checkpoints", "memfine", has_kernels=True, has_checkpoints=True),
        Way("memfine, kernels, least", "memfine", "least", has_kernels=True),
    )
}


@dataclass(frozen=True)
class Sizes:
    """Of a model and a batch.

    Args:
        model: in `benchmarks.known_models`.
        is_autocast: whether weights are in fp32 and steps under autocast, as trainers run them; else they are in bf16.
        rank: of adapters on the experts and attention's projections, by PEFT, which alone are trained; 0 for none.
        is_small: whether it is made small in every direction, to try this out.
    """

    model: str = "Qwen3-30B-A3B"
    layers: int = 4
    batch: int = 2
    sequence: int = 4096
    is_autocast: bool = False
    rank: int = 0
    is_small: bool = False


_SMALL = {
    "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "vocab_size": 256, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def measure(
    model: str = Sizes.model,
    layers: int = Sizes.layers,
    batch: int = Sizes.batch,
    sequence: int = Sizes.sequence,
    ways: str = ";".join(WAYS),
    json_to: str | None = None,
    is_autocast: bool = False,
    rank: int = 0,
    is_small: bool = False,
    page: bool = False,
) -> Answer:
    if page:
        PAGE.write_text(filled(PAGE.read_text(), json.loads(FILE.read_text())))
        return Answer([f"{PAGE.name} written"])
    sizes = Sizes(model, layers, batch, sequence, is_autocast, rank, is_small)
    told = f"{model}, {layers} layers, {batch} x {sequence} tokens{', fp32 under autocast' * is_autocast}"
    told += f", adapters of rank {rank}" * (rank > 0)
    rows: list[dict[str, Any]] = []
    for row in rows_of(sizes, [WAYS[name] for name in ways.split(";")]):
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if json_to is not None:  # after every row: the machine may go before the last
            Path(json_to).write_text(written({**name_of(device_here()), "model": told, "rows": rows}))
    return Answer([f"{len(rows)} rows"])


def rows_of(sizes: Sizes, ways: Sequence[Way]) -> Iterator[dict[str, Any]]:
    """A row for each way, with the last lines of its error under "failed" in place of figures where it did."""
    with tempfile.TemporaryDirectory() as folder:
        reference = str(Path(folder) / "reference.pt")
        # The reference alone: a step in fp32 may leave no memory for others.
        for together in ([_REFERENCE], *(ways[first : first + _AT_ONCE] for first in range(0, len(ways), _AT_ONCE))):
            with contextlib.ExitStack() as stack:
                started = [stack.enter_context(_Process(sizes, way, reference)) for way in together]
                for process in started:
                    process.wait_until_ready()
                for process in started:
                    row = process.row()
                    if process.way is not _REFERENCE or "failed" in row:
                        yield {"way": process.way.name, **row}


class _Process:
    """One way's: it says that it has compiled, waits for its turn, and answers by a row."""

    def __init__(self, sizes: Sizes, way: Way, reference: str) -> None:
        self.way = way
        call = f"from benchmarks.measures.gpu_model import Sizes, Way, work; work({sizes!r}, {way!r}, {reference!r})"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", call],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=_environment(way),
        )  # fmt: skip
        self._is_ready = False

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *of_error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        self._is_ready = any(line.strip() == _READY for line in iter(self._process.stdout.readline, ""))

    def row(self) -> dict[str, Any]:
        if self._is_ready:
            out, _ = self._process.communicate(_GO + "\n")
            lines = [line for line in out.splitlines() if line.startswith("{")]
            if lines:
                return dict(json.loads(lines[-1]))
        self._process.wait()
        self._errors.seek(0)
        return {"failed": self._errors.read().strip().splitlines()[-_TOLD:]}


def _environment(way: Way) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if name != "MEMFINE_GPU_KERNELS"}
    return others if way.has_kernels is None else others | {"MEMFINE_GPU_KERNELS": str(int(way.has_kernels))}


def work(sizes: Sizes, way: Way, reference: str) -> None:
    """What a process does: two steps, then, when it is told to, the measured ones; a row as one line of JSON.

    Args:
        reference: file of samples of fp32's loss and gradients, written by the reference.
    """
    device = device_here()
    model = _model(sizes, way, device)
    ids = torch.randint(0, model.config.vocab_size, (sizes.batch, sizes.sequence), device=device)
    forward = _compiled(model, way)
    is_autocast = sizes.is_autocast and not way.is_reference

    def step() -> Tensor:
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=is_autocast):
            loss: Tensor = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    started = time.perf_counter()
    for _ in range(1 if way.is_reference else 2):  # the second step knows what the first kept
        loss = step()
    synchronize(device)
    first_seconds = time.perf_counter() - started
    found = _samples(loss, model)
    model.zero_grad()
    if way.is_reference:
        torch.save(found, reference)
        del model, forward
    if device.type == "cuda":
        torch.cuda.empty_cache()
    print(f"\n{_READY}", flush=True)
    if input() != _GO or way.is_reference:
        print("{}", flush=True)
        return
    errors = {name: _distance(one, found[name]) for name, one in torch.load(reference).items()}
    step()
    seconds = [seconds_of(lambda: [step() for _ in range(_STEPS)], device) / _STEPS for _ in range(_REPEATS)]
    model.zero_grad()
    trace = trace_memory(step, device)
    row = {
        "ms": rounded(1e3 * statistics.median(seconds)),
        "peak_gb": rounded(trace.peak_bytes / 1e9),
        "loss_error": rounded(errors.pop("loss")),
        "worst_gradient_error": rounded(max(errors.values())),
        "median_gradient_error": rounded(statistics.median(errors.values())),
        "two_steps_s": rounded(first_seconds),
    }
    if way.backend == "memfine":
        report = memfine_fx.report(forward)
        row["predicted_gb"] = rounded(report.step.peak.num_bytes / 1e9)
        row["runs_in"] = sorted({region.runs_in for region in report.regions if region.runs_in})
    if device.type == "cuda":
        row |= _on_device(step, device)
    print(json.dumps(row), flush=True)


def _model(sizes: Sizes, way: Way, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    config = known_config(sizes.model)
    config.num_hidden_layers = sizes.layers
    if sizes.is_small:
        for name, value in _SMALL.items():
            setattr(config, name, value)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if sizes.rank:
            model = with_adapters(model, sizes.rank)
    if way.has_checkpoints:
        model.gradient_checkpointing_enable()
    return (model.float() if way.is_reference or sizes.is_autocast else model).train()


def _compiled(model: Any, way: Way) -> Any:
    if way.backend is None:
        return model
    if way.backend == "inductor":
        return torch.compile(model)
    return memfine_fx.optimize(model, memory_budget=way.budget)


def _samples(loss: Tensor, model: Any) -> dict[str, Tensor]:
    """The loss, and entries of every gradient."""
    found = {"loss": loss.reshape(1).float().cpu()}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:  # frozen
            continue
        flat = parameter.grad.flatten()
        found[name] = flat[:: -(-flat.shape[0] // _COMPARED)].float().cpu()
    return found


def _distance(expected: Tensor, found: Tensor) -> float:
    """Relative, of norms."""
    return float((found - expected).norm() / expected.norm())


def _on_device(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step's kernels, of this project's for experts, how many these are, and the longest by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize(device)
    times: dict[str, float] = defaultdict(float)
    launches: list[float] = []
    for event in profiler.events() or ():
        times[event.name[:_NAME]] += event.device_time
        if _OF_EXPERTS.match(event.name):
            launches.append(event.device_time)
    longest = sorted(times.items(), key=lambda item: -item[1])[:_LONGEST]
    return {
        "device_ms": rounded(sum(times.values()) / 1e3),
        "own_ms": rounded(sum(launches) / 1e3),
        "own_launches": len(launches),
        "longest_ms": {name: rounded(one / 1e3) for name, one in longest},
    }


def filled(text: str, sessions: Sequence[dict[str, Any]]) -> str:
    """A page with one table of the newest session of each device and model in its place."""
    return with_blocks(text, "gpu-model", lambda _: _markdown(sessions))


def _markdown(sessions: Sequence[dict[str, Any]]) -> str:
    """Ways by memory and time as shares of torch.compile's in the same session.

    Ways without memfine_fx do not depend on its commit, so an older session's rows of those are shown too.
    """
    newest = {(one["device"], one["model"]): one for one in sessions}
    head = ["", "memory, of torch.compile's", "peak GiB", "predicted GiB", "time, of torch.compile's", "ms"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for (device, model), last in newest.items():
        lines.append(f"| *{device.split()[1]}: {model}* |{' |' * (len(head) - 1)}")
        measured = {row["way"] for row in last["rows"]}
        for session in sessions:
            if (session["device"], session["model"]) == (device, model):
                rows = [row for row in session["rows"] if "failed" not in row]
                if session is not last:
                    rows = [row for row in rows if row["way"] not in measured and "memfine" not in row["way"]]
                lines += [_line(row, session) for row in rows]
    return "".join(f"{line}\n" for line in lines)


def _line(row: dict[str, Any], session: dict[str, Any]) -> str:
    compiled = next(one for one in session["rows"] if one["way"] == "compile")
    memory, time = (f"{row[name] / compiled[name]:.2f}" for name in ("peak_gb", "ms"))
    peak, predicted = (f"{row[name] * 1e9 / 2**30:#.3g}" if name in row else "" for name in ("peak_gb", "predicted_gb"))
    way = row["way"].replace("compile", "torch.compile", 1).replace("bodies", "compiled functions")
    return f"| {' | '.join([way, memory, peak, predicted, time, format(row['ms'], '.1f')])} |"
