"""Chunked layers are compared with the model's own code: what a broken rule loses is noticed, and no state changes."""

from __future__ import annotations

import copy
import itertools
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfine_fx
from benchmarks.coverage.spellings import SPELLINGS
from memfine_fx.capture.undo import ModelState
from memfine_fx.compiler import own_code, own_code_runs
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.passes.read import guard_proof
from memfine_fx.passes.read.frame import Frame
from memfine_fx.passes.read.values import Ids, Mask
from memfine_fx.passes.verify.forced_choices import ROUTINGS, ForcedChoices, by_routing
from tests.properties.life import state_of
from tests.properties.written import EXPERTS, PRODUCTS, WrittenLayer, load, module_source

pytestmark = pytest.mark.own_code
ROWS = "out.index_add_(0, t, self.ex[e](x[t]) * w[t, c, None])"
ROUTE = "w, i = logits.softmax(-1).topk(2, dim=-1)"
Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def compares_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No verdict of another test is taken over."""
    monkeypatch.setattr(own_code, "_known", {})
    torch._dynamo.reset()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def layer(folder: Path, name: str, lines: list[str], *, init: tuple[str, ...] = (), expert: str = "mlp") -> nn.Module:
    """A layer of a file of its own, whose forward holds these lines between its router and its end."""
    written = WrittenLayer(name, module_source(name, 4, EXPERTS[expert], init, lines), {})
    return load(written, folder)()


def loop(*body: str, guard: str = "t.numel() == 0", start: str = "pass", end: str = "pass") -> list[str]:
    inner = ["t, c = torch.where(i == e)", f"if {guard}: continue", *body]
    head = [ROUTE, "out = torch.zeros_like(x)", start, "for e in range(self.num):"]
    return [*head, *("    " + line for line in inner), end, "return out"]


def dense(edit: str, product: str = "scatter") -> list[str]:
    return [ROUTE, edit, *PRODUCTS[product], "return out"]


TABLES = (
    "self.up = nn.Parameter(torch.randn(self.num, H, 12) / 3)",
    "self.down = nn.Parameter(torch.randn(self.num, 12, H) / 3)",
)


def optimized(model: nn.Module, **fields: Any) -> None:
    config = memfine_fx.Config(inner_backend="eager", rows_per_chunk=3, **fields)
    memfine_fx.optimize(model, dynamic=True, config=config)


def first_report(model: nn.Module, **fields: Any) -> memfine_fx.Report:
    """Optimize, run one step, and return the report."""
    optimized(model, **fields)
    model(torch.randn(6, 8, requires_grad=True)).sum().backward()
    return memfine_fx.report(model)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 12) / 3), nn.Parameter(torch.randn(4, 12, 8) / 3)

    def forward(self, x: Tensor, i: Tensor, w: Tensor) -> Tensor:
        rows = torch.einsum("tkf,tkfh->tkh", torch.einsum("th,tkhf->tkf", x, self.up[i]).relu(), self.down[i])
        return (rows * w[..., None]).sum(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        w, i = self.router(x).softmax(-1).topk(2, dim=-1)
        out: Tensor = self.experts(x, i, w)
        return out


# Rules that accept what they should refuse.


def excuses_every_effect(patch: pytest.MonkeyPatch) -> None:
    """Run guarded bodies for no rows, whatever they do."""
    patch.setattr(guard_proof.GuardProof, "_check_node", lambda self, node: None)
    patch.setattr(guard_proof.GuardProof, "_replace", lambda self, node: node.replace_all_uses_with(node.args[1]))


def takes_ids_for_distinct(patch: pytest.MonkeyPatch) -> None:
    for owner in (Frame, Ids, Mask):
        patch.setattr(owner, "is_distinct", property(lambda self: True, lambda self, value: None), raising=False)


BROKEN: dict[str, tuple[Break, list[str]]] = {
    "a mean over no rows": (
        excuses_every_effect,
        loop(ROWS, "aux = aux + w[t, c].mean()", start="aux = x.new_zeros(())", end="out = out + aux"),
    ),
    "a count of visits": (excuses_every_effect, loop(ROWS, "self.visits += 1")),
    "a random draw": (
        excuses_every_effect,
        loop(ROWS, "aux = aux + torch.rand(())", start="aux = x.new_zeros(())", end="out = out + aux"),
    ),
    "a name that is read after the loop": (
        excuses_every_effect,
        loop(ROWS, "last = self.penalty[e]", start="last = self.penalty[0]", end="out = out * last"),
    ),
    "ids that are halved": (takes_ids_for_distinct, dense("i = i // 2")),
    "weights at the input": (takes_ids_for_distinct, dense("i = i // 2", "input scaled")),
}
INIT = (*TABLES, "self.register_buffer('visits', torch.zeros(()))", "self.penalty = nn.Parameter(torch.rand(self.num))")


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_broken_rule_loses_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, lines = BROKEN[name]
    model = layer(tmp_path, f"Broken{list(BROKEN).index(name)}", lines, init=INIT)
    before = copy.deepcopy(model)
    breaks(monkeypatch)
    unnoticed = first_report(copy.deepcopy(model), gives_up_comparison_with_eager=True)
    assert unnoticed.num_chunked == 1, "without the comparison the broken rule would be believed"
    torch._dynamo.reset()
    report = first_report(model)
    assert report.num_chunked == 0, str(report)
    assert "your code" in str(report)

    x = torch.randn(6, 8)
    generator = torch.get_rng_state()
    expected = before(x)
    torch.set_rng_state(generator)
    assert torch.allclose(model(x), expected)


def test_a_difference_is_refused_with_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes_ids_for_distinct(monkeypatch)
    report = first_report(layer(tmp_path, "Halved", dense("i = i // 2"), init=INIT))
    (refusal,) = [region for region in report.regions if region.status == "refused"]
    assert "run eagerly: output 0 is off by" in (refusal.reason or "")


@pytest.mark.parametrize(
    ("options", "num_chunked"),
    [("verify=false", 0), ("gives_up_comparison_with_eager=true", 1)],
)
def test_only_the_option_of_this_name_switches_it_off(
    options: str, num_chunked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes_ids_for_distinct(monkeypatch)
    monkeypatch.setenv("MEMFINE_OPTIONS", f"rows_per_chunk=3,{options}")
    model = layer(tmp_path, "Optional", dense("i = i // 2"), init=INIT)
    memfine_fx.optimize(model, inner_backend="eager", dynamic=True)
    model(torch.randn(6, 8))
    assert memfine_fx.report(model).num_chunked == num_chunked


# What is reported.


def test_the_report_says_what_the_comparison_took(tmp_path: Path) -> None:
    report = first_report(layer(tmp_path, "Agrees", loop(ROWS)))
    assert report.num_chunked == 1 and report.comparison_seconds > 0
    assert "compared with your code, run eagerly" in str(report).splitlines()[1]
    assert not any(region.not_compared_with_code for region in report.regions)


@pytest.mark.parametrize(("dynamic", "num_experts"), [(True, own_code_runs._FEW_TOKENS), (False, 4)])
def test_sizes_vary_in_the_comparison_as_they_do_in_the_model(
    dynamic: bool, num_experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []
    compile_alone = own_code_runs.PairOfRuns._try_to_compile

    def noting(pair: Any, num_regions: int, dynamic: bool) -> str:
        tried.append(dynamic)
        return compile_alone(pair, num_regions, dynamic)

    monkeypatch.setattr(own_code_runs.PairOfRuns, "_try_to_compile", noting)
    lines = module_source("Sized", num_experts, EXPERTS["mlp"], INIT, dense("pass"))
    model = load(WrittenLayer("Sized", lines, {}), tmp_path)()
    memfine_fx.optimize(model, dynamic=dynamic, config=memfine_fx.Config(inner_backend="eager", rows_per_chunk=3))
    model(torch.randn(100, 8, requires_grad=True)).sum().backward()
    (region,) = memfine_fx.report(model).regions
    assert region.status == "chunked" and not region.not_compared_with_code, region.not_compared_with_code
    assert tried == [dynamic]


def test_layers_inside_a_compared_module_are_its_regions_too(tmp_path: Path) -> None:
    """The second layer's experts are chosen outside of it, so that the module that holds both is its own."""

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (layer(tmp_path, name, dense("pass"), init=INIT) for name in ("First", "Second"))
            self.router, self.experts = nn.Linear(8, 4), Experts()

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.first(x)
            w, i = self.router(x).softmax(-1).topk(2, dim=-1)
            out: Tensor = x + self.experts(x, i, w)
            return out

    model = nn.Sequential(Parent())
    optimized(model)
    model(torch.randn(100, 8, requires_grad=True)).sum().backward()
    report = memfine_fx.report(model)
    assert report.num_chunked == 2 and not any(region.not_compared_with_code for region in report.regions), str(report)


class Cache:
    """Grows in each call of a layer, as a cache of keys does."""

    def __init__(self) -> None:
        self.total: Tensor | None = None


def test_an_object_that_a_layer_is_given_is_as_it_was_in_every_run() -> None:
    class WithCache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts, self.before = nn.Linear(8, 4), Experts(), nn.Linear(8, 8)

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            x = self.before(x)
            cache.total = x if cache.total is None else cache.total + x
            w, i = self.router(cache.total).softmax(-1).topk(2, dim=-1)
            out: Tensor = self.experts(x, i, w)
            return out

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = WithCache()

        def forward(self, x: Tensor) -> Tensor:
            cache = Cache()
            first: Tensor = self.inner(x, cache)
            return first

    parent = Parent()
    optimized(parent)
    parent(torch.randn(100, 8, requires_grad=True)).sum().backward()
    (region,) = memfine_fx.report(parent).regions
    assert region.status == "chunked" and not region.not_compared_with_code, region.not_compared_with_code


def test_a_model_that_takes_no_fewer_tokens_is_compared_with_all(tmp_path: Path) -> None:
    model = layer(tmp_path, "Alone", loop(ROWS))

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] < 100:
                raise ValueError("too few tokens")
            return self.inner(x)

    parent = Parent()
    optimized(parent)
    parent(torch.randn(200, 8)).sum().backward()
    report = memfine_fx.report(parent)
    assert report.num_chunked == 1 and not report.regions[0].not_compared_with_code


@pytest.mark.parametrize("spelling", ["list of experts, choices", "list of experts, scatter"])
def test_rounding_of_gradients_that_cancel_is_no_difference(spelling: str) -> None:
    model, hidden = SPELLINGS[spelling]()
    optimized(model)
    model(hidden.requires_grad_()).sum().backward()
    report = memfine_fx.report(model)
    assert report.num_chunked == 1 and not report.regions[0].not_compared_with_code


CALLS: list[int] = []


@torch.library.custom_op("memfine_tests::noted", mutates_args=())
def noted(x: Tensor) -> Tensor:
    CALLS.append(1)
    return x.clone()


@noted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


noted.register_autograd(lambda context, gradient: gradient)


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(noted(x))


def test_the_report_says_first_what_was_not_compared() -> None:
    CALLS.clear()
    report = first_report(Noting())
    line = str(report).splitlines()[1]
    assert report.num_chunked == 1 and len(CALLS) == 1
    assert "not compared with your code" in line and "memfine_tests::noted" in line


def test_a_layer_with_tensors_that_hold_no_data_is_not_compared() -> None:
    model = nn.Sequential(Block())
    model[0].register_buffer("shape", torch.empty(2, device="meta"))
    report = first_report(model)
    assert report.num_chunked == 1 and "hold no data" in report.regions[0].not_compared_with_code


@pytest.mark.parametrize("spelling", ["loop", "gathered add"])
def test_layers_of_one_kind_are_compared_once(spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's sizes are computed in the first, where both compute with them."""
    compared: list[str] = []
    verdict = own_code._Layer.verdict

    def noted(self: Any, session: Any) -> Any:
        compared.append(self.name)
        return verdict(self, session)

    monkeypatch.setattr(own_code._Layer, "verdict", noted)
    lines = loop(ROWS) if spelling == "loop" else dense("pass", spelling)
    kind = type(layer(tmp_path, "Kind", lines, init=TABLES))
    report = first_report(nn.Sequential(*(kind() for _ in range(4))))
    assert report.num_chunked == 4 and len(compared) == 1


def test_layers_with_other_settings_are_compared_each(tmp_path: Path) -> None:
    kind = type(layer(tmp_path, "Setting", dense("pass"), init=TABLES))
    settings = (True, False, "a", 2.0, 3, None)
    layers = [kind() for _ in settings]
    for own, setting in zip(layers, settings, strict=True):
        own.setting = setting
    assert first_report(nn.Sequential(*layers)).num_chunked == len(own_code._known) == len(settings)


def test_the_module_that_holds_router_and_experts_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    verdict = own_code._Layer.verdict
    monkeypatch.setattr(
        own_code._Layer, "verdict", lambda self, session: (compared.append(self.name), verdict(self, session))[1]
    )
    model = nn.Sequential(nn.Linear(8, 8), Block())
    assert first_report(model).num_chunked == 1 and compared == ["1"]


@pytest.mark.parametrize(
    ("family", "records"),
    [("qwen3_moe", True), ("deepseek_v3", False), ("gpt_oss", False)],
)
def test_layers_of_transformers_are_compared(family: str, records: bool) -> None:
    """Also where the model records router logits, which its layers alone do not."""
    model = tiny_causal_lm(family)
    optimized(model)
    tokens = torch.randint(0, model.config.vocab_size, (2, 20))
    recorded = {"output_router_logits": True} if records else {}
    out = model(input_ids=tokens, labels=tokens, **recorded)
    out.loss.backward()
    assert not records or len(out.router_logits) == model.config.num_hidden_layers
    report = memfine_fx.report(model)
    assert report.num_chunked and not [
        region.not_compared_with_code for region in report.regions if region.not_compared_with_code
    ]


# State.

STATISTICS = torch.zeros(4)
STEPS = 0


def warmth() -> float:
    global STEPS
    STEPS += 1
    return min(1.0, 0.1 * STEPS)


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Registry:
    def __init__(self) -> None:
        self.steps = 0


REGISTRY = Registry()


def registered() -> int:
    REGISTRY.steps += 1
    return REGISTRY.steps


class Notes(dict):  # type: ignore[type-arg]
    pass


class Teacher(nn.Module):
    """A model whose every call changes what no search of its modules finds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.block, self.hidden = kind, nn.Linear(8, 8), Block(), [nn.Linear(8, 8)]
        self.slots, self.notes, self.counter = Slots(), Notes(steps=0), itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind == "parameters in a list":
            with torch.no_grad():
                self.hidden[0].weight.mul_(0.9).add_(self.first.weight, alpha=0.1)
            x = x + self.hidden[0](x).detach()
        if self.kind == "a tensor of another module":
            STATISTICS.add_(x.detach().mean())
            x = x + STATISTICS.sum()
        if self.kind == "a helper's global":
            x = x * warmth()
        if self.kind == "an object of a helper":
            x = x * registered()
        if self.kind == "slots":
            self.slots.count += 1
            x = x * self.slots.count
        if self.kind == "a subclass of a dictionary":
            self.notes["steps"] += 1
            x = x * self.notes["steps"]
        if self.kind == "an iterator":
            x = x * (1 + next(self.counter))
        if self.kind == "a graph break":
            x = x * warmth()
            torch._dynamo.graph_break()
        out: Tensor = self.block(x)
        return out


@pytest.mark.parametrize(
    "kind",
    [
        "parameters in a list",
        "a tensor of another module",
        "a helper's global",
        "an object of a helper",
        "slots",
        "a subclass of a dictionary",
        "an iterator",
        "a graph break",
    ],
)
def test_what_no_search_finds_is_changed_once_a_step(kind: str) -> None:
    global STEPS
    model = Teacher(kind)
    eager, x, outputs = copy.deepcopy(model), torch.randn(6, 8), []
    for module in (eager, model):
        STEPS = REGISTRY.steps = 0
        STATISTICS.zero_()
        if module is model:
            optimized(module)
        outputs.append(torch.stack([module(x).detach() for _ in range(3)]))
    assert torch.allclose(*outputs, rtol=1e-4, atol=1e-6)
    assert memfine_fx.report(model).num_chunked >= 1


def test_state_after_the_first_step_is_as_after_an_eager_step(tmp_path: Path) -> None:
    """Buffers, attributes, containers, closures, globals and random state of a step that was compiled and compared."""
    lines = [
        *loop(ROWS)[:-1],
        "self.total += x.shape[0]",
        "self.steps = self.steps + 1",
        "self.log.append(self.steps)",
        "self.seen['last'] = self.steps",
        "self.memory.values.append(x.shape[0])",
        "count()",
        "out = out + torch.rand(()) + random.random()",
        "return out",
    ]
    init = (
        "self.register_buffer('total', torch.zeros((), dtype=torch.long))",
        "self.steps, self.log, self.seen, self.memory = 0, [], {}, Memory()",
    )
    source = module_source("Stateful", 4, EXPERTS["mlp"], init, lines).replace(
        "class Stateful",
        "import random\nCOUNTS = [0]\n\n\ndef count():\n    COUNTS[0] += 1\n\n\n"
        "class Memory:\n    def __init__(self):\n        self.values = []\n\n\nclass Stateful",
    )
    kind = load(WrittenLayer("Stateful", source, {}), tmp_path)
    model, calls = kind(), []
    eager = copy.deepcopy(model)
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    x = torch.randn(6, 8)
    states, outputs, counts = [], [], []
    variables = vars(__import__("sys").modules[kind.__module__])
    for module, is_ours in ((eager, False), (model, True)):
        variables["COUNTS"][0] = 0
        torch.manual_seed(1)
        random.seed(1)
        if is_ours:
            optimized(module)
        for _ in range(2):
            outputs.append(module(x).detach())
        states.append({name: copy.deepcopy(value) for name, value in state_of(module).items()})
        states[-1]["memory"] = list(module.memory.values)
        counts.append(list(variables["COUNTS"]))
    report = memfine_fx.report(model)
    assert counts[0] == counts[1] == [2]
    assert torch.equal(states[0].pop("torch's random state"), states[1].pop("torch's random state"))
    for name, value in states[0].items():
        other = states[1][name]
        assert torch.allclose(value, other) if isinstance(value, Tensor) else value == other, name
    assert torch.allclose(torch.stack(outputs[:2]), torch.stack(outputs[2:]))
    assert len(calls) == 2, str(report)


def test_hooks_of_the_users_see_the_step_alone(tmp_path: Path) -> None:
    model = layer(tmp_path, "Hooks", loop(ROWS))
    optimized(model)
    gradients: list[Tensor] = []
    model.router.weight.register_hook(gradients.append)  # type: ignore[union-attr,operator]
    num_saved: list[int] = []
    for _ in range(2):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda tensor: tensor
        ):
            out = model(torch.randn(6, 8, requires_grad=True))
        out.sum().backward()
        num_saved.append(len(saved))
    assert memfine_fx.report(model).num_chunked == 1
    assert len(gradients) == 2 and num_saved[0] == num_saved[1] > 0


def test_a_checkpointed_layer_is_compared(tmp_path: Path) -> None:
    model = layer(tmp_path, "Checkpointed", loop(ROWS))
    optimized(model)
    checkpoint(model, torch.randn(6, 8, requires_grad=True), use_reentrant=False).sum().backward()
    report = memfine_fx.report(model)
    assert report.num_chunked == 1 and not report.regions[0].not_compared_with_code


def test_loggers_that_are_made_meanwhile_stay(tmp_path: Path) -> None:
    """A module's logger leads to all others, which are not the model's state."""
    source = module_source("Logging", 4, EXPERTS["mlp"], (), [*loop(ROWS)[:-1], "logger.debug(out)", "return out"])
    source = source.replace("class Logging", "import logging\nlogger = logging.getLogger('written')\n\n\nclass Logging")
    model = load(WrittenLayer("Logging", source, {}), tmp_path)()
    state = ModelState(model)
    made = logging.getLogger(f"written.{tmp_path.name}")
    state.restore()
    assert logging.getLogger(f"written.{tmp_path.name}") is made


def test_layers_that_are_called_by_name_get_every_routing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer(tmp_path, "Named", loop(ROWS))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x=x * 1.0)

    first_rows: list[bool] = []
    results = own_code_runs.PairOfRuns._results

    def noted(self: Any, call: Any, given: own_code.Given, forced: Any = None) -> Any:
        tokens = given[1]["x"]
        first_rows.append(bool((tokens == tokens[:1]).all()))
        return results(self, call, given, forced)

    monkeypatch.setattr(own_code_runs.PairOfRuns, "_results", noted)
    report = first_report(Parent())
    assert report.num_chunked == 1 and not report.regions[0].not_compared_with_code
    assert first_rows[-2:] == [True, True] and not any(first_rows[:-2])


def test_layers_under_autocast_are_compared_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    kind = own_code._Layer.kind
    monkeypatch.setattr(own_code._Layer, "kind", lambda self, session: kinds.append(kind(self, session)) or kinds[-1])
    made = type(layer(tmp_path, "Casting", loop(ROWS)))
    first_report(made())
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        first_report(made())
    assert len(set(kinds)) == len(kinds) == 2


# Forced choices.


@pytest.mark.parametrize(
    ("shapes", "cut"),
    [
        ([(100, 8)], [(7, 8)]),
        ([(100,)], [(7,)]),
        ([(4, 100, 8), (100, 100), (4, 100)], [(1, 7, 8), (100, 7), (1, 7)]),
        ([(4, 10, 8)], [(4, 10, 8)]),
        ([(4, 100, 100), (4, 100)], [(1, 7, 100), (1, 100)]),
        ([(100, 8), (100,), (), (8,), (50, 8)], [(7, 8), (7,), (), (8,), (50, 8)]),
        ([()], [()]),
    ],
)
def test_arguments_are_cut_to_a_few_tokens(shapes: list[tuple[int, ...]], cut: list[tuple[int, ...]]) -> None:
    given = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
    (*positional,), named = next(
        own_code_runs.few_tokens_of((given[:1], {str(number): value for number, value in enumerate(given[1:])}))
    )
    result = [*positional, *named.values()]
    assert [tuple(tensor.shape) for tensor in result] == cut
    assert not any(tensor.requires_grad for tensor in result)
    assert all(tensor.data_ptr() != before.data_ptr() for tensor, before in zip(result, given, strict=True))


def test_integers_are_cut_along_all_their_dimensions() -> None:
    ((tokens,), named) = next(own_code_runs.few_tokens_of(((torch.zeros(4, 100, dtype=torch.long),), {"scale": 2.0})))
    assert tokens.shape == (1, 7) and named == {"scale": 2.0}


ONES, SPECIAL = torch.ones(3), torch.tensor([1.0, float("nan"), float("inf")])


@pytest.mark.parametrize(
    ("value", "expected", "differs"),
    [
        (ONES, ONES + 1e-9, ""),
        (ONES, 2 * ONES, "off by"),
        (ONES, ONES[:2], "is torch.float32 [3], not"),
        (ONES, ONES.double(), "not torch.float64"),
        (ONES.long(), ONES.long(), ""),
        (ONES.long(), 2 * ONES.long(), "differs"),
        (SPECIAL, SPECIAL, ""),
        (SPECIAL, ONES, "not finite"),
        (ONES, SPECIAL, "not finite"),
        (None, None, ""),
        (None, 0 * ONES, ""),
        (0 * ONES, None, ""),
        (None, ONES, "in one of them only"),
        (ONES, None, "in one of them only"),
        (1, ONES, "in one of them only"),
        (1, 1, ""),
        (1, 2, "is 1, not 2"),
        (None, 2, "is None, not 2"),
        (2, None, "is 2, not None"),
        (1.0, 1.0 + 1e-9, ""),
        (1.0, 2.0, "is 1.0, not 2.0"),
        (float("nan"), float("nan"), ""),
        (float("nan"), 1.0, "is nan"),
        (1.0, float("nan"), "is 1.0"),
        ("a", "b", "is 'a'"),
        (frozenset("ab"), frozenset("ab"), ""),
        (frozenset("ab"), frozenset("a"), "is frozenset"),
        ([1, ONES], [1, ONES], ""),
        ([1, ONES], [1, 2 * ONES], "off by"),
        ([1], [1, 1], "is [1], not"),
        ({"load": ONES}, {"load": ONES}, ""),
        ({"load": ONES}, {"load": 2 * ONES}, "off by"),
        ({"load": 1}, {"rows": 1}, "is {'load': 1}"),
    ],
)
def test_what_counts_as_a_difference(value: Any, expected: Any, differs: str) -> None:
    difference = own_code_runs._difference(value, expected, 0.0, 1e-6)
    assert (differs in difference) if differs else not difference


def test_small_gradients_are_compared_with_the_largest() -> None:
    large = {"gradient of up": 1e6 * ONES, "output 0": ONES}
    assert not own_code_runs._first_difference(
        large | {"gradient of b": 2e-4 * ONES}, large | {"gradient of b": 1e-4 * ONES}, 1e-6
    )
    assert own_code_runs._first_difference(
        large | {"gradient of b": 2e3 * ONES}, large | {"gradient of b": 1e3 * ONES}, 1e-6
    )
    assert "only one of them has output 1" in own_code_runs._first_difference(large, large | {"output 1": ONES}, 1e-6)
    assert "output 0" in own_code_runs._first_difference(large | {"output 0": 1.1 * ONES}, large, 1e-6)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_choice_follows_the_routing(routing: str) -> None:
    scores = torch.randn(2, 3, 5, requires_grad=True)
    with ForcedChoices(by_routing(routing), 5) as forced:
        values, ids = scores.topk(2, dim=-1)
        maximum, first = scores.max(-1)
        order = scores.argsort(-1, descending=True)
        argmax = scores.argmax(-1, keepdim=True)
    assert forced.num_forced == 4
    assert torch.equal(ids, order[..., :2]) and torch.equal(ids[..., 0], first) and torch.equal(argmax, ids[..., :1])
    assert torch.equal(values, scores.gather(-1, ids)) and torch.equal(maximum, values[..., 0])
    assert all(len(set(row.tolist())) == 5 for row in order.reshape(-1, 5))
    (gradient,) = torch.autograd.grad(values.sum(), scores)
    assert torch.equal(gradient, torch.zeros_like(gradient).scatter(-1, ids, 1.0))


def test_routings_leave_experts_idle_and_set_tokens_apart() -> None:
    ids = {}
    for routing in ROUTINGS:
        with ForcedChoices(by_routing(routing), 6):
            ids[routing] = torch.randn(4, 6).topk(1)[1][:, 0].tolist()
    assert set(ids["first experts only"]) == {0} and set(ids["last experts only"]) == {5}
    assert ids["in turn"] == [0, 1, 2, 3]
    assert ids["token 0 apart"] == [0, 1, 1, 1] and ids["last token apart"] == [0, 0, 0, 5]


def test_choices_among_other_things_stay_free() -> None:
    scores = torch.randn(4, 6)
    with ForcedChoices(by_routing("in turn"), 6) as forced:
        assert torch.equal(scores.topk(1, dim=0)[1], scores.sort(0, descending=True)[1][:1])
        scores[:, :5].topk(2)
        torch.arange(6).max(-1)
    assert not forced.num_forced
