"""Small layers with routing of every kind, and the same layer without kernels.

The tests run on a device where there is one, else in Triton's interpreter, which must be asked for before Triton is
imported for the first time.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_CAN_RUN = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
_needs_triton = pytest.mark.skipif(
    not (_HAS_TRITON and _CAN_RUN),
    reason="needs Triton, and a device or TRITON_INTERPRET=1 from the start: make gpu-kernels",
)
# exp saturates as on a device; the interpreter's numpy says so.
in_kernels = [_needs_triton, pytest.mark.filterwarnings("ignore:overflow encountered in exp")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUTS = ("apart", "apart_in_out", "halves", "halves_in_out", "interleaved_in_out")
ACTIVATIONS = ("swiglu", "geglu", "geglu_exact", "clamped")
FORMS = (
    *((activation, layout) for activation in ACTIVATIONS for layout in LAYOUTS),
    ("relu2", "single"),
    ("relu2", "single_in_out"),
)
PATTERNS = ("random", "one_expert", "last_expert", "two_experts", "dropped", "all_dropped", "even")


@dataclass(frozen=True)
class Sizes:
    """T, K, E, H, F of a layer."""

    tokens: int = 13
    top_k: int = 2
    experts: int = 5
    hidden: int = 24
    width: int = 20


def small_tiles(size: int = 16) -> Any:
    """Tiles of 16 in every direction, so that toy sizes have borders of tiles."""
    from memfine_fx.kernels.launches import Tiles
    from memfine_fx.kernels.tiling import LayerTiles

    one = Tiles(size, size, size, num_warps=4, num_stages=2)
    return LayerTiles(one, one, one, one)


def expert_index(pattern: str, sizes: Sizes) -> Tensor:
    """[T,K] ids that leave experts without rows, crowd them or name none."""
    shape, last = (sizes.tokens, sizes.top_k), sizes.experts - 1
    if pattern == "one_expert":
        index = torch.zeros(shape, dtype=torch.int64)
    elif pattern == "last_expert":
        index = torch.full(shape, last)
    elif pattern == "two_experts":
        index = torch.where(torch.rand(shape) < 0.1, 0, last)
    elif pattern == "all_dropped":
        index = torch.full(shape, sizes.experts)
    elif pattern == "even":
        index = torch.arange(sizes.tokens * sizes.top_k).remainder(sizes.experts).view(shape)
    else:
        index = torch.randint(-1 if pattern == "dropped" else 0, sizes.experts + (pattern == "dropped"), shape)
    return index.to(DEVICE)


def parameters(
    layout: str, sizes: Sizes, dtype: torch.dtype = torch.float32, *, has_bias: bool = False
) -> list[Tensor]:
    """Tables of a layout, leaves that want gradients; biases behind them."""
    experts, hidden, width = sizes.experts, sizes.hidden, sizes.width
    in_out = layout in ("halves_in_out", "interleaved_in_out")
    projection = (hidden, 2 * width) if in_out else (2 * width, hidden)
    shapes = [(experts, *projection), (experts, width, hidden) if in_out else (experts, hidden, width)]
    if layout == "apart":
        shapes = [(experts, width, hidden), (experts, width, hidden), (experts, hidden, width)]
    if layout == "apart_in_out":
        shapes = [(experts, hidden, width), (experts, hidden, width), (experts, width, hidden)]
    if layout == "single":
        shapes = [(experts, width, hidden), (experts, hidden, width)]
    if layout == "single_in_out":
        shapes = [(experts, hidden, width), (experts, width, hidden)]
    if has_bias:
        outputs = [width, width] if layout.startswith("apart") else [width if "single" in layout else 2 * width]
        shapes += [(experts, size) for size in (*outputs, hidden)]
    return [(torch.randn(shape, device=DEVICE) * 0.3).to(dtype).requires_grad_() for shape in shapes]


def adapters(
    layout: str, sizes: Sizes, ranks: tuple[int | None, int | None], dtype: torch.dtype = torch.float32
) -> tuple[Any, list[Tensor]]:
    """(forms, factors) of adapters of gate and up, and of down; B of down stands as PEFT has it, experts last."""
    from memfine_fx.kernels.adapter_tables import AdapterForm

    experts, hidden, width = sizes.experts, sizes.hidden, sizes.width
    outputs = [width, width] if layout.startswith("apart") else [width if "single" in layout else 2 * width]
    sides = [*((out, hidden, ranks[0]) for out in outputs), (hidden, width, ranks[1])]
    forms: list[AdapterForm | None] = []
    factors = []
    for out, depth, rank in sides:
        if rank is None:
            forms.append(None)
            continue
        is_down = out == hidden and depth == width
        first = torch.randn((experts, depth, rank) if is_down else (experts, rank, depth), device=DEVICE)
        second = torch.randn((out, rank, experts), device=DEVICE).permute(2, 0, 1)
        factors += [(one * 0.3).to(dtype).requires_grad_() for one in (first, second)]
        forms.append(AdapterForm(rank, 0.5, is_first_out_in=not is_down))
    return tuple(forms), factors


def with_adapters(params: Sequence[Tensor], layout: str, forms: Any, factors: Sequence[Tensor]) -> list[Tensor]:
    """The tables with what adapters add to them, in float64."""
    tables, left = [param.double() for param in params], [factor.double() for factor in factors]
    for place, form in enumerate(forms):
        if form is not None:
            first, second = left.pop(0), left.pop(0)
            delta = form.scale * (second @ (first if form.is_first_out_in else first.mT))
            tables[place] = tables[place] + (delta.mT if layout.endswith("in_out") else delta)
    return tables


def biases(params: Sequence[Tensor], layout: str) -> list[Tensor]:
    """(gate [E,F], up [E,F], down [E,H]), written out for each layout; zeros where there are none."""
    num_tables = 3 if layout.startswith("apart") else 2
    if len(params) == num_tables:
        return [params[0].new_zeros(1)] * 3
    *both, down = params[num_tables:]
    if layout == "interleaved_in_out":
        both = [both[0][:, ::2], both[0][:, 1::2]]
    elif layout.startswith("halves"):
        width = both[0].shape[1] // 2
        both = [both[0][:, :width], both[0][:, width:]]
    return [both[0], both[-1], down]


def matrices(params: Sequence[Tensor], layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """(gate [E,F,H], up [E,F,H], down [E,H,F]), written out for each layout."""
    params = params[: 3 if layout.startswith("apart") else 2]
    down = params[-1]
    if layout == "single":
        return params[0], params[0], down
    if layout == "single_in_out":
        return params[0].transpose(1, 2), params[0].transpose(1, 2), down.transpose(1, 2)
    if layout == "apart":
        return params[0], params[1], down
    if layout == "apart_in_out":
        return params[0].transpose(1, 2), params[1].transpose(1, 2), down.transpose(1, 2)
    both = params[0]
    if layout == "halves":
        width = both.shape[1] // 2
        return both[:, :width], both[:, width:], down
    width = both.shape[2] // 2
    if layout == "halves_in_out":
        gate, up = both[:, :, :width], both[:, :, width:]
    else:
        gate, up = both[:, :, ::2], both[:, :, 1::2]
    return gate.transpose(1, 2), up.transpose(1, 2), down.transpose(1, 2)


def activated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The experts' activation, as their papers and sources write it."""
    if activation == "swiglu":
        return gate / (1 + torch.exp(-gate)) * up
    if activation == "geglu":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if activation == "geglu_exact":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    if activation == "relu2":
        return gate.clamp(min=0) ** 2
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def eager_layer(
    hidden: Tensor, index: Tensor, weight: Tensor | None, params: Sequence[Tensor], layout: str, activation: str
) -> Tensor:
    """The layer in float64, expert by expert."""
    gate, up, down = (table.double() for table in matrices(params, layout))
    gate_bias, up_bias, down_bias = (bias.double().expand(gate.shape[0], -1) for bias in biases(params, layout))
    out = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    for expert in range(gate.shape[0]):
        token, choice = torch.where(index == expert)
        rows = hidden[token].double()
        halves = rows @ gate[expert].T + gate_bias[expert], rows @ up[expert].T + up_bias[expert]
        rows = activated(*halves, activation) @ down[expert].T + down_bias[expert]
        out = out.index_add(0, token, rows if weight is None else rows * weight[token, choice, None].double())
    return out


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, by the largest value expected."""
    if not expected.numel():
        return 0.0
    scale = expected.detach().double().abs().max().clamp(min=1e-6)
    return float((found.detach().double() - expected.detach().double()).abs().max() / scale)
