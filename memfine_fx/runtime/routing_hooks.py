"""Hooks of running layers by which `record_routing` reads expert ids, and `replay_routing` gives and compares them.

A record takes the ids from the index arrays that each chunked layer runs with. A replay hands ids to the place between
choosing and using: `memfine::replayed_ids` in a compiled graph (`passes.lower.replay`), a dispatch mode around an eager
router (`compiler.replay`). What the layer then runs with is compared with what was handed out. A layer is known by the
storage of a parameter, because equal layers share a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from memfine_fx.compat.autograd import is_in_backward
from memfine_fx.errors import ConfigError, RoutingReplayError
from memfine_fx.runtime.routing_replay import Key, RoutingRecord, RoutingReplay, key_of

if TYPE_CHECKING:
    from memfine_fx.runtime.store import LiveRegion

__all__ = [
    "active", "note_backward", "note_ids", "note_run", "noted", "paused", "replay_of", "replayed_ids",
]  # fmt: skip

ActiveT = TypeVar("ActiveT", RoutingRecord, RoutingReplay)
_active: list[RoutingRecord | RoutingReplay] = []
_ended: list[RoutingReplay] = []
"""Replays whose forwards have had no backward: a checkpoint may recompute a layer when nothing is forced any more."""
_MOST_ENDED = 16
_num_pauses = 0
_is_noted: ContextVar[bool] = ContextVar("is_noted", default=False)


@contextlib.contextmanager
def active(state: ActiveT) -> Iterator[ActiveT]:
    """Inside, layers of the model in scope are recorded or replayed, in every thread.

    Raises:
        ConfigError: the same model is recorded or replayed already.
    """
    if any(type(other) is type(state) and other.scope.modules & state.scope.modules for other in _active):
        raise ConfigError("the routing of this model is recorded or replayed already")
    _active.append(state)
    try:
        yield state
    finally:
        _active.remove(state)
        if isinstance(state, RoutingReplay) and state.awaits_backward:
            _ended[:] = [*_ended[1 - _MOST_ENDED :], state]


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside, nothing is recorded or replayed, in any thread: layers run to be compiled and compared."""
    global _num_pauses
    _num_pauses += 1
    try:
        yield
    finally:
        _num_pauses -= 1


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Inside, layers of this thread are not noted by what they run with: their ids are noted already."""
    token = _is_noted.set(True)
    try:
        yield
    finally:
        _is_noted.reset(token)


def replay_of(module: torch.nn.Module) -> RoutingReplay | None:
    """Return the replay of a model that a module is, or is a part of."""
    for state in _active:
        if isinstance(state, RoutingReplay) and id(module) in state.scope.modules:
            return state
    return None


def replay_by_key(key: Key) -> RoutingReplay | None:
    """Return the replay under which a layer runs."""
    replays = (state for state in _active if isinstance(state, RoutingReplay) and state.scope.has(key))
    return next(replays, None)


def note_run(region: LiveRegion, params: Sequence[Sequence[Tensor]], order: Tensor, offsets: Tensor) -> None:
    """Record and check the routing that a layer runs with.

    Args:
        params: see `LiveRegion.key`.
        order, offsets: see `runtime.routing.sort_assignments`.

    Raises:
        RoutingReplayError: experts choose tokens, or the layer runs with other ids than those that are replayed.
    """
    if not _active or _num_pauses or _is_noted.get() or is_in_backward():
        return
    key = region.key(params)
    if any(state.scope.has(key) for state in _active):
        if region.takes_slots:
            raise RoutingReplayError(
                f"the routing of {region.name} cannot be recorded or replayed: experts choose tokens"
            )
        ids = _ids_of(order, offsets.to(order.device), region.num_experts).view(-1, region.top_k)
        note_ids(key, region.name, ids, region.num_experts)


def note_ids(key: Key, name: str, ids: Tensor, num_experts: int) -> None:
    """As `note_run`, given the ids [T,K] of a layer by its name."""
    if _num_pauses:
        return
    if is_in_backward():
        if replay_by_key(key) is None:
            for ended in _ended:
                ended.check_recomputed(ended.scope.owner(key), ids, num_experts)
        return
    if replay_by_key(key) is None:
        for ended in _ended:
            ended.note_later_forward(ended.scope.owner(key), ids)
    for state in _active:
        if not state.scope.has(key):
            continue
        if isinstance(state, RoutingRecord):
            state.note(state.scope.owner(key), ids, num_experts)
        else:
            state.check(state.scope.owner(key), ids, num_experts, name)


def note_backward(region: LiveRegion, params: Sequence[Sequence[Tensor]]) -> None:
    """Note that backward ran through a layer, so that one of its forwards will not be recomputed any more."""
    if _num_pauses or not (_active or _ended):
        return
    key = region.key(params)
    for state in (*_active, *_ended):
        if isinstance(state, RoutingReplay) and state.scope.has(key):
            state.note_backward(state.scope.owner(key))
    _ended[:] = [ended for ended in _ended if ended.awaits_backward]


def _ids_of(order: Tensor, offsets: Tensor, num_experts: int) -> Tensor:
    """[N] int64: the expert of each assignment, E where it was dropped."""
    places = torch.arange(order.numel(), device=order.device, dtype=offsets.dtype)
    experts = torch.searchsorted(offsets, places, right=True) - 1
    # Of dropped assignments the kernels' order is undefined: they are written behind the last, and cut off.
    is_routed = (experts >= 0) & (experts < num_experts)
    ids = order.new_full((order.numel() + 1,), num_experts, dtype=torch.int64)
    return ids.scatter_(0, torch.where(is_routed, order.long(), order.numel()), experts)[:-1]


@torch.library.custom_op(
    "memfine::replayed_ids",
    mutates_args=(),
    schema="(Tensor own, Tensor? parameter, str region_id, int num_experts, int first, int width, int top_k) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def replayed_ids(
    own: Tensor, parameter: Tensor | None, region_id: str, num_experts: int, first: int, width: int, top_k: int
) -> Tensor:
    """Return the ids that are replayed in the place of a router's own.

    Args:
        own: ints, `width` choices of each token from choice `first` on, [...,K] or [...].
        parameter: of the layer, which tells layers apart that share a graph.
        region_id: key of the live region.
        num_experts, top_k: E, K.
    """
    key = key_of(region_id, parameter)
    if _num_pauses:
        return own.clone()
    state = replay_by_key(key)
    if state is None:
        raise RoutingReplayError("code that was compiled to replay a routing runs outside of replay_routing")
    return state.chosen(state.scope.owner(key), own.reshape(-1, width), num_experts, first, top_k).reshape(own.shape)


@replayed_ids.register_fake
def _(own: Tensor, *others: object) -> Tensor:
    return torch.empty_like(own, memory_format=torch.contiguous_format)
