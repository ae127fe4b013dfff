"""Records and replays of routing: expert ids by token, layer and choice.

Columns are layers in the order in which they run. What runs inside of backward recomputes an earlier forward, and gets
that forward's ids; `runtime.routing_hooks` calls both where layers run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from memfine_fx.compat.autograd import is_in_backward
from memfine_fx.compat.tensors import storage_id
from memfine_fx.errors import ConfigError, RoutingReplayError

__all__ = ["Key", "RoutingRecord", "RoutingReplay", "Scope", "key_of"]

_MOST_IN_FLIGHT = 64
"""Forwards of a layer that may still be recomputed: of older ones nothing is held, and a recomputation is refused."""
_SAMPLED_TOKENS = 256
Key = int | str
"""Of a layer: the storage of one of its parameters, or the id of its region where no parameter is an input."""


@dataclass(frozen=True)
class Scope:
    """The model whose layers are meant.

    Args:
        modules: ids of it and its parts.
        owners: storage of each parameter and buffer -> what stands for the layer that owns it; None where storages
            change, as sharded ones do: then every layer is meant.
    """

    modules: frozenset[int]
    owners: Mapping[Key, Key] | None

    def has(self, key: Key) -> bool:
        return self.owners is None or isinstance(key, str) or key in self.owners

    def owner(self, key: Key) -> Key:
        return key if self.owners is None else self.owners.get(key, key)


class _Columns:
    """The layers of a model in the order in which they run."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._num_run = 0

    def __len__(self) -> int:
        return len(self._keys)

    def next(self, key: Key) -> tuple[int, bool]:
        """Return the column of a layer that runs now, and whether a forward of the model begins with it.

        Raises:
            RoutingReplayError: another layer ran in this place before.
        """
        begins = self._num_run == 0 or key in self._keys[: self._num_run]
        column = 0 if begins else self._num_run
        if column == len(self._keys):
            self._keys.append(key)
        elif self._keys[column] != key:
            raise RoutingReplayError(
                f"layer {column} is not the layer that ran in this place before: a routing belongs to layers that run "
                "in the same order in every forward"
            )
        self._num_run = column + 1
        return column, begins


@dataclass
class RoutingRecord:
    """Expert ids of the tokens that a model ran on, see `memfine_fx.record_routing`."""

    scope: Scope
    _columns: _Columns = field(default_factory=_Columns)
    _layers: list[Tensor] = field(default_factory=list)  # of the forward that runs, [T,K] each
    _forwards: list[Tensor] = field(default_factory=list)  # [T,L,K] each, on the host

    def note(self, key: Key, ids: Tensor, num_experts: int) -> None:
        """Add the ids of one layer.

        Args:
            ids: [T,K]; an id outside [0, E) says that the choice was dropped.
            num_experts: E.
        """
        _, begins = self._columns.next(key)
        if begins:
            self._finish()
        dtype, dropped = (torch.uint8, 255) if num_experts <= 255 else (torch.uint16, 65535)
        outside = (ids < 0) | (ids >= num_experts)
        # In bytes on the device until the forward has ended: one copy a forward, not one a layer, waits for it.
        self._layers.append(ids.masked_fill(outside, dropped).to(dtype))

    def _finish(self) -> None:
        if self._layers:
            try:
                self._forwards.append(torch.stack(self._layers, dim=1).cpu())
            except RuntimeError as error:
                shapes = ", ".join(str(list(layer.shape)) for layer in self._layers)
                raise RoutingReplayError(f"layers ran on different tokens or choices, [T,K]: {shapes}") from error
            finally:
                self._layers = []

    def take(self) -> list[Tensor]:
        """Return the ids of each forward since the last call, [T,L,K] each, and forget them."""
        self._finish()
        forwards, self._forwards = self._forwards, []
        return forwards

    @property
    def ids(self) -> Tensor:
        """[T,L,K] uint8 (uint16 from 256 experts on), on the host: of all tokens of all forwards, in their order.

        T counts the tokens as the layers see them, B*S of a batch, padding included. L are the MoE layers in the order
        in which they run. The largest number of the dtype marks a choice that the router dropped.

        Raises:
            RoutingReplayError: no layer ran.
        """
        self._finish()
        if not self._forwards:
            raise RoutingReplayError(
                "no routing was recorded: none of the model's chunked layers ran; memfine_fx.report(model) says which "
                "layers are chunked"
            )
        return torch.cat(self._forwards)


@dataclass
class _Forward:
    """One layer's part of a forward that may be recomputed.

    Args:
        own: what the router chose for some of the tokens, by which a recomputation is known.
        ids: handed out, [T,K], a view of the given ones; None where the router's own were used.
    """

    own: Tensor
    ids: Tensor | None


class RoutingReplay:
    """Expert ids that a model is to use, see `memfine_fx.replay_routing`.

    Args:
        scope: the model.
        ids: [T,L,K] integers of all tokens, or those of one forward after the other.
        mask: which tokens have ids, bool with one entry a token of the model; None where all have.
        layers: for each MoE layer its place in L; None where they are the same.
    """

    def __init__(
        self,
        scope: Scope,
        ids: Tensor | Iterable[Tensor],
        mask: Tensor | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.scope = scope
        self._whole = _checked(ids) if isinstance(ids, Tensor) else None
        self._parts = iter(()) if isinstance(ids, Tensor) else iter(ids)
        self._mask = None if mask is None else mask.reshape(-1).bool()
        self._layers = layers
        if self._mask is not None and (self._whole is None or int(self._mask.sum()) != len(self._whole)):
            raise ConfigError(
                "mask must have as many true entries as ids has tokens, and ids must be one tensor: "
                f"{int(self._mask.sum())} entries are true"
            )
        self._columns = _Columns()
        self._num_tokens = self._num_used = 0
        self._rows = torch.empty(0)
        self._current: dict[Key, Tensor] = {}  # [T,K] int64, of the layer's latest run
        self._unchecked: set[Key] = set()
        self._compared: set[Key] = set()
        self._forwards: dict[Key, list[_Forward]] = {}
        self._num_backwards: dict[Key, int] = {}

    @property
    def top_k(self) -> int:
        """K of the ids."""
        if self._whole is not None:
            return self._whole.shape[-1]
        if not self._num_tokens:
            part = self._next_part()
            self._parts = chain([part], self._parts)
            return part.shape[-1]
        return self._rows.shape[-1]

    def _next_part(self) -> Tensor:
        part = next(self._parts, None)
        if part is None:
            raise RoutingReplayError("there are no ids for a forward: all parts were used")
        return _checked(part)

    def chosen(self, key: Key, own: Tensor, num_experts: int, first: int, top_k: int) -> Tensor:
        """Return the ids of a layer's tokens, as `own` in dtype, device and shape.

        Args:
            own: [T,K], or [T,1] of one of several choices: what the router chose.
            num_experts: E.
            first: place of its first choice among the layer's K.
            top_k: K.

        Raises:
            RoutingReplayError: there are no ids for these tokens and this layer.
        """
        if first == 0 and is_in_backward():
            self._current[key] = self._recomputed(key, own)
        elif first == 0:
            ids = self._next(key, own.shape[0], top_k)
            _check_distinct(ids.to(torch.int64), own, num_experts)
            self._note_forward(key, own, ids)
            self._current[key] = ids.to(own.device, torch.int64)
            self._unchecked.add(key)
        return self.merged(key, own, num_experts, first)

    def merged(self, key: Key, own: Tensor, num_experts: int, first: int) -> Tensor:
        """As `chosen`, for another choice of a layer that runs."""
        ids = self._current[key]
        is_given = _is_given(ids, num_experts).unsqueeze(-1)
        return torch.where(is_given, ids[:, first : first + own.shape[-1]], own).to(own.dtype)

    def _next(self, key: Key, num_tokens: int, top_k: int) -> Tensor:
        column, begins = self._columns.next(key)
        if begins:
            self._rows = self._begun(num_tokens)
        shape = (len(self._rows), self._rows.shape[2])
        if column >= self._num_layers or shape != (num_tokens, top_k):
            raise RoutingReplayError(
                f"MoE layer {column} chooses {top_k} experts for each of {num_tokens} tokens; the ids of this "
                f"forward are for {self._num_layers} layers, {shape[1]} experts and {shape[0]} tokens"
            )
        return self._rows[:, column if self._layers is None else self._layers[column]]

    def _begun(self, num_tokens: int) -> Tensor:
        """Return the ids of a forward's tokens, [T,L,K]: a view of what was given where no mask spreads them."""
        if self._num_tokens:
            self._check_layers()
        if self._whole is None:
            rows = self._next_part()
        elif self._mask is None:
            rows = self._whole[self._num_used : self._num_used + num_tokens]
            self._num_used += len(rows)
        else:
            mask = self._mask[self._num_tokens : self._num_tokens + num_tokens].to(self._whole.device)
            rows = self._whole.new_empty((len(mask), *self._whole.shape[1:]), dtype=torch.int32).fill_(-1)
            unmasked = self._whole[self._num_used : self._num_used + int(mask.sum())]
            rows[mask] = unmasked.to(torch.int32)
            self._num_used += len(unmasked)
        self._num_tokens += num_tokens
        return rows

    @property
    def _num_layers(self) -> int:
        return self._rows.shape[1] if self._layers is None else len(self._layers)

    def _check_layers(self) -> None:
        if len(self._columns) != self._num_layers:
            raise RoutingReplayError(
                f"the ids are for {self._num_layers} MoE layers, and {len(self._columns)} of the model are chunked; "
                "layers= says which of the ids' layers are MoE layers, and memfine_fx.report(model) which layers are "
                "chunked"
            )

    def _note_forward(self, key: Key, own: Tensor, ids: Tensor) -> None:
        forwards = self._forwards.setdefault(key, [])
        if self._num_backwards.get(key, 0) >= len(forwards):
            forwards.clear()
            self._num_backwards[key] = 0
        forwards.append(_Forward(_sample(own), ids))
        del forwards[:-_MOST_IN_FLIGHT]

    def _recomputed(self, key: Key, own: Tensor) -> Tensor:
        """Return the ids that a forward had which is recomputed now, [T,K] int64."""
        forwards = self._forwards.get(key, [])
        # A recomputed router chooses what it chose, which tells micro-batches in flight apart.
        if len(forwards) > 1 or own.device.type == "cpu":  # a comparison waits for the device
            forwards = self._like(key, own)
        given = [forward.ids.to(own.device, torch.int64) for forward in forwards if forward.ids is not None]
        if not given or not all(torch.equal(ids, given[0]) for ids in given[1:]):
            raise RoutingReplayError(
                "which forward is recomputed cannot be told: run backward inside of replay_routing, and enter it once "
                "for each micro-batch"
            )
        return given[0]

    def _like(self, key: Key, own: Tensor) -> list[_Forward]:
        """Return the forwards of a layer in which the router chose what it chooses now, [T,K]."""
        sample = _sample(own)
        return [forward for forward in self._forwards.get(key, []) if torch.equal(forward.own, sample)]

    @property
    def awaits_backward(self) -> bool:
        return any(self._num_backwards.get(key, 0) < len(forwards) for key, forwards in self._forwards.items())

    def note_later_forward(self, key: Key, ids: Tensor) -> None:
        """Note ids [T,K] of a forward after the end, so that its recomputation is not taken for a replayed one's."""
        if key in self._forwards:
            self._forwards[key].append(_Forward(_sample(ids), None))
            del self._forwards[key][:-_MOST_IN_FLIGHT]

    def check_recomputed(self, key: Key, ids: Tensor, num_experts: int) -> None:
        """Compare ids [T,K] with which a layer is recomputed after the end with those of its forwards.

        Raises:
            RoutingReplayError: its forward was replayed, and ran with others.
        """
        forwards = self._like(key, ids)
        if forwards and all(
            forward.ids is not None and _differs(ids, forward.ids.to(ids.device, torch.int64), num_experts)
            for forward in forwards
        ):
            raise RoutingReplayError(
                "a checkpoint recomputes a layer whose routing was replayed: run backward inside of replay_routing"
            )

    def check(self, key: Key, ids: Tensor, num_experts: int, name: str) -> None:
        """Compare what a layer runs with with what was handed out.

        Args:
            ids: [T,K].
            name: of the layer, for the message.

        Raises:
            RoutingReplayError: they differ, or nothing was handed out.
        """
        if key not in self._unchecked:
            raise RoutingReplayError(
                f"{name} chose its experts itself: its router is not replayed. Optimize the model with "
                'memfine_fx.optimize(model), run it uncompiled with experts_implementation="memfine", or run a step '
                'of a model that torch.compile compiles with backend="memfine" before it replays'
            )
        self._unchecked.remove(key)
        if ids.device.type != "cpu" and key in self._compared:
            return  # a comparison waits for the device
        self._compared.add(key)
        if _differs(ids, self._current[key], num_experts):
            raise RoutingReplayError(f"{name} runs with other experts than those that are replayed")

    def note_backward(self, key: Key) -> None:
        self._num_backwards[key] = self._num_backwards.get(key, 0) + 1

    def finish(self) -> None:
        """Check that everything was used.

        Raises:
            RoutingReplayError: ids are left, or layers.
        """
        if not self._num_tokens:
            raise RoutingReplayError("no routing was replayed: none of the model's chunked layers ran")
        self._check_layers()
        num_left = 0 if self._whole is None else len(self._whole) - self._num_used
        if num_left:
            raise RoutingReplayError(
                f"ids of {num_left} tokens were not used: the model ran on {self._num_tokens} tokens"
            )


def _checked(ids: object) -> Tensor:
    ids = torch.as_tensor(ids)
    if ids.ndim != 3 or ids.is_floating_point() or ids.dtype is torch.bool:
        raise ConfigError(
            f"ids must be integers [tokens, layers, experts of a token], not {ids.dtype} {list(ids.shape)}"
        )
    return ids


def _check_distinct(ids: Tensor, own: Tensor, num_experts: int) -> None:
    """Raise ConfigError where a token names one expert twice, as its router does not.

    Layers may add such an expert's result once, or twice.
    """
    twice = _names_twice(ids) & _is_given(ids, num_experts)
    if bool(twice.any()) and bool((twice := twice & ~_names_twice(own).to(twice.device)).any()):
        token = int(twice.nonzero()[0])
        raise ConfigError(
            f"ids name one expert twice for token {token} of a layer: {ids[token].tolist()}. Tokens without ids, such "
            "as padding, are marked by mask= or by ids outside of the layer's experts"
        )


def _names_twice(ids: Tensor) -> Tensor:
    ordered = ids.sort(dim=-1).values
    return (ordered[:, 1:] == ordered[:, :-1]).any(dim=-1)


def _is_given(ids: Tensor, num_experts: int) -> Tensor:
    """[T] bool: whether all of a token's ids [T,K] name experts."""
    return ((ids >= 0) & (ids < num_experts)).all(dim=-1)


def _differs(ids: Tensor, given: Tensor, num_experts: int) -> bool:
    """Return whether ids [T,K] that a layer runs with are others than given ones, dropped choices apart."""
    is_compared = _is_given(given, num_experts) & _is_given(ids, num_experts)
    return bool(((ids != given).any(dim=-1) & is_compared).any())


def _sample(own: Tensor) -> Tensor:
    """Return the ids [T,K] of some tokens, in memory of their own."""
    return own[:: max(1, len(own) // _SAMPLED_TOKENS)].to(torch.int32, copy=True)


def key_of(region_id: str, parameter: Tensor | None) -> Key:
    """Return the key of a layer, given a parameter of it that is no result of the graph."""
    storage = None if parameter is None else storage_id(parameter)
    return region_id if storage is None else storage
