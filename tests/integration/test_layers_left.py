"""Layers that no compiled graph reads are counted as not chunked, by their path; a limit of Dynamo's leaves none."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfine_fx
from memfine_fx.capture.structure import moe_layers
from memfine_fx.compat import checks
from memfine_fx.compat.settings import RECOMPILE_LIMIT
from memfine_fx.models.mixtral import MixtralConfig, MixtralMoE
from memfine_fx.models.naive import NaiveConfig, NaiveMoE
from memfine_fx.report.reports import first_step_line
from memfine_fx.runtime import op
from tests.integration.comparison import FP32_TOLERANCE, relative_error

LAYERS, HIDDEN = 10, 8
"""More layers than Dynamo's limit of eight compilations of one code."""


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number  # what a guard of Dynamo's asks, as a layer's place in a cache of keys
        self.mlp = MixtralMoE(MixtralConfig(HIDDEN, 6, num_experts=4, top_k=2, spelling="gathered"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + 0.02 * (1 + self.number) * self.mlp(hidden)
        return result


class Listed(nn.Module):
    """A layer whose experts are a list, and a list of other modules that nothing runs."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = NaiveMoE(NaiveConfig(HIDDEN, 6, num_experts=4, top_k=2))
        self.unused = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.mlp(hidden)
        return result


class Stack(nn.Module):
    """Layers with a graph break behind each, as a model with images has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(number) for number in range(LAYERS))

    def forward(self, hidden: torch.Tensor, num_layers: int = LAYERS) -> torch.Tensor:
        for layer in self.layers[:num_layers]:
            hidden = layer(hidden)
            torch._dynamo.graph_break()
        return hidden


def trained(num_layers: int = LAYERS) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """An optimized model and one that was not, after a backward each."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Stack()
    reference = copy.deepcopy(model)
    memfine_fx.optimize(model, inner_backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hidden = torch.randn(13, HIDDEN)
    for each in (model, reference):
        each(hidden, num_layers).square().mean().backward()
    return model, reference, optimizer


def test_each_of_many_layers_in_frames_of_their_own_is_chunked() -> None:
    model, reference, _ = trained()
    report = memfine_fx.report(model)
    paths = [region.where.module for region in report.regions]
    assert (report.num_chunked, len(set(paths))) == (LAYERS, LAYERS)
    assert all(path.startswith(f"layers.{number}.mlp") for number, path in enumerate(paths))
    assert first_step_line(report).startswith(f"{LAYERS} of {LAYERS} MoE layers chunked")
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert relative_error(ours.grad, theirs.grad) < FP32_TOLERANCE


def test_layers_that_dynamo_gave_up_on_are_counted_and_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks._failures, RECOMPILE_LIMIT.name, "broken on purpose")
    with pytest.warns(UserWarning, match="differs from what memfine_fx knows"):
        model, _, optimizer = trained()
    report = memfine_fx.report(model)
    left = [region for region in report.regions if region.status == "refused"]
    assert 0 < len(left) < LAYERS and report.num_chunked == LAYERS - len(left)
    assert {region.refused_for for region in left} == {"NOT_CAPTURED"}
    assert [region.where.module.split(".")[1] for region in left] == [
        str(number) for number in range(report.num_chunked, LAYERS)
    ]
    with pytest.warns(UserWarning, match=f"{report.num_chunked} of {LAYERS} MoE layers chunked.*layers.9.mlp"):
        optimizer.step()


def test_a_list_of_modules_that_nothing_runs_is_no_layer() -> None:
    torch.compiler.reset()
    model = Listed()
    memfine_fx.optimize(model, inner_backend="aot_eager")
    model(torch.randn(13, HIDDEN)).sum().backward()
    assert [region.status for region in memfine_fx.report(model).regions] == ["chunked"]


def test_each_layer_is_chunked_in_every_kind_of_call() -> None:
    """Each layer is compiled with and without gradients, for one number of tokens and then for any."""
    model, reference, _ = trained()
    for is_training, num_tokens in ((False, 13), (True, 29), (False, 31), (False, 47)):
        hidden = torch.randn(num_tokens, HIDDEN)
        with torch.set_grad_enabled(is_training), mock.patch.object(op, "run_forward", wraps=op.run_forward) as run:
            assert relative_error(model(hidden), reference(hidden)) < FP32_TOLERANCE
        assert run.call_count >= LAYERS, (is_training, num_tokens)


class Changing(Block):
    """A layer that Dynamo compiles in each call anew."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return super().forward(hidden)


def test_a_model_that_is_one_graph_is_compiled_no_more_often_for_its_layers() -> None:
    torch.compiler.reset()
    model = nn.Sequential(*map(Changing, range(4)))
    memfine_fx.optimize(model, inner_backend="aot_eager")
    for _ in range(16):
        model(torch.randn(13, HIDDEN))
    assert memfine_fx.report(model).num_graphs == 8 + len(model)


def test_layers_that_have_not_run_are_counted_until_they_do() -> None:
    model, _, _ = trained(num_layers=3)
    assert first_step_line(memfine_fx.report(model)).startswith(f"3 of {LAYERS} MoE layers chunked")
    model(torch.randn(13, HIDDEN)).sum().backward()
    assert first_step_line(memfine_fx.report(model)).startswith(f"{LAYERS} of {LAYERS} MoE layers chunked")


class Breaking(nn.Module):
    """A layer that Dynamo cannot capture, and leaves to Python with everything in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(hidden)
        return result

    @staticmethod
    def apply_to(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        result: torch.Tensor = module(rows)
        return result


class Counting(Block):
    """A layer that adds to a buffer, which a checkpoint around it replays."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("num_tokens", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_tokens += hidden.shape[0]
        return super().forward(hidden)


class Deep(nn.Module):
    """Layers of which one is not captured."""

    def __init__(self, layers: list[nn.Module], *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.layers, self.is_checkpointed = nn.ModuleList(layers), is_checkpointed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.is_checkpointed else layer(hidden)
        return hidden


def step_of(model: nn.Module, *, by_name: bool = False) -> memfine_fx.Report:
    """Return the report after two steps, the second of which warns under the backend's name."""
    torch.compiler.reset()
    options = {"inner_backend": "aot_eager"}
    call = (
        torch.compile(model, backend="memfine", options=options) if by_name else memfine_fx.optimize(model, **options)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        call(torch.randn(13, HIDDEN)).square().mean().backward()
        optimizer.step()
    return memfine_fx.report(model)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_layer_that_python_runs_is_counted(by_name: bool) -> None:
    layers: list[nn.Module] = [Block(number) for number in range(10)]
    layers[5] = Breaking(layers[5])
    limit = torch._dynamo.config.patch(recompile_limit=64) if by_name else contextlib.nullcontext()
    with limit, pytest.warns(UserWarning, match="9 of 10 MoE layers chunked.*layers.5.inner"):
        report = step_of(Deep(layers), by_name=by_name)
    left = [region for region in report.regions if region.status == "refused"]
    assert [(region.where.module, region.refused_for) for region in left] == [("layers.5.inner.mlp", "NOT_CAPTURED")]
    assert by_name or any("torch.compiler.disable" in note for note in report.notes)


def test_an_effect_under_a_checkpoint_is_named_with_the_setting_that_helps() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Deep([Counting(number) for number in range(3)], is_checkpointed=True)

    setting = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    with pytest.warns(UserWarning, match=f"layers.0.mlp, layers.1.mlp, layers.2.mlp: no compiled graph.*{setting}"):
        report = step_of(model())
    assert [region.refused_for for region in report.regions] == ["NOT_CAPTURED"] * 3
    with torch._dynamo.config.patch({setting: True}):
        assert step_of(model()).num_chunked == 3


class Tables(nn.Module):
    """Weights of four experts, whose router is in the module around."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, HIDDEN, 6))


class Skipped(nn.Module):
    """A layer whose whole frame Dynamo gives up on, since a graph breaks in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, HIDDEN, 6)), nn.Parameter(torch.randn(4, 6, HIDDEN))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(self.gate(hidden).softmax(-1), 2)
        for choice in range(2):
            torch._dynamo.graph_break()
            rows = (hidden.unsqueeze(1) @ self.up[ids[:, choice]]).relu() @ self.down[ids[:, choice]]
            hidden = hidden + weights[:, choice, None] * rows.squeeze(1)
        return hidden


def test_a_frame_that_dynamo_skips_is_counted() -> None:
    with pytest.warns(UserWarning, match="layers.0, layers.1: no compiled graph reads.*User-inserted graph break"):
        report = step_of(Deep([Skipped(), Skipped()]))
    assert [region.refused_for for region in report.regions] == ["NOT_CAPTURED"] * 2


def test_under_the_backends_name_the_hint_is_dynamos_limit() -> None:
    with pytest.warns(UserWarning, match=f"8 of {LAYERS} MoE layers chunked"):
        report = step_of(Stack(), by_name=True)
    left = [region for region in report.regions if region.status == "refused"]
    assert len(left) == LAYERS - 8 and all("recompile_limit" in (region.hint or "") for region in left)


class Kernels(nn.Conv1d):
    """A convolution with a class of its own, as audio encoders have."""


class Towered(nn.Module):
    """A tower with as many equal blocks as there are experts in a layer outside of the tower."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.tower = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))})
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.tower["blocks"]:
            hidden = hidden + block(hidden).tanh()
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize(
    ("layer", "paths"),
    [
        (lambda: nn.ModuleDict({"model": Towered([Block(0), Block(1)])}), ["model.layers.0.mlp", "model.layers.1.mlp"]),
        (lambda: nn.Sequential(nn.ModuleDict({"a": Kernels(HIDDEN, 1, 3), "b": nn.Linear(HIDDEN, 1)})), []),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 4, 3)), []),
        (
            lambda: nn.ModuleDict(
                {"layers": nn.ModuleList(nn.Linear(5, 5) for _ in range(3)), "head": nn.Linear(5, 9)}
            ),
            [],
        ),
        (lambda: nn.ModuleDict({"a": Listed(), "b": Block(0)}), ["a.mlp", "b.mlp"]),
        (lambda: nn.ModuleDict({"gate": nn.Linear(HIDDEN, 4), "experts": Tables()}), [""]),
        (lambda: nn.ModuleDict({"a": nn.ModuleDict({"gate": nn.Linear(HIDDEN, 4), "experts": Tables()})}), ["a"]),
    ],
)
def test_layers_are_known_by_their_parameters(layer: Callable[[], nn.Module], paths: list[str]) -> None:
    assert moe_layers(layer()) == paths


class Scaled(torch.autograd.Function):
    """An auxiliary loss as Megatron-LM has it: its backward reads an attribute of the class, where Dynamo breaks."""

    scale = torch.tensor(1.0)

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss) * Scaled.scale


class Cut(nn.Module):
    """A layer whose graph breaks between its router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, HIDDEN, 6)), nn.Parameter(torch.randn(4, 6, HIDDEN))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.gate(hidden).softmax(-1)
        weights, ids = torch.topk(scores, 2)
        weights = Scaled.apply(weights, scores.square().mean())
        rows = (hidden.repeat_interleave(2, 0).unsqueeze(1) @ self.up[ids.flatten()]).relu() @ self.down[ids.flatten()]
        return hidden + (rows.view(-1, 2, HIDDEN) * weights.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_equal_layers_that_share_a_graph_are_counted_each(inner: str) -> None:
    torch.compiler.reset()
    model = nn.Sequential(Cut(), nn.Linear(HIDDEN, HIDDEN), Cut(), nn.Linear(HIDDEN, HIDDEN), Cut())
    memfine_fx.optimize(model, inner_backend=inner)
    model(torch.randn(13, HIDDEN)).square().mean().backward()
    regions = memfine_fx.report(model).regions
    assert [(region.status, region.where.module) for region in regions] == [("chunked", path) for path in "024"]


def test_a_layer_that_is_cut_behind_its_router_is_counted_once() -> None:
    report = step_of(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Cut(), nn.Linear(HIDDEN, HIDDEN), Cut()))
    assert [(region.status, region.where.module) for region in report.regions] == [("chunked", "1"), ("chunked", "3")]


class Half(Cut):
    """A layer of which a graph has the router, and none the experts."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def experts(self, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = (hidden.repeat_interleave(2, 0).unsqueeze(1) @ self.up[ids.flatten()]).relu() @ self.down[ids.flatten()]
        return (rows.view(-1, 2, HIDDEN) * weights.unsqueeze(-1)).sum(1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(self.gate(hidden).softmax(-1), 2)
        return hidden + self.experts(hidden, weights, ids)


def test_a_layer_that_is_cut_and_not_chunked_counts_also_in_a_model_with_a_tower() -> None:
    with pytest.warns(UserWarning, match="1 of 2 MoE layers chunked"):
        report = step_of(nn.Sequential(Towered([Block(0), Half()])))
    assert {(region.status, region.where.module) for region in report.regions} == {
        ("chunked", "0.layers.0.mlp.experts"),
        ("refused", "0.layers.1.gate"),
    }


class Apart(nn.Module):
    """A layer whose frame Dynamo gives up on, while its experts' are compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, 6), nn.Linear(6, HIDDEN)) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(self.gate(hidden).softmax(-1), 2)
        total = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows, choices = torch.where(ids == number)
            total.index_add_(0, rows, Breaking.apply_to(expert, hidden[rows]) * weights[rows, choices, None])
        return total


def test_a_layer_of_which_only_experts_are_compiled_is_counted() -> None:
    with pytest.warns(UserWarning, match="1 of 2 MoE layers chunked.*layers.1: no compiled graph reads all"):
        report = step_of(Deep([Block(0), Apart()]))
    assert [(region.status, region.where.module) for region in report.regions[1:]] == [("refused", "layers.1")]
