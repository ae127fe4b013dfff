"""Which runs of graphs make a step: noted as they happen, so that plans follow what a training loop really does.

Terms
    run         one call of a compiled graph, with the values of its symbols
    open        a run whose forward saved for a backward that has not come; what it saved is alive
    pass        the runs from one that begins while none is open to the moment when none is open again: a forward and
                its backward, several forwards under one loss, or an evaluation
    interval    everything between two steps of an optimizer
    context     what a plan depends on beside its graph: sizes, what is alive beside the run, bytes that it may use
                (`memory.step.RunMemory`)

A run is open for as long as the autograd nodes of its results live and their backward has not run. So a loss that is
thrown away, an evaluation that forgot `no_grad` and a step that an exception ended all close by themselves, exactly
when their memory is free. A run's own plans look at its own forward and backward only: what graphs that run later need
does not depend on how this one is chunked.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdRef

from memfine_fx.memory.step import GraphStep, RunMemory

__all__ = ["CalledGraph", "Caller", "Owner", "Run", "RunHistory", "gradient_bytes", "parameters_of"]

_KEY = "memfine_fx"


class CalledGraph(Protocol):
    """A compiled graph as plans see it; its parameters are those of all its callers.

    Args:
        step: memory of the latest of its partitions that ran.
        is_limited: whether a byte limit constrains what it saves (`plan.budget.is_limited`).
    """

    step: GraphStep
    is_limited: bool

    def alive_parameters(self) -> list[torch.Tensor]:
        """Return the parameters that still live."""

    def input_bytes(self, inputs: Sequence[object]) -> int:
        """Tensor inputs of a call that are neither parameters nor results of earlier graphs."""


@dataclass(eq=False)
class Caller:
    """A module that calls a graph, by its parameters: equal layers that are compiled one by one share a graph.

    Args:
        graph: which.
        parameters: among its inputs, in their order.
    """

    graph: CalledGraph
    parameters: tuple[WeakIdRef, ...]

    def alive_parameters(self) -> list[torch.Tensor]:
        return list(self._alive())

    @property
    def has_gradients(self) -> bool:
        """Whether its first parameter that wants a gradient has one; no other is asked."""
        first = next((parameter for parameter in self._alive() if parameter.requires_grad), None)
        return first is not None and first.grad is not None

    @property
    def is_dead(self) -> bool:
        return bool(self.parameters) and self.parameters[0]() is None

    def _alive(self) -> Iterator[torch.Tensor]:
        return (parameter for reference in self.parameters if (parameter := reference()) is not None)


Owner = CalledGraph | Caller
"""An owner of parameters."""


class _Mark:
    """Lives as long as the autograd nodes that it is put in."""


@dataclass(eq=False)
class Run:
    """One call of a graph.

    Args:
        caller: who called what.
        memory: its record, sizes and surroundings.
        input_bytes: of its inputs that are neither parameters nor results of earlier graphs.
        gradient_bytes: gradients of the step's parameters that were there when it began.
        concurrent_runs: the runs of its pass so far, itself among them.
    """

    caller: Caller
    memory: RunMemory
    input_bytes: int
    gradient_bytes: int
    concurrent_runs: list[Run]
    _mark: weakref.ref[_Mark] | None = None
    _is_done: bool = False

    @property
    def graph(self) -> CalledGraph:
        return self.caller.graph

    @property
    def has_saved(self) -> bool:
        """Whether its forward left anything to a backward, which may have run since."""
        return self._mark is not None

    @property
    def is_open(self) -> bool:
        return self._mark is not None and self._mark() is not None and not self._is_done

    def note_results(self, results: object, inputs: Sequence[object]) -> None:
        """Record, once its forward returned, whether its results lead to a backward of this graph."""
        tensors = results if isinstance(results, (tuple, list)) else (results,)
        input_ids = {id(value) for value in inputs}  # an input that is handed through has somebody else's autograd node
        mark = _Mark()
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None and id(tensor) not in input_ids:
                metadata: dict[str, object] = tensor.grad_fn.metadata  # type: ignore[assignment]  # a property
                metadata[_KEY] = mark
                self._mark = weakref.ref(mark)

    def close(self) -> None:
        self._is_done = True


class RunHistory:
    """The runs of a session's graphs: those that are open, the latest passes, and what usually follows a graph."""

    def __init__(self) -> None:
        self._open: list[Run] = []
        self._latest: list[Run] = []
        self._training: dict[CalledGraph, list[Run]] = {}  # latest pass of each, the latest of all at the end
        self._followers: dict[CalledGraph, dict[int, list[Caller]]] = {}  # by how many runs of it came before
        self._intervals: dict[Caller, int] = {}  # in which each ran last
        self._interval = 0

    def begin(
        self, caller: Caller, step: GraphStep, sizes: Mapping[str, int], input_bytes: int, *, is_limited: bool
    ) -> Run:
        """A graph is called.

        Args:
            is_limited: whether bytes decide anything. If not, one parameter tells whether there are gradients, since
                asking all of a model with an expert a module takes milliseconds.
        """
        opened = self.opened()
        if not opened:
            self._learn()
            self._latest = []
        concurrent_runs, graph = self._latest, caller.graph
        self._intervals[caller] = self._interval
        saved = sum(run.memory.left_bytes for run in opened)
        later = _missing_gradient_bytes(self._expected_after(graph, concurrent_runs))
        memory = RunMemory(step, dict(sizes), saved, later)
        gradients = self.gradient_bytes() if is_limited or caller.has_gradients else 0
        run = Run(caller, memory, input_bytes, gradients, concurrent_runs)
        concurrent_runs.append(run)
        return run

    def is_followed(self, run: Run) -> bool:
        """Whether runs that save for a backward are expected after it in its pass, as they came the last time."""
        return bool(self._followers.get(run.graph, {}).get(self._number(run)))

    def expected_after(self, run: Run) -> list[Run]:
        """The runs that came after it in the pass before, those that saved for a backward."""
        before = self._training.get(run.graph, [])
        if before is run.concurrent_runs:
            return []
        places = [place for place, earlier in enumerate(before) if earlier.graph is run.graph]
        number = self._number(run)
        if number >= len(places):
            return []
        return [later for later in before[places[number] + 1 :] if later.has_saved]

    @staticmethod
    def _number(run: Run) -> int:
        """How many runs of its graph came before it in its pass."""
        return sum(other.graph is run.graph for other in run.concurrent_runs) - 1

    def note_results(self, run: Run, results: object, inputs: Sequence[object]) -> None:
        """The forward of a run returned."""
        run.note_results(results, inputs)
        if run.has_saved:
            self._open.append(run)
            self._training.pop(run.graph, None)
            self._training[run.graph] = run.concurrent_runs

    @contextlib.contextmanager
    def backward(self, step: GraphStep, *, keeps_graph: bool) -> Iterator[Run | None]:
        """The backward of a graph runs: yields the run whose it is, with what is alive beside it now.

        Several runs of one graph are taken latest first, which is the order of autograd under one loss.
        """
        opened = self.opened()
        run = next((candidate for candidate in reversed(opened) if candidate.memory.step is step), None)
        if run is not None:
            saved = sum(other.memory.left_bytes for other in opened if other is not run)
            new_gradient_bytes = (
                max(0, self.gradient_bytes() - run.gradient_bytes) if len(run.concurrent_runs) > 1 else 0
            )
            run.memory = replace(run.memory, saved_bytes=saved, later_gradient_bytes=new_gradient_bytes)
        yield run
        if run is not None and not keeps_graph:
            run.close()

    def note_optimizer_step(self) -> None:
        """An optimizer of these parameters stepped: a new interval begins."""
        self._interval += 1

    def members(self) -> list[Caller]:
        """Whose parameters and gradients are there in a step: they ran in this interval or the one before."""
        return [caller for caller, interval in self._intervals.items() if interval >= self._interval - 1]

    def gradient_bytes(self) -> int:
        """Gradients of the step's parameters that are there now."""
        return gradient_bytes(self.members())

    def latest_pass(self, graphs: Iterable[CalledGraph]) -> list[Run]:
        """Runs of the latest pass that trained one of these graphs; of the latest of all where none did."""
        wanted = set(graphs)
        trained = next((graph for graph in reversed(self._training) if graph in wanted), None)
        runs = self._latest if trained is None else self._training[trained]
        return [run for run in runs if run.graph in wanted]

    def forget(self, graph: CalledGraph) -> None:
        """A graph is gone."""
        self._training.pop(graph, None)
        for runs in (self._open, self._latest, *self._training.values()):
            runs[:] = [run for run in runs if run.graph is not graph]
        self._followers.pop(graph, None)
        self._intervals = {caller: at for caller, at in self._intervals.items() if caller.graph is not graph}

    def opened(self) -> list[Run]:
        """Runs whose backwards are still to come."""
        self._open = [run for run in self._open if run.is_open]
        return self._open

    def _learn(self) -> None:
        """The latest pass is over: what followed each of its graphs is what is expected next time."""
        self._intervals = {
            caller: at for caller, at in self._intervals.items() if at >= self._interval - 1 and not caller.is_dead
        }
        counts: dict[int, int] = {}
        for place, run in enumerate(self._latest):
            number = counts[id(run.graph)] = counts.get(id(run.graph), -1) + 1
            later = [follower.caller for follower in self._latest[place + 1 :] if follower.has_saved]
            self._followers.setdefault(run.graph, {})[number] = later

    def _expected_after(self, graph: CalledGraph, concurrent_runs: Sequence[Run]) -> list[Caller]:
        number = sum(run.graph is graph for run in concurrent_runs)
        return self._followers.get(graph, {}).get(number, [])


def parameters_of(owners: Iterable[Owner]) -> list[torch.Tensor]:
    """The living parameters of all, each once."""
    unique: dict[int, Any] = {id(parameter): parameter for owner in owners for parameter in owner.alive_parameters()}
    return list(unique.values())


def gradient_bytes(owners: Iterable[Owner]) -> int:
    """Gradients of these parameters that are there now."""
    return sum(parameter.grad.nbytes for parameter in parameters_of(owners) if parameter.grad is not None)


def _missing_gradient_bytes(owners: Sequence[Owner]) -> int:
    """Gradients that backwards of what these have called will make and leave."""
    parameters = parameters_of(owners)
    return sum(parameter.nbytes for parameter in parameters if parameter.requires_grad and parameter.grad is None)
