"""Tables that exist tile by tile: packed numbers in every layout give the layer whose tables are written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memfine_fx.kernels.packed import FP4, NF4, four_bits, microscaling, scaled_blocks
from memfine_fx.kernels.tables import TileSource
from tests.kernels.cases import DEVICE, Sizes, expert_index, in_kernels, relative_error, small_tiles
from tests.kernels.test_layer import eager_layer

SIZES = Sizes(hidden=64, width=32)
LAYOUTS = ("apart", "apart_in_out", "halves", "halves_in_out", "interleaved_in_out", "single", "single_in_out")

Packed = tuple[TileSource, list[Tensor], Tensor]
"""How a table is made, of what, and the table."""


def nibbles(packed: Tensor, *, low_first: bool) -> Tensor:
    pair = [packed & 15, packed >> 4] if low_first else [packed >> 4, packed & 15]
    return torch.stack(pair, -1).flatten(1).long()


def in_four_bits(shape: tuple[int, int], codes: tuple[float, ...] = NF4) -> Packed:
    experts, size, block = SIZES.experts, shape[0] * shape[1], 16
    packed = torch.randint(0, 256, (experts, size // 2, 1), dtype=torch.uint8, device=DEVICE)
    scales = torch.rand(experts, size // block, device=DEVICE) * 0.5
    numbers = torch.tensor(codes, device=DEVICE)[nibbles(packed.flatten(1), low_first=False)]
    table = (numbers.view(experts, -1, block) * scales[:, :, None]).view(experts, *shape)
    return four_bits(shape, block, codes), [packed, scales], table


def in_fp4(shape: tuple[int, int]) -> Packed:
    return in_four_bits(shape, FP4)


def in_mxfp4(shape: tuple[int, int]) -> Packed:
    experts, groups = SIZES.experts, shape[1] // 32
    blocks = torch.randint(0, 256, (experts, shape[0], groups, 16), dtype=torch.uint8, device=DEVICE)
    exponents = torch.randint(122, 127, (experts, shape[0], groups), dtype=torch.uint8, device=DEVICE)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # a sign, two bits of exponent and one of fraction
    codes = torch.tensor([*magnitudes, *(-one for one in magnitudes)], device=DEVICE)
    numbers = codes[nibbles(blocks.flatten(1), low_first=True)].view(experts, shape[0], groups, 32)
    return microscaling(shape), [blocks, exponents], torch.ldexp(numbers, exponents.int()[..., None] - 127).flatten(2)


def in_int8(shape: tuple[int, int]) -> Packed:
    """With blocks that do not divide the matrix."""
    rows, columns = 24, 48
    numbers = torch.randint(-127, 128, (SIZES.experts, *shape), dtype=torch.int8, device=DEVICE)
    counts = -(-shape[0] // rows), -(-shape[1] // columns)
    scales = torch.rand(SIZES.experts, *counts, device=DEVICE) * 0.005
    wide = scales.repeat_interleave(rows, 1)[:, : shape[0]].repeat_interleave(columns, 2)[:, :, : shape[1]]
    return scaled_blocks(shape, (rows, columns)), [numbers, scales], numbers * wide


FORMATS: dict[str, Callable[[tuple[int, int]], Packed]] = {
    "nf4": in_four_bits, "fp4": in_fp4, "mxfp4": in_mxfp4, "int8": in_int8,
}  # fmt: skip


def shapes_of(layout: str) -> list[tuple[int, int]]:
    hidden, width = SIZES.hidden, SIZES.width
    columns = width if layout.startswith(("apart", "single")) else 2 * width
    shapes = [(columns, hidden)] * (2 if layout.startswith("apart") else 1) + [(hidden, width)]
    return [(columns, rows) for rows, columns in shapes] if layout.endswith("in_out") else shapes


def check(layout: str, pack: Callable[[tuple[int, int]], Packed], pattern: str, rows: int, **options: Any) -> None:
    """Output and gradients of tokens and of the routing weight, beside the layer on tables that are written out."""
    from memfine_fx.kernels.layer import LayerOptions
    from memfine_fx.kernels.swiglu import swiglu_experts

    hidden = torch.randn(SIZES.tokens, SIZES.hidden, device=DEVICE, requires_grad=True)
    weight = torch.rand(SIZES.tokens, SIZES.top_k, device=DEVICE, requires_grad=True)
    index = expert_index(pattern, SIZES)
    made = [pack(shape) for shape in shapes_of(layout)]
    sources = tuple(how for how, _, _ in made)
    activation: Any = "relu2" if layout.startswith("single") else "swiglu"
    chosen = LayerOptions(rows, layout=layout, activation=activation, tiles=small_tiles(), sources=sources, **options)  # type: ignore[arg-type]
    params = [one for _, tensors, _ in made for one in tensors]
    found = swiglu_experts(hidden, index, weight, params, chosen)
    expected = eager_layer(hidden, index, weight, [table for _, _, table in made], layout, activation)
    grad = torch.randn_like(found)
    gradients = torch.autograd.grad(found, [hidden, weight], grad)
    references = torch.autograd.grad(expected, [hidden, weight], grad.double(), materialize_grads=True)
    for one, other in zip((found, *gradients), (expected, *references), strict=True):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
class TestLayers:
    pytestmark = in_kernels

    def test_packed_tables_give_the_eager_layer(self, name: str, layout: str) -> None:
        check(layout, FORMATS[name], "random", 11)


@pytest.mark.parametrize("pattern", ("one_expert", "dropped", "all_dropped"))
@pytest.mark.parametrize("saves_products", (False, True))
class TestRouting:
    pytestmark = in_kernels

    def test_however_tokens_are_routed(self, pattern: str, saves_products: bool) -> None:
        check("halves", in_four_bits, pattern, 7, saves_products=saves_products)


class TestRefused:
    pytestmark = in_kernels

    def test_gradients_of_what_is_beside_made_tables(self) -> None:
        from memfine_fx.kernels.layer import LayerOptions
        from memfine_fx.kernels.swiglu import swiglu_experts

        made = [in_four_bits(shape) for shape in shapes_of("halves")]
        bias = [torch.randn(SIZES.experts, size, device=DEVICE) for size in (2 * SIZES.width, SIZES.hidden)]
        bias[1].requires_grad_()
        options = LayerOptions(9, has_bias=True, tiles=small_tiles(), sources=tuple(how for how, _, _ in made))
        hidden = torch.randn(SIZES.tokens, SIZES.hidden, device=DEVICE)
        params = [*(one for _, tensors, _ in made for one in tensors), *bias]
        found = swiglu_experts(hidden, expert_index("random", SIZES), None, params, options)
        with pytest.raises(ValueError, match="have no gradients of their parameters"):
            found.sum().backward()

    def test_tensors_that_do_not_make_a_table(self) -> None:
        from memfine_fx.kernels.tables import Tables, TileTable

        how, (packed, scales), _ = in_four_bits((32, 64))
        with pytest.raises(ValueError, match="a table is computed from 2 contiguous tensors of its experts"):
            TileTable.of(how, [packed, scales[:, ::2]])
        with pytest.raises(ValueError, match="a table is computed from 2 contiguous tensors of its experts"):
            TileTable.of(how, [packed, scales[1:]])
        with pytest.raises(ValueError, match="does not have 3 parameters"):
            Tables.of([packed, scales, packed], "halves", sources=(how, how))
        with pytest.raises(ValueError, match=r"down \[5, 32, 64\] computed by tiles does not take back"):
            Tables.of([packed, scales] * 2, "halves", sources=(how, how))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_functions_of_a_kernel_have_names_of_their_own(layout: str) -> None:
    """Triton compiles one function for each name, and calls it in place of all others."""
    pytest.importorskip("triton")
    from memfine_fx.kernels.computed_tables import loader_of
    from memfine_fx.kernels.tables import Tables

    made = [in_four_bits(shape) for shape in shapes_of(layout)]
    params = [one for _, tensors, _ in made for one in tensors]
    tables = Tables.of(params, layout, sources=tuple(how for how, _, _ in made))  # type: ignore[arg-type]
    loaders = [loader_of(one) for one in (tables.gate, tables.up, tables.down)]
    assert len({f"{one.fn.__module__}.{one.fn.__qualname__}" for one in loaders}) == len(set(loaders)) > 1


def test_codes_of_a_compilation_are_not_kept() -> None:
    from torch._subclasses import FakeTensorMode

    from memfine_fx.kernels.tables import TileTable

    how, tensors, _ = in_four_bits((32, 64), tuple(float(code) for code in range(16)))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = TileTable.of(how, [mode.from_tensor(one) for one in tensors])
    made, again = (TileTable.of(how, tensors) for _ in range(2))
    assert type(fake.tensors[2]) is not Tensor
    assert made.tensors[2].tolist() == list(range(16))
    assert again.tensors[2] is made.tensors[2]


def test_codes_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    for name, codes in (("nf4", NF4), ("fp4", FP4)):
        torch.testing.assert_close(torch.tensor(codes), functional.get_4bit_type(name, device="cpu"))
