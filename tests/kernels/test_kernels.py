"""Each kernel against its reference in plain torch, window by window."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.cases import (
    DEVICE,
    FORMS,
    PATTERNS,
    Sizes,
    expert_index,
    in_kernels,
    parameters,
    relative_error,
    small_tiles,
)

pytestmark = in_kernels
SIZES = Sizes()
WINDOW_ROWS = (5, 16, 26)


class Layer:
    """A layer's inputs, index arrays and tables."""

    def __init__(self, pattern: str, layout: str = "halves", *, has_bias: bool = False) -> None:
        from memfine_fx.kernels.sorting import reference_sort
        from memfine_fx.kernels.tables import Tables

        self.hidden = torch.randn(SIZES.tokens, SIZES.hidden, device=DEVICE)
        self.weight = torch.rand(SIZES.tokens * SIZES.top_k, device=DEVICE)
        self.routing = reference_sort(expert_index(pattern, SIZES), SIZES.experts)
        params = [param.detach() for param in parameters(layout, SIZES, has_bias=has_bias)]
        self.tables = Tables.of(params, layout, has_bias=has_bias)  # type: ignore[arg-type]

    def windows(self, rows: int) -> list[Any]:
        from memfine_fx.kernels.windows import windows_of

        return list(windows_of(self.routing.num_rows, rows))

    def rows(self, num_rows: int, width: int) -> torch.Tensor:
        return torch.randn(num_rows, width, device=DEVICE)

    def routed(self, window: Any) -> int:
        """How many of a window's rows are of an expert."""
        return max(0, min(window.last, int(self.routing.offsets[-1])) - window.first)


@pytest.mark.parametrize("rows", WINDOW_ROWS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gathered_products_and_their_activation(pattern: str, rows: int) -> None:
    check_gate_up(Layer(pattern), rows, "swiglu")


@pytest.mark.parametrize(("activation", "layout"), FORMS)
def test_gathered_products_in_every_layout_and_activation(activation: str, layout: str) -> None:
    check_gate_up(Layer("random", layout), 16, activation)
    check_gate_up(Layer("dropped", layout, has_bias=True), 16, activation)


def check_gate_up(layer: Layer, rows: int, activation: Any) -> None:
    from memfine_fx.kernels.gate_up import gate_up, reference_gate_up

    for window in layer.windows(rows):
        found = [layer.rows(window.num_rows, SIZES.width) for _ in range(3)]
        gate_up(
            layer.hidden, layer.weight, layer.routing, layer.tables, window, activation, (found[0], found[1]), found[2],
            small_tiles().gate_up, "ieee",
        )  # fmt: skip
        expected = reference_gate_up(layer.hidden, layer.weight, layer.routing, layer.tables, window, activation)
        num_routed = layer.routed(window)
        for one, other in zip(found, expected, strict=True):
            if one is found[1] and activation == "relu2":
                continue
            assert relative_error(one[:num_routed], other[:num_routed]) < 1e-5


@pytest.mark.parametrize("rows", WINDOW_ROWS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("num_factors", (1, 2))
def test_products_are_added_to_their_tokens(num_factors: int, pattern: str, rows: int) -> None:
    from memfine_fx.kernels.combine import combine, reference_combine
    from memfine_fx.kernels.down import add_products, reference_products

    layer, tiles = Layer(pattern), small_tiles().down
    if num_factors == 1:
        depth, factors = SIZES.width, [layer.tables.down]
    else:
        depth, factors = SIZES.width, [layer.tables.gate.mT, layer.tables.up.mT]
    by_atomics, by_rows, expected = torch.zeros(3, SIZES.tokens, SIZES.hidden, device=DEVICE).unbind()
    for window in layer.windows(rows):
        values = [layer.rows(window.num_rows, depth) for _ in factors]
        add_products(values, factors, layer.routing, window, by_atomics, tiles, "ieee", is_atomic=True)
        found = torch.full((window.num_rows, SIZES.hidden), float("nan"), device=DEVICE)
        add_products(values, factors, layer.routing, window, found, tiles, "ieee", is_atomic=False)
        combine(found, layer.routing, window, by_rows)
        reference = reference_products(values, factors, layer.routing, window)
        num_routed = layer.routed(window)
        assert relative_error(found[:num_routed], reference[:num_routed]) < 1e-5
        reference_combine(reference, layer.routing, window, expected)
    assert relative_error(by_atomics, expected) < 1e-5
    assert relative_error(by_rows, expected) < 1e-5


@pytest.mark.parametrize("rows", WINDOW_ROWS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_pass_the_down_projection(pattern: str, rows: int) -> None:
    check_down_backward(Layer(pattern), rows, "swiglu")


@pytest.mark.parametrize(("activation", "layout"), FORMS)
def test_gradients_pass_in_every_layout_and_activation(activation: str, layout: str) -> None:
    check_down_backward(Layer("random", layout), 16, activation)
    check_down_backward(Layer("dropped", layout, has_bias=True), 16, activation)


def check_down_backward(layer: Layer, rows: int, activation: Any) -> None:
    from memfine_fx.kernels.down_backward import down_backward, num_weight_parts, reference_down_backward

    tiles, grad = small_tiles().down_backward, layer.rows(SIZES.tokens, SIZES.hidden)
    num_parts = num_weight_parts(SIZES.width, tiles)
    for window in layer.windows(rows):
        gate, up, activated = (layer.rows(window.num_rows, SIZES.width) * 4 for _ in range(3))
        parts = torch.zeros(num_parts, layer.routing.num_rows, device=DEVICE)
        common = (grad, layer.weight, layer.routing, layer.tables, window, activation)
        expected = reference_down_backward(*common, (gate, up))
        down_backward(*common, (gate, up), (gate, up), activated, parts, tiles, "ieee")  # over the products
        num_routed = layer.routed(window)
        for one, other in zip((gate, up, activated), expected, strict=False):
            if one is up and activation == "relu2":
                continue
            assert relative_error(one[:num_routed], other[:num_routed]) < 1e-5
        assert relative_error(parts.sum(0), expected[3]) < 1e-5


@pytest.mark.parametrize("rows", range(1, 27, 5))
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    ("parts", "are_added"),
    (
        ((True, True), (False, False)),
        ((True, False), (False, False)),
        ((False, True), (False, True)),
        ((True, True), (True, False)),
    ),
)
def test_weight_gradients_of_experts_that_windows_cut(
    parts: tuple[bool, bool], are_added: tuple[bool, bool], pattern: str, rows: int
) -> None:
    from memfine_fx.kernels.tables import Tables
    from memfine_fx.kernels.weight_gradient import TableGradients, reference_weight_gradient, weight_gradient

    layer, tiles, has_bias = Layer(pattern, has_bias=True), small_tiles().weight_gradient, True
    grad = layer.rows(SIZES.tokens, SIZES.hidden)
    shapes = [tuple(one.shape) for one in parameters("halves", SIZES, has_bias=True)]
    totals = [torch.zeros(shape, device=DEVICE) for shape in shapes]
    for one, is_added in zip(totals[:2], are_added, strict=True):
        one.normal_() if is_added else None
    found = [one.clone() for one in totals]
    for one, is_added in zip(found[:2], are_added, strict=True):
        one.fill_(float("nan")) if not is_added else None  # what is not added to must not be read
    into = TableGradients.of(
        Tables.of(found, "halves", has_bias=has_bias), has_projections=parts[0], has_down=parts[1], are_added=are_added
    )
    for stage in (one for pair in into.stages for one in pair):
        stage.fill_(float("nan"))  # what was not written must not be read
    expected = Tables.of(totals, "halves", has_bias=has_bias)
    for window in layer.windows(rows):
        rows_of = [layer.rows(window.num_rows, one.shape[1]) for one in expected.projections]
        activated = layer.rows(window.num_rows, SIZES.width)
        common = (rows_of, layer.hidden, activated, grad, layer.weight, layer.routing, window)
        weight_gradient(*common, into, tiles, "ieee")
        reference_weight_gradient(*common, expected)
    is_written = [parts[0], parts[1], parts[0], parts[1]]
    for one, other, is_one in zip(found, totals, is_written, strict=True):
        if is_one:
            assert relative_error(one, other) < 1e-5
        else:
            assert not one.nan_to_num().any()  # neither written nor, as a bias, added to
