"""Generated MoE layers are chunked, and give the outputs and gradients of the unmodified layer whatever the routing.

One example compiles one recipe and runs it on `RUNS`. What generation found once is kept as a named case in `FOUND`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import memfine_fx
from memfine_fx import Config
from tests.integration.comparison import FP32_TOLERANCE, Gradients, run_step
from tests.properties.generated import ACTIVATIONS, HIDDEN, GeneratedMoE, Recipe, Routing, routing_of

RUNS: tuple[tuple[int, Routing], ...] = (
    (9, "random"),
    (2, "ties"),
    (23, "one expert"),
    (5, "first experts"),
    (64, "random"),
    (3, "one expert"),
    (2, "random"),
    (31, "first experts"),
    (12, "ties"),
)
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
_FACTOR, _BF16_FLOOR, _NUM_DRAWS = 2.0, 2**-6, 12
"""Of eager's own error; two units in the last place, which a sum of two or three rows may differ by; and how many
inputs decide where one is off by more."""


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    num_experts = draw(st.integers(2, 5))
    product = draw(st.sampled_from(("bmm", "bmm_column", "einsum", "einsum_tokens", "grouped")))
    dtypes = (torch.bfloat16,) if product == "grouped" else (torch.float32, torch.float32, torch.bfloat16)
    recipe = Recipe(
        product=product,
        weight_layout=draw(st.sampled_from(("in_out", "out_in"))),
        gate=draw(st.sampled_from(("none", "halves", "interleaved", "separate"))),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        weighs=draw(st.sampled_from(("output", "output", "inner", "input", "nowhere"))),
        combine=draw(st.sampled_from(("sum", "index_add", "einsum"))),
        has_bias=draw(st.booleans()),
        norm=draw(st.sampled_from(("none", "none", "rms"))),
        dtype=draw(st.sampled_from(dtypes)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
    )
    is_scale_free = recipe.norm == "rms" and not recipe.has_bias and recipe.weighs in ("inner", "input")
    return dataclasses.replace(recipe, weighs="output") if is_scale_free else recipe  # d weight is rounding alone


def check(recipe: Recipe, rows_per_chunk: int, axis: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = GeneratedMoE(recipe)
    optimized, wide = copy.deepcopy(layer), _widened(layer)
    config = Config(inner_backend="eager", axis=axis, rows_per_chunk=rows_per_chunk)  # type: ignore[arg-type]  # drawn
    memfine_fx.optimize(optimized, inner_backend="eager", dynamic=True, config=config)
    for num_tokens, kind in RUNS:
        inputs = {
            "hidden": torch.randn(num_tokens, HIDDEN, dtype=recipe.dtype),
            "index": routing_of(kind, num_tokens, recipe),
            "weight": torch.rand(num_tokens, recipe.top_k, dtype=recipe.dtype),
        }
        if recipe.weighs == "nowhere":
            inputs["weight"].requires_grad_(False)
        assert_close(partial(run, optimized), partial(run, layer), partial(run, wide), inputs)
    report = memfine_fx.report(optimized)
    assert report.num_chunked == 1, str(report)


def run(layer: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Gradients:
    """As `run_step`; an input that no gradient reaches (an unused weight) counts as zero."""
    unused = {"weight"} if layer.recipe.weighs == "nowhere" else set()  # type: ignore[union-attr]  # a GeneratedMoE
    leaves = {name: value for name, value in inputs.items() if name not in unused}
    kept = {name: inputs[name] for name in unused}
    return run_step(_WithFixed(layer, kept), leaves)


class _WithFixed(torch.nn.Module):
    """A layer with some inputs given, without a gradient."""

    def __init__(self, layer: torch.nn.Module, fixed: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.fixed = fixed

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(**inputs, **self.fixed)
        return result


def assert_close(ours: Runs, eager: Runs, wide: Runs, inputs: dict[str, torch.Tensor]) -> None:
    """fp32 to the gate, bf16 no further from the truth than eager bf16, by `_FACTOR`; `wide` is the layer in more bits.

    Single gradients of layers this small may cancel to next to nothing, where one rounding is a large part of them: one
    draw of eight numbers may be off by several times what is usual. Where it is, other tokens decide, all together.
    """
    step, expected = ours(inputs), eager(inputs)
    is_fp32 = all(tensor.dtype is torch.float32 for tensor in expected.tensors.values())
    if is_fp32 and max(step.error_from(expected).values()) < FP32_TOLERANCE:
        return
    floor = FP32_TOLERANCE if is_fp32 else _BF16_FLOOR
    truth = wide(_widened_inputs(inputs))
    errors, theirs = step.error_from(truth), expected.error_from(truth)
    suspects = [name for name in errors if errors[name] > max(_FACTOR * theirs[name], floor)]
    draws = [{name: _drawn_again(name, value) for name, value in inputs.items()} for _ in range(_NUM_DRAWS)]
    truths = [wide(_widened_inputs(draw)) for draw in draws]
    for name in suspects:
        error, allowed = (_pooled_error(name, run, draws, truths) for run in (ours, eager))
        assert error <= max(_FACTOR * allowed, floor), f"{name}: {error:.2e} where eager is {allowed:.2e} off"


def _drawn_again(name: str, value: torch.Tensor) -> torch.Tensor:
    """Other tokens, and weights a tenth away: gradients of linear experts' biases follow from these alone."""
    if name == "hidden":
        return torch.randn_like(value)
    return value * (1 + 0.1 * torch.randn_like(value)) if value.is_floating_point() else value


def _pooled_error(name: str, run: Runs, draws: list[dict[str, torch.Tensor]], truths: list[Gradients]) -> float:
    """Of one tensor over `draws`, taken for one tensor: a draw in which it cancels weighs no more than others."""
    exact = [truth.tensors[name].double() for truth in truths]
    found = [run(draw).tensors[name].double() for draw in draws]
    error = sum(float((one - other).square().sum()) for one, other in zip(found, exact, strict=True))
    return math.sqrt(error / max(sum(float(one.square().sum()) for one in exact), 1e-30))


def _widened_inputs(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: value.to(WIDER[value.dtype]) if value.is_floating_point() else value for name, value in inputs.items()
    }


def _widened(layer: GeneratedMoE) -> GeneratedMoE:
    """The same layer in twice as many bits, written with gathered weights, which every dtype has."""
    wide = copy.deepcopy(layer).to(WIDER[layer.recipe.dtype])
    if layer.recipe.product == "grouped":
        wide.recipe = dataclasses.replace(layer.recipe, product="bmm")
    return wide


Runs = Callable[[dict[str, torch.Tensor]], Gradients]
EXAMPLES = dict(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)


_PLAIN = Recipe(
    product="bmm", weight_layout="in_out", gate="halves", activation="silu", weighs="output", combine="sum",
    has_bias=False, norm="none", dtype=torch.float32, num_experts=4, top_k=2,
)  # fmt: skip
FOUND = {
    "einsum of [T,H] by [T,K,H,F]": dataclasses.replace(_PLAIN, product="einsum_tokens", top_k=1, num_experts=2),
    "einsum of tokens weighted by [T,K,1]": dataclasses.replace(_PLAIN, product="einsum", weighs="input"),
    "separate projections of sorted rows": dataclasses.replace(
        _PLAIN, product="grouped", gate="separate", weighs="input", has_bias=True, dtype=torch.bfloat16
    ),
    "sorted rows of K = 1 viewed as [T,1,H] before their sum": dataclasses.replace(
        _PLAIN, product="grouped", norm="rms", has_bias=True, num_experts=3, top_k=1, dtype=torch.bfloat16
    ),
    "einsum of tokens [T,1,H] by [T,1,H,F]": dataclasses.replace(
        _PLAIN, product="einsum", gate="none", activation="identity", weighs="inner", num_experts=2, top_k=1
    ),
    "two projections of tokens [T,1,H] with K = 1": dataclasses.replace(
        _PLAIN, weight_layout="out_in", gate="separate", top_k=1
    ),
    "a shared vector over the rows of K = 1": dataclasses.replace(
        _PLAIN, weighs="inner", has_bias=True, norm="rms", num_experts=2, top_k=1
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_generation_once_found_refused_is_chunked_exactly(name: str) -> None:
    check(FOUND[name], 5, "rows")


@settings(max_examples=24, phases=(Phase.generate,), **EXAMPLES)  # type: ignore[arg-type]  # one dict of options
@given(recipe=recipes(), rows_per_chunk=st.integers(1, 12), axis=st.sampled_from(("rows", "rows", "tokens")))
def test_generated_layers_are_chunked_exactly(recipe: Recipe, rows_per_chunk: int, axis: str) -> None:
    check(recipe, rows_per_chunk, axis)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.campaign) for part in (1, 2, 3))])
@settings(max_examples=100, **{**EXAMPLES, "derandomize": False})  # type: ignore[arg-type]  # one dict of options
@given(recipe=recipes(), rows_per_chunk=st.integers(1, 12), axis=st.sampled_from(("rows", "rows", "tokens")))
def test_many_more_generated_layers_are_chunked_exactly(
    part: int, recipe: Recipe, rows_per_chunk: int, axis: str
) -> None:
    check(recipe, rows_per_chunk, axis)


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(40))
def test_ten_thousand_generated_layers_are_chunked_exactly(part: int) -> None:
    """A fortieth of them; its number is the seed, so that one that fails can be run again alone."""

    @seed(part)
    @settings(max_examples=250, phases=(Phase.generate,), **{**EXAMPLES, "derandomize": False})  # type: ignore[arg-type]  # one dict of options
    @given(recipe=recipes(), rows_per_chunk=st.integers(1, 12), axis=st.sampled_from(("rows", "rows", "tokens")))
    def check_drawn(recipe: Recipe, rows_per_chunk: int, axis: str) -> None:
        check(recipe, rows_per_chunk, axis)

    check_drawn()
