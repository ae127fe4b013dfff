"""PEFT: low-rank updates of expert tables (`target_parameters`)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize

from memfine_fx.compat.checks import Feature, expect
from memfine_fx.compat.nn import own_parameters

__all__ = [
    "MAGNITUDES",
    "WRAPPERS",
    "activate_unchecked",
    "active_adapters",
    "adapters_on",
    "factors_to_table",
    "has_unknown_wrappers",
    "layers_with_magnitudes",
    "low_rank_product",
    "parametrized_table",
    "upcasts",
    "updated_weight",
    "with_adapters",
    "with_whole_weight",
    "wrapped_tables",
]

_MODULE = "peft.tuners.lora.layer"
_DORA = "peft.tuners.lora.dora"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def wrapped_tables(model: torch.nn.Module) -> list[Any]:
    """The wrappers that PEFT put around expert tables; where PEFT was never imported, none."""
    wrappers = _wrappers(model)
    return wrappers if wrappers and WRAPPERS.holds() else []


def has_unknown_wrappers(model: torch.nn.Module) -> bool:
    """Whether adapters on expert tables are there which `wrapped_tables` does not find in this version."""
    return bool(_wrappers(model)) and not WRAPPERS.holds()


def _wrappers(model: torch.nn.Module) -> list[Any]:
    wrapper = getattr(sys.modules.get(_MODULE), "ParamWrapper", None)
    return [] if wrapper is None else [module for module in model.modules() if type(module) is wrapper]


def active_adapters(wrapper: Any) -> list[str]:
    """Adapters that a wrapper adds to its weight; none where it is merged or disabled, or upcasts the weight."""
    adapters = adapters_on(wrapper)
    return [] if adapters and upcasts(wrapper) else adapters


def adapters_on(wrapper: Any) -> list[str]:
    """As `active_adapters`, of a wrapper that is known not to upcast: nothing is read."""
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def upcasts(wrapper: Any) -> bool:
    """Whether a wrapper adds to its weight in more bits than the weight has, which is then made anew."""
    # Not `get_param`: where experts are shared among ranks, it gathers the whole table.
    own = own_parameters(wrapper.get_base_layer()).get(wrapper.parameter_name)
    weight: torch.Tensor = wrapper.get_param() if own is None else own
    return weight.dtype not in _DTYPES


def factors_to_table(wrapper: Any) -> str:
    """In letters: the table that an adapter's factors give, of B as [E,out,r] and A as [E,r,in]."""
    # Newer versions take tables for [E,out,in], as transformers writes them, if their layer does not say otherwise.
    return "eor,eri->eoi" if getattr(wrapper, "_did_swap_in_out_features", False) else "eor,eri->eio"


def with_adapters(wrapper: Any, weight: torch.Tensor) -> torch.Tensor:
    """A weight with the active adapters of its wrapper added, W + B A each."""
    for name in active_adapters(wrapper):
        weight = weight + wrapper.get_delta_weight(name)
    return weight


def parametrized_table(wrapper: Any) -> Any:
    """The list of parametrizations that makes a wrapper's table, as bitsandbytes' of numbers in 4 bits; else None."""
    lists = getattr(wrapper.get_base_layer(), "parametrizations", None)
    name = wrapper.parameter_name
    return lists[name] if lists is not None and name in lists else None


def updated_weight(wrapper: Any) -> tuple[str, torch.Tensor]:
    """The weight with its active adapters added, and its name below `wrapper.base_layer`."""
    weight = with_adapters(wrapper, wrapper.get_param())
    path, layer = wrapper.parameter_name, wrapper.base_layer
    while layer is not wrapper.get_base_layer():
        path, layer = f"base_layer.{path}", layer.base_layer
    return path, weight


def layers_with_magnitudes(model: torch.nn.Module) -> list[Any]:
    """The layers in which PEFT keeps the magnitudes of DoRA, beside linear layers; where it was never used, none."""
    layer = getattr(sys.modules.get(_DORA), "DoraLinearLayer", None)
    layers = [] if layer is None else [module for module in model.modules() if type(module) is layer]
    return layers if layers and MAGNITUDES.holds() else []


def activate_unchecked(layers: Any, is_ours: Callable[[torch.nn.Module], bool]) -> None:
    """Let adapters on some layers' weights be registered without a check, given the module `peft.tuners.lora.layer`.

    PEFT registers a parametrization around each call, and torch checks its shape by computing the whole weight.

    Args:
        is_ours: of the layer whose weight is adapted.
    """
    wrapper: Any = getattr(layers, "ParamWrapper", None)
    checked: Any = getattr(wrapper, "_activate_lora", None)
    if checked is None or checked.__module__ == __name__:
        return

    @functools.wraps(checked)
    @contextlib.contextmanager
    def activate(self: Any, adapters: list[str]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with _unchecked() if is_ours(self.get_base_layer()) else contextlib.nullcontext():
                stack.enter_context(checked(self, adapters))
            yield

    activate.__module__ = __name__
    wrapper._activate_lora = activate


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """Inside, parametrizations are registered as `unsafe` ones: torch computes none to check it."""
    register = parametrize.register_parametrization
    parametrize.register_parametrization = functools.partial(register, unsafe=True)
    try:
        yield
    finally:
        parametrize.register_parametrization = register


class _WholeWeight:
    """A linear layer to PEFT's `dequantize_module_weight`, which asks a class for its module, unless there is `W_q`."""

    W_q = None

    def __init__(self, layer: Any) -> None:
        self.weight, self.bias = layer.weight, layer.bias

    def dequantize(self) -> torch.Tensor:
        return self.weight  # type: ignore[no-any-return]  # of a linear layer


def with_whole_weight(layer: Any) -> Any:
    """A layer as DoRA's forward may read it in a graph; itself where its weight is no plain parameter."""
    is_plain = type(layer) is torch.nn.Linear and type(layer.weight) is torch.nn.Parameter
    return _WholeWeight(layer) if is_plain else layer


def low_rank_product(lora_a: Any, lora_b: Any) -> torch.Tensor | None:
    """B A of two plain linear layers, which PEFT makes of an identity matrix; None for others."""
    for linear in (lora_a, lora_b):
        if (
            type(linear) is not torch.nn.Linear
            or type(linear.weight) is not torch.nn.Parameter
            or linear.bias is not None
        ):
            return None
    return lora_b.weight @ lora_a.weight  # type: ignore[no-any-return]  # parameters


class _Table(torch.nn.Module):
    """A table of two experts, which is what a wrapper adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(12.0).view(2, 3, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.einsum("er,eor->eo", rows, self.weight)


def _check_wrappers() -> None:
    """A wrapped table gives what it gives with the weight that is made here."""
    peft: Any = importlib.import_module("peft")
    with torch.random.fork_rng(devices=[]):
        config = peft.LoraConfig(r=1, target_modules=[], target_parameters=["table.weight"], init_lora_weights=False)
        model: Any = peft.inject_adapter_in_model(config, torch.nn.ModuleDict({"table": _Table()}))
        wrapper, rows = model["table"], torch.randn(2, 2)
        expect(type(wrapper) is getattr(sys.modules.get(_MODULE), "ParamWrapper", None), f"a {type(wrapper)} wraps it")
        path, weight = updated_weight(wrapper)
        ours = torch.func.functional_call(wrapper.base_layer, {path: weight}, (rows,))
        expect(active_adapters(wrapper) and torch.allclose(ours, wrapper(rows)), "adapters add something else")
        a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
        product = torch.einsum(factors_to_table(wrapper), b.view(-1, 1, 2).permute(2, 0, 1), a.view(2, 1, -1))
        expect(
            torch.allclose(product * wrapper.scaling["default"], wrapper.get_delta_weight("default")),
            "factors of an adapter stand otherwise",
        )


WRAPPERS = Feature(
    name="peft.tuners.lora.layer.ParamWrapper",
    package="peft",
    purpose="adapters on expert tables in one graph",
    seen=("0.17", "0.21"),
    fallback="Experts with adapters of PEFT (target_parameters) run as PEFT wrote them, outside the graphs, and are "
    "not chunked.",
    check=_check_wrappers,
)


def _check_magnitudes() -> None:
    """A layer with magnitudes gives what it gives with the weight and the product that are made here."""
    peft: Any = importlib.import_module("peft")
    with torch.random.fork_rng(devices=[]):
        config = peft.LoraConfig(r=1, target_modules=["one"], use_dora=True, init_lora_weights=False)
        model: Any = peft.inject_adapter_in_model(config, torch.nn.ModuleDict({"one": torch.nn.Linear(3, 2)}))
        (layer,) = model["one"].lora_magnitude_vector.values()
        expect(type(layer) is getattr(sys.modules.get(_DORA), "DoraLinearLayer", None), f"a {type(layer)} keeps them")
        a, b = model["one"].lora_A["default"], model["one"].lora_B["default"]
        product, rows = low_rank_product(a, b), torch.randn(4, 3)
        expect(product is not None and torch.allclose(product, layer.get_lora_weight(a, b)), "the product is another")
        base = model["one"].base_layer
        expect(type(with_whole_weight(base)) is _WholeWeight, f"its base layer is a {type(base)}")
        settings = dict(lora_A=a, lora_B=b, scaling=2.0, base_result=base(rows))
        result, expected = (
            layer(rows, base_layer=base_layer, **settings) for base_layer in (with_whole_weight(base), base)
        )
        expect(torch.equal(result, expected), "another weight is read")


MAGNITUDES = Feature(
    name="peft.tuners.lora.dora.DoraLinearLayer",
    package="peft",
    purpose="DoRA on lists of experts in one graph",
    seen=("0.21", "0.21"),
    fallback="Experts in a list whose linear layers have DoRA's magnitudes run as PEFT wrote them, and are not "
    "chunked.",
    check=_check_magnitudes,
)
