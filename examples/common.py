"""What the examples share: a small MoE language model, its data, and the proof that each ends with.

Every example trains the same model twice from the same weights, unoptimized and with memfine_fx, and fails unless the
losses agree. `--inner eager` skips Inductor, which is faster to start and chunks in the same way.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # measuring bytes uses the profiler, which would talk
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout works without being installed

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.memory.measure import trace_memory

VOCABULARY = 128
LENGTH = 128
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Run:
    """One training run: its losses, and the peak bytes of a step beyond what was alive before it."""

    losses: Sequence[float]
    peak_bytes: int


def options(description: str | None) -> argparse.Namespace:
    """The command line of an example."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--inner", choices=("inductor", "aot_eager", "eager"), default="inductor")
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


def config(inner: str) -> memfine_fx.Config:
    return memfine_fx.Config(inner_backend=inner, rows_per_chunk=128)


def moe_model(num_experts: int = 8, **overrides: Any) -> Any:
    """A Qwen3-MoE with random weights: 2 layers, hidden 64, experts of width 128, top-4."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, moe_intermediate_size=128, num_experts_per_tok=4, vocab_size=VOCABULARY)
    counts = dict(num_experts=num_experts, num_local_experts=num_experts)  # transformers' name for it changed
    return tiny_causal_lm("qwen3_moe", **{**sizes, **counts, **overrides})


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences with their labels."""

    def __init__(self, num_sequences: int = 32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, VOCABULARY, (num_sequences, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}


def batches(num_steps: int, size: int = 2) -> list[dict[str, torch.Tensor]]:
    """The first batches of `Tokens`, in order."""
    tokens = Tokens(num_steps * size).tokens.split(size)
    return [{"input_ids": one, "labels": one} for one in tokens]


def step_peak(step: Callable[[], object]) -> int:
    """Peak bytes of a step that has run before."""
    step()
    return trace_memory(step, torch.device("cpu")).peak_bytes


def forward_backward(model: Any, **inputs: Any) -> Callable[[], None]:
    """One step of a model on the first batch, ready to be measured."""
    batch = batches(1)[0] | inputs

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    return step


def train_adapters(model: Any, num_steps: int) -> Run:
    """AdamW on what wants gradients."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for batch in batches(num_steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(losses, step_peak(forward_backward(model)))


def table_allocations(model: Any, table: torch.Tensor) -> int:
    """Allocations of one step as large as an eighth of a table of all experts."""
    trace = trace_memory(forward_backward(model), torch.device("cpu"))
    return sum(num_bytes >= table.numel() * table.element_size() // 8 for num_bytes in trace.allocation_bytes)


def prove(reference: Run, optimized: Run, model: Any, tolerance: float = TOLERANCE) -> None:
    """Print both runs and the report.

    Raises:
        SystemExit: the losses differ, or nothing was chunked.
    """
    report = memfine_fx.report(model)
    print(
        f"peak     unoptimized {reference.peak_bytes:,} B, memfine {optimized.peak_bytes:,} B "
        f"({optimized.peak_bytes / reference.peak_bytes:.2f} x)"
    )
    print(f"regions  {report.num_chunked} chunked")
    prove_losses(reference.losses, optimized.losses, tolerance)
    if not report.num_chunked:
        raise SystemExit("FAILED: nothing was chunked")
    print("OK")


def prove_losses(reference: Sequence[float], optimized: Sequence[float], tolerance: float = TOLERANCE) -> None:
    """Print both runs' losses.

    Raises:
        SystemExit: they differ.
    """
    difference = max(abs(a - b) for a, b in zip(reference, optimized, strict=True))
    print(f"losses   unoptimized {_numbers(reference)}")
    print(f"         memfine     {_numbers(optimized)}   largest difference {difference:.1e}")
    if not difference <= tolerance:
        raise SystemExit("FAILED: the optimized run is not the unoptimized one")


def prove_layers(model: Any) -> None:
    """Print how many layers were chunked.

    Raises:
        SystemExit: not all of them.
    """
    expected, chunked = model.config.num_hidden_layers, chunked_layers(model)
    print(f"layers   {len(chunked)} of {expected} chunked")
    if chunked != set(range(expected)):
        raise SystemExit(f"FAILED: {memfine_fx.report(model)}")


def chunked_layers(model: Any) -> set[int]:
    """Numbers of the layers whose experts were chunked in some graph."""
    regions = memfine_fx.report(model).regions
    chunked = [region.where.module.split(".") for region in regions if region.status == "chunked"]
    return {int(parts[parts.index("layers") + 1]) for parts in chunked}


def _numbers(losses: Sequence[float]) -> str:
    return " ".join(f"{loss:.5f}" for loss in losses)
