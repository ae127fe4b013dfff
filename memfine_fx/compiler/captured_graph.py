"""What one captured graph gave: its regions and heads as they were lowered, refusals, and whose parameters it reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakIdRef

from memfine_fx.memory.step import GraphStep
from memfine_fx.records import MoERegion, Refusal
from memfine_fx.records.heads import HeadRegion, ReturnedLogits
from memfine_fx.records.verification import RegionVerification
from memfine_fx.report.picture import RegionGraph
from memfine_fx.runtime.live_head import LiveHead
from memfine_fx.runtime.store import LiveRegion

__all__ = ["CapturedGraph", "LoweredHead", "LoweredRegion"]


@dataclass(frozen=True)
class LoweredRegion:
    """A raised region, its live counterpart, T of the captured call, what verifying it gave, its picture, and why its
    gradients could not be compared with autograd's ("" where they agree)."""

    region: MoERegion
    live: LiveRegion
    num_tokens_hint: int | None = None
    verification: RegionVerification | None = None
    graph: RegionGraph | None = None
    uncompared: str = ""


@dataclass(frozen=True)
class LoweredHead:
    """A head, its live counterpart, T of the captured call, and what verifying it gave."""

    region: HeadRegion
    live: LiveHead
    num_tokens_hint: int | None = None
    verification: RegionVerification | None = None


@dataclass(eq=False)
class CapturedGraph:
    """What one graph gave, and whose it is.

    Args:
        outcomes: its regions and refusals.
        step: its memory, of the latest of its partitions that ran.
        heads: its heads, and losses whose logits stayed whole.
        returned: logits among its results whose gradient is taken beside it.
        foreseen: what it would hold under the smallest budget that works ("least") and under one that nothing exceeds
            ("most"), and as partitions that are the same for every layer ("lean", "spare"), only where nothing is
            built; estimated from the graph, or read from code that would be compiled: "most estimated" is then what it
            would be chosen by.
        is_limited: see `CalledGraph`.
    """

    outcomes: list[LoweredRegion | Refusal] = field(default_factory=list)
    step: GraphStep = field(default_factory=GraphStep)
    verifications: list[RegionVerification] = field(default_factory=list)
    heads: list[LoweredHead | Refusal] = field(default_factory=list)
    returned: list[ReturnedLogits] = field(default_factory=list)
    foreseen: dict[str, GraphStep] = field(default_factory=dict)
    is_limited: bool = False
    _parameters: tuple[WeakIdRef, ...] = ()
    _places: tuple[int, ...] = ()  # of parameters among the inputs
    _is_known: bool = False

    def note_inputs(self, inputs: Sequence[object], forgotten: Callable[[], None] | None = None) -> bool:
        """Learn the parameters of a call, and whether they are others than before: equal models share compiled code.

        Args:
            forgotten: called when the first of them dies.
        """
        if self._is_known and (not self._places or self._parameters[0]() is inputs[self._places[0]]):
            return False
        self._is_known = True
        places = [place for place, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)]
        callbacks = [None if forgotten is None else lambda _: forgotten(), *[None] * len(places)]
        self._places = tuple(places)
        self._parameters = tuple(WeakIdRef(inputs[place], one) for place, one in zip(places, callbacks, strict=False))
        return True

    def input_bytes(self, inputs: Sequence[object]) -> int:
        """Tensor inputs of a call that are there for it: the model's buffers and the user's batch.

        Results of earlier graphs are inputs too; they are counted among what those graphs left.
        """
        given = (value for place, value in enumerate(inputs) if place not in self._parameter_places)
        return sum(one.nbytes for one in given if isinstance(one, torch.Tensor) and one.grad_fn is None)

    @property
    def parameter_ids(self) -> frozenset[int]:
        return frozenset(id(parameter) for parameter in self.alive_parameters())

    def alive_parameters(self) -> list[torch.Tensor]:
        return list(self._alive())

    def parameters_with_sole_gradients(self, step: GraphStep) -> dict[tuple[str, int], torch.Tensor]:
        """The parameters of `GraphStep.sole` that are alive."""
        places = dict(zip(self._places, self._parameters, strict=True))
        found = {key: places[place]() for key, place in step.sole.items() if place in places}
        return {key: parameter for key, parameter in found.items() if parameter is not None}

    @property
    def has_gradients(self) -> bool:
        """Whether its first parameter that wants a gradient has one; no other is asked."""
        first = next((parameter for parameter in self._alive() if parameter.requires_grad), None)
        return first is not None and first.grad is not None

    def _alive(self) -> Iterator[torch.Tensor]:
        return (parameter for reference in self._parameters if (parameter := reference()) is not None)

    @property
    def lowered(self) -> list[LoweredHead | LoweredRegion]:
        """Its chunked heads, then its chunked regions."""
        heads: list[LoweredHead | LoweredRegion] = [head for head in self.heads if isinstance(head, LoweredHead)]
        return [*heads, *(outcome for outcome in self.outcomes if isinstance(outcome, LoweredRegion))]

    def live_regions(self) -> list[LiveRegion]:
        return [outcome.live for outcome in self.outcomes if isinstance(outcome, LoweredRegion)]

    @functools.cached_property
    def _parameter_places(self) -> frozenset[int]:
        return frozenset(self._places)
