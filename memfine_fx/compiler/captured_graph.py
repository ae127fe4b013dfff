"""The record of one captured graph: its lowered regions and heads, its refusals, and the modules that call it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakIdRef

from memfine_fx.memory.step import GraphStep
from memfine_fx.plan.runs import Caller, parameters_of
from memfine_fx.records import MoERegion, Refusal
from memfine_fx.records.heads import HeadRegion, ReturnedLogits
from memfine_fx.records.verification import RegionVerification
from memfine_fx.report.picture import RegionGraph
from memfine_fx.runtime.live import LiveHead
from memfine_fx.runtime.store import LiveRegion

__all__ = ["CapturedGraph", "LoweredHead", "LoweredRegion"]


@dataclass(frozen=True)
class LoweredRegion:
    """A raised region, its live counterpart, T of the captured call, what verifying it gave, its picture, why its
    gradients could not be compared with autograd's, and why its layer could not be compared with the model's own code
    ("" where they agree)."""

    region: MoERegion
    live: LiveRegion
    num_tokens_hint: int | None = None
    verification: RegionVerification | None = None
    graph: RegionGraph | None = None
    uncompared: str = ""
    not_compared_with_code: str = ""


@dataclass(frozen=True)
class LoweredHead:
    """A head, its live counterpart, T of the captured call, and what verifying it gave."""

    region: HeadRegion
    live: LiveHead
    num_tokens_hint: int | None = None
    verification: RegionVerification | None = None


@dataclass(eq=False)
class CapturedGraph:
    """The record of one captured graph: the regions, heads and refusals in it, its memory, and its callers.

    Args:
        caller: the module that made the latest call, by its parameters.
        outcomes: regions and refusals.
        step: memory of the graph's partition that ran last.
        heads: chunked heads, and refusals for losses whose logits stayed whole.
        returned: logits among the graph's results whose gradient is computed outside of the graph.
        is_limited: see `CalledGraph`.
    """

    outcomes: list[LoweredRegion | Refusal] = field(default_factory=list)
    step: GraphStep = field(default_factory=GraphStep)
    verifications: list[RegionVerification] = field(default_factory=list)
    heads: list[LoweredHead | Refusal] = field(default_factory=list)
    returned: list[ReturnedLogits] = field(default_factory=list)
    is_limited: bool = False
    caller: Caller = field(init=False)
    _callers: dict[int, Caller] = field(default_factory=dict)  # by the id of the first parameter
    _places: tuple[int, ...] = ()  # of parameters among the inputs

    def __post_init__(self) -> None:
        self.caller = Caller(self, ())

    def note_inputs(self, inputs: Sequence[object], forgotten: Callable[[], None] | None = None) -> bool:
        """Learn whose call this is by its parameters, and whether it is the first of theirs.

        Args:
            forgotten: called when the first of them dies.
        """
        if not self._callers:
            self._places = tuple(place for place, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter))
        first = inputs[self._places[0]] if self._places else None
        known = self._callers.get(id(first))
        if known is not None and (first is None or known.parameters[0]() is first):
            self.caller = known
            return False
        parameters = [inputs[place] for place in self._places]
        callbacks = [None if forgotten is None else lambda _: forgotten(), *[None] * len(parameters)]
        references = tuple(
            WeakIdRef(parameter, callback) for parameter, callback in zip(parameters, callbacks, strict=False)
        )
        self._callers = {place: caller for place, caller in self._callers.items() if caller.alive_parameters()}
        self.caller = self._callers[id(first)] = Caller(self, references)
        return True

    def input_bytes(self, inputs: Sequence[object]) -> int:
        """Tensor inputs of a call that are there for it: the model's buffers and the user's batch.

        Results of earlier graphs are inputs too; they are counted among what those graphs left.
        """
        non_parameters = (value for place, value in enumerate(inputs) if place not in self._parameter_places)
        return sum(
            value.nbytes for value in non_parameters if isinstance(value, torch.Tensor) and value.grad_fn is None
        )

    @property
    def parameter_ids_by_caller(self) -> list[frozenset[int]]:
        """Return the ids of the parameters of each module that the graph was called for: equal layers share a graph."""
        return [frozenset(map(id, parameters_of([caller]))) for caller in self._callers.values()]

    @property
    def parameter_ids(self) -> frozenset[int]:
        return frozenset(id(parameter) for parameter in self.alive_parameters())

    def alive_parameters(self) -> list[torch.Tensor]:
        return parameters_of(self._callers.values())

    def parameters_with_sole_gradients(self, step: GraphStep, caller: Caller) -> dict[tuple[str, int], torch.Tensor]:
        """The parameters of `GraphStep.fusible_gradients` in a call, those that are alive."""
        places = dict(zip(self._places, caller.parameters, strict=True))
        parameters = {key: places[place]() for key, place in step.fusible_gradients.items() if place in places}
        return {key: parameter for key, parameter in parameters.items() if parameter is not None}

    @property
    def lowered(self) -> list[LoweredHead | LoweredRegion]:
        """Return the chunked heads of the graph, followed by its chunked regions."""
        heads: list[LoweredHead | LoweredRegion] = [head for head in self.heads if isinstance(head, LoweredHead)]
        return [*heads, *(outcome for outcome in self.outcomes if isinstance(outcome, LoweredRegion))]

    def live_regions(self) -> list[LiveRegion]:
        return [outcome.live for outcome in self.outcomes if isinstance(outcome, LoweredRegion)]

    @functools.cached_property
    def _parameter_places(self) -> frozenset[int]:
        return frozenset(self._places)
