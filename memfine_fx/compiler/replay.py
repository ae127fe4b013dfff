"""`record_routing` and `replay_routing`: the routing of one run, and another run under it.

An optimized model is compiled once more for steps that replay (`passes.lower.replay`). A layer that runs in the experts
function "memfine" of transformers, outside of any graph, has its router in the module around it: from that module's
call to the experts' call, a dispatch mode gives choices among experts the replayed ids.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from memfine_fx.capture.ranks import is_fully_sharded
from memfine_fx.compat.autograd import BACKWARD
from memfine_fx.compat.nn import compiled_call_of, has_compiled_call, set_compiled_call, written_module
from memfine_fx.compat.tensors import storage_id
from memfine_fx.compat.transformers import name_of_experts_function
from memfine_fx.compiler.optimized import OptimizedCall, Options, optimized_call
from memfine_fx.compiler.sessions import sessions
from memfine_fx.errors import ConfigError, MemfineError, RoutingReplayError
from memfine_fx.passes.verify.forced_choices import ForcedChoices
from memfine_fx.runtime.routing_hooks import active
from memfine_fx.runtime.routing_replay import Key, RoutingRecord, RoutingReplay, Scope, key_of

__all__ = ["layer_key", "leave_router", "record_routing", "replay_routing"]


@contextlib.contextmanager
def record_routing(model: torch.nn.Module) -> Iterator[RoutingRecord]:
    """Record which experts the tokens of a model choose in every forward inside.

    Args:
        model: optimized, compiled with backend="memfine", or with experts_implementation="memfine"; or a module around
            such a model.

    Yields:
        The record, whose `ids` are [T,L,K]: the tokens of all forwards, MoE layers in the order in which they run,
        choices. uint8, uint16 from 256 experts on; the largest number marks a choice that the router dropped.

    Raises:
        RoutingReplayError: in a forward, where a layer has no routing by token, or its ids are computed of what the
            router chooses; from `ids`, where no layer ran.
    """
    with active(RoutingRecord(_scope(model))) as record, _eager_routers(model, None):
        yield record


@contextlib.contextmanager
def replay_routing(
    model: torch.nn.Module,
    ids: Tensor | Iterable[Tensor],
    *,
    mask: Tensor | None = None,
    layers: Sequence[int] | None = None,
) -> Iterator[None]:
    """Run a model, forward and backward, with the experts that each token is given.

    Routing weights are those of the model's router at the given experts, and so are its gradients. An optimized model
    is compiled once more when it first replays.

    Args:
        model: optimized with `memfine_fx.optimize`, or with experts_implementation="memfine"; or a module around it.
        ids: [T,L,K] integers on the host or a device, of the tokens of all forwards in their order; or an iterable that
            gives one such tensor for each forward. T counts tokens as the layers see them, padding included. A token
            with an id outside of a layer's experts is routed by the router.
        mask: bool, for each token of the forwards whether `ids` has it, as an attention mask does for batches that are
            padded; the others are routed by the router.
        layers: for each MoE layer, in the order in which they run, its place in L. For ids that have an entry for each
            layer of the model, dense ones included.

    Raises:
        ConfigError: ids or the mask are malformed, or name an expert twice for a token.
        RoutingReplayError: the ids do not belong to the tokens and layers that run, a layer's router cannot be
            replayed, or ids are left at the end.
    """
    replay = RoutingReplay(_scope(model), ids, mask, layers)
    with active(replay), _compiled_by_name(model), _eager_routers(model, replay):
        yield
    replay.finish()


def _scope(model: torch.nn.Module) -> Scope:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"a routing expects a torch.nn.Module, got {type(model).__name__}")
    if not BACKWARD.holds():
        raise MemfineError("this version of torch does not say whether a backward runs, which a routing has to know")
    modules = frozenset(map(id, model.modules()))
    if is_fully_sharded(model):
        return Scope(modules, None)
    owners: dict[Key, Key] = {}
    for module in model.modules():
        # Of experts that transformers calls by name all tensors stand for one layer, adapters on them too.
        whole = name_of_experts_function(module) is not None
        for tensor in (*module.parameters(recurse=whole), *module.buffers(recurse=whole)):
            storage = storage_id(tensor)
            if storage is not None:
                owners.setdefault(storage, id(module))
    return Scope(modules, owners)


# Models that were compiled with backend="memfine".

_REPLAYING = "memfine_replaying"
"""Attribute of what torch compiled: the call that replays. There it lives as long as the model, and is not copied."""


@contextlib.contextmanager
def _compiled_by_name(model: torch.nn.Module) -> Iterator[None]:
    """Inside, parts of a model that torch.compile compiled for backend="memfine" run as `optimize` compiles them."""
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            written = written_module(module)
            if not has_compiled_call(module) or optimized_call(written) is not None:
                continue
            open_sessions = [session for session in sessions() if not session.holds_compiled]
            by_name = [session for session in open_sessions if session.restricted_to(written.parameters())]
            if not by_name:
                continue
            compiled = compiled_call_of(module) if written is module else vars(module)["forward"]
            if not hasattr(compiled, _REPLAYING):
                setattr(compiled, _REPLAYING, OptimizedCall(written, Options(by_name[-1].config)))
            install = (
                functools.partial(set_compiled_call, module)
                if written is module
                else functools.partial(vars(module).__setitem__, "forward")
            )
            undo.callback(install, compiled)
            install(getattr(compiled, _REPLAYING))
        yield


# Routers of layers that run outside of graphs.


class _Router:
    """The part of a module's call in front of its experts, where the router chooses.

    Args:
        experts: of the module.
        replay: what gives the ids; None while they are recorded.
    """

    def __init__(self, experts: torch.nn.Module, replay: RoutingReplay | None) -> None:
        self._experts, self._replay = experts, replay
        self._modes = contextlib.ExitStack()
        self._num_chosen = 0
        self._chosen_here: list[Tensor] = []

    def enter(self, module: torch.nn.Module, args: object) -> None:
        """Force choices from here on; a pre-hook of the module around the experts."""
        if not torch.compiler.is_compiling():
            self._num_chosen, self._chosen_here = 0, []
            self._modes.enter_context(ForcedChoices(self._chosen, self._num_experts))

    def leave(self, *args: object) -> None:
        """Leave choices free again; before the experts run, or a hook of the module around them."""
        if not torch.compiler.is_compiling():
            self._modes.close()

    @property
    def _num_experts(self) -> int:
        return int(self._experts.num_experts)  # type: ignore[arg-type]

    def compare(self, index: Tensor) -> None:
        """Compare ids [T,K] that experts are called with with the router's choices, while these are recorded.

        Raises:
            RoutingReplayError: they are others, so that replaying them would give other choices.
        """
        choices = [ids.reshape(-1, ids.shape[-1]) for ids in self._chosen_here]
        choices = [ids for ids in choices if len(ids) == len(index)]
        if choices:
            whole = [*choices, torch.cat([ids for ids in choices if ids.shape[1] == 1] or choices, dim=1)]
            is_dropped = (index < 0) | (index >= self._num_experts)
            same = (bool(((ids == index) | is_dropped).all()) for ids in whole if ids.shape == index.shape)
            if not any(same):
                name = type(self._experts).__name__
                raise RoutingReplayError(f"the ids of {name} are computed of what the router chooses")

    def _chosen(self, scores: Tensor, own: Tensor) -> Tensor | None:
        if self._replay is None:
            self._chosen_here.append(own)
            return None
        top_k, width = self._replay.top_k, own.shape[-1]
        if width not in (1, top_k) or (width == 1 and self._num_chosen == top_k):
            return None
        first = self._num_chosen if width == 1 else 0
        choose = self._replay.merged if self._num_chosen else functools.partial(self._replay.chosen, top_k=top_k)
        self._num_chosen += 1
        key = self._replay.scope.owner(layer_key(self._experts))
        return choose(key, own.reshape(-1, width), self._num_experts, first).reshape(own.shape)


_routers: dict[int, list[_Router]] = {}
"""By the id of the experts whose router is recorded or replayed, while it is; in the order of their hooks."""


@contextlib.contextmanager
def _eager_routers(model: torch.nn.Module, replay: RoutingReplay | None) -> Iterator[None]:
    """Inside, routers of layers in the experts function "memfine" that no optimized model captures are replayed.

    Args:
        replay: None to compare their choices with the ids that are recorded.
    """
    captured = {id(part) for module in model.modules() if optimized_call(module) for part in module.modules()}
    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            children = map(_below_adapters, module.children())
            experts = [child for child in children if name_of_experts_function(child) == "memfine"]
            if not experts or id(module) in captured or _below_adapters(module) is not module:
                continue
            if len(experts) > 1 and replay is None:
                continue
            if len(experts) > 1:
                raise RoutingReplayError(
                    f"{type(module).__name__} has {len(experts)} modules of experts: which router belongs to which "
                    "only a graph shows; memfine_fx.optimize(model) captures it"
                )
            router = _Router(experts[0], replay)
            routers = _routers.setdefault(id(experts[0]), [])
            routers.append(router)
            hooks.callback(routers.remove, router)
            hooks.callback(module.register_forward_pre_hook(router.enter).remove)
            hooks.callback(module.register_forward_hook(router.leave, always_call=True).remove)
        yield


def _below_adapters(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that PEFT's layers around it adapt, or the module itself."""
    while isinstance(base := getattr(module, "base_layer", None), torch.nn.Module):
        module = base
    return module


def leave_router(experts: torch.nn.Module, index: Tensor) -> None:
    """Leave choices free again where experts run on ids [T,K] whose router is recorded or replayed."""
    for router in reversed(_routers.get(id(experts), [])):
        router.leave()
        router.compare(index)


def layer_key(experts: torch.nn.Module) -> Key:
    """Return what a module of experts is known by in a routing that is recorded or replayed."""
    return key_of(f"experts {id(experts)}", next(experts.parameters(), None))
