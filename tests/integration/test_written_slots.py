"""Capacity layers as they are written: one-hot dispatch into slots [E,C,H], two products, and what stands on results.

Each layer trains for four steps, and so does an unmodified copy of it (`tests/properties/life.py`): outputs, gradients,
parameters and random state are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.properties.life import Outcome, compare
from tests.properties.written import EXPERTS, WrittenLayer, load, module_source

pytestmark = pytest.mark.usefixtures("float64_by_default")
ROUTE = ("w, i = logits.softmax(-1).topk(2, dim=-1)",)
DISPATCH = (
    "mask = F.one_hot(i, self.num).to(x.dtype)",
    "place = mask.sum(1).cumsum(0)[:, None] * mask - 1",
    "d = (F.one_hot(place.long().clamp(0, 3), 4) * (mask * (place < 4))[..., None]).sum(1)",
    "xs = torch.einsum('tec,th->ech', d, x)",
)
COMBINE = ("out = torch.einsum('ech,tec->th', y, d * (mask * w[..., None]).sum(1)[..., None])", "return out")
INIT = (
    "self.up = nn.Parameter(torch.randn(self.num, H, 12) / 3)",
    "self.down = nn.Parameter(torch.randn(self.num, 12, H) / 3)",
    "self.b, self.bias = nn.Parameter(torch.randn(self.num, 1, H)), nn.Parameter(torch.randn(self.num, H))",
    "self.inner = nn.Parameter(torch.randn(self.num, 1, 12))",
    "self.off, self.drop = nn.Dropout(0.0), nn.Dropout(0.3)",
)
_numbers = itertools.count()


def outcome(folder: Path, experts: Sequence[str], combine: Sequence[str] = COMBINE) -> Outcome:
    """Train a layer with two regions of slots at most: Dynamo compiles a batch of one token again."""
    name = f"Slots{next(_numbers)}"
    source = module_source(name, 4, EXPERTS["mlp"], INIT, [*ROUTE, *DISPATCH, *experts, *combine])
    return compare(load(WrittenLayer(name, source, {}), folder)(), seed=3)


BMM = "torch.bmm(F.silu(torch.bmm(xs, self.up)), self.down)"

EXACT: dict[str, tuple[str, ...]] = {
    "nothing": (f"y = {BMM}",),
    "dropout that is off": (f"y = self.off({BMM})",),
    "dropout": (f"y = self.drop({BMM})",),
    "a bias": (f"y = {BMM} + self.b",),
    "a bias in place": (f"y = {BMM}", "y += self.bias.unsqueeze(1)"),
    "a bias that the mask scales": (f"y = {BMM} + self.b * d.sum(0)[..., None]",),
    "biases, then dropout": (
        "y = self.drop(torch.bmm(F.silu(torch.bmm(xs, self.up) + self.inner), self.down) + self.b)",
    ),
    "biases by letters": (
        "y = torch.einsum('ech,ehf->ecf', xs, self.up) + self.inner",
        "y = torch.einsum('ecf,efh->ech', F.gelu(y), self.down) + self.bias[:, None]",
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_stands_on_the_results_of_slots_is_no_obstacle(name: str, tmp_path: Path) -> None:
    result = outcome(tmp_path, EXACT[name])
    assert result.verdict == "exact" and result.num_chunked, result


def test_a_bias_of_slots_that_no_mask_empties_reaches_who_reads_all_slots(tmp_path: Path) -> None:
    result = outcome(
        tmp_path, (f"y = {BMM} + self.b",), ("out = y.sum(1).mean(0)", *COMBINE[:1], "return out + y.mean()")
    )
    assert result.verdict == "exact" and result.num_chunked, result


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        ("y = torch.bmm(self.drop(F.silu(torch.bmm(xs, self.up))), self.down)", "random numbers are drawn inside"),
        (f"y = {BMM} + x.mean()", "dispatch by mask or one-hot"),
        ("y = torch.bmm(torch.bmm(xs, self.up).softmax(1), self.down)", "dispatch by mask or one-hot"),
    ],
)
def test_what_is_not_proved_of_slots_runs_as_written(experts: str, reason: str, tmp_path: Path) -> None:
    result = outcome(tmp_path, (experts,))
    assert result.verdict == "exact" and result.num_chunked == 0 and reason in result.details, result
