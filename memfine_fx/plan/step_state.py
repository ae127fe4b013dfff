"""The state that plans of a session's graphs depend on: runs of its graphs, and the bytes that exist before a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch

from memfine_fx.config import Config
from memfine_fx.memory.static import foreseen_state_bytes, living_optimizers, static_terms
from memfine_fx.memory.step import RunMemory
from memfine_fx.plan.peaks import SolvedPeaks
from memfine_fx.plan.runs import CalledGraph, Owner, RunHistory, gradient_bytes, parameters_of

__all__ = ["StepState"]


@dataclass(eq=False)
class StepState:
    """The runs of a session's graphs, peaks that were solved for them, and bytes that exist before a step.

    Args:
        config: options of the session.
        graphs: of the session; it appends to this list and removes from it.
        timed: returns a context manager that counts the time within as a stage's.
        runs_here: whether the graphs run on this machine, whose measured rates then count.
        context: the run whose forward or backward is at work, or was last.
        device_limits: bytes of accelerators for this session, where it has no budget; they are asked again once more
            exists there.
        revision: the number of times that a graph or a caller of one was added.
    """

    config: Config
    graphs: Sequence[CalledGraph]
    timed: Callable[[str], AbstractContextManager[None]]
    runs_here: bool = True
    history: RunHistory = field(default_factory=RunHistory)
    context: RunMemory | None = None
    peaks: SolvedPeaks = field(default_factory=SolvedPeaks)
    device_limits: dict[torch.device, int] = field(default_factory=dict)
    revision: int = 0
    _wanted: frozenset[int] | None = None  # ids of a model's parameters, where it is a part of a session
    _optimizers: weakref.WeakSet[torch.optim.Optimizer] | None = None
    _persistent: tuple[frozenset[int], int] | None = None  # ids of members -> bytes, while nothing new is known

    def context_key(self) -> object:
        """Return a key that is equal where plans are equal."""
        return None if self.context is None else self.context.key

    def held_bytes(self) -> int:
        """Return the bytes of parameters, gradients and optimizer state of all graphs, as far as they exist now."""
        existing = static_terms(parameters_of(self.graphs), self._known_optimizers())
        return sum(existing.values()) + gradient_bytes(self.graphs)

    def persistent_bytes(self, members: Sequence[Owner]) -> int:
        """Return the bytes of the members' parameters and optimizer state, which a first step may have yet to make."""
        key = frozenset(map(id, members))
        if self._persistent is None or self._persistent[0] != key:
            parameters, optimizers = parameters_of(members), self._known_optimizers()
            existing_bytes = sum(static_terms(parameters, optimizers).values())
            self._persistent = key, existing_bytes + foreseen_state_bytes(parameters, optimizers)
        return self._persistent[1]

    def latest_runs(self) -> tuple[RunMemory, ...]:
        """Return the memory of each graph that ran in the latest step that trained."""
        return tuple(run.memory for run in self.history.latest_pass(self.graphs))

    def static_terms(self) -> dict[str, int]:
        """Return the bytes that existed before the latest step that trained, by term."""
        runs = self.history.latest_pass(self.graphs)
        terms = static_terms(parameters_of(self._members()), self._known_optimizers())
        terms["gradients before the step"] = runs[0].gradient_bytes if runs else 0
        terms["inputs and buffers"] = sum(run.input_bytes for run in runs)
        return terms

    def reads_any(self, parameters: Collection[int]) -> bool:
        """Return whether the graphs read one of the parameters with these ids."""
        return any(id(parameter) in parameters for parameter in parameters_of(self.graphs))

    def note_parameters(self) -> None:
        """Note that parameters, and so perhaps optimizers, are new."""
        self.revision += 1
        self._optimizers = None
        self.forget_bytes()

    def note_optimizer_step(self, *, is_first: bool) -> None:
        """Note that an optimizer of the graphs' parameters stepped; at its first step it makes state."""
        self.history.note_optimizer_step()
        if is_first:
            self._optimizers = None
            self.forget_bytes()

    def forget_bytes(self) -> None:
        """Forget the bytes that exist before a step, because they changed."""
        self._persistent = None
        self.device_limits.clear()

    def restricted_to(self, graphs: Sequence[CalledGraph], wanted: frozenset[int]) -> StepState:
        """Return the state of these graphs alone, with callers that have one of the parameters with these ids."""
        return replace(self, graphs=graphs, _wanted=wanted)

    def _members(self) -> Sequence[Owner]:
        """Return the callers of the graphs in the latest steps; the graphs themselves where nothing has run."""
        own = set(self.graphs)
        # Another model may share a graph, so that callers are asked for their parameters.
        members = [
            caller
            for caller in self.history.members()
            if caller.graph in own
            and (self._wanted is None or any(id(alive) in self._wanted for alive in caller.alive_parameters()))
        ]
        return members or self.graphs

    def _known_optimizers(self) -> list[torch.optim.Optimizer]:
        if self._optimizers is None:
            self._optimizers = weakref.WeakSet(living_optimizers(parameters_of(self.graphs)))
        return list(self._optimizers)
