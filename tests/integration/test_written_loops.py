"""Loops over experts as public code writes them: valid tokens beside ids, places among choices, named experts.

Each layer trains for four steps, and so does an unmodified copy of it (`tests/properties/life.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfine_fx
from tests.integration.test_guarded_loops import ROWS, outcome
from tests.properties.life import NUM_TOKENS

pytestmark = pytest.mark.usefixtures("float64_by_default")
VALID = "valid = x[:, :1] > 0"
ONE_CHOICE = "w, i = logits.softmax(-1).topk(1, dim=-1)"
PLACES = (
    "token = mask.any(dim=-1).nonzero(as_tuple=False).squeeze(-1)",
    "if token.numel() == 0: continue",
    "choice = mask[token].int().argmax(dim=-1, keepdim=True)",
    "share = torch.gather(w.index_select(0, token), dim=-1, index=choice).squeeze(-1)",
    "out.index_add_(0, token, self.ex[e](x.index_select(0, token)) * share.unsqueeze(-1))",
)
BY_NAME = ("e = int(name.item())", "mask = i == e", "if not mask.any(): continue", *PLACES)
SORTED = (
    "flat = i.view(-1)",
    "_, order = torch.sort(flat)",
    "counts = torch.bincount(flat, minlength=self.num).cpu().numpy()",
    "xs = x.index_select(0, torch.div(order, 2, rounding_mode='floor'))",
    "parts = []",
    "start = 0",
)

CHUNKED: dict[str, dict[str, Any]] = {
    "valid tokens": {"start": (VALID,), "select": ("t, c = torch.where((i == e) & valid)",)},
    "valid tokens of a padding mask": {
        "start": ("valid = ~(x[:, 0] < 0)",),
        "select": ("t, c = torch.where(torch.logical_and(i == e, valid.unsqueeze(-1)))",),
    },
    "all tokens are valid": {
        "start": ("valid = torch.ones(x.size(0), dtype=torch.bool)",),
        "select": ("t, c = torch.where(torch.logical_and(i == e, valid.unsqueeze(-1)))",),
    },
    "choices of some weight": {"select": ("t, c = ((i == e) & (w > 0.3)).nonzero(as_tuple=True)",)},
    "rows by gather and scatter_add": {
        "select": ("t, c = torch.where(i == e)", "at = t[:, None].expand(-1, x.size(1))"),
        "body": ("out.scatter_add_(0, at, self.ex[e](x.gather(0, at)) * w[t, c, None])",),
    },
    "places among choices": {"select": ("mask = i == e",), "guard": "not mask.any()", "body": PLACES},
    "experts by name": {"header": "for name in torch.unique(i):", "select": (), "guard": "", "body": BY_NAME},
    "experts by name, named before": {
        "start": ("names = torch.unique(i)",), "header": "for name in names:", "select": (), "guard": "",
        "body": BY_NAME,
    },
    "slices by a count": {
        "start": SORTED, "select": ("n = counts[e]",), "guard": "",
        "body": ("parts.append(self.ex[e](xs[start : start + n]))", "start += n"),
        "end": (
            "rows = torch.cat(parts)",
            "rows = torch.empty_like(rows).index_copy(0, order, rows).view(-1, 2, H)",
            "out = torch.bmm(w.unsqueeze(1), rows).squeeze(1)",
        ),
    },
    "slices by a count, reshaped behind the bmm": {
        "start": SORTED, "select": ("n = counts[e]",), "guard": "",
        "body": ("parts.append(self.ex[e](xs[start : start + n]))", "start += n"),
        "end": (
            "rows = torch.cat(parts)",
            "rows = torch.zeros_like(rows).index_copy(0, order, rows).view(-1, 2, H)",
            "out = torch.bmm(w.unsqueeze(1), rows).reshape(-1, 2, H // 2).flatten(1)",
        ),
    },
    "slices of one choice": {
        "route": (ONE_CHOICE, "order = i.view(-1).argsort(stable=True)"),
        "start": (
            "counts = torch.bincount(i.view(-1), minlength=self.num).tolist()",
            "parts, scales, rows = x[order].split(counts), w[order].split(counts), []",
        ),
        "select": (), "guard": "", "body": ("rows.append(self.ex[e](parts[e]) * scales[e])",),
        "end": ("out = out.index_add(0, order, torch.cat(rows))",),
    },
    "masks of one choice": {
        "route": (ONE_CHOICE, "ids = i.view(-1)"), "select": ("m = ids == e",), "guard": "",
        "body": ("out[m] = self.ex[e](x[m]) * w[m]",),
    },
    "masked rows that are weighed before the expert": {
        "select": ("m = (i == e).any(-1)", "s = (w * (i == e)).sum(-1)"), "guard": "not m.any()",
        "body": ("out[m] += self.ex[e](x[m] * s[m, None])",),
    },
}  # fmt: skip
UNPROVED: dict[str, dict[str, Any]] = {
    "other tokens are valid for each expert": {"select": ("t, c = torch.where((i == e) & (x[:, :1] > 0.1 * e))",)},
    "valid tokens are written": {
        "start": (VALID,), "select": ("t, c = torch.where((i == e) & valid)",), "body": (ROWS, "valid[t] = False"),
    },
    "places among the choices of all tokens": {
        "select": ("mask = i == e", "c = mask.long().argmax(-1)", "t = mask.any(-1).nonzero().squeeze(-1)"),
        "guard": "", "body": ("out.index_add_(0, t, self.ex[e](x[t]) * w.gather(1, c[:, None])[t])",),
    },
    "places of another expert": {
        "select": ("mask = i == (e + 1) % self.num", "t = (i == e).any(-1).nonzero().squeeze(-1)"),
        "guard": "", "body": ("c = mask[t].long().argmax(-1)", ROWS),
    },
    "an expert that a token names twice": {
        "route": ("w, i = logits.softmax(-1).topk(2, dim=-1)", "i = i // 2"),
        "select": ("mask = i == e", "t = mask.any(-1).nonzero().squeeze(-1)"),
        "guard": "", "body": ("c = mask[t].long().argmax(-1)", ROWS),
    },
    "a name that is read later": {
        "header": "for name in torch.unique(i):", "select": (), "guard": "", "body": BY_NAME,
        "end": ("out = out * (1 + name)",),
    },
}  # fmt: skip


def trained(folder: Path, fields: dict[str, Any]) -> Any:
    """The outcome of a loop that adds rows at places t with weights of choices c, unless `fields` say otherwise."""
    options: dict[str, Sequence[str]] = {"body": (ROWS,)}
    return outcome(folder, **(options | fields))  # type: ignore[arg-type]  # lists of lines


@pytest.mark.parametrize("name", CHUNKED)
def test_a_loop_that_public_code_writes_is_chunked(name: str, tmp_path: Path) -> None:
    result = trained(tmp_path, CHUNKED[name] | {"num_tokens": NUM_TOKENS})
    assert result.verdict == "exact" and result.num_chunked, result


class Weighted(torch.autograd.Function):
    """An activation with a backward of its own, as training frameworks write weighted SwiGLU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.relu() * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        return gradients[0] * weight * (rows > 0), (gradients[0] * rows.relu()).sum(-1, keepdim=True)


class OwnBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(index == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, Weighted.apply(expert(x[token]), weight[token, choice, None]))
        return out


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
def test_a_backward_of_ones_own_in_the_experts_is_the_reason_why_they_run_as_written() -> None:
    layer, x = OwnBackward(), torch.randn(5, 8)
    expected = layer(x)
    memfine_fx.optimize(layer, inner_backend="eager")
    assert torch.equal(layer(x), expected)
    (region,) = memfine_fx.report(layer).layers
    assert "an autograd.Function is called" in (region.reason or ""), region


@pytest.mark.parametrize("name", UNPROVED)
def test_a_loop_that_is_not_proved_runs_as_written(name: str, tmp_path: Path) -> None:
    result = trained(tmp_path, UNPROVED[name])
    assert result.verdict == "exact" and result.num_chunked == 0, result
