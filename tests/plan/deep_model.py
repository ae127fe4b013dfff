"""The record of a deep model's step without a model: T is a symbol, and every layer has what a compiled one has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import sympy
import torch

from memfine_fx.config import Config
from memfine_fx.memory.liveness import Allocation, Call, GraphMemory
from memfine_fx.memory.region_bytes import RegionBytes
from memfine_fx.memory.sizes import ROWS
from memfine_fx.memory.step import GraphStep, RegionMemory, RunMemory
from memfine_fx.plan.peaks import SolvedPeaks
from memfine_fx.plan.runs import CalledGraph, RunHistory
from memfine_fx.records import SavePolicy

TOKENS = sympy.Symbol("s0", integer=True, positive=True)
HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
"""Of a layer of Qwen3-30B."""
_PER_LAYER = 24
"""Storages that a compiled layer allocates in each direction."""
_ROW = 2 * HIDDEN


@dataclass(eq=False)
class DeepModel:
    """What plans ask of a session and of its only graph.

    Args:
        step: of the graph.
    """

    step: GraphStep
    config: Config = field(default_factory=Config)
    history: RunHistory = field(default_factory=RunHistory)
    context: RunMemory | None = None
    peaks: SolvedPeaks = field(default_factory=SolvedPeaks)
    has_gradients: bool = False
    runs_here: bool = True
    device_limits: dict[torch.device, int] = field(default_factory=dict)

    @property
    def is_limited(self) -> bool:
        return self.config.has_budget

    def held_bytes(self) -> int:
        return 0

    def persistent_bytes(self, members: Sequence[CalledGraph]) -> int:
        return 0

    def alive_parameters(self) -> list[torch.Tensor]:
        return []

    def input_bytes(self, inputs: Sequence[object]) -> int:
        return 0

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        yield


def deep_model(num_layers: int, *, has_room: bool = False, **options: object) -> DeepModel:
    """A model of so many equal layers with a region each.

    Args:
        has_room: whether regions may keep something of each routed row.
        options: of its config.
    """
    model = DeepModel(GraphStep(), Config(**options))  # type: ignore[arg-type]
    region_ids = [f"body/{layer}" for layer in range(num_layers)]

    def terms(policy: SavePolicy) -> RegionBytes:  # made anew each time, as a region's are
        return replace(LAYER, forward_peak=sympy.Max(LAYER.forward_peak, 7 * ROWS))

    for region_id in region_ids:
        model.step.regions[region_id] = RegionMemory(terms, TOKENS, "rows")
    if has_room:
        model.step.optional = dict.fromkeys(region_ids, 1.0)
    model.step.forward = _memory(region_ids, "forward", has_room=has_room)
    model.step.backward = _memory(region_ids[::-1], "backward", has_room=has_room)
    return model


def at_tokens(model: DeepModel, num_tokens: int, available_bytes: int | None, *, gradient_bytes: int = 0) -> None:
    """A run with so many tokens begins.

    Args:
        gradient_bytes: of gradients that exist, out of what is available.
    """
    available = None if available_bytes is None else available_bytes - gradient_bytes
    model.context = RunMemory(model.step, {str(TOKENS): num_tokens}, available_bytes=available)


LAYER = RegionBytes(
    top_k=TOP_K,
    num_experts=EXPERTS,
    hidden=HIDDEN,
    out_width=HIDDEN,
    item_bytes=2,
    out_item_bytes=2,
    contribution_item_bytes=2,
    accumulator_item_bytes=4,
    weight_item_bytes=2,
    param_bytes=EXPERTS * 3 * HIDDEN * WIDTH * 2,
    staging_bytes=3 * HIDDEN * WIDTH * 4,
    forward_peak=sympy.Max(ROWS * 6 * WIDTH, ROWS * (2 * WIDTH + _ROW)),
    backward_peak=sympy.Max(ROWS * 14 * WIDTH, ROWS * (4 * WIDTH + _ROW)),
    takes_group=False,
    device_type="cpu",
    forward_results=ROWS * _ROW,
    backward_results=ROWS * _ROW,
)


def _memory(region_ids: Sequence[str], phase: str, *, has_room: bool) -> GraphMemory:
    """Layers one after another; each leaves one tensor and, in backward, its gradients."""
    policy: SavePolicy = "projections" if has_room else "nothing"
    allocations, calls, position = [], [], 0
    for region_id in region_ids:
        for place in range(_PER_LAYER):
            stop = None if place == 0 else position + place + 3
            size = TOKENS * _ROW * (1 + place % 3)
            if phase == "backward" and place == 0:
                size = sympy.Integer(LAYER.param_bytes)
            allocations.append(Allocation(f"{phase} {region_id} {place}", size, position + place, stop))
        middle = position + _PER_LAYER // 2
        calls.append(Call(middle, region_id, phase, policy))  # type: ignore[arg-type]
        if has_room:
            start, stop = (middle, None) if phase == "forward" else (0, middle + 1)
            saved = TOKENS * TOP_K * WIDTH * 4
            allocations.append(Allocation(f"kept {region_id}", saved, start, stop, phase == "backward", region_id))
        position += _PER_LAYER
    return GraphMemory(tuple(allocations), tuple(calls), position + 3)
