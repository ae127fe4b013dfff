"""Peaks of many equal layers from three and four of them, on records made by hand and on those of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import pytest
import sympy
import torch
from torch.nn.utils import parametrize
from transformers import DeepseekV2Config

from memfine_fx.config import Config
from memfine_fx.demo.training import ModelSizes
from memfine_fx.fitting.models import fake_model
from memfine_fx.fitting.recording import UNIFORM_PLANS, RecordedStep, record_step
from memfine_fx.fitting.setup import Setup
from memfine_fx.fitting.stack import find_stack, shortened
from memfine_fx.fitting.stretch import Moment, aligned, has_all_alike, is_uniform, moments_of, stretched
from memfine_fx.memory.liveness import Allocation, Call, GraphMemory
from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.memory.step import GraphStep, RunMemory, SizeOf
from tests.fitting.models import fake_mode, qwen3_moe

KEPT, PASSING, HEAD, GRADIENT = 10, 7, 100, 25


def size_of(region_id: str, num_tokens: int) -> ChunkSize:
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


def peak_of(runs: Sequence[RunMemory], size_of: SizeOf = size_of) -> int:
    return max(moment.num_bytes for stretches in moments_of(runs, size_of) for moment in stretches)


def extended(short: Sequence[RunMemory], long: Sequence[RunMemory], more: int, size_of: SizeOf = size_of) -> Moment:
    shorts, longs = (moments_of(runs, size_of) for runs in (short, long))
    return stretched(shorts, longs, more, aligned(short, long))


@pytest.mark.parametrize("gradient", [1, 10, 25])
@pytest.mark.parametrize("num_layers", [5, 6, 48])
def test_a_longer_step_peaks_where_its_own_record_does(num_layers: int, gradient: int) -> None:
    """Small gradients put the peak at the head, large ones at the end of backward."""
    steps = [[step_of(number, gradient=gradient)] for number in (3, 4)]
    expected = peak_of([step_of(num_layers, gradient=gradient)])
    assert extended(*steps, num_layers - 3).num_bytes == expected


def test_the_peak_moves_to_the_end_of_backward_only_in_a_longer_step() -> None:
    short_peak = max(
        (one for stretches in moments_of([step_of(3)], size_of) for one in stretches), key=lambda one: one.num_bytes
    )
    assert short_peak.parts[0] == 0
    assert extended([step_of(3)], [step_of(4)], 45).parts[0] == 48 * GRADIENT


def test_layers_that_keep_the_same_are_even() -> None:
    assert is_uniform([step_of(3)], [step_of(4)])


def test_a_layer_that_keeps_more_is_not_even() -> None:
    assert not is_uniform([step_of(3, odd=1)], [step_of(4, odd=1)])


@pytest.mark.parametrize("gradient", [1, 8, 25])
@pytest.mark.parametrize("shared", [3, 60, 900])
def test_what_units_share_is_made_by_the_first(shared: int, gradient: int) -> None:
    """Units of two layers, the second of which is of a kind that reads something made once."""
    short, long, whole = (step_of(number, gradient=gradient, shared=shared) for number in (4, 6, 24))
    assert is_uniform([short], [long])
    assert extended([short], [long], 10).num_bytes == peak_of([whole])


def test_stretches_without_their_like_are_told() -> None:
    assert has_all_alike([step_of(3)], [step_of(4)])
    assert not has_all_alike([step_of(3)], [step_of(4, gradient=GRADIENT + 1)])


def test_steps_of_as_many_layers_are_not_even() -> None:
    assert not is_uniform([step_of(3)], [step_of(3)])


def test_a_moment_is_extended_by_the_difference() -> None:
    assert Moment("forward", (1, 2, 0, 0, 5)).extended(Moment("forward", (1, 4, 0, 0, 5)), 3).parts == (1, 8, 0, 0, 5)


def of_layers(num_layers: int) -> RunMemory:
    """A backward of marks: layers of two stretches, the first one of one, and behind it a layer of another kind."""
    lengths = [2, 3] * (num_layers - 1) + [3, 1, 1, 1]
    sizes = [5, 90] * (num_layers - 1) + [20, 1, 1, 1]
    ends = list(accumulate(lengths))
    allocations = [
        Allocation(f"passing {place}", sympy.Integer(size), end - 1, end)
        for place, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    memory = GraphMemory(tuple(allocations), tuple(Call(end - 1, "", "mark") for end in ends), ends[-1] + 1)
    return RunMemory(GraphStep(forward=None, backward=memory), {})


def test_layers_beside_one_of_another_kind_are_aligned() -> None:
    """Nothing grows with the number of layers here, and a stretch that stands for another one would say so."""
    assert has_all_alike([of_layers(3)], [of_layers(4)])
    assert extended([of_layers(3)], [of_layers(4)], 20).num_bytes == peak_of([of_layers(23)]) == 90


@pytest.mark.slow
def test_eight_layers_behind_a_dense_one_peak_as_three_and_four_of_them_say() -> None:
    """As torch.compile takes them: in backward the layers beside the dense one have fewer products than others."""
    setup = Setup(batch=2, seq=256, dtype="fp32", checkpointing=True)
    config = DeepseekV2Config(
        vocab_size=256, hidden_size=64, intermediate_size=192, moe_intermediate_size=32, num_hidden_layers=12,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=2,
        first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16,
    )  # fmt: skip
    mode = fake_mode()
    stack = find_stack(fake_model(config, setup, mode))
    assert stack is not None and (stack.begin, stack.unit, stack.repeats) == (1, 1, 11)

    def recorded(num_layers: int) -> Sequence[RunMemory]:
        mode = fake_mode()
        model = fake_model(config, setup, mode)
        shortened(model, stack, num_layers)
        return record_step(model, setup, mode, Config(), "graph", ()).runs["asked"]

    short, long, whole = (recorded(number) for number in (3, 4, 8))
    assert extended(short, long, 5).num_bytes == peak_of(whole)


@pytest.mark.slow
def test_six_layers_of_a_model_peak_as_three_and_four_of_them_say() -> None:
    setup, sizes = Setup(batch=2, seq=256, dtype="fp32"), dataclasses.replace(SIZES, layers=8)

    def recorded(num_layers: int) -> RecordedStep:
        mode = fake_mode()
        model = qwen3_moe(sizes, mode)
        stack = find_stack(model)
        assert stack is not None and (stack.begin, stack.unit, stack.repeats) == (0, 1, 8)
        shortened(model, stack, num_layers)
        return record_step(model, setup, mode, Config(), "graph", plans=("least", *UNIFORM_PLANS))

    short, long, whole = (recorded(number) for number in (3, 4, 6))
    assert is_uniform(short.runs["most"], long.runs["most"])
    said = {}
    for plan in ("least", *UNIFORM_PLANS):
        peak = peak_of(whole.runs[plan], size_of_whole)
        said[plan] = extended(short.runs[plan], long.runs[plan], 3, size_of_whole).num_bytes / peak
    assert said["most"] == said["recompute_all"] == said["recompute_pointwise"] == 1
    assert 1 <= said["least"] < 1.03, "an estimate: what a layer keeps depends on how many there are"


def size_of_whole(region_id: str, num_tokens: int) -> ChunkSize:
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
