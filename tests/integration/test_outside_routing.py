"""Routing decisions that a model is given: an input of integers, or a buffer, of any layout that reaches experts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfine_fx
from tests.integration.comparison import FP32_TOLERANCE, relative_error

LAYERS, BATCH, SEQUENCE, HIDDEN, FFN, NUM_EXPERTS, TOP_K = 2, 3, 7, 8, 6, 5, 2

Pick = Callable[[torch.Tensor, int], torch.Tensor]
"""Returns the ids [T,K] of one layer from those of all layers."""

LAYOUTS: dict[str, tuple[tuple[int, ...], Pick]] = {
    "[B,S,L,K], a layer selected": ((0, 1, 3, 2), lambda ids, i: ids[:, :, i].reshape(-1, TOP_K)),
    "[L,B,S,K], the first dimension": ((3, 0, 1, 2), lambda ids, i: ids[i].view(-1, TOP_K)),
    "[L,B,S,K], unbind": ((3, 0, 1, 2), lambda ids, i: ids.unbind(0)[i].flatten(0, 1)),
    "[B,L,S,K], select": ((0, 3, 1, 2), lambda ids, i: ids.select(1, i).reshape(-1, TOP_K)),
    "[B,S,K,L], last": ((0, 1, 2, 3), lambda ids, i: ids[..., i].reshape(-1, TOP_K)),
    "[B,S,L,K], index_select": (
        (0, 1, 3, 2),
        lambda ids, i: ids.index_select(2, torch.tensor([i])).squeeze(2).flatten(0, 1),
    ),
    "[B,S,L,K], narrow": ((0, 1, 3, 2), lambda ids, i: ids.narrow(2, i, 1).reshape(-1, TOP_K)),
    "[B,S,L,K], chunk": ((0, 1, 3, 2), lambda ids, i: ids.chunk(LAYERS, 2)[i].reshape(-1, TOP_K)),
    "[K,L,B,S], permuted": ((2, 3, 0, 1), lambda ids, i: ids[:, i].permute(1, 2, 0).reshape(-1, TOP_K)),
    "[B,S,L,K], cast": ((0, 1, 3, 2), lambda ids, i: ids[:, :, i].reshape(-1, TOP_K).to(torch.int64)),
    "[B,S,L,K], unsqueezed": (
        (0, 1, 3, 2),
        lambda ids, i: ids[:, :, i][None].squeeze(0).reshape(-1, TOP_K).contiguous(),
    ),
}


class Gathered(nn.Module):
    """Each row's expert weights are picked from [E, ...]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, FFN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, FFN, HIDDEN) / FFN**0.5)
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)

    def forward(self, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        tokens, ids = tokens.flatten(0, -2), ids.flatten(0, -2)
        weights = self.router(tokens).softmax(-1).gather(-1, ids)
        return self.experts(tokens, ids, weights)

    def experts(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        num_choices, rows = ids.shape[-1], ids.flatten()
        hidden = tokens.repeat_interleave(num_choices, 0).unsqueeze(1)
        hidden = nn.functional.silu(hidden @ self.up[rows]) @ self.down[rows]
        return (hidden.view(-1, num_choices, HIDDEN) * weights.unsqueeze(-1)).sum(1)


class Looped(Gathered):
    """Each expert takes the tokens whose ids are its number."""

    def experts(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(tokens)
        for number in range(NUM_EXPERTS):
            rows, choices = torch.where(ids == number)
            hidden = nn.functional.silu(tokens[rows] @ self.up[number]) @ self.down[number]
            total.index_add_(0, rows, hidden * weights[rows, choices, None])
        return total


class Masked(Gathered):
    """Each choice of each token is compared with each expert's number."""

    def experts(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(tokens)
        for choice in range(ids.shape[-1]):
            for number in range(NUM_EXPERTS):
                mask = ids[:, choice] == number
                hidden = nn.functional.silu(tokens[mask] @ self.up[number]) @ self.down[number]
                total[mask] += weights[:, choice][mask].unsqueeze(-1) * hidden
        return total


class Dense(Gathered):
    """A one-hot combine [T,E], which cannot tell whether a token names an expert twice."""

    def experts(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        shares = (nn.functional.one_hot(ids, NUM_EXPERTS) * weights.unsqueeze(-1)).sum(1)
        hidden = nn.functional.silu(torch.einsum("th,ehf->tef", tokens, self.up))
        return torch.einsum("te,tef,efh->th", shares, hidden, self.down)


class Listed(Gathered):
    """Rows are sorted by expert and split."""

    def experts(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = ids.flatten().argsort(stable=True)
        places = order // ids.shape[-1]
        counts = torch.bincount(ids.flatten(), minlength=NUM_EXPERTS).tolist()
        parts = zip(tokens[places].split(counts), self.up, self.down, strict=True)
        hidden = torch.cat([nn.functional.silu(rows @ up) @ down for rows, up, down in parts])
        return torch.zeros_like(tokens).index_add_(0, places, hidden * weights.flatten()[order, None])


class Replayed(nn.Module):
    def __init__(self, pick: Pick, layer: type[Gathered] = Gathered) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.pick = pick

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            hidden = hidden + layer(hidden, self.pick(ids, number)).view_as(hidden)
        return hidden


class Held(Replayed):
    """Routing of all layers in a buffer."""

    def __init__(self, pick: Pick, ids: torch.Tensor) -> None:
        super().__init__(pick)
        self.register_buffer("ids", ids)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden, self.ids)


def ids_of(order: tuple[int, ...], *, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return ids [B,S,K,L] with dimensions in another order; layer 1 sends every token to expert 3: others are idle."""
    ids = torch.randint(NUM_EXPERTS, (BATCH, SEQUENCE, TOP_K, LAYERS))
    ids[..., 1] = 3
    return ids.permute(order).contiguous().to(dtype)


def assert_chunked_and_exact(model: nn.Module, *inputs: torch.Tensor) -> None:
    torch.compiler.reset()
    reference = copy.deepcopy(model)
    memfine_fx.optimize(model, inner_backend="eager", verify=True)
    assert_equal(model, reference, *inputs)
    report = memfine_fx.report(model)
    assert [region.status for region in report.regions] == ["chunked"] * LAYERS, report


def assert_equal(model: nn.Module, reference: nn.Module, *inputs: torch.Tensor) -> None:
    results = [each(*inputs) for each in (model, reference)]
    for result in results:
        result.square().mean().backward()
    assert relative_error(*results) < FP32_TOLERANCE
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None and expected.grad is not None, name
        assert relative_error(parameter.grad, expected.grad) < FP32_TOLERANCE, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_given_for_all_layers_choose_experts(layout: str) -> None:
    torch.manual_seed(0)
    order, pick = LAYOUTS[layout]
    assert_chunked_and_exact(Replayed(pick), torch.randn(BATCH, SEQUENCE, HIDDEN), ids_of(order))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_ids_of_a_narrow_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Replayed(lambda ids, i: ids[:, :, i].reshape(-1, TOP_K).long())
    assert_chunked_and_exact(model, torch.randn(BATCH, SEQUENCE, HIDDEN), ids_of((0, 1, 3, 2), dtype=dtype))


@pytest.mark.parametrize("layer", [Gathered, Looped, Masked, Listed])
def test_ids_of_all_layers_reach_experts_of_any_spelling(layer: type[Gathered]) -> None:
    torch.manual_seed(0)
    model = Replayed(lambda ids, i: ids[:, :, i].reshape(-1, TOP_K), layer)
    assert_chunked_and_exact(model, torch.randn(BATCH, SEQUENCE, HIDDEN), ids_of((0, 1, 3, 2)))


@pytest.mark.parametrize("layer", [Masked, Listed])
def test_ids_of_tokens_in_sequences(layer: type[Gathered]) -> None:
    """The layer itself flattens ids [B,S,K]."""
    torch.manual_seed(0)
    model = Replayed(lambda ids, i: ids[i], layer)
    assert_chunked_and_exact(model, torch.randn(BATCH, SEQUENCE, HIDDEN), ids_of((3, 0, 1, 2)))


@pytest.mark.parametrize("layer", [Gathered, Looped])
def test_ids_of_one_choice(layer: type[Gathered]) -> None:
    torch.manual_seed(0)
    model = Replayed(lambda ids, i: ids[..., i].reshape(-1, 1), layer)
    assert_chunked_and_exact(model, torch.randn(BATCH, SEQUENCE, HIDDEN), ids_of((0, 1, 2, 3))[:, :, 0])


def test_ids_in_a_buffer() -> None:
    torch.manual_seed(0)
    model = Held(lambda ids, i: ids[:, :, i].reshape(-1, TOP_K), ids_of((0, 1, 3, 2)))
    assert_chunked_and_exact(model, torch.randn(BATCH, SEQUENCE, HIDDEN))


def test_one_decision_for_all_layers() -> None:
    torch.manual_seed(0)
    assert_chunked_and_exact(
        Replayed(lambda ids, _: ids), torch.randn(BATCH, SEQUENCE, HIDDEN), ids_of((0, 1, 2, 3))[..., 0]
    )


class ScaledBetween(Masked):
    """Weights are written between two experts, so that each expert reads others of the same view."""

    def experts(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total, weights = torch.zeros_like(tokens), weights * 1.0
        for number in range(NUM_EXPERTS):
            mask = ids[:, 0] == number
            total[mask] += weights[:, 0][mask].unsqueeze(-1) * (tokens[mask] @ self.up[number] @ self.down[number])
            weights[:, 0].mul_(0.5)
        return total


class Shifted(Gathered):
    """Ids are written in place."""

    def experts(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ids = ids.clone()
        ids[:, 0].add_(1).remainder_(NUM_EXPERTS)
        return super().experts(tokens, ids, weights)


@pytest.mark.parametrize("layer", [ScaledBetween, Shifted, Dense])
@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
def test_what_cannot_be_proved_runs_as_written(layer: type[Gathered]) -> None:
    torch.manual_seed(0)
    model = Replayed(lambda ids, i: ids[:, :, i].reshape(-1, TOP_K), layer)
    torch.compiler.reset()
    reference = copy.deepcopy(model)
    memfine_fx.optimize(model, inner_backend="eager")
    assert_equal(model, reference, torch.randn(BATCH, SEQUENCE, HIDDEN), ids_of((0, 1, 3, 2)))
    regions = memfine_fx.report(model).regions
    assert regions and all(region.status == "refused" for region in regions)
    assert len({region.where.module for region in regions}) == len(regions), "a layer is reported once"
