"""The row-wise proof: what an expert may do to its rows, and the reason for what it may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memfine_fx.records import MoERegion
from tests.helpers import WIDTH, GatheredMoE, largest_error, naive_combine, raised, refusal_reason

HALF = WIDTH // 2
ACROSS_ROWS = "works along the routed dimension 0, so rows are not independent"
ALL_DIMS = "a reduction over all dimensions mixes rows"


def scaled_without_gradient(rows: Tensor) -> Tensor:
    with torch.no_grad():
        scale = rows.abs().amax(dim=-1, keepdim=True) + 1
    return rows / scale


PROVED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "leaky relu": lambda rows: F.leaky_relu(rows, 0.1),
    "hardswish": F.hardswish,
    "clamp and power": lambda rows: rows.clamp(min=0, max=2).pow(2),
    "softmax inside a row": lambda rows: rows.softmax(dim=-1),
    "sum inside a row": lambda rows: rows / (rows.abs().sum(dim=-1, keepdim=True) + 1),
    "mean inside a row": lambda rows: rows - rows.mean(dim=1, keepdim=True),
    "maximum inside a row": lambda rows: rows - rows.amax(dim=-1, keepdim=True),
    "cumsum inside a row": lambda rows: rows.cumsum(dim=-1),
    "root mean square": lambda rows: F.rms_norm(rows, (WIDTH,)),
    "chunk and cat": lambda rows: torch.cat([part.relu() for part in rows.chunk(2, dim=-1)], dim=-1),
    "split": lambda rows: torch.cat(rows.split([4, 12], dim=1)[::-1], dim=1),
    "unbind": lambda rows: torch.cat(rows.view(-1, 2, HALF).unbind(1)[::-1], dim=-1),
    "interleaved halves": lambda rows: torch.cat([rows[..., ::2], rows[..., 1::2].tanh()], dim=-1),
    "columns by a full row slice": lambda rows: torch.cat([rows[:, :HALF], rows[:, HALF:].tanh()], dim=-1),
    "heads": lambda rows: rows.view(-1, 4, 4).transpose(1, 2).reshape(-1, WIDTH),
    "where": lambda rows: torch.where(rows > 0, rows, 0.1 * rows),
    "where with a number": lambda rows: torch.where(rows > 0, rows, 0.25),
    "cast there and back": lambda rows: rows.to(torch.float64).sigmoid().to(torch.float32),
    "in place on its own rows": lambda rows: rows.clone().mul_(2).add_(1),
    "expand inside a row": lambda rows: rows * rows.sum(dim=-1, keepdim=True).expand(-1, WIDTH).sigmoid(),
    "dropout in eval mode": lambda rows: F.dropout(rows, 0.5, training=False),
}


def leaves_of(layer: GatheredMoE, hidden: Tensor) -> list[Tensor]:
    return [hidden, layer.up, layer.down]


def region_step(layer: GatheredMoE, region: MoERegion, hidden: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """[T,H] by the raised expert function, assignment by assignment."""
    return naive_combine(
        region.expert_fn.graph_module, hidden, weight, index, [layer.up, layer.down], region.expert_fn.param_kinds
    )


@pytest.mark.parametrize("name", PROVED)
def test_what_stays_inside_a_row_is_raised_with_its_value_and_gradients(name: str) -> None:
    layer = GatheredMoE(PROVED[name])
    region = raised(layer)
    hidden = torch.randn(5, 8, requires_grad=True)
    index, weight = (tensor.detach() for tensor in layer.route(hidden))
    got = region_step(layer, region, hidden, weight, index)
    expected = layer.experts(hidden, index, weight)
    assert largest_error(got, expected) < 1e-5
    leaves = leaves_of(layer, hidden)
    probe = torch.randn_like(expected)
    for ours, truth in zip(
        torch.autograd.grad(got, leaves, probe), torch.autograd.grad(expected, leaves, probe), strict=True
    ):
        assert largest_error(ours, truth) < 1e-5


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "softmax across rows": (lambda rows: rows.softmax(dim=0), ACROSS_ROWS),
    "cumsum over rows": (lambda rows: rows.cumsum(dim=0), ACROSS_ROWS),
    "batch mean": (lambda rows: rows - rows.mean(dim=0, keepdim=True), ACROSS_ROWS),
    "batch sum": (lambda rows: rows / rows.sum(dim=0), ACROSS_ROWS),
    "batch maximum": (lambda rows: rows - rows.amax(dim=0, keepdim=True), ACROSS_ROWS),
    "mean over rows and columns": (lambda rows: rows - rows.mean(dim=(0, 1), keepdim=True), ACROSS_ROWS),
    "the first row for all": (lambda rows: rows + rows[:1], ACROSS_ROWS),
    "one row": (lambda rows: rows + rows.select(0, 0), ACROSS_ROWS),
    "columns become rows": (lambda rows: rows.t().softmax(dim=-1).t(), "permute [1, 0] moves the routed dimensions"),
    "rows in pairs": (lambda rows: rows.view(-1, 2 * WIDTH).relu().view(-1, WIDTH), "mixes [N] in token order"),
    "batch variance": (lambda rows: rows / rows.std(dim=0), "no row-wise rule for aten.std.correction"),
    "rows reversed": (lambda rows: rows.flip(0), "no row-wise rule for aten.flip.default"),
    "rows rolled": (lambda rows: rows.roll(1, 0), "no row-wise rule for aten.roll.default"),
    "noise": (lambda rows: rows + torch.rand_like(rows), "random numbers are drawn inside the experts"),
    "the number of rows": (lambda rows: rows / rows.shape[0], "a symbolic number"),
    "maximum of all": (lambda rows: rows - rows.amax(), "mixes rows"),
    "maximum of all as a matrix": (lambda rows: rows - rows.amax(dim=(), keepdim=True), ALL_DIMS),
    "mean of all as a matrix": (lambda rows: rows - rows.mean(dim=(), keepdim=True), ALL_DIMS),
    "sum of all as a matrix": (lambda rows: rows / rows.sum(dim=(), keepdim=True), ALL_DIMS),
    "sum over no named dimension": (lambda rows: rows / rows.sum(dim=None, keepdim=True), ALL_DIMS),
    "a detached factor": (lambda rows: rows * rows.detach().sigmoid(), "detach stops gradients inside the region"),
    "a scale without gradient": (scaled_without_gradient, "autocast or gradient mode changes inside the region"),
    "dropout": (lambda rows: F.dropout(rows, 0.5, training=True), "dropout"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_lets_rows_meet_is_refused_with_its_reason(name: str) -> None:
    activation, reason = REFUSED[name]
    assert reason in refusal_reason(GatheredMoE(activation))
