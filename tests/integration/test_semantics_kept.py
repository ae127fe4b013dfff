"""Code around and inside regions that a careless rewrite gets wrong: in-place writes, modes, views, detach.

Each case must end exact, whether it is chunked or refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfine_fx
from memfine_fx.passes.read.rules import RULES
from tests.integration.comparison import assert_same_step, optimized_copy, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")

H, E, K, WIDTH = 16, 5, 2, 12


class Gathered(nn.Module):
    """Gathered weights; the hooks are where cases differ."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.up = nn.Parameter(torch.randn(E, H, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(E, WIDTH, H) * 0.3)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, index = torch.softmax(self.router(x), -1).topk(K, -1)
        return weight, index

    def act(self, h: torch.Tensor) -> torch.Tensor:
        return F.silu(h)

    def experts(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ids = index.reshape(-1)
        rows = x.repeat_interleave(K, 0).unsqueeze(1)
        h = self.act(torch.bmm(rows, self.up[ids]).squeeze(1))
        return torch.bmm(h.unsqueeze(1), self.down[ids]).squeeze(1)

    def combine(self, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (y * weight.reshape(-1, 1)).view(-1, K, H).sum(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.route(x)
        return self.combine(self.experts(x, index), weight)


class InPlaceCombine(Gathered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.route(x)
        tokens = torch.arange(K * x.shape[0]) // K
        out = torch.zeros(x.shape[0], H)
        out.index_add_(0, tokens, self.experts(x, index) * weight.reshape(-1, 1))
        return out


class InPlaceCombineOntoOther(Gathered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.route(x)
        tokens = torch.arange(K * x.shape[0]) // K
        out = torch.zeros(x.shape[0], H)
        out.add_(x * 2)
        return out.index_add_(0, tokens, self.experts(x, index) * weight.reshape(-1, 1))


class StraightThrough(Gathered):
    def act(self, h: torch.Tensor) -> torch.Tensor:
        h = F.silu(h)
        return h + (torch.round(h * 4) / 4 - h).detach()


class NoGradScale(Gathered):
    def act(self, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = h.abs().amax(-1, keepdim=True) + 1
        return F.silu(h) / scale


class NoGradExperts(Gathered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.route(x)
        with torch.no_grad():
            y = self.experts(x, index)
        return self.combine(y, weight)


class DetachedWeight(Gathered):
    def combine(self, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (y * weight.reshape(-1, 1).detach()).view(-1, K, H).sum(1)


class Rounded(torch.autograd.Function):
    """Rounds, and lets gradients pass as if it had not."""

    @staticmethod
    def forward(ctx: object, h: torch.Tensor) -> torch.Tensor:
        return torch.round(h * 4) / 4

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad


def detached_in_place(h: torch.Tensor) -> torch.Tensor:
    scale = h.sigmoid()
    scale.detach_()
    return h * scale


@torch.no_grad()
def scale_of(h: torch.Tensor) -> torch.Tensor:
    return h.abs().amax(-1, keepdim=True) + 1


STOPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "straight through": lambda h: h + (torch.round(h * 4) / 4 - h).detach(),
    "straight through .data": lambda h: h + (torch.round(h * 4) / 4 - h).data,
    "torch.detach": lambda h: h * torch.detach(h).sigmoid(),
    "an overload": lambda h: h * torch.ops.aten.detach.default(h).sigmoid(),
    "detach_": detached_in_place,
    "a function under no_grad": lambda h: F.silu(h) / scale_of(h),
    "an autograd.Function": Rounded.apply,
}


class Stopped(Gathered):
    """Gradients stop in the experts' activation."""

    def __init__(self, name: str, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.name, self.is_checkpointed = name, is_checkpointed

    def act(self, h: torch.Tensor) -> torch.Tensor:
        return STOPS[self.name](h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False) if self.is_checkpointed else super().forward(x)


class DetachedRows(Gathered):
    def experts(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ids = index.reshape(-1)
        h = self.act(torch.bmm(x.repeat_interleave(K, 0).detach().unsqueeze(1), self.up[ids]).squeeze(1))
        return torch.bmm(h.unsqueeze(1), self.down[ids]).squeeze(1)


class DetachedTable(Gathered):
    """Of one projection: read outside, it is a table without gradients; gathered first, it would stop them inside."""

    is_gathered_first = False

    def experts(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ids = index.reshape(-1)
        up = self.up[ids].detach() if self.is_gathered_first else self.up.data[ids]
        h = self.act(torch.bmm(x.repeat_interleave(K, 0).unsqueeze(1), up).squeeze(1))
        return torch.bmm(h.unsqueeze(1), self.down[ids]).squeeze(1)


class DetachedGatheredTable(DetachedTable):
    is_gathered_first = True


class ScaledAddmm(Gathered):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def act(self, h: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, F.silu(h), self.mix, beta=0.5, alpha=2.0)


class SharedMatrix(ScaledAddmm):
    def act(self, h: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, F.silu(h), self.mix)


class ScalarParameter(Gathered):
    def experts(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return super().experts(x, index) + self.scale


class SumOverAll(Gathered):
    def act(self, h: torch.Tensor) -> torch.Tensor:
        return F.silu(h) + h.sum() * 1e-2


class MaxOverAll(Gathered):
    def act(self, h: torch.Tensor) -> torch.Tensor:
        return F.silu(h) / (h.abs().amax() + 1)


class WeightOnInput(Gathered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.route(x)
        ids = index.reshape(-1)
        rows = x.repeat_interleave(K, 0) * weight.reshape(-1, 1)
        h = self.act(torch.bmm(rows.unsqueeze(1), self.up[ids]).squeeze(1))
        return torch.bmm(h.unsqueeze(1), self.down[ids]).squeeze(1).view(-1, K, H).sum(1)


class InputChangedBetween(Gathered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.route(x)
        x = x * 1.0
        alias = x.float()
        ids = index.reshape(-1)
        rows = x.repeat_interleave(K, 0).unsqueeze(1)
        with torch.no_grad():
            alias.mul_(3.0)
        h = self.act(torch.bmm(rows, self.up[ids]).squeeze(1))
        return self.combine(torch.bmm(h.unsqueeze(1), self.down[ids]).squeeze(1), weight) + x


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Gathered(), Gathered()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class MergedLoRA(Gathered):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(E, H, 2) * 0.3)
        self.b = nn.Parameter(torch.randn(E, 2, WIDTH) * 0.3)
        self.up.requires_grad_(False)

    def experts(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ids = index.reshape(-1)
        merged = self.up + torch.bmm(self.a, self.b)
        h = self.act(torch.bmm(x.repeat_interleave(K, 0).unsqueeze(1), merged[ids]).squeeze(1))
        return torch.bmm(h.unsqueeze(1), self.down[ids]).squeeze(1)


CHUNKED = [
    Gathered, InPlaceCombine, InPlaceCombineOntoOther, SharedMatrix, ScalarParameter, WeightOnInput, MergedLoRA,
    DetachedTable,
]  # fmt: skip
REFUSED = [
    StraightThrough, NoGradScale, NoGradExperts, DetachedWeight, DetachedGatheredTable,
    ScaledAddmm, SumOverAll, MaxOverAll,
]  # fmt: skip
EITHER = [InputChangedBetween, DetachedRows]


@pytest.mark.parametrize(
    ("case", "inner"),
    [*((case, "eager") for case in (*CHUNKED, *REFUSED, *EITHER)), *((case, "aot_eager") for case in CHUNKED)],
)
def test_outputs_and_gradients_stay_exact(case: type[nn.Module], inner: str) -> None:
    model = case()
    optimized = optimized_copy(model, inner=inner, rows_per_chunk=3)
    assert_same_step(optimized, model, {"x": torch.randn(10, H)})
    (region,) = memfine_fx.report(optimized).regions
    assert case in EITHER or region.status == ("chunked" if case in CHUNKED else "refused")
    assert "internal error" not in (region.reason or "")


@pytest.fixture
def detach_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retraced as torch 2.15 does it: a `detach` looks like an alias, whatever the version at hand."""
    monkeypatch.setitem(RULES, torch.ops.aten.detach.default, RULES[torch.ops.aten.alias.default])


@pytest.mark.usefixtures("detach_leaves_no_trace")
@pytest.mark.parametrize(
    ("name", "is_checkpointed"), [*((name, False) for name in STOPS), ("detach_", True), ("an autograd.Function", True)]
)
def test_what_stops_gradients_among_the_experts_keeps_them_as_written(name: str, is_checkpointed: bool) -> None:
    model = Stopped(name, is_checkpointed=is_checkpointed)
    optimized = optimized_copy(model, inner="aot_eager", rows_per_chunk=3)
    assert_same_step(optimized, model, {"x": torch.randn(10, H)})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "refused"
    assert "internal error" not in region.reason


@pytest.mark.usefixtures("detach_leaves_no_trace")
@pytest.mark.parametrize("case", [StraightThrough, DetachedWeight, DetachedRows, DetachedGatheredTable])
def test_a_detach_is_read_in_the_captured_graph_and_not_in_its_retrace(case: Callable[[], nn.Module]) -> None:
    optimized = optimized_copy(case(), rows_per_chunk=3)
    optimized(torch.randn(10, H, requires_grad=True))
    (region,) = memfine_fx.report(optimized).regions
    assert region.reason == "detach stops gradients inside the region, which a chunk's backward would not"
    assert "detach outside the experts" in str(region)


def test_an_evaluation_has_no_gradients_to_stop() -> None:
    model = StraightThrough()
    optimized = optimized_copy(model, rows_per_chunk=3)
    with torch.no_grad():
        assert relative_error(optimized(x := torch.randn(10, H)), model(x)) < 1e-5
    assert_same_step(optimized, model, {"x": torch.randn(10, H)})


def test_two_layers_without_anything_between_are_both_chunked() -> None:
    model = Stacked()
    optimized = optimized_copy(model, rows_per_chunk=3)
    assert_same_step(optimized, model, {"x": torch.randn(10, H)})
    assert memfine_fx.report(optimized).num_chunked == 2


def test_random_dropout_inside_an_expert_is_refused() -> None:
    class Dropout(Gathered):
        def act(self, h: torch.Tensor) -> torch.Tensor:
            return F.dropout(F.silu(h), 0.3, self.training)

    optimized = optimized_copy(Dropout())
    optimized(torch.randn(10, H))
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "refused"


def test_an_index_also_read_outside_keeps_its_in_place_write() -> None:
    class ReturnsInverse(Gathered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, index = self.route(x)
            ids, order = torch.sort(index.reshape(-1))
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(order.shape[0])
            rows = x[order // K].unsqueeze(1)
            h = self.act(torch.bmm(rows, self.up[ids]).squeeze(1))
            y = torch.bmm(h.unsqueeze(1), self.down[ids]).squeeze(1)
            y = y * weight.reshape(-1)[order].unsqueeze(1)
            return y[inverse].view(-1, K, H).sum(1) + inverse.view(-1, K).float().sum(1, keepdim=True)

    model = ReturnsInverse()
    optimized = optimized_copy(model, rows_per_chunk=3)
    assert_same_step(optimized, model, {"x": torch.randn(10, H)})
    assert memfine_fx.report(optimized).num_chunked == 1


def test_ids_outside_the_table_are_an_error_as_in_eager() -> None:
    class Shifted(Gathered):
        def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weight, index = super().route(x)
            return weight, index + E - 1

    with pytest.raises(IndexError, match="outside"):
        optimized_copy(Shifted())(torch.randn(10, H))


def test_ambient_autocast_does_not_leak_into_a_later_fp32_model() -> None:
    model = Gathered()

    class Off(Gathered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    with torch.autocast("cpu", torch.bfloat16):
        optimized_copy(Off())(torch.randn(10, H)).sum().backward()
    assert_same_step(optimized_copy(model, rows_per_chunk=3), model, {"x": torch.randn(10, H)})


def test_autocast_around_a_checkpointed_layer_runs_its_experts_in_bf16() -> None:
    class Checkpointed(Gathered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return checkpoint(super().forward, x, use_reentrant=False)

    model = Checkpointed()
    optimized = optimized_copy(model, inner="aot_eager", rows_per_chunk=3)
    x = torch.randn(10, H)
    ours, theirs = optimized(x), model(x)
    assert ours.dtype is theirs.dtype is torch.bfloat16
    assert relative_error(ours, theirs) < 1e-2
    assert memfine_fx.report(optimized).num_chunked == 1
