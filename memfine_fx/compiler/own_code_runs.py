"""Both runs of a layer: as the user wrote it and compiled alone, on a few tokens; and how their results differ."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import random
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from memfine_fx.capture.installing import uninstalled
from memfine_fx.capture.undo import Generators, ModelState, functions_of, named_globals
from memfine_fx.compat.autograd import autocast_devices
from memfine_fx.compat.functional import Writes
from memfine_fx.compat.nn import own_buffers, plain_call
from memfine_fx.compat.tensors import tree_leaves, tree_map
from memfine_fx.compiler.session import Observer, Session
from memfine_fx.passes.verify.forced_choices import ROUTINGS, ForcedChoices, by_routing
from memfine_fx.passes.verify.gradient_check import in_words
from memfine_fx.records import Refusal

__all__ = [
    "ALIKE",
    "MOST_BYTES",
    "TOLERANCES",
    "Autocast",
    "CannotCompare",
    "CompileGraph",
    "Given",
    "ModuleReached",
    "OtherLayer",
    "PairOfRuns",
    "all_tokens_of",
    "autocast_states",
    "few_tokens_of",
    "frozen_if_large",
    "in_double",
    "num_bytes",
    "stopping_at",
    "tolerance_of",
]


_FEW_TOKENS, _MOST_TOKENS = 7, 64
"""Seven, because where sizes do not vary a number of tokens must not look like one of experts."""
_ROWS_PER_CHUNK = 5
MOST_BYTES = 64 << 20
"""Of all parameters whose gradients are compared, the smallest first. Larger tables count as frozen here;
`passes.verify.gradient_check` compares their gradients, with narrow widths."""
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Of differences relative to the norm, by the coarsest dtype in which a module computes."""
_COARSE = 0.1
"""Where it computes in a dtype of 8 bits."""
_LEAST_SHARE = 1e-3
"""Of the largest gradient: what is smaller is compared with this."""
_HIDDEN_ATTRIBUTES = frozenset(("training", "T_destination", "call_super_init", "dump_patches"))
ALIKE = "tokens alike"
"""Routing where all tokens are the first one, which no choice needs to be forced for."""
_PLAIN = (int, float, str, frozenset, list, dict)
Results = dict[str, Any]
Autocast = tuple[str, torch.dtype, bool]
"""Arguments of `torch.autocast`: device, dtype, whether it is on."""
Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call, by position and by name."""
CompileGraph = Callable[[fx.GraphModule, Sequence[Any], Session], Callable[..., Any]]
"""`pipeline.compile_graph`, which calls this module and so is handed to it."""


class CannotCompare(Exception):
    """A layer cannot run on its own; the message says why."""


class OtherLayer(CannotCompare):
    """Compiled alone, a layer has other regions, whatever its arguments are."""


class ModuleReached(BaseException):
    """The module was called, with these arguments. No handler of the model's own code catches it."""

    def __init__(self, given: Given) -> None:
        super().__init__()
        self.given, self.autocasts = given, autocast_states()


def tolerance_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return the largest relative difference that rounding explains where these floating-point dtypes occur."""
    return max((TOLERANCES.get(dtype, _COARSE) for dtype in dtypes), default=TOLERANCES[torch.float32])


@contextlib.contextmanager
def stopping_at(module: torch.nn.Module) -> Iterator[None]:
    """The module's forward raises `ModuleReached`."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise ModuleReached((args, kwargs))

    attributes = vars(module)
    before = attributes.get("forward")
    attributes["forward"] = stop
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


def autocast_states() -> list[Autocast]:
    """Return autocast as it is now, for each kind of device."""
    return [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in autocast_devices()
    ]


# Arguments for a few tokens.


def few_tokens_of(given: Given) -> Iterator[Given]:
    """Copies of arguments with a few tokens, the likeliest to run first.

    The first tensor says which sizes count tokens: all dimensions of integers, all but the last of floats.
    """
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors:
        yield _copied(given, lambda tensor: tensor)
        return
    first = tensors[0]
    sizes = first.shape[:-1] if first.is_floating_point() and first.ndim > 1 else first.shape
    if math.prod(sizes) <= _MOST_TOKENS:
        yield _copied(given, lambda tensor: tensor)
        return
    if len(sizes) > 1:
        has_width = first.is_floating_point() and first.shape[-1] == sizes[1]
        yield _copied(given, functools.partial(_few_of_both, sizes[0], sizes[1], has_width))
    yield _copied(given, functools.partial(_few_of_first, sizes[0]))


def all_tokens_of(given: Given) -> Iterator[Given]:
    """A copy of arguments as they are, unless they are large."""
    if num_bytes(tree_leaves(given)) <= MOST_BYTES:
        yield _copied(given, lambda tensor: tensor)


def num_bytes(values: Iterable[object]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def in_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _copied(value: Any, cut: Callable[[Tensor], Tensor]) -> Any:
    """A copy of arguments, their tensors cut and detached."""

    def copied(part: Any) -> Any:
        if isinstance(part, torch.nn.Parameter):
            return part
        return cut(part.detach()).clone() if isinstance(part, Tensor) else _copied_object(part)

    return tree_map(copied, value)


def _copied_object(value: Any) -> Any:
    """A copy of an argument that is no tensor, such as a cache of keys; modules and functions are what they are."""
    is_fixed = value is None or isinstance(value, (int, float, str, torch.dtype, torch.device, torch.nn.Module))
    return value if is_fixed or callable(value) else copy.deepcopy(value)


def _few_of_first(size: int, tensor: Tensor) -> Tensor:
    return tensor[:_FEW_TOKENS] if tensor.ndim and tensor.shape[0] == size else tensor


def _few_of_both(batch: int, length: int, has_width: bool, tensor: Tensor) -> Tensor:
    """One sequence, and few of its tokens; a last dimension of floats may be as wide as the sequence is long."""
    if tensor.ndim and tensor.shape[0] == batch:
        tensor = tensor[:1]
    for dim in range(1, tensor.ndim - (has_width and tensor.is_floating_point())):
        if tensor.shape[dim] == length:
            tensor = tensor.narrow(dim, 0, min(length, _FEW_TOKENS))
    return tensor


# Both runs.


def _call_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return plain_call(module)(*args, **kwargs)


class PairOfRuns:
    """A module's two calls on the same arguments.

    Args:
        module: in the state from which each call begins.
        given: arguments of its forward.
        changed: Python objects outside of the module that its calls may change.
        session: of the model, whose options and flags hold for the module alone.
        tolerance: largest difference, relative to a tensor's norm.
        compile_graph: compiles the captured graph of the module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        given: Given,
        changed: Iterable[object],
        session: Session,
        tolerance: float,
        compile_graph: CompileGraph,
    ) -> None:
        self._module, self._given, self._tolerance, self._compile_graph = module, given, tolerance, compile_graph
        self._as_routed: Results = {}
        config = replace(
            session.config, inner_backend="eager", rows_per_chunk=_ROWS_PER_CHUNK, tokens_per_chunk=None, bins=None,
            memory_budget=None, verify=False, gives_up_comparison_with_eager=True,
        )  # fmt: skip
        self._config, self._flags = config, session.capture_flags
        self._forced: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._writes = Writes()
        self._parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._state = ModelState(module, self._parameters.values(), objects=changed)
        self._compiled: Callable[..., Any] = _call_module

    def compile(self, num_regions: int, varies: bool) -> None:
        """Compile the module alone, by a call as it is routed.

        Args:
            num_regions: how many regions of it are chunked in the model.
            varies: whether sizes vary there. If not, they do here only where the module is read otherwise alone: a few
                tokens may be as many as another dimension has entries.

        Raises:
            OtherLayer: compiled alone it has other regions.
            CannotCompare: compiled alone it raises.
        """
        other_regions = self._try_to_compile(num_regions, varies)
        if other_regions and not varies:
            other_regions = self._try_to_compile(num_regions, True)
        if other_regions:
            raise OtherLayer(other_regions)

    def _try_to_compile(self, num_regions: int, dynamic: bool) -> str:
        """Compile the module alone, and say which regions it has; "" where these are as many as in the model.

        Raises:
            CannotCompare: compiled alone it raises.
        """
        alone = Session(self._config, observer=Observer(runs_here=False))
        alone.start_attempt(self._flags)

        def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            compiled = self._compile_graph(graph_module, inputs, alone)

            def run(*args: Any) -> Any:
                with self._writes, self._forced:  # here, because Dynamo compiles nothing under a dispatch mode
                    return compiled(*args)

            return run

        # A code object of its own, so that what Dynamo compiles for it goes with it.
        function = types.FunctionType(_call_module.__code__.replace(), _call_module.__globals__)
        self._compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
        try:
            self._as_routed = self._results(self._compiled, self._given)
        except Exception as error:  # NOTE: what runs alone may need what the model gives it
            raise CannotCompare(f"compiled alone it raises {in_words(error)}") from None
        finally:
            self._restore()
        refusals = "; ".join(outcome.details for outcome in alone.outcomes if isinstance(outcome, Refusal))
        has_same = len(alone.lowered) == num_regions
        return "" if has_same else f"compiled alone it has {len(alone.lowered)} chunked regions ({refusals})"

    def _restore(self) -> None:
        self._writes.restore()
        self._state.restore()

    def difference(self, routing: str, num_experts: int | None) -> str:
        """Run both under a routing ("": as it is) and say what differs first; "" where nothing does.

        Args:
            routing: from `ROUTINGS`.
            num_experts: among which choices are forced; None for choices among any number.
        """
        forced = ForcedChoices(by_routing(routing), num_experts) if routing in ROUTINGS else None
        arguments = tree_map(_alike, self._given) if routing == ALIKE else self._given
        self._forced = forced or contextlib.nullcontext()
        try:
            # Not the other way round: the state was noted with everything installed.
            self._restore()
            with uninstalled(), self._writes:
                expected = self._results(_call_module, arguments, forced)
            self._restore()
        except Exception as error:  # NOTE: a routing that the model's code does not take
            if routing:
                return ""
            raise CannotCompare(f"run eagerly it raises {in_words(error)}") from None
        if forced is not None and not forced.num_forced:
            return "" if num_experts is None else self.difference(routing, None)
        try:
            results = self._results(self._compiled, arguments) if routing else self._as_routed
        except Exception as error:  # NOTE: whatever it raises, the model's code does not
            return f"it raises {in_words(error)}"
        finally:
            self._restore()
        return _first_difference(results, expected, self._tolerance)

    def _results(self, call: Callable[..., Any], given: Given, forced: ForcedChoices | None = None) -> Results:
        """Call the module once, and note its outputs, arguments, state and gradients by name."""
        leaves: list[Tensor] = []
        args, kwargs = tree_map(functools.partial(_as_leaf, leaves), given)
        with forced or contextlib.nullcontext():
            output = call(self._module, args, kwargs)
        results = {f"output {place}": _noted(leaf) for place, leaf in enumerate(tree_leaves(output))}
        results |= {f"argument {place}": _noted(leaf) for place, leaf in enumerate(tree_leaves((args, kwargs)))}
        state = _observed(self._module)
        results |= {name: _noted(value) for name, value in state.items()}
        return results | self._gradients([*tree_leaves(output), *tree_leaves(list(state.values()))], leaves)

    def _gradients(self, values: Sequence[object], leaves: Sequence[Tensor]) -> Results:
        """Return the gradients of all values that a call gave, into its arguments and trained parameters."""
        tensors = [
            value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.grad_fn
        ]
        names = [*(f"gradient of argument {place}" for place in range(len(leaves)))]
        names += [f"gradient of {name}" for name in self._parameters]
        sources = [*leaves, *self._parameters.values()]
        if not tensors or not sources:  # a loop over hit experts, given no tokens: gradients of zero and none are alike
            return dict.fromkeys(names)
        probes = [
            torch.linspace(-1, 1, tensor.numel(), device=tensor.device).to(tensor.dtype).view(tensor.shape)
            for tensor in tensors
        ]
        gradients = torch.autograd.grad(tensors, sources, probes, allow_unused=True)
        return {name: _noted(gradient) for name, gradient in zip(names, gradients, strict=True)}


def _as_leaf(leaves: list[Tensor], value: Any) -> Any:
    """An argument for one call: a float gets a gradient, and may be written in place."""
    if not isinstance(value, Tensor) or isinstance(value, torch.nn.Parameter):
        return value if isinstance(value, Tensor) else _copied_object(value)
    if not (value.is_floating_point() and torch.is_grad_enabled()):
        return value.clone()
    leaf = value.clone().requires_grad_()
    leaves.append(leaf)
    return leaf.clone()


def _alike(value: Any) -> Any:
    """An argument in which every token is the first one."""
    if not isinstance(value, Tensor) or isinstance(value, torch.nn.Parameter) or not value.numel():
        return value
    num_entries = value.shape[-1] if value.is_floating_point() and value.ndim > 1 else 1
    return value.reshape(-1, num_entries)[0].expand(value.shape).clone()


@contextlib.contextmanager
def frozen_if_large(module: torch.nn.Module) -> Iterator[None]:
    """Take the largest parameters, beyond `MOST_BYTES` in all, for frozen."""
    trained = sorted(
        (parameter for parameter in module.parameters() if parameter.requires_grad),
        key=lambda parameter: parameter.nbytes,
    )
    sizes = itertools.accumulate(parameter.nbytes for parameter in trained)
    large = [parameter for parameter, size in zip(trained, sizes, strict=True) if size > MOST_BYTES]
    for parameter in large:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in large:
            parameter.requires_grad_(True)


# What a call changes.


def _observed(module: torch.nn.Module) -> Results:
    """Buffers, attributes, variables of functions and random state, by name."""
    state: Results = {}
    for path, part in module.named_modules():
        state |= {f"buffer {path}.{name}": value for name, value in own_buffers(part).items()}
        state |= {f"{path}.{name}": value for name, value in vars(part).items() if _is_observed(name, value)}
    functions = functions_of(module)
    state |= {f"global {name}": value for _, name, value in named_globals(functions) if _is_comparable(value)}
    for function in functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not bound yet
                if _is_comparable(cell.cell_contents):
                    state[f"variable {name} of {function.__qualname__}"] = cell.cell_contents
    return state | {
        "random state": torch.get_rng_state(),
        "random state of the accelerator": Generators().of_device,
        "Python's random state": hash(random.getstate()),
    }


def _is_observed(name: str, value: object) -> bool:
    return not name.startswith("_") and name not in _HIDDEN_ATTRIBUTES and _is_comparable(value)


def _is_comparable(value: object) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return len(value) <= _MOST_TOKENS and all(map(_is_comparable, value))
    if isinstance(value, dict):
        return len(value) <= _MOST_TOKENS and all(map(_is_comparable, value.values()))
    if isinstance(value, torch.nn.Parameter):
        return False
    return value is None or isinstance(value, (int, float, str, Tensor))


def _noted(value: Any) -> Any:
    """A copy that later steps do not change."""
    if isinstance(value, (list, tuple)):
        return [_noted(part) for part in value]
    if isinstance(value, dict):
        return {key: _noted(part) for key, part in value.items()}
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _first_difference(results: Results, expected: Results, tolerance: float) -> str:
    missing = results.keys() ^ expected.keys()
    if missing:
        return f"only one of them has {min(missing)}"
    scales = [_norm(value) for name, value in expected.items() if name.startswith("gradient")]
    least = _LEAST_SHARE * max(scales, default=0.0)
    for name, value in expected.items():
        difference = _difference(results[name], value, least if name.startswith("gradient") else 0.0, tolerance)
        if difference:
            return f"{name} {difference}"
    return ""


def _difference(value: Any, expected: Any, least: float, tolerance: float) -> str:
    """Say how two values differ, "" where they do not; tensors by their norm, which counts as `least` or more."""
    if isinstance(value, Tensor) or isinstance(expected, Tensor):
        return _difference_of_tensors(value, expected, least, tolerance)
    pairs: list[tuple[Any, Any]] = []
    if isinstance(expected, list) and isinstance(value, list) and len(value) == len(expected):
        pairs = list(zip(value, expected, strict=True))
    elif isinstance(expected, dict) and isinstance(value, dict) and value.keys() == expected.keys():
        pairs = [(value[key], expected[key]) for key in expected]
    elif isinstance(expected, float) and isinstance(value, float):
        is_close = math.isclose(value, expected, rel_tol=tolerance) or (math.isnan(value) and math.isnan(expected))
        return "" if is_close else f"is {value}, not {expected}"
    elif (expected is None or isinstance(expected, _PLAIN)) and value != expected:
        return f"is {value!r}, not {expected!r}"[:200]
    return next(filter(None, (_difference(part, expected_part, least, tolerance) for part, expected_part in pairs)), "")


def _difference_of_tensors(value: Any, expected: Any, least: float, tolerance: float) -> str:
    if not isinstance(value, Tensor) or not isinstance(expected, Tensor):
        tensor, other = (value, expected) if isinstance(value, Tensor) else (expected, value)
        return "" if other is None and not bool(tensor.any()) else "is a tensor in one of them only"
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return f"is {value.dtype} {list(value.shape)}, not {expected.dtype} {list(expected.shape)}"
    if not expected.is_floating_point():
        return "" if torch.equal(value, expected) else "differs"
    distance, norm = _norm(_wide(expected) - _wide(value)), _norm(expected)
    if not math.isfinite(distance):
        exact, other = expected.double(), value.double()
        if not torch.equal(exact.isfinite(), other.isfinite()):
            return "has other entries that are not finite"
        distance, norm = (_norm(part.nan_to_num(0.0, 0.0, 0.0)) for part in (exact - other, exact))
    error = distance / max(norm, least, 1e-12)
    return "" if error <= tolerance else f"is off by {error:.1e} relative"


def _norm(value: Any) -> float:
    """Return the norm of a tensor of floats, 0.0 of anything else; squares of large numbers need fp64."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return 0.0
    norm = float(_wide(value).norm())
    return norm if math.isfinite(norm) else float(value.double().norm())


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype in (torch.float32, torch.float64) else value.float()
