"""Peaks of many equal layers from three and four of them, on records made by hand and on those of a model."""

from __future__ import annotations

import dataclasses

import pytest
import sympy
import torch
from torch.nn.utils import parametrize

from memfine_fx.config import Config
from memfine_fx.demo.model import ModelSizes
from memfine_fx.fitting.recording import EVEN_PLANS, RecordedStep, record_step
from memfine_fx.fitting.setup import Setup
from memfine_fx.fitting.stack import find_stack, shortened
from memfine_fx.fitting.stretch import Moment, is_even, moments_of, stretched
from memfine_fx.memory.liveness import Allocation, Call, GraphMemory
from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.memory.step import GraphStep, RunMemory
from tests.fitting.models import fake_mode, qwen3_moe

KEPT, PASSING, HEAD, GRADIENT = 10, 7, 100, 25


def size_of(site: str, num_tokens: int) -> ChunkSize:
    return ChunkSize(1)


def step_of(num_layers: int, *, gradient: int = GRADIENT, odd: int = 0, shared: int = 0) -> RunMemory:
    """Each layer keeps something and runs experts; in backward each leaves a gradient. Four positions a layer.

    With `odd` layer 1 keeps more; with `shared` it makes what it and all later odd layers read in their backwards.
    """
    forward, backward = [], []
    last = 4 * num_layers
    for layer in range(num_layers):
        begin, back = 4 * layer, 4 * (num_layers - 1 - layer) + 1
        kept = sympy.Integer(KEPT + (odd if layer == 1 else 0))
        forward.append(Allocation(f"kept {layer}", kept, begin, None))
        forward.append(Allocation(f"passing {layer}", sympy.Integer(PASSING), begin + 1, begin + 3))
        backward.append(Allocation(f"kept {layer}", kept, 0, back + 3, is_input=True))
        backward.append(Allocation(f"gradient {layer}", sympy.Integer(gradient), back + 2, None))
    if shared:
        forward.append(Allocation("shared", sympy.Integer(shared), 5, None))
        backward.append(Allocation("shared", sympy.Integer(shared), 0, 4 * (num_layers - 1), is_input=True))
    forward.append(Allocation("head", sympy.Integer(HEAD), last, last + 1))
    backward.append(Allocation("head", sympy.Integer(HEAD), 0, 1))
    calls = [Call(4 * layer + 2, str(layer), "forward") for layer in range(num_layers)]
    back_calls = [Call(4 * layer + 3, str(layer), "backward") for layer in range(num_layers)]
    step = GraphStep(
        forward=GraphMemory(tuple(forward), tuple(calls), last + 1),
        backward=GraphMemory(tuple(backward), tuple(back_calls), last + 1),
    )
    return RunMemory(step, {})


def peak_of(runs: list[RunMemory]) -> int:
    return max(moment.num_bytes for stretches in moments_of(runs, size_of) for moment in stretches)


@pytest.mark.parametrize("gradient", [1, 10, 25])
@pytest.mark.parametrize("num_layers", [5, 6, 48])
def test_a_longer_step_peaks_where_its_own_record_does(num_layers: int, gradient: int) -> None:
    """Small gradients put the peak at the head, large ones at the end of backward."""
    shorts, longs = (moments_of([step_of(number, gradient=gradient)], size_of) for number in (3, 4))
    expected = peak_of([step_of(num_layers, gradient=gradient)])
    assert stretched(shorts, longs, num_layers - 3).num_bytes == expected


def test_the_peak_moves_to_the_end_of_backward_only_in_a_longer_step() -> None:
    shorts, longs = (moments_of([step_of(number)], size_of) for number in (3, 4))
    short_peak = max((one for stretches in shorts for one in stretches), key=lambda one: one.num_bytes)
    assert short_peak.parts[0] == 0
    assert stretched(shorts, longs, 45).parts[0] == 48 * GRADIENT


def test_layers_that_keep_the_same_are_even() -> None:
    assert is_even([step_of(3)], [step_of(4)])


def test_a_layer_that_keeps_more_is_not_even() -> None:
    assert not is_even([step_of(3, odd=1)], [step_of(4, odd=1)])


@pytest.mark.parametrize("gradient", [1, 8, 25])
@pytest.mark.parametrize("shared", [3, 60, 900])
def test_what_units_share_is_made_by_the_first(shared: int, gradient: int) -> None:
    """Units of two layers, the second of which is of a kind that reads something made once."""
    short, long, whole = (step_of(number, gradient=gradient, shared=shared) for number in (4, 6, 24))
    assert is_even([short], [long])
    shorts, longs = (moments_of([one], size_of) for one in (short, long))
    assert stretched(shorts, longs, 10).num_bytes == peak_of([whole])


def test_steps_of_as_many_layers_are_not_even() -> None:
    assert not is_even([step_of(3)], [step_of(3)])


def test_a_moment_is_extended_by_the_difference() -> None:
    assert Moment("forward", (1, 2, 0, 0, 5)).extended(Moment("forward", (1, 4, 0, 0, 5)), 3).parts == (1, 8, 0, 0, 5)


@pytest.mark.slow
def test_six_layers_of_a_model_peak_as_three_and_four_of_them_say() -> None:
    setup, sizes = Setup(batch=2, seq=256, dtype="fp32"), dataclasses.replace(SIZES, layers=8)

    def recorded(num_layers: int) -> RecordedStep:
        mode = fake_mode()
        model = qwen3_moe(sizes, mode)
        stack = find_stack(model)
        assert stack is not None and (stack.begin, stack.unit, stack.repeats) == (0, 1, 8)
        shortened(model, stack, num_layers)
        return record_step(model, setup, mode, Config(), "graph", plans=("least", *EVEN_PLANS))

    short, long, whole = (recorded(number) for number in (3, 4, 6))
    assert is_even(short.runs["most"], long.runs["most"])
    said = {}
    for plan in ("least", *EVEN_PLANS):
        shorts, longs = (moments_of(one.runs[plan], size_of_whole) for one in (short, long))
        peak = max(one.num_bytes for each in moments_of(whole.runs[plan], size_of_whole) for one in each)
        said[plan] = stretched(shorts, longs, 3).num_bytes / peak
    assert said["most"] == said["lean"] == said["spare"] == 1
    assert 1 <= said["least"] < 1.03, "an estimate: what a layer keeps depends on how many there are"


def size_of_whole(site: str, num_tokens: int) -> ChunkSize:
    return ChunkSize(num_tokens)


SIZES = ModelSizes(
    layers=2, hidden=64, width=64, experts=8, top_k=2, heads=4, kv_heads=2, head_dim=16, vocab=256, positions=1024
)


class Packed(torch.nn.Module):
    """A parametrization: what a parameter is made of."""

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.float()


def test_layers_with_packed_tables_are_equal() -> None:
    """A parametrized module has a class of its own, and packed layers are analysed once too."""
    layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(6))
    for layer in layers[1:]:
        parametrize.register_parametrization(layer[0], "weight", Packed())
    stack = find_stack(torch.nn.ModuleDict({"layers": layers}))
    assert stack is not None and (stack.begin, stack.unit, stack.repeats) == (1, 1, 5)
