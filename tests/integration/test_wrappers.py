"""A model is optimized wherever it is called from: wrappers, forwards that others put on it, modules set later."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfine_fx
from memfine_fx.capture.forward_wrappers import backbones
from memfine_fx.models import MixtralConfig, MixtralMoE
from tests.integration.comparison import assert_same_step

HIDDEN, VOCABULARY = 16, 11
CONFIG = memfine_fx.Config(rows_per_chunk=5, inner_backend="eager")


def layer() -> nn.Module:
    return MixtralMoE(MixtralConfig(HIDDEN, 24, 4, 2, spelling="gathered"))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([layer(), layer()])

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for one in self.layers:
            hidden = hidden + one(hidden)
        return hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(self.backbone(tokens)) * scale


class Wrapper(nn.Module):
    """Calls the forward of what it holds, as some wrappers of adapters do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.forward(tokens)


def tokens(number: int = 9) -> dict[str, Any]:
    return {"tokens": torch.arange(number) % VOCABULARY}


def fused(model: Any) -> None:
    """Put a forward on a model that calls its backbone alone, and the forward before it only if asked."""
    before = model.forward

    def forward(self: Any, tokens: Tensor, is_fused: bool = True) -> Tensor:
        if not is_fused:
            return before(tokens)  # type: ignore[no-any-return]
        return torch.nn.functional.linear(self.backbone(tokens), self.head.weight)

    model.forward = types.MethodType(forward, model)


def chunked(model: nn.Module) -> list[str]:
    return [region.status for region in memfine_fx.report(model).regions]


def pair() -> tuple[Any, Any]:
    """A model that is optimized and one that is not, of the same weights."""
    model = Model()
    return memfine_fx.optimize(copy.deepcopy(model), config=CONFIG), model


CALLS: dict[str, Callable[[Any], nn.Module]] = {
    "itself": lambda model: model,
    "its forward": Wrapper,
    "a forward of others": lambda model: (fused(model), model)[1],
    "a forward of others, by its forward": lambda model: (fused(model), Wrapper(model))[1],
}


@pytest.mark.parametrize("way", CALLS)
def test_every_call_is_chunked(way: str) -> None:
    optimized, model = pair()
    ours, theirs = CALLS[way](optimized), CALLS[way](model)
    for number in (9, 6):
        assert_same_step(ours, theirs, tokens(number))
    assert chunked(optimized) == ["chunked"] * 2


def test_switching_to_eval_and_back_keeps_calls_chunked() -> None:
    optimized, model = pair()
    ours, theirs = Wrapper(optimized), Wrapper(model)
    for _ in range(2):
        ours.eval(), theirs.eval()
        with torch.no_grad():
            assert torch.allclose(ours(**tokens()), theirs(**tokens()), rtol=1e-5, atol=1e-6)
        ours.train(), theirs.train()
        assert_same_step(ours, theirs, tokens())
    assert set(chunked(optimized)) == {"chunked"}


def test_the_forward_before_the_one_of_others_is_ours() -> None:
    optimized, model = pair()
    fused(optimized)
    found = optimized.forward(**tokens(), is_fused=False)
    assert torch.allclose(found, model(**tokens()), rtol=1e-5, atol=1e-6)
    assert chunked(optimized) == ["chunked"] * 2


def test_optimizing_again_stands_before_the_forward_of_others() -> None:
    optimized, model = pair()
    fused(optimized), fused(model)
    for _ in range(2):
        memfine_fx.optimize(optimized, config=CONFIG)
        assert_same_step(Wrapper(optimized), Wrapper(model), tokens())
        assert chunked(optimized) == ["chunked"] * 2


def test_code_that_somebody_else_compiles_leaves_the_model_to_us() -> None:
    optimized, model = pair()
    for wrap in (Wrapper, lambda one: nn.Sequential(one)):
        compiled = torch.compile(wrap(optimized), backend="eager")
        assert torch.allclose(compiled(tokens()["tokens"]), model(**tokens()), rtol=1e-5, atol=1e-6)
    assert chunked(optimized) == ["chunked"] * 2


def test_a_model_inside_of_an_optimized_one_is_in_its_graph() -> None:
    optimized, model = pair()
    whole = memfine_fx.optimize(nn.Sequential(optimized), config=CONFIG, fullgraph=True)
    assert torch.allclose(whole(tokens()["tokens"]), model(**tokens()), rtol=1e-5, atol=1e-6)
    assert chunked(whole) == ["chunked"] * 2
    explained = memfine_fx.explain(nn.Sequential(optimized), tokens()["tokens"], config=CONFIG)
    assert explained.num_chunked == 2


def test_hooks_of_the_model_run_once_a_call_and_not_where_its_forward_is_called() -> None:
    optimized, _ = pair()
    seen: list[str] = []
    optimized.register_forward_hook(lambda *_: seen.append("hook"))
    optimized(**tokens())
    assert seen == ["hook"]
    optimized.forward(**tokens())
    assert seen == ["hook"]


def test_the_forward_keeps_its_signature_and_names() -> None:
    optimized, model = pair()
    assert inspect.signature(optimized.forward) == inspect.signature(model.forward)
    assert optimized.forward.__qualname__ == "Model.forward"
    assert not hasattr(optimized.forward, "__wrapped__"), "who unwraps it would leave us out"
    fused(model), memfine_fx.optimize(model, config=CONFIG)
    assert list(inspect.signature(model.forward).parameters) == ["tokens", "is_fused"]


def test_wrapping_as_mixed_precision_does_and_unwrapping_gives_ours_back() -> None:
    optimized, model = pair()
    before = optimized.forward
    inner = before.__func__

    def cast(self: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    cast.__wrapped__ = inner  # type: ignore[attr-defined]
    optimized.forward = types.MethodType(cast, optimized)
    assert_same_step(Wrapper(optimized), Wrapper(model), tokens())
    optimized.forward = types.MethodType(cast.__wrapped__, optimized)  # type: ignore[attr-defined]
    assert_same_step(Wrapper(optimized), Wrapper(model), tokens())
    assert chunked(optimized) == ["chunked"] * 2


@pytest.mark.parametrize("of_part", [False, True], ids=["model", "backbone"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_stand_for_themselves(copied: Callable[[Any], Any], of_part: bool) -> None:
    optimized, model = pair()
    ours = copied(optimized.backbone if of_part else optimized)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert not Wrapper(ours)(**tokens()).any()
    assert_same_step(Wrapper(optimized), Wrapper(model), tokens())
    if of_part:
        assert "forward" not in vars(ours), "a part of an optimized model is plain when it is copied alone"
    else:
        assert chunked(ours) == ["chunked"] * 2


class Looping(nn.Module):
    """A layer whose loop reaches no graph as it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4, bias=False)
        self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(4)])

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self.gate(hidden), -1).topk(2, -1)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if row.numel() == 0:
                continue
            out.index_add_(0, row, expert(hidden[row]) * weights[row, place].unsqueeze(-1))
        return out


def test_modules_set_after_a_call_are_prepared_too() -> None:
    optimized, model = pair()
    optimized(**tokens())
    model.backbone.layers[1] = Looping()
    optimized.backbone.layers[1] = copy.deepcopy(model.backbone.layers[1])
    assert_same_step(optimized, model, tokens(40))
    families = [region.family for region in memfine_fx.report(optimized).regions if region.status == "chunked"]
    assert sorted(set(families)) == ["gathered", "loops"]


class Broken(Model):
    """Breaks the graph behind the backbone."""

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.backbone(tokens)
        torch._dynamo.graph_break()
        return self.head(hidden) * scale


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after a call"])
def test_an_embedding_that_is_told_to_want_gradients_breaks_no_graph(is_late: bool) -> None:
    """As trainers tell a frozen one, for the sake of checkpoints."""
    model = Broken()
    model.backbone.embedding.requires_grad_(False)
    optimized = memfine_fx.optimize(copy.deepcopy(model), config=CONFIG)
    if is_late:
        assert_same_step(optimized, model, tokens())

    def want_gradients(module: Any, input: Any, output: Any) -> None:
        output.requires_grad_(True)

    handles = [one.backbone.embedding.register_forward_hook(want_gradients) for one in (optimized, model)]
    before = memfine_fx.report(optimized).num_graphs
    assert_same_step(optimized, model, tokens())
    assert chunked(optimized) == ["chunked"] * 2
    assert memfine_fx.report(optimized).num_graphs - before <= 2, "the backbone in one graph, the head in another"
    assert optimized.backbone.embedding(tokens()["tokens"]).requires_grad, "outside of graphs too"
    handles[0].remove()
    assert not optimized.backbone.embedding(tokens()["tokens"]).requires_grad


def test_a_layer_that_is_the_whole_model_is_rewritten_where_its_forward_is_called() -> None:
    model = Looping()
    optimized = memfine_fx.optimize(copy.deepcopy(model), config=CONFIG)
    assert_same_step(Wrapped(optimized), Wrapped(model), {"hidden": torch.randn(40, HIDDEN)})
    assert [region.family for region in memfine_fx.report(optimized).regions] == ["loops"]


class Wrapped(Wrapper):
    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]  # a layer takes hidden states
        return self.model.forward(hidden)  # type: ignore[no-any-return, operator]


class Slicing(Backbone):
    """Makes a container of its layers in every call, as transformers' models do."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for one in self.layers[:2]:
            hidden = hidden + one(hidden)
        return hidden


def test_containers_that_a_call_makes_and_modules_set_elsewhere_compile_nothing_again() -> None:
    model = memfine_fx.optimize(Slicing(), config=CONFIG)
    model(**tokens())
    num_graphs = memfine_fx.report(model).num_graphs
    nn.Sequential(nn.Linear(2, 2)).add_module("more", nn.Linear(2, 2))
    model(**tokens()), model.forward(**tokens())
    after_forward = memfine_fx.report(model).num_graphs
    model(**tokens()), model.forward(**tokens())
    one_for_each = 2 if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13) else 1  # older ones share it
    assert (num_graphs, after_forward) == (1, one_for_each), "one graph for each place where calls arrive"
    assert memfine_fx.report(model).num_graphs == after_forward


class Watched(Model):
    """Notes what its instance has for a forward while it runs, and fails if told to."""

    seen: list[bool]
    fails = False

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.backbone(tokens)
        self.note()
        return self.head(hidden) * scale

    @torch.compiler.disable
    def note(self) -> None:
        self.seen.append(any("forward" in vars(one) for one in (self, self.backbone)))
        if self.fails:
            raise ZeroDivisionError


def test_stand_ins_are_out_while_a_call_runs_and_back_after_it_also_if_it_fails() -> None:
    optimized = memfine_fx.optimize(Watched(), config=CONFIG)
    optimized.seen = []
    before = optimized.forward, optimized.backbone.forward
    optimized(**tokens()), optimized.forward(**tokens())
    optimized.fails = True
    with pytest.raises(ZeroDivisionError):
        optimized(**tokens())
    assert optimized.seen == [False] * 3
    assert before == (optimized.forward, optimized.backbone.forward)
    assert all("forward" in vars(one) for one in (optimized, optimized.backbone))


class Shared(nn.Module):
    """A layer whose shared expert has more modules than all the rest of it."""

    def __init__(self) -> None:
        super().__init__()
        self.routed, self.shared = layer(), nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(6)))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.routed(hidden) + self.shared(hidden)  # type: ignore[no-any-return]


def test_the_backbone_is_what_holds_the_parameters_too() -> None:
    model = Shared()
    assert backbones(model) == []
    assert [type(one) for one in backbones(Model())] == [Backbone]
