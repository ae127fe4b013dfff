"""Adapters of experts in the kernels: the layer whose tables hold them, and gradients of every factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.cases import (
    DEVICE,
    FORMS,
    PATTERNS,
    Sizes,
    adapters,
    eager_layer,
    expert_index,
    in_kernels,
    parameters,
    relative_error,
    small_tiles,
    with_adapters,
)

pytestmark = in_kernels
SIZES = Sizes()
Ranks = tuple[int | None, int | None]


def check(
    sizes: Sizes,
    pattern: str,
    rows: int,
    ranks: Ranks = (3, 5),
    *,
    layout: Any = "halves",
    activation: Any = "swiglu",
    dtype: torch.dtype = torch.float32,
    has_bias: bool = False,
    has_weight: bool = True,
    **options: bool,
) -> None:
    """Output and all gradients against the layer in float64; factors in fp32 beside rows of any dtype."""
    from memfine_fx.kernels.layer import LayerOptions
    from memfine_fx.kernels.swiglu import swiglu_experts

    params = parameters(layout, sizes, dtype, has_bias=has_bias)
    forms, factors = adapters(layout, sizes, ranks)
    hidden = torch.randn(sizes.tokens, sizes.hidden, device=DEVICE).to(dtype).requires_grad_()
    index = expert_index(pattern, sizes)
    weight = torch.rand(sizes.tokens, sizes.top_k, device=DEVICE, requires_grad=True) if has_weight else None
    chosen = LayerOptions(
        rows, layout=layout, activation=activation, has_bias=has_bias, tiles=small_tiles(), adapters=forms, **options
    )
    found = swiglu_experts(hidden, index, weight, [*params, *factors], chosen)
    expected = eager_layer(hidden, index, weight, with_adapters(params, layout, forms, factors), layout, activation)
    grad = torch.randn_like(found)
    leaves = [hidden, *([] if weight is None else [weight]), *params, *factors]
    gradients = torch.autograd.grad(found, leaves, grad)
    references = torch.autograd.grad(expected, leaves, grad.double(), materialize_grads=True, allow_unused=True)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-3
    for one, other in zip((found, *gradients), (expected, *references), strict=True):
        assert relative_error(one, other) < tolerance


@pytest.mark.parametrize("pattern", PATTERNS)
def test_layer_is_the_one_whose_tables_hold_its_adapters(pattern: str) -> None:
    check(SIZES, pattern, 11)


@pytest.mark.parametrize("rows", range(1, 11, 2))
def test_windows_may_cut_an_expert_anywhere(rows: int) -> None:
    check(Sizes(tokens=5, top_k=2, experts=3, hidden=8, width=4), "random", rows)


@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize(("activation", "layout"), FORMS)
def test_layouts_and_activations(activation: str, layout: str, has_bias: bool) -> None:
    check(Sizes(tokens=7), "random", 9, layout=layout, activation=activation, has_bias=has_bias)


@pytest.mark.parametrize("ranks", ((1, None), (None, 1), (16, 16), (70, 3)), ids=str)
def test_ranks(ranks: Ranks) -> None:
    """Of one projection alone, of a whole tile, and beyond what is added at once."""
    check(Sizes(tokens=7), "random", 9, ranks)


@pytest.mark.parametrize("saves_products", (False, True))
def test_what_is_kept_and_summed_in_order(saves_products: bool) -> None:
    check(Sizes(tokens=9), "dropped", 7, saves_products=saves_products, is_deterministic=True, has_weight=False)


def test_rows_of_half_precision_meet_factors_of_full() -> None:
    check(Sizes(tokens=9), "random", 7, dtype=torch.float16)


@pytest.mark.parametrize("sizes", (Sizes(tokens=0), Sizes(tokens=3, top_k=1, experts=9, hidden=1, width=1)), ids=str)
def test_sizes_at_the_edge(sizes: Sizes) -> None:
    check(sizes, "random", 4)


@pytest.mark.parametrize(
    "frozen", (("tables",), ("up",), ("down",), ("tables", "up", "hidden"), ("up", "down")), ids=str
)
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen: tuple[str, ...]) -> None:
    from memfine_fx.kernels.layer import LayerOptions
    from memfine_fx.kernels.swiglu import swiglu_experts

    sizes = Sizes(tokens=6)
    index, params = expert_index("random", sizes), parameters("halves", sizes)
    forms, factors = adapters("halves", sizes, (2, 3))
    hidden = torch.randn(sizes.tokens, sizes.hidden, device=DEVICE, requires_grad=True)
    options = LayerOptions(5, tiles=small_tiles(), is_deterministic=True, adapters=forms)
    groups = {"hidden": [hidden], "tables": params, "up": factors[:2], "down": factors[2:]}

    def gradients() -> dict[str, list[torch.Tensor | None]]:
        for leaf in (hidden, *params, *factors):
            leaf.grad = None
        swiglu_experts(hidden, index, None, [*params, *factors], options).square().sum().backward()
        return {name: [leaf.grad for leaf in leaves] for name, leaves in groups.items()}

    expected = gradients()
    for name in frozen:
        for leaf in groups[name]:
            leaf.requires_grad_(False)
    for name, found in gradients().items():
        for one, other in zip(found, expected[name], strict=True):
            assert one is None if name in frozen else torch.equal(one, other)  # type: ignore[arg-type]  # both are there


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rows", (5, 26))
@pytest.mark.parametrize("is_gathered", (True, False))
def test_narrow_products(is_gathered: bool, rows: int, pattern: str) -> None:
    from memfine_fx.kernels.low_rank import narrow_product, reference_narrow_product
    from memfine_fx.kernels.sorting import reference_sort
    from memfine_fx.kernels.windows import windows_of

    routing = reference_sort(expert_index(pattern, SIZES), SIZES.experts)
    matrix = torch.randn(SIZES.experts, 18, SIZES.hidden, device=DEVICE)
    for window in windows_of(routing.num_rows, rows):
        num = SIZES.tokens if is_gathered else window.num_rows
        taken = torch.randn(num, SIZES.hidden, device=DEVICE)
        found = torch.full((window.num_rows, 18), float("nan"), device=DEVICE)
        tiles = small_tiles().gate_up
        narrow_product(taken, matrix, 0.7, routing, window, found, tiles, "ieee", is_gathered=is_gathered)
        expected = reference_narrow_product(taken, matrix, 0.7, routing, window, is_gathered=is_gathered)
        routed = max(0, min(window.last, int(routing.offsets[-1])) - window.first)
        assert relative_error(found[:routed], expected[:routed]) < 1e-5
        assert found[routed:].isnan().all()


def test_adapters_that_do_not_fit_are_named() -> None:
    from memfine_fx.kernels.adapter_tables import AdapterForm, adapters_of
    from memfine_fx.kernels.layer import LayerOptions

    params = parameters("apart", SIZES)
    forms, factors = adapters("apart", SIZES, (2, 3))
    with pytest.raises(ValueError, match="5 parameters are not those of adapters"):
        adapters_of(factors[:5], forms)
    with pytest.raises(ValueError, match=r"factors \[5, 2, 24\] of strides .* do not meet"):
        adapters_of(factors, (AdapterForm(3, 1.0), *forms[1:]))
    with pytest.raises(ValueError, match="adapters of gate and up come together"):
        LayerOptions(8, layout="apart", adapters=(forms[0], None, None)).adapters_of([*params, *factors[:2]])
