"""transformers: recorders of what layers computed, and models whose experts have several spellings."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.parametrize import type_before_parametrizations

from memfine_fx.compat.checks import Feature, expect

__all__ = [
    "EXPERTS",
    "RECORDERS",
    "SPELLINGS",
    "accept_experts_function",
    "can_switch_experts",
    "config_with_experts",
    "eager_experts",
    "experts_function",
    "gated",
    "installer_of_recorders",
    "is_expert_parallel",
    "is_in_fp8",
    "is_recording_outside_graphs",
    "model_classes",
    "name_of_experts_function",
    "recordable_outputs",
    "register_experts_function",
    "without_recorder",
]

_MODULE = "transformers.utils.output_capturing"
_EXPERTS = "transformers.integrations.moe"
_FP8_EXPERTS = "transformers.integrations.finegrained_fp8"


def installer_of_recorders() -> Callable[[torch.nn.Module], object] | None:
    """Return the function of transformers that installs the hooks of a model that records outputs.

    None where this process cannot have such a model.
    """
    capturing: Any = sys.modules.get(_MODULE)  # a transformers model is here only if it was imported
    if capturing is None or not RECORDERS.holds():
        return None
    install: Callable[[torch.nn.Module], object] = capturing.maybe_install_capturing_hooks
    return install


def recordable_outputs(part: torch.nn.Module) -> tuple[str, ...]:
    """Names of the outputs that a part of a model can record, () for any other module."""
    keys = getattr(part, "_can_record_outputs", None)
    return tuple(keys) if isinstance(keys, dict) and hasattr(part, "config") else ()


def is_recording_outside_graphs() -> bool:
    """Whether code that Dynamo left has set a recorder: in a graph it is a plain variable.

    Asked while the model runs.
    """
    if sys.modules.get(_MODULE) is None or not RECORDERS.holds():
        return False
    recorder: Any = sys.modules[_MODULE]
    return bool(recorder._active_collector.context_var.get())


@contextlib.contextmanager
def without_recorder() -> Iterator[None]:
    """Inside, hooks that record a model's outputs find no recorder: what runs of the model is no call of it.

    In graphs too, where Dynamo traces no context variable: the recorder is a plain variable once it was set there.
    """
    if sys.modules.get(_MODULE) is None or not RECORDERS.holds():
        yield
        return
    capturing: Any = sys.modules[_MODULE]
    recorder = capturing._active_collector
    before = recorder.global_var, recorder.compiling
    recorder.global_var, recorder.compiling = None, True
    try:
        yield
    finally:
        recorder.global_var, recorder.compiling = before


def can_switch_experts(model: Any) -> bool:
    """Whether a model that offers `set_experts_implementation` takes another one."""
    return SPELLINGS.holds() and bool(model._can_set_experts_implementation())


def config_with_experts(config: Any, implementation: str) -> Any:
    """A model's config that spells its experts in this way; the same object."""
    config._experts_implementation = implementation
    return config


def register_experts_function(module: Any, name: str, function: Callable[..., torch.Tensor]) -> None:
    """Let models choose a function of their experts by name, given a module of transformers that lists functions."""
    functions = _experts_functions(module)
    if functions is not None:
        functions.register(name, function)


def _experts_functions(module: Any) -> Any:
    """Return the functions of experts that a module lists, by name; None where it has no such list."""
    return getattr(module, "ALL_FP8_EXPERTS_FUNCTIONS", None) or getattr(module, "ALL_EXPERTS_FUNCTIONS", None)


def accept_experts_function(modeling_utils: Any, name: str) -> None:
    """Let models take a registered name, given the module `transformers.modeling_utils`.

    Before transformers 5.8 models know a list of names, which registering does not extend.
    """
    model_class = getattr(modeling_utils, "PreTrainedModel", None)
    check: Any = getattr(model_class, "get_correct_experts_implementation", None)
    if check is None or "ALL_EXPERTS_FUNCTIONS" in check.__code__.co_names:
        return

    @functools.wraps(check)
    def accepting(self: Any, requested: str | None) -> Any:
        return name if requested == name else check(self, requested)

    modeling_utils.PreTrainedModel.get_correct_experts_implementation = accepting


def experts_function(experts: torch.nn.Module, name: str) -> Callable[..., torch.Tensor]:
    """Return the function of this name for experts: (experts, hidden [T,H], index [T,K], weight [T,K]) -> [T,H]."""
    of_fp8 = _experts_functions(sys.modules[_FP8_EXPERTS]) if is_in_fp8(experts) else None
    function: Callable[..., torch.Tensor] = (of_fp8 or _experts_functions(sys.modules[_EXPERTS]))[name]
    return function


def is_in_fp8(experts: torch.nn.Module) -> bool:
    """Return whether experts are multiplied by transformers' FP8 kernels."""
    return isinstance(experts, getattr(sys.modules.get(_FP8_EXPERTS), "FP8Experts", ()))


def name_of_experts_function(experts: torch.nn.Module) -> str | None:
    """Return the name of the function that experts' config chooses; None where nothing is chosen, or of no experts."""
    if not hasattr(experts, "is_transposed"):  # which transformers' decorator notes
        return None
    name: str | None = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return name


def eager_experts(experts: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """Return the forward that the class of experts defines, below transformers' choice of a function."""
    kind = type_before_parametrizations(experts)
    forward: Callable[..., torch.Tensor] = kind.forward.__wrapped__  # type: ignore[attr-defined]
    return forward


def gated(experts: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return rows [R,2F] of gate and up after their activation, [R,F]."""
    result: torch.Tensor = experts._apply_gate(rows)
    return result


def is_expert_parallel(experts: Any) -> bool:
    """Whether transformers has the experts of a layer on several ranks."""
    return bool(getattr(experts, "_is_expert_parallel", False))


def model_classes(auto_class: Any) -> Any:
    """Config class -> model class, of one of transformers' auto classes."""
    return auto_class._model_mapping


def _check_recorders() -> None:
    capturing: Any = sys.modules.get(_MODULE)
    if capturing is None:
        return
    expect(callable(getattr(capturing, "maybe_install_capturing_hooks", None)), "nothing installs recorders")
    recorder = getattr(capturing, "_active_collector", None)
    variable = getattr(recorder, "context_var", None)
    expect(callable(getattr(variable, "get", None)), "a recorder that is on stands in no context variable")
    is_variable = hasattr(recorder, "global_var") and hasattr(recorder, "compiling")
    expect(is_variable, "a recorder that is on in a graph is no plain variable")


def _check_spellings() -> None:
    from transformers import PreTrainedModel

    base: Any = PreTrainedModel
    for name in ("_can_set_experts_implementation", "set_experts_implementation", "get_experts_implementation"):
        expect(callable(getattr(base, name, None)), f"models have no {name}")


def _check_experts() -> None:
    moe: Any = importlib.import_module(_EXPERTS)

    def forward(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    class Experts(torch.nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.act_fn = torch.nn.Identity()

    Experts.forward = forward
    experts = moe.use_experts_implementation(Experts)(None)
    expect(eager_experts(experts) is forward, "the forward of a decorated class does not wrap its own")
    expect(experts.is_transposed is False and experts.has_bias is False, "it notes no layout at the experts")
    expect(torch.equal(gated(experts, torch.tensor([[2.0, 3.0]])), torch.tensor([[6.0]])), "the gate is another")


EXPERTS = Feature(
    name="transformers.integrations.moe.use_experts_implementation",
    package="transformers",
    purpose="reading the layout of experts whose function is chosen by name",
    seen=("5.2", "5.23"),
    fallback='experts_implementation="memfine" computes what "grouped_mm" does, and nothing is chunked.',
    check=_check_experts,
)
RECORDERS = Feature(
    name="transformers.utils.output_capturing",
    package="transformers",
    purpose="installing the hooks of models that return router logits or hidden states before they are compiled",
    seen=("5.0", "5.23"),
    fallback="Layers that record outputs (output_router_logits, output_hidden_states) break graphs, and are not "
    "chunked.",
    check=_check_recorders,
)
SPELLINGS = Feature(
    name="PreTrainedModel._can_set_experts_implementation",
    package="transformers",
    purpose="switching experts that run in an eager loop to a spelling that reaches a graph",
    seen=("5.0", "5.23"),
    fallback='Experts that run in an eager loop stay so, outside the graphs: give experts_implementation="grouped_mm".',
    check=_check_spellings,
)
