"""Generated lists of experts are chunked, and give the outputs and gradients of the unmodified layer for any routing.

One example captures one recipe and runs it on `RUNS`. What generation once found is kept as a named case in `FOUND`.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import memfine_fx
from memfine_fx import Config
from tests.integration.comparison import FP32_TOLERANCE, Gradients, run_step
from tests.properties.generated import ACTIVATIONS, HIDDEN
from tests.properties.generated_lists import COMBINES, GeneratedList, ListRecipe, logits_of
from tests.properties.test_generated_regions import EXAMPLES, RUNS, WIDER, assert_close


@st.composite
def recipes(draw: st.DrawFn) -> ListRecipe:
    num_experts = draw(st.integers(2, 4))
    take = draw(st.sampled_from(sorted(COMBINES)))
    is_dense = take in ("every", "stacked")
    recipe = ListRecipe(
        take=take,
        combine=draw(st.sampled_from(COMBINES[take])),
        store=draw(st.sampled_from(("modules", "lists", "stacks"))),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        is_gated=draw(st.booleans()),
        has_bias=draw(st.booleans()),
        scores=draw(st.sampled_from(("softmax", "renormed", "after", "sigmoid"))),
        weighs_input=not is_dense and draw(st.booleans()),
        dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16))),
        num_experts=num_experts,
        top_k=min(draw(st.integers(1, num_experts)), num_experts - is_dense),  # K = E: see the test below
        residual=draw(st.sampled_from(("zeros", "zeros", "before", "after", "both"))),
    )
    is_in_place = recipe.combine in ("add", "index_add")
    if is_in_place and recipe.residual in ("before", "both"):  # written expert by expert: refused
        recipe = dataclasses.replace(recipe, residual="after")
    has_constant_weight = recipe.top_k == 1 and recipe.scores == "renormed"  # w / w: its gradient is rounding alone
    return dataclasses.replace(recipe, scores="softmax") if has_constant_weight else recipe


def check(recipe: ListRecipe, rows_per_chunk: int, axis: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = GeneratedList(recipe)
    optimized, wide = copy.deepcopy(layer), copy.deepcopy(layer).to(WIDER[recipe.dtype])
    config = Config(inner_backend="eager", axis=axis, rows_per_chunk=rows_per_chunk)  # type: ignore[arg-type]  # drawn
    memfine_fx.optimize(optimized, inner_backend="eager", dynamic=True, config=config)
    for num_tokens, kind in RUNS:
        inputs = {
            "hidden": torch.randn(num_tokens, HIDDEN, dtype=recipe.dtype),
            "logits": logits_of(kind, num_tokens, recipe),
        }
        assert_close(
            lambda inputs: _paired(run_step(optimized, inputs), run_step(layer, inputs)),
            partial(run_step, layer),
            partial(run_step, wide),
            inputs,
        )
    report = memfine_fx.report(optimized)
    assert report.num_chunked == 1, str(report)


def _paired(ours: Gradients, eager: Gradients) -> Gradients:
    """Ours without the gradients that eager leaves at None, which must be zero."""
    extra = ours.tensors.keys() - eager.tensors.keys()
    assert not any(ours.tensors[name].any() for name in extra)
    return Gradients({name: tensor for name, tensor in ours.tensors.items() if name not in extra})


_PLAIN = ListRecipe(
    take="where", combine="index_add", store="modules", activation="silu", is_gated=True, has_bias=False,
    scores="softmax", weighs_input=False, dtype=torch.float32, num_experts=3, top_k=2,
)  # fmt: skip
FOUND: dict[str, ListRecipe] = {
    "linear experts with biases, whose gradients follow from weights alone": dataclasses.replace(
        _PLAIN,
        take="guarded",
        store="lists",
        activation="identity",
        is_gated=False,
        has_bias=True,
        dtype=torch.bfloat16,
        num_experts=4,
        top_k=1,
    ),
    "places put together before one index_add": dataclasses.replace(_PLAIN, take="places"),
    "bf16 biases rounded once a chunk": dataclasses.replace(
        _PLAIN, has_bias=True, weighs_input=True, is_gated=False, dtype=torch.bfloat16
    ),
    "one draw of a bias's gradient three times as far off as eager's, bf16": dataclasses.replace(
        _PLAIN,
        take="every",
        combine="sum",
        store="lists",
        activation="identity",
        is_gated=False,
        has_bias=True,
        scores="sigmoid",
        dtype=torch.bfloat16,
        num_experts=2,
        top_k=1,
    ),
    "results put back by the order that sorted them": dataclasses.replace(_PLAIN, take="split", combine="put"),
    "a token is its only assignment": dataclasses.replace(_PLAIN, take="flat", combine="sum", top_k=1),
    "tokens added to what all experts gave": dataclasses.replace(_PLAIN, residual="after"),
    "tokens added before and after": dataclasses.replace(_PLAIN, take="every", combine="sum", residual="both"),
    "weights [T,1] sorted and split": dataclasses.replace(_PLAIN, take="split", combine="index_add", top_k=1),
    "entries of tables with K = 1": dataclasses.replace(
        _PLAIN, take="stacked", combine="gather", store="stacks", num_experts=2, top_k=1
    ),
    "a bias behind a weight that a mask took": dataclasses.replace(
        _PLAIN, take="mask", combine="add", store="lists", has_bias=True, weighs_input=True
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_generation_once_found_is_chunked_exactly(name: str) -> None:
    check(FOUND[name], 5, "rows")


def test_a_dense_layer_whose_tokens_choose_every_expert_stays_exact() -> None:
    """Found by generation: with K = E its weights [T,E] look like weights [T,K]."""
    layer = GeneratedList(dataclasses.replace(_PLAIN, take="every", combine="sum", num_experts=2, top_k=2))
    optimized = copy.deepcopy(layer)
    memfine_fx.optimize(optimized, inner_backend="eager", config=Config(inner_backend="eager", rows_per_chunk=5))
    inputs = {"hidden": torch.randn(9, HIDDEN), "logits": torch.rand(9, 2)}
    assert max(run_step(optimized, inputs).error_from(run_step(layer, inputs)).values()) < FP32_TOLERANCE
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked"


@settings(max_examples=16, phases=(Phase.generate,), **EXAMPLES)  # type: ignore[arg-type]  # one dict of options
@given(recipe=recipes(), rows_per_chunk=st.integers(1, 12), axis=st.sampled_from(("rows", "rows", "tokens")))
def test_generated_lists_are_chunked_exactly(recipe: ListRecipe, rows_per_chunk: int, axis: str) -> None:
    check(recipe, rows_per_chunk, axis)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.campaign)])
@settings(max_examples=100, **{**EXAMPLES, "derandomize": False})  # type: ignore[arg-type]  # one dict of options
@given(recipe=recipes(), rows_per_chunk=st.integers(1, 12), axis=st.sampled_from(("rows", "rows", "tokens")))
def test_many_more_generated_lists_are_chunked_exactly(
    part: int, recipe: ListRecipe, rows_per_chunk: int, axis: str
) -> None:
    check(recipe, rows_per_chunk, axis)
