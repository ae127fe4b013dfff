"""The experts function "memfine" of transformers: routed experts in chunks that backward recomputes, run op by op.

transformers lets a model choose by name what computes its experts (`experts_implementation`). Ours needs no Dynamo and
no Inductor. When a kind of layer is first called:

1. a spelling of the layer that multiplies each routed row by its expert's weights, by the layout that transformers'
   decorator notes at the class, is traced on fake tensors with a symbolic number of tokens;
2. the pipeline (`pipeline.compile_graph`) reads the graph, proves that rows are independent, compares gradients with
   autograd's, and puts `memfine::route` and `memfine::experts` in the place of the region;
3. the result is compared with the eager loop of the module's class on a few tokens: outputs and gradients.

Layers of one kind share the result. A layer that is refused runs in transformers' "grouped_mm", and a warning names
the reason. Weights that a parametrization computes, as PEFT's adapters on expert weights, are computed in the graph, so
that the loop computes them one expert at a time.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from memfine_fx.capture.experts_call import TracedExperts, call_traced, register_traced
from memfine_fx.compat.autograd import autocast_devices, run_without_modes, without_autocast, without_saved_tensor_hooks
from memfine_fx.compat.shapes import mode_of_trace, symbolic_size
from memfine_fx.compat.transformers import (
    EXPERTS,
    eager_experts,
    experts_function,
    gated,
    is_expert_parallel,
    is_in_fp8,
)
from memfine_fx.compiler.own_code_runs import MOST_BYTES, tolerance_of
from memfine_fx.compiler.pipeline import compile_graph
from memfine_fx.compiler.replay import layer_key, leave_router
from memfine_fx.compiler.session import Session
from memfine_fx.compiler.sessions import open_session
from memfine_fx.config import Config
from memfine_fx.errors import Reason
from memfine_fx.passes.tracing import copied_module
from memfine_fx.passes.verify.gradient_check import in_words
from memfine_fx.passes.verify.region import errors_of
from memfine_fx.progress import working
from memfine_fx.records import ChunkPlan, Refusal, Where
from memfine_fx.runtime.routing_hooks import note_ids, noted, paused
from memfine_fx.runtime.store import LiveRegion

__all__ = ["experts_forward", "experts_in_graph"]

_TOKENS_HINT = 4096
_NUM_COMPARED = 13
"""Tokens on which a layer is compared with the loop of its class."""
_ROWS_COMPARED = 5
_MOST_KINDS = 16
"""Of one layer: a model is trained and evaluated, with and without autocast, with one adapter or another."""
_UNREAD = frozenset(vars(torch.nn.Module())) - {"training"} | {"forward", "_old_forward", "_hf_hook"}
"""Attributes of modules that say how they are called, not what they compute."""
_TRACE_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError)
_lock = threading.RLock()
_sessions: dict[Config, Session] = {}
_kinds: weakref.WeakValueDictionary[object, _Kind] = weakref.WeakValueDictionary()
_kinds_of: weakref.WeakKeyDictionary[torch.nn.Module, dict[object, _Kind]] = weakref.WeakKeyDictionary()

Call = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class _Kind:
    """A kind of experts layer: layers that run one traced graph. It lives as long as one of them.

    Args:
        name: by which graphs call it; "" where none may.
        traced: the layer as traced, and in chunks; None where it is refused.
    """

    name: str = ""
    traced: TracedExperts | None = None


def experts_forward(experts: torch.nn.Module, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Return the combined outputs [T,H] of the routed experts of one layer.

    Args:
        experts: whose class transformers decorated with `use_experts_implementation`.
        hidden: [T,H].
        index: expert ids, [T,K] int64.
        weight: routing weights, [T,K].

    Raises:
        ConfigError: MEMFINE_OPTIONS is malformed.
        BudgetInfeasible: not even the smallest chunk fits in the memory budget.
    """
    tensors = _tensors_of(experts)
    traced = _kind(experts, tensors, (hidden, index, weight)).traced
    leave_router(experts, index)
    note_ids(layer_key(experts), type(experts).__name__, index, int(experts.num_experts))  # type: ignore[arg-type]
    if traced is None:
        return experts_function(experts, "grouped_mm")(experts, hidden, index, weight)
    with noted():
        return traced.run(*tensors.values(), hidden, index, weight)


def experts_in_graph(experts: torch.nn.Module, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """As `experts_forward`, where Dynamo captures a graph."""
    arguments = [(tensor.dtype, tensor.device, tensor.shape[-1]) for tensor in (hidden, index, weight)]
    name = _name_of_kind(experts, arguments)
    if not name:
        return experts_function(experts, "grouped_mm")(experts, hidden, index, weight)
    return call_traced(name, *_parameters_and_buffers(experts).values(), hidden, index, weight)


def _name_of_kind(experts: torch.nn.Module, arguments: Sequence[tuple[torch.dtype, torch.device, int]]) -> str:
    """Return the name of a layer's kind, "" where a graph cannot call it."""
    tensors = _tensors_of(experts)
    if is_parametrized(experts) or tensors.keys() != _parameters_and_buffers(experts).keys():
        return ""
    like = [torch.empty((0, width), dtype=dtype, device=device) for dtype, device, width in arguments]
    return _kind(experts, tensors, like).name


torch.compiler.assume_constant_result(_name_of_kind)  # type: ignore[no-untyped-call]


# Which layers are of one kind.


class _SameObject:
    """Equal to the same object only, which it keeps alive."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _kind(experts: torch.nn.Module, tensors: Mapping[str, Tensor], arguments: Sequence[Tensor]) -> _Kind:
    key, kinds = _key_of(experts, tensors, arguments), _kinds_of.setdefault(experts, {})
    if key not in kinds:
        if len(kinds) >= _MOST_KINDS:
            kinds.clear()
        kinds[key] = _kind_by(key, experts, tensors, arguments)
    return kinds[key]


def _kind_by(
    key: object, experts: torch.nn.Module, tensors: Mapping[str, Tensor], arguments: Sequence[Tensor]
) -> _Kind:
    with _lock:
        kind = _kinds.get(key)
        if kind is None:
            # Modes of the call, such as those of a selective checkpoint, would see what is only traced and compared.
            with paused(), torch.inference_mode(False), torch.enable_grad(), without_saved_tensor_hooks():
                kind = _kinds[key] = run_without_modes(lambda: _prepared(experts, tensors, arguments))
        return kind


def _key_of(experts: torch.nn.Module, tensors: Mapping[str, Tensor], arguments: Sequence[Tensor]) -> object:
    """Return a key that is equal for calls which one traced graph serves: all that tracing reads of a layer."""
    layouts = [
        (name, type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
        for name, tensor in tensors.items()
    ]
    parts = [(name, type_before_parametrizations(part), *_switches_of(part)) for name, part in experts.named_modules()]
    of_arguments = [(tensor.dtype, tensor.device, tensor.shape[1:]) for tensor in arguments]
    autocasts = [(device, torch.get_autocast_dtype(device)) for device in _active_autocasts()]
    return Config.from_environment(), tuple(layouts), tuple(parts), tuple(of_arguments), tuple(autocasts)


def _switches_of(module: torch.nn.Module) -> Iterator[object]:
    for name, value in vars(module).items():
        if name not in _UNREAD and not isinstance(value, Tensor):
            is_plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))
            yield name, (value if is_plain else _SameObject(value))


def _active_autocasts() -> list[str]:
    return [device for device in autocast_devices() if torch.is_autocast_enabled(device)]


# Tracing a kind of layer, and comparing it with the code of its class.


def _prepared(experts: torch.nn.Module, tensors: Mapping[str, Tensor], arguments: Sequence[Tensor]) -> _Kind:
    name = type_before_parametrizations(experts).__name__
    with working(f"preparing {name} to run in chunks", "prepared"):
        kind = _chunked(experts, tensors, arguments)
    if isinstance(kind, _Kind):
        return kind
    warnings.warn(f'memfine_fx: {name} runs in transformers\' "grouped_mm", not in chunks: {kind}', stacklevel=2)
    return _Kind()


def _chunked(experts: torch.nn.Module, tensors: Mapping[str, Tensor], arguments: Sequence[Tensor]) -> _Kind | str:
    """Return the kind of a layer, or why it cannot be chunked."""
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"{name} is a {type(tensor).__name__}, which is not read one expert at a time"
    if not EXPERTS.holds():
        return "this version of transformers decorates classes of experts otherwise"
    if is_in_fp8(experts):
        return (
            "transformers' kernels round its rows to FP8 in every product; FineGrainedFP8Config(dequantize=True) loads "
            "weights that are chunked"
        )
    if is_expert_parallel(experts):
        return "transformers has its experts on several ranks"
    session = _session()
    try:
        graph_module, inputs, constants = _traced(experts, tensors, arguments)
    except _TRACE_ERRORS as error:
        return f"its code does not run on fake tensors: {in_words(error)}"
    graph = copied_module(graph_module).graph
    run = _outside_autocast(functools.partial(compile_graph(graph_module, inputs, session), *constants))
    captured = session.graphs[-1]
    refusals = [outcome.details for outcome in captured.outcomes if isinstance(outcome, Refusal)]
    if refusals or not captured.outcomes:
        return "; ".join(refusals) or "no experts are found in it"
    # The rewritten graph itself: a call of `run` would count as a step of the layer.
    chunked = _outside_autocast(functools.partial(graph_module, *constants))
    with session.diagnostics.timed("compare"):
        difference = _difference(experts, chunked, captured.live_regions(), tensors, arguments)
    if difference:
        where = Where(source=_place_of(experts))
        details = f"in chunks it would differ from the eager loop of its class: {difference}"
        captured.outcomes[:] = [Refusal(where, Reason.OTHER_OUTPUT, details)]
        return details
    for live in captured.live_regions():
        live.name = type_before_parametrizations(experts).__name__
    region_id, traced = captured.live_regions()[0].region_id, TracedExperts(graph, run)
    if constants:
        return _Kind("", traced)
    register_traced(region_id, traced)
    return _Kind(region_id, traced)


def _outside_autocast(run: Call) -> Call:
    """Return a layer's call without autocast: its graph holds the casts of the kind."""

    def call(*args: Tensor) -> Tensor:
        if not _active_autocasts():
            return run(*args)
        with without_autocast():
            return run(*args)

    return call


def _session() -> Session:
    """Return the session of all layers under the options that MEMFINE_OPTIONS has now."""
    options = Config.from_environment()
    if options not in _sessions:
        config = replace(options, inner_backend="eager", verify=False, gives_up_comparison_with_eager=True)
        session = _sessions[options] = open_session(config)
        if options.has_budget:
            session.diagnostics.notes.append(
                "experts_implementation shrinks chunks to what the budget leaves beside parameters, gradients and "
                "optimizer state; a plan of the whole step needs memfine_fx.optimize(model)"
            )
    return _sessions[options]


def _tensors_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers and attributes of a module and its parts that are tensors, by path."""
    tensors = _parameters_and_buffers(module)
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        tensors |= {f"{prefix}{name}": value for name, value in vars(part).items() if isinstance(value, Tensor)}
    return tensors


def _parameters_and_buffers(module: torch.nn.Module) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


def _with_tensors(module: torch.nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> torch.nn.Module:
    """Return a copy of a module that has other tensors, and plain attributes in place of parametrized ones.

    The module itself is not touched: another thread may call it, and PEFT caches what its parametrizations give.
    """
    kind = type_before_parametrizations(module)
    copy: torch.nn.Module = object.__new__(kind)
    attributes = dict(vars(module))

    def replaced(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: tensors[f"{prefix}{name}"] if isinstance(value, Tensor) else value for name, value in values.items()
        }

    attributes = replaced(attributes)
    attributes |= {name: replaced(attributes[name]) for name in ("_parameters", "_buffers")}
    attributes["_modules"] = {
        name: part and _with_tensors(part, tensors, f"{prefix}{name}.") for name, part in attributes["_modules"].items()
    }
    vars(copy).update(attributes)
    if is_parametrized(module):
        parametrizations: Any = attributes["_modules"].pop("parametrizations")
        attributes["_parameters"].update({name: compute() for name, compute in parametrizations.items()})
    return copy


def _traced(
    experts: torch.nn.Module, tensors: Mapping[str, Tensor], arguments: Sequence[Tensor]
) -> tuple[fx.GraphModule, list[Tensor], list[Tensor]]:
    """Return the graph of a layer's gathered spelling with a symbolic T, its inputs, and the bound ones.

    Bound inputs come first: tensors inside of other objects, such as scales of 4-bit weights. The layer's own tensors
    follow, then fake arguments.
    """
    mode, shape_env = mode_of_trace(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # as in `trace_rows`; and no compiler asks this mode again
    num_tokens = symbolic_size(shape_env, "num_tokens", _TOKENS_HINT)
    fakes = [_as_parameter(mode.from_tensor(tensor, static_shapes=True)) for tensor in tensors.values()]
    with mode:
        for like in arguments:
            fake = torch.empty((num_tokens, *like.shape[1:]), dtype=like.dtype, device=like.device)
            fakes.append(fake.requires_grad_(like.is_floating_point()))

    def call(*args: Tensor) -> Tensor:
        replaced = dict(zip(tensors, args, strict=False))
        return _gathered(_with_tensors(experts, replaced), *args[len(tensors) :])

    # Below autograd and autocast, so that casts are calls of the graph; `_difference` sees gradients that this loses.
    functional = torch.func.functionalize(call, remove="mutations")
    with torch.no_grad():
        graph_module = make_fx(functional, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    graph_module.graph.eliminate_dead_code()
    constants = _bind_constants(graph_module)
    fakes = [*(_as_parameter(mode.from_tensor(tensor, static_shapes=True)) for tensor in constants), *fakes]
    file, _, line = _place_of(experts).rpartition(":")
    for node in graph_module.graph.nodes:
        node.meta["stack_trace"] = f'  File "{file}", line {line}, in forward\n'
    _Examples(graph_module).run(*fakes)
    return graph_module, [*constants, *tensors.values(), *fakes[-len(arguments) :]], constants


def _gathered(experts: Any, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Return the combined outputs [T,H] of experts, each of the T*K routed rows times its own expert's matrices."""
    ids, top_k = index.reshape(-1), index.shape[-1]

    def projected(rows: Tensor, name: str) -> Tensor:
        matrices = getattr(experts, name)[ids]
        matrices = matrices if experts.is_transposed else matrices.transpose(1, 2)
        product = torch.bmm(rows.unsqueeze(1), matrices).squeeze(1)
        return product + getattr(experts, f"{name}_bias")[ids] if experts.has_bias else product

    has_gate = getattr(experts, "has_gate", True)  # not noted before transformers 5.3
    rows = projected(hidden.repeat_interleave(top_k, dim=0), "gate_up_proj" if has_gate else "up_proj")
    rows = projected(gated(experts, rows) if has_gate else experts.act_fn(rows), "down_proj")
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)
    weighted = (rows * weight.reshape(-1, 1)).view(*index.shape, -1)
    return weighted.sum(dim=1).to(hidden.dtype)


def _bind_constants(graph_module: fx.GraphModule) -> list[Tensor]:
    """Turn tensors that a graph holds into its first inputs, and return them."""
    graph = graph_module.graph
    first, attributes = next(iter(graph.nodes)), graph.find_nodes(op="get_attr")
    tensors: list[Tensor] = []
    for node in attributes:
        tensors.append(getattr(graph_module, node.target))
        with graph.inserting_before(first):
            node.replace_all_uses_with(graph.placeholder(node.name))
        graph.erase_node(node)
    graph_module.recompile()
    return tensors


def _as_parameter(tensor: Tensor) -> Tensor:
    """Return a tensor of a layer as one that does not depend on tokens: the pass knows these as parameters."""
    return torch.nn.Parameter(tensor, tensor.requires_grad)


def _place_of(experts: torch.nn.Module) -> str:
    code = eager_experts(experts).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


class _Examples(fx.Interpreter):
    """Records results as Dynamo does: tracing detaches them, so that nothing shows where gradients stop."""

    def run_node(self, node: fx.Node) -> Any:
        node.meta["example_value"] = result = super().run_node(node)
        return result


def _difference(
    experts: torch.nn.Module,
    run: Call,
    regions: Sequence[LiveRegion],
    tensors: Mapping[str, Tensor],
    arguments: Sequence[Tensor],
) -> str:
    """Return how outputs and gradients of a layer differ from those of its class's eager loop; "" where they agree."""
    if any(tensor.is_meta for tensor in tensors.values()):
        return ""
    hidden, index, weight = arguments
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_NUM_COMPARED, *hidden.shape[1:], generator=generator).to(hidden)
    scores = torch.rand(_NUM_COMPARED, int(experts.num_experts), generator=generator)  # type: ignore[arg-type]
    top = scores.topk(index.shape[1], dim=-1)
    samples = [rows, top.indices.to(index), top.values.to(weight)]

    def step(function: Call) -> dict[str, Tensor]:
        leaves = {
            name: tensor.detach().requires_grad_(tensor.requires_grad and tensor.nbytes <= MOST_BYTES)
            for name, tensor in tensors.items()
        }
        args = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in samples]
        output = function(leaves, args)
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        wanted |= {"hidden states": args[0], "routing weights": args[2]}
        upstream = torch.linspace(-1, 1, output.numel(), device=output.device).to(output.dtype).view(output.shape)
        gradients = torch.autograd.grad(output, list(wanted.values()), upstream, allow_unused=True)
        named = {f"the gradient of {name}": grad for name, grad in zip(wanted, gradients, strict=True)}
        return {"the output": output.detach(), **{name: grad for name, grad in named.items() if grad is not None}}

    expected = step(lambda leaves, args: eager_experts(experts)(_with_tensors(experts, leaves), *args))
    for region in regions:  # whatever the budget, and in several chunks
        region.use_plan(_NUM_COMPARED, ChunkPlan("rows", _ROWS_COMPARED, 0, 0, "to compare"))
    results = step(lambda leaves, args: run(*leaves.values(), *args))
    for region in regions:
        region.forget_steps()
    dtypes = {tensor.dtype for tensor in (*results.values(), *tensors.values())}
    dtypes |= {torch.get_autocast_dtype(device) for device in _active_autocasts()}
    tolerance = tolerance_of(dtype for dtype in dtypes if dtype.is_floating_point)
    errors = {name: error for name, error in errors_of(results, expected).items() if not error <= tolerance}
    return "; ".join(f"{name} is off by {error:.1e} relative" for name, error in errors.items())
