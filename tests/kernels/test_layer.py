"""A layer of kernels against the same layer in eager float64: outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import (
    DEVICE,
    FORMS,
    PATTERNS,
    Sizes,
    eager_layer,
    expert_index,
    in_kernels,
    parameters,
    relative_error,
    small_tiles,
)

pytestmark = in_kernels
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}


def check(
    sizes: Sizes,
    pattern: str,
    rows: int,
    *,
    layout: Any = "halves",
    activation: Any = "swiglu",
    dtype: torch.dtype = torch.float32,
    table_dtype: torch.dtype | None = None,
    has_weight: bool = True,
    has_bias: bool = False,
    **options: bool,
) -> None:
    """Compare output and gradients in windows of so many rows."""
    from memfine_fx.kernels.layer import LayerOptions
    from memfine_fx.kernels.swiglu import swiglu_experts

    hidden = torch.randn(sizes.tokens, sizes.hidden, device=DEVICE).to(dtype).requires_grad_()
    index = expert_index(pattern, sizes)
    weight = torch.rand(sizes.tokens, sizes.top_k, device=DEVICE, requires_grad=True) if has_weight else None
    params = parameters(layout, sizes, table_dtype or dtype, has_bias=has_bias)
    chosen = LayerOptions(rows, layout=layout, activation=activation, has_bias=has_bias, tiles=small_tiles(), **options)
    found = swiglu_experts(hidden, index, weight, params, chosen)
    expected = eager_layer(hidden, index, weight, params, layout, activation)
    assert found.dtype is dtype
    grad = torch.randn_like(found)
    leaves = [hidden, *([] if weight is None else [weight]), *params]
    gradients = torch.autograd.grad(found, leaves, grad)
    references = torch.autograd.grad(expected, leaves, grad.double(), materialize_grads=True, allow_unused=True)
    for one, other in zip((found, *gradients), (expected, *references), strict=True):
        assert relative_error(one, other) < TOLERANCE[dtype]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_layer_is_the_eager_layer(pattern: str) -> None:
    check(Sizes(), pattern, 11)


@pytest.mark.parametrize("rows", range(1, 11))
def test_windows_may_cut_an_expert_anywhere(rows: int) -> None:
    check(Sizes(tokens=5, top_k=2, experts=3, hidden=8, width=4), "random", rows)


@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize(("activation", "layout"), FORMS)
def test_layouts_and_activations(activation: str, layout: str, has_bias: bool) -> None:
    check(Sizes(tokens=7), "random", 9, layout=layout, activation=activation, has_bias=has_bias)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("activation", "layout"), (("clamped", "interleaved_in_out"), ("relu2", "single")))
def test_experts_with_biases_under_any_routing(activation: str, layout: str, pattern: str) -> None:
    check(Sizes(tokens=9), pattern, 5, layout=layout, activation=activation, has_bias=True)


@pytest.mark.parametrize("rows", range(1, 11, 2))
def test_windows_may_cut_an_expert_with_biases_anywhere(rows: int) -> None:
    check(Sizes(tokens=5, top_k=2, experts=3, hidden=8, width=4), "random", rows, has_bias=True, saves_products=True)


def test_biases_without_routing_weights() -> None:
    check(Sizes(tokens=6), "random", 7, has_weight=False, has_bias=True, is_deterministic=True)


@pytest.mark.parametrize("is_deterministic", (False, True))
@pytest.mark.parametrize("saves_products", (False, True))
def test_what_is_kept_and_how_tokens_are_summed(saves_products: bool, is_deterministic: bool) -> None:
    check(Sizes(tokens=9), "dropped", 7, saves_products=saves_products, is_deterministic=is_deterministic)


@pytest.mark.parametrize("table_dtype", (torch.float16, torch.float32))
def test_rows_of_half_precision_meet_tables_of_either(table_dtype: torch.dtype) -> None:
    check(Sizes(tokens=9), "random", 7, dtype=torch.float16, table_dtype=table_dtype)


@pytest.mark.parametrize(
    "sizes",
    (
        Sizes(tokens=0),
        Sizes(tokens=1, top_k=1, experts=1),
        Sizes(tokens=3, top_k=1, experts=9, hidden=1, width=1),
        Sizes(tokens=6, hidden=33, width=17),
    ),
    ids=str,
)
def test_sizes_at_the_edge(sizes: Sizes) -> None:
    check(sizes, "random", 4)


def test_layer_without_routing_weights() -> None:
    check(Sizes(tokens=6), "random", 7, has_weight=False)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 9), top_k=st.integers(1, 3), experts=st.integers(1, 6), hidden=st.integers(1, 20),
    width=st.integers(1, 20), rows=st.integers(1, 30), pattern=st.sampled_from(PATTERNS),
)  # fmt: skip
def test_drawn_layers(tokens: int, top_k: int, experts: int, hidden: int, width: int, rows: int, pattern: str) -> None:
    check(Sizes(tokens, top_k, experts, hidden, width), pattern, rows)


@pytest.mark.parametrize(
    "frozen",
    (
        ("hidden",),
        ("weight",),
        ("gate_up",),
        ("down",),
        ("gate_up", "down", "hidden"),
        ("gate_up_bias",),
        ("down_bias",),
        ("gate_up", "down"),
        ("gate_up_bias", "down_bias"),
    ),
)
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen: tuple[str, ...]) -> None:
    from memfine_fx.kernels.layer import LayerOptions
    from memfine_fx.kernels.swiglu import swiglu_experts

    sizes = Sizes(tokens=6)
    index, options = (
        expert_index("random", sizes),
        LayerOptions(5, has_bias=True, tiles=small_tiles(), is_deterministic=True),
    )
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    leaves = {
        "hidden": torch.randn(sizes.tokens, sizes.hidden, device=DEVICE, requires_grad=True),
        "weight": torch.rand(sizes.tokens, sizes.top_k, device=DEVICE, requires_grad=True),
        **dict(zip(names, parameters("halves", sizes, has_bias=True), strict=True)),
    }

    def gradients() -> dict[str, torch.Tensor | None]:
        for leaf in leaves.values():
            leaf.grad = None
        tables = [leaves[name] for name in names]
        swiglu_experts(leaves["hidden"], index, leaves["weight"], tables, options).square().sum().backward()
        return {name: leaf.grad for name, leaf in leaves.items()}

    expected = gradients()
    for name in frozen:
        leaves[name].requires_grad_(False)
    for name, found in gradients().items():
        if name in frozen:
            assert found is None
        else:
            torch.testing.assert_close(found, expected[name], rtol=0, atol=0)


def test_tables_that_do_not_fit_are_named() -> None:
    from memfine_fx.kernels.layer import LayerOptions
    from memfine_fx.kernels.swiglu import swiglu_experts

    sizes = Sizes()
    hidden, index = torch.randn(sizes.tokens, sizes.hidden), expert_index("random", sizes)
    gate_up, down = parameters("halves", sizes)
    with pytest.raises(ValueError, match=r"down \[5, 20, 24\] of strides .* in layout 'halves'"):
        swiglu_experts(hidden, index, None, [gate_up, down.mT], LayerOptions(8))
    with pytest.raises(ValueError, match="layout 'apart' does not have 2 parameters"):
        swiglu_experts(hidden, index, None, [gate_up, down], LayerOptions(8, layout="apart"))
    with pytest.raises(ValueError, match="layout 'halves' with biases does not have 3 parameters"):
        swiglu_experts(hidden, index, None, [gate_up, down, down], LayerOptions(8, has_bias=True))
    with pytest.raises(ValueError, match=r"biases .*\(5, 12\).* do not meet gate"):
        biases = [gate_up.new_zeros(5, 24), gate_up.new_zeros(5, 24)]
        swiglu_experts(hidden, index, None, [gate_up, down, *biases], LayerOptions(8, has_bias=True))
    with pytest.raises(ValueError, match="activation 'relu2' does not go with layout 'halves'"):
        swiglu_experts(hidden, index, None, [gate_up, down], LayerOptions(8, activation="relu2"))
    with pytest.raises(ValueError, match=r"tokens \[13, 12\] do not meet experts of \[20, 24\]"):
        swiglu_experts(hidden[:, :12], index, None, [gate_up, down], LayerOptions(8))
    with pytest.raises(ValueError, match="at least one row, not 0"):
        swiglu_experts(hidden.to(DEVICE), index, None, [gate_up, down], LayerOptions(0, tiles=small_tiles()))


def test_windows_beyond_32_bits_are_refused() -> None:
    from memfine_fx.kernels.layer import LayerOptions
    from memfine_fx.kernels.swiglu import swiglu_experts

    sizes = Sizes()
    hidden, index = torch.randn(sizes.tokens, sizes.hidden), expert_index("random", sizes)
    with pytest.raises(ValueError, match="windows of 2147483648 rows of 40 entries; at most 53687091 rows fit"):
        swiglu_experts(hidden, index, None, parameters("halves", sizes), LayerOptions(2**31))
