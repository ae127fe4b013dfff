"""Copies of an optimized model are optimized too: deep copies, pickles, averaged weights, other processes."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import memfine_fx
from memfine_fx.compiler.optimized import restored
from memfine_fx.models import MixtralConfig, MixtralMoE
from tests.integration.comparison import assert_same_step, relative_error

HIDDEN = 16
CONFIG = memfine_fx.Config(rows_per_chunk=5, inner_backend="eager")


class Layer(MixtralMoE):
    """A layer of this module, so that a pickle finds its class here."""

    def __init__(self) -> None:
        super().__init__(MixtralConfig(HIDDEN, 24, 4, 2, spelling="gathered"))


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def inside_another(model: nn.Module) -> nn.Module:
    copied: nn.Module = copy.deepcopy(nn.ModuleDict({"teacher": model}))["teacher"]
    return copied


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "oldest pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=0)),
    "torch.save": through_torch_save,
    "inside another module": inside_another,
    "averaged weights": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
}


def rows_of(model: nn.Module) -> list[int]:
    return [region.plan.rows_per_chunk for region in memfine_fx.report(model).regions if region.plan is not None]


CASES = [*((way, True) for way in COPIES), ("deepcopy", False), ("pickle", False)]


@pytest.mark.parametrize(("way", "has_run"), CASES, ids=[f"{way}, {'trained' if ran else 'new'}" for way, ran in CASES])
def test_a_copy_is_optimized_as_its_model_is(way: str, has_run: bool) -> None:
    model, reference = Layer(), Layer()
    reference.load_state_dict(model.state_dict())
    optimized, hidden = memfine_fx.optimize(model, config=CONFIG), torch.randn(9, HIDDEN)
    if has_run:
        optimized(hidden).sum().backward()
    copied = COPIES[way](optimized)
    assert type(copied) is Layer and copied.state_dict().keys() == reference.state_dict().keys()
    with torch.no_grad():
        for one in (copied, reference):
            one.gate.weight.mul_(2)  # type: ignore[union-attr]
    assert_same_step(copied, reference, {"hidden": hidden})
    assert rows_of(copied) == [5]
    assert not any(one is other for one in copied.parameters() for other in model.parameters())


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="torch counts by code"
)
def test_models_of_one_class_do_not_use_up_each_others_compilations() -> None:
    """Dynamo counts compilations by code, and runs what is beyond its limit as it is written."""
    optimized, hidden = memfine_fx.optimize(Layer(), config=CONFIG), torch.randn(9, HIDDEN)
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            memfine_fx.explain(Layer(), hidden, config=CONFIG)
            copied = copy.deepcopy(optimized)
            copied(hidden)
            assert memfine_fx.report(copied).num_chunked == 1


def test_a_copy_has_a_session_of_its_own_that_opens_at_its_first_call() -> None:
    optimized = memfine_fx.optimize(Layer(), config=CONFIG)
    optimized(torch.randn(9, HIDDEN))
    copied = copy.deepcopy(optimized)
    assert "nothing has run yet" in str(memfine_fx.report(copied))
    copied(torch.randn(6, HIDDEN))
    assert memfine_fx.report(copied).regions[0].num_tokens == 6
    assert memfine_fx.report(optimized).regions[0].num_tokens == 9


def test_a_copy_of_a_parametrized_model_reads_its_own_parameters() -> None:
    """torch's own copy of such a module takes along the compiled call of the original, with its parameters."""
    optimized = memfine_fx.optimize(Layer(), config=CONFIG)
    parametrize.register_parametrization(optimized.gate, "weight", nn.Identity())
    hidden = torch.randn(9, HIDDEN)
    optimized(hidden)
    copied = copy.deepcopy(optimized)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(hidden).any() and optimized(hidden).any()


class Scaled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * self.scale


def test_a_copy_of_a_model_whose_own_parameter_is_parametrized_reads_its_own_parameters() -> None:
    optimized = memfine_fx.optimize(Scaled(), config=CONFIG)
    parametrize.register_parametrization(optimized, "scale", nn.Identity())
    hidden = torch.randn(9, HIDDEN)
    optimized(hidden)
    copied = copy.deepcopy(optimized)
    with torch.no_grad():
        copied.parametrizations.scale.original.zero_()  # type: ignore[union-attr]
    assert not copied(hidden).any() and optimized(hidden).any()
    assert rows_of(copied) == [5]


def test_a_shallow_copy_says_that_it_is_plain_and_what_would_do() -> None:
    optimized = memfine_fx.optimize(Layer(), config=CONFIG)
    hidden = torch.randn(9, HIDDEN)
    expected = optimized(hidden)
    with pytest.warns(UserWarning, match=r"memfine_fx\.optimize\(the copy\)"):
        copied = copy.copy(optimized)
    assert copied.gate.weight is optimized.gate.weight and copied._compiled_call_impl is None
    assert relative_error(copied(hidden), expected) < 1e-5
    memfine_fx.optimize(copied, config=CONFIG)(hidden)
    assert rows_of(copied) == rows_of(optimized) == [5]


def test_options_travel_with_a_copy() -> None:
    budget = memfine_fx.Config(inner_backend="eager", memory_budget="1GiB", verify=True)
    copied = pickle.loads(pickle.dumps(memfine_fx.optimize(Layer(), config=budget)))
    copied(torch.randn(9, HIDDEN))
    report = memfine_fx.report(copied)
    assert report.regions[0].verified_error is not None


def test_a_pickle_of_unknown_options_names_them() -> None:
    with pytest.raises(memfine_fx.ConfigError, match="unknown option 'colour'"):
        restored(Layer(), {"colour": 3}, False, None)


def test_a_pickle_reads_with_weights_only_where_one_function_is_allowed() -> None:
    """As it did before `optimize`, with the model's own classes."""
    optimized = memfine_fx.optimize(nn.Sequential(nn.Linear(4, 4)), config=CONFIG)
    file = io.BytesIO()
    torch.save(optimized, file)
    file.seek(0)
    wanted = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    assert [name for name in wanted if name.startswith("memfine_fx")] == ["memfine_fx._restored"]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_names_nothing_of_ours_that_could_move(protocol: int) -> None:
    written = pickle.dumps(memfine_fx.optimize(nn.Sequential(nn.Linear(4, 4)), config=CONFIG), protocol)
    assert b"_restored" in written and b"compiler" not in written
    assert pickle.loads(b"cmemfine_fx\n_restored\n.") is restored, "the name that is in earlier pickles"


def _run_in_child(model: nn.Module, hidden: torch.Tensor, results: object) -> None:
    out = model(hidden)
    results.put((out.tolist(), rows_of(model)))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_spawned_process_gets_an_optimized_model() -> None:
    optimized, hidden = memfine_fx.optimize(Layer(), config=CONFIG), torch.randn(9, HIDDEN)
    expected = optimized(hidden)
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_run_in_child, args=(optimized, hidden, results))
    process.start()
    out, rows = results.get()
    process.join()
    assert rows == [5] and relative_error(torch.tensor(out), expected) < 1e-5


def test_copying_warns_of_nothing_and_leaves_the_model_as_it_was() -> None:
    optimized = memfine_fx.optimize(Layer(), config=CONFIG)
    before = dict(vars(optimized))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(optimized)
        pickle.dumps(optimized)
    assert vars(optimized) == before
