"""Free keeps: without a budget regions keep what leaves the peak of the whole step where it is (`plan.kept`).

Gradients pile up while what was kept is consumed, so a step is usually largest at the end of backward, or at its head,
and most of what would be kept is there at neither.

The rows of a chunk depend on the routing of the step, which nobody knows before it. So the limit is the peak of the
lean run with chunks of one row, and what comes under it has chunks as large as the plan allows: it holds for any
routing. Parameters, gradients that exist, optimizer state and inputs are the same in both runs, as is what an optimizer
takes when it steps. Only positions of the run itself are compared, so nothing of that need be known.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfine_fx.config import LEAST, Config
from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.memory.step import RunMemory
from memfine_fx.plan.kept import SLACK, keep_rows, kept_rows, lean_of, live_bytes
from memfine_fx.plan.peaks import chunk_sizes

__all__ = ["describe_budget", "free_rows"]


def free_rows(config: Config, run: RunMemory) -> RunMemory:
    """The run with as many rows kept as leave its peak where it is."""
    lean = lean_of(run)
    if lean.forward is None or lean.backward is None:
        return lean
    planned = chunk_sizes(config, run.step, None, None)

    def smallest(site: str, num_tokens: int) -> ChunkSize:
        return planned(site, num_tokens) if site in run.step.heads else ChunkSize(1, stages=False)

    limit = max(max(one, default=0) for one in live_bytes(lean, smallest))
    return run.keeping(kept_rows(live_bytes(lean, planned), keep_rows(run, planned), limit - limit // SLACK))


def describe_budget(config: Config, runs: Sequence[RunMemory], device_bytes: int | None = None) -> str:
    """By which budget a step's runs were planned, in words; `device_bytes` is what bounds them without one."""
    if config.has_budget:
        return f"memory_budget={config.memory_budget!r} bounds the bytes of a step"
    if config.memory_budget == LEAST:
        return 'memory_budget="least": regions keep nothing'
    if device_bytes is not None:
        return f"no memory_budget: what the device has for the step bounds it, {device_bytes:,} B"
    steps = {id(run.step): run for run in runs}.values()
    num_optional = sum(len(run.step.optional) for run in steps)
    if not num_optional:
        return (
            "no memory_budget: regions keep nothing (where Inductor compiles a graph that returns its loss for a CPU, "
            "they keep what leaves the step's peak where it is)"
        )
    num_keeping = sum(run.kept_rows(site) > 0 for run in steps for site in run.step.optional)
    return f"no memory_budget: {num_keeping} of {num_optional} regions keep what leaves the step's peak where it is"
