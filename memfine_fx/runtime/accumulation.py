"""Gradients that a backward adds to where they are, instead of making a second set of them.

A compiled backward returns new gradients, which autograd adds to those that exist: a micro-batch that accumulates holds
two of every table. Where a result of a region's backward is all that would be added to one parameter's gradient
(`passes.step.fusible_gradients`), the loop adds its products into that gradient, and autograd is handed None for it:
nothing more to add. In fp32 the sum is the same but for the order of additions; in low precision each product is
rounded once with what it is added to, instead of twice.

The ordinary way stays for gradients that others look at or that autograd does not accumulate: parameters with hooks,
`torch.autograd.grad`, `backward(inputs=...)` without them, `create_graph=True`, gradients of another dtype or layout or
in storages that they share (DDP's buckets), and tensors that are no parameters themselves.

NOTE: a backward that an error ends has added what it had computed by then, as autograd itself has for layers whose
gradients were complete.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from memfine_fx.compat.autograd import has_gradient_hooks, is_accumulated

__all__ = ["Accumulation", "adding", "can_add", "can_be_none", "gradients_to_add_to", "is_added", "note_idle"]

Key = tuple[str, int]
"""(region id, index among the results of the region's backward)."""


@dataclass
class Accumulation:
    """One backward of a graph.

    Args:
        places: where the results stand among those of the graph.
        parameters: whose gradients are added to in place.
        added: those that were: the gradients themselves.
        can_be_none: results that may be left out where their expert has no rows.
        idle: those that are left out.
    """

    places: Mapping[Key, int] = field(default_factory=dict)
    parameters: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    added: dict[Key, torch.Tensor] = field(default_factory=dict)
    can_be_none: Set[Key] = frozenset()
    idle: set[Key] = field(default_factory=set)

    def left_to_add(self, results: Sequence[Any]) -> list[Any]:
        """A graph's results without those that were added where they are; autograd takes None as nothing to add."""
        left = list(results)
        for key, gradient in self.added.items():
            place = self.places[key]
            assert left[place] is not None and left[place].is_set_to(gradient), f"{key} is not result {place}"
            left[place] = None
        for key in self.idle:
            left[self.places[key]] = None
        return left


class _Current(threading.local):
    """The accumulation at work in this thread: autograd runs a graph's backward in the thread of its device."""

    accumulation: Accumulation | None = None


_current = _Current()


@contextlib.contextmanager
def adding(accumulation: Accumulation) -> Iterator[Accumulation]:
    """Backwards of regions inside add to the gradients of its parameters."""
    before, _current.accumulation = _current.accumulation, accumulation
    try:
        yield accumulation
    finally:
        _current.accumulation = before


def gradients_to_add_to(
    region_id: str, params: Sequence[torch.Tensor], wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    """For each parameter of a region's backward the gradient that it adds to; None where it makes one.

    Args:
        region_id: of the region.
        params: of its function, flat.
        wanted: gradients of hidden, weight and each of `params`.
    """
    accumulation = _current.accumulation
    if accumulation is None or not accumulation.parameters:
        return [None] * len(params)
    gradients: list[torch.Tensor | None] = []
    place = sum(wanted[:2])
    for param, is_wanted in zip(params, wanted[2:], strict=True):
        parameter = accumulation.parameters.get((region_id, place)) if is_wanted else None
        gradient = None if parameter is None else _seen_alike(parameter, param)
        if parameter is not None and gradient is not None:
            assert parameter.grad is not None, "a gradient is seen"
            accumulation.added[region_id, place] = parameter.grad
        gradients.append(gradient)
        place += is_wanted
    return gradients


def note_idle(region_id: str, places: Sequence[int], wanted: Sequence[bool]) -> None:
    """Leave out gradients of a region's backward at work, as far as its graph returns them to autograd.

    Args:
        region_id: of the region.
        places: of parameters whose experts have no rows, among the region's flat parameters.
        wanted: gradients of hidden, weight and each parameter.
    """
    accumulation = _current.accumulation
    if accumulation is not None:
        keys = {(region_id, sum(wanted[: 2 + place])) for place in places if wanted[2 + place]}
        accumulation.idle |= keys & accumulation.can_be_none


def _seen_alike(parameter: torch.Tensor, param: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient in the view that `param` is of the parameter.

    None where it is a view of something else: a hook of the user's may have put another tensor in the place of a saved
    one.
    """
    gradient = parameter.grad
    if gradient is None or param.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
        return None
    if (param.dtype, param.numel()) != (parameter.dtype, parameter.numel()):
        return None
    return gradient.as_strided(param.shape, param.stride(), param.storage_offset() - parameter.storage_offset())


def can_add(parameter: torch.Tensor) -> bool:
    """Whether a backward that autograd runs for it may add to a parameter's gradient in place."""
    gradient = parameter.grad
    return (
        gradient is not None
        and parameter.is_leaf
        and type(gradient) is torch.Tensor
        and not gradient.requires_grad
        and not has_gradient_hooks(parameter)
        and (gradient.dtype, gradient.shape) == (parameter.dtype, parameter.shape)
        and (gradient.device, gradient.layout) == (parameter.device, torch.strided)
        and gradient.stride() == parameter.stride()
        and gradient.untyped_storage().nbytes() == gradient.nbytes
    )


def can_be_none(parameter: torch.Tensor) -> bool:
    """Whether nobody looks at a parameter's gradient before it is accumulated, so that there may be none."""
    return parameter.is_leaf and not has_gradient_hooks(parameter)


def is_added(parameter: torch.Tensor) -> bool:
    """Whether the backward at work adds to a parameter's gradient in place."""
    return can_add(parameter) and not torch.is_grad_enabled() and is_accumulated(parameter)
