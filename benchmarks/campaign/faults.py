"""Faults on purpose at random points of training steps: what is left changed, and is the next step exact?

Terms
    subject   a small MoE model, optimized and compiled once, with what a step of it gives in plain torch
    point     where a fault happens: the n-th operation inside chunks, the n-th hook of a user, or the n-th call of any
              function of memfine_fx; n is drawn among those that a step without a fault has

1. A fault is drawn: its kind, its subject, its point, and whether gradients exist when the step begins.
2. The step runs with the fault. It may raise, or survive (an allocation failure inside a chunk).
3. Nothing but gradients may differ from before (`untouched`). Each gradient is what it was, or that plus the whole
   gradient of the step: what a fault interrupts, it may not leave half done.
4. The next step, without a fault, has the gradients of plain torch.

Faults of the compiler come first, each on a fresh copy of a subject, because each must forget all compiled code.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memfine_fx
from benchmarks.campaign.untouched import changes, state_of
from memfine_fx.compiler.optimized import optimized_call
from memfine_fx.config import InnerBackend
from memfine_fx.models import GptOssConfig, GptOssMoE, LoopConfig, LoopMoE, MixtralConfig, MixtralMoE
from memfine_fx.runtime import halving as chunk_faults

__all__ = ["FaultResult", "run_faults"]

HIDDEN, NUM_TOKENS = 16, 12
TOLERANCE = 1e-5
_OURS = str(Path(memfine_fx.__file__).parent)
_MESSAGE = "injected"
_MAY_CHANGE = ("grad of", "bits of grad of")
_SHARES = {"allocation": 25, "allocations": 10, "hook": 20, "interrupt": 20, "error": 20, "compiler": 5}
"""Kinds of faults, in per cent. "allocation" fails once, "allocations" from a point on."""
_ERRORS = (RuntimeError, ValueError, MemoryError, torch.OutOfMemoryError)
Gradients = dict[str, Tensor]


class Residual(nn.Module):
    """Layers of one kind, so that a fault may happen between them."""

    def __init__(self, make: Callable[[], nn.Module], num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(num_layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: MixtralMoE(MixtralConfig(HIDDEN, 24, 4, 2, spelling="gathered")),
    "gpt_oss": lambda: GptOssMoE(GptOssConfig(HIDDEN, 24, 4, 2, spelling="gathered")),
    "loop": lambda: LoopMoE(LoopConfig(HIDDEN, 24, 4, 2, spelling="where")),
    "loop over hits": lambda: LoopMoE(LoopConfig(HIDDEN, 24, 4, 2, spelling="hit")),
}
_INNER: tuple[InnerBackend, ...] = ("eager", "aot_eager")


class Subject:
    """A model to fault, and what its step must give.

    Args:
        name: of its layers.
        inner: compiler.
        num_layers: of it.
    """

    def __init__(self, name: str, inner: InnerBackend, num_layers: int = 2) -> None:
        self.name = f"{name}, {inner}"
        self.hidden = torch.randn(NUM_TOKENS, HIDDEN)
        plain = Residual(_LAYERS[name], num_layers)
        self.expected = _gradients_after(plain, self.hidden)
        plain.zero_grad()
        self.model = memfine_fx.optimize(plain, config=memfine_fx.Config(rows_per_chunk=8, inner_backend=inner))
        self.hook = _Failing()
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient: self.hook())
            parameter.register_post_accumulate_grad_hook(lambda one: self.hook())
        self.num_hooks = 2 * sum(1 for _ in self.model.parameters())
        self.num_calls_compiling = self._count(_calls_counted)
        self.num_calls = self._count(_calls_counted)
        self.num_operations = self._count(_operations_counted)

    def run(self) -> None:
        run_step(self.model, self.hidden)

    def fresh(self) -> Subject:
        """The same with nothing compiled yet."""
        torch._dynamo.reset()
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        return other

    def forget_failures(self) -> None:
        """Chunks as large as before an allocation failed."""
        call = optimized_call(self.model)
        assert call is not None and call.session is not None
        for lowered in call.session.lowered:
            lowered.live._limits.clear()
        call.session.forget_plans()

    def _count(self, counted: Callable[[], Any]) -> int:
        with counted() as counter:
            self.run()
        self.model.zero_grad()
        return int(counter.number)


def run_step(model: nn.Module, hidden: Tensor) -> None:
    out = model(hidden)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()


def _gradients_after(model: nn.Module, hidden: Tensor) -> Gradients:
    """Of one step; zeros where plain torch gives None."""
    model.zero_grad()
    run_step(model, hidden)
    return {name: _or_zeros(one) for name, one in model.named_parameters()}


def _or_zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


@dataclass
class FaultResult:
    """What came of it.

    Args:
        kinds: faults by kind.
        num_survived: steps that went on.
        worst_error: of the next steps' gradients, relative.
        seconds, cpu_seconds: that all took, compiling the subjects among it.
        failures: one line for each fault after which something was wrong.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    num_survived: int = 0
    worst_error: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        count = self.kinds.total()
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.kinds.items()))
        return (
            f"{count} faults ({kinds}) in {self.seconds:.0f} s ({self.cpu_seconds:.0f} s of CPU): "
            f"{len(self.failures)} left something wrong; {self.num_survived} steps survived their fault; "
            f"worst gradient of a next step {self.worst_error:.1e} off"
        )


def run_faults(count: int, seed: int = 0) -> FaultResult:
    """Inject `count` faults.

    Args:
        count: of faults.
        seed: of kinds, subjects and points.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    result = FaultResult()
    kinds = draw.choices(list(_SHARES), weights=list(_SHARES.values()), k=count)
    kinds.sort(key=lambda kind: kind != "compiler")
    with warnings.catch_warnings(), _quiet_logs():
        warnings.simplefilter("ignore")
        to_compile = [Subject(name, inner, num_layers=1) for name in _LAYERS for inner in _INNER]
        started, cpu = time.perf_counter(), time.process_time()
        num_compiler = kinds.count("compiler")
        for number in range(num_compiler):
            _inject(number, "compiler", draw.choice(to_compile).fresh(), draw, result)
        torch._dynamo.reset()
        subjects = [Subject(name, inner) for name in _LAYERS for inner in _INNER]
        for number, kind in enumerate(kinds[num_compiler:], num_compiler):
            _inject(number, kind, draw.choice(subjects), draw, result)
    result.seconds, result.cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    return result


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """A fault in a pass becomes a refusal, which is logged with its traceback."""
    log = logging.getLogger("memfine_fx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _inject(number: int, kind: str, subject: Subject, draw: random.Random, result: FaultResult) -> None:
    """One fault, and what it left."""
    model, point = subject.model, draw.random()
    model.zero_grad()
    if draw.random() < 0.5:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    grads = {name: None if one.grad is None else one.grad.clone() for name, one in model.named_parameters()}
    before = state_of(model, [subject.hidden])
    failure = _failure(kind, draw)
    problems = []
    try:
        with _faulted(kind, subject, point, failure):
            subject.run()
        result.num_survived += 1
    except (Exception, KeyboardInterrupt) as raised:
        if _MESSAGE not in str(raised):
            problems.append(f"raised {type(raised).__name__}: {raised}")
    found = changes(before, state_of(model, [subject.hidden]))
    problems += [f"changed {name}" for name in found if not name.startswith(_MAY_CHANGE)]
    problems += [f"half a gradient of {name}" for name in _half_done(model, grads, subject.expected)]
    if kind.startswith("allocation"):
        subject.forget_failures()
    own = _gradients_after(model, subject.hidden)
    worst = max(_error(own[name], subject.expected[name]) for name in own)
    result.worst_error = max(result.worst_error, worst)
    if not worst < TOLERANCE:
        problems.append(f"the next step is {worst:.1e} off")
    result.kinds[kind] += 1
    text = f"fault {number} ({kind}, {type(failure).__name__} at {point:.4f} of {subject.name})"
    result.failures += [f"{text}: {'; '.join(problems)}"] if problems else []


def _failure(kind: str, draw: random.Random) -> BaseException:
    if kind.startswith("allocation"):
        return torch.OutOfMemoryError(f"CUDA out of memory ({_MESSAGE})")
    if kind == "interrupt":
        return KeyboardInterrupt(_MESSAGE)
    if kind == "compiler":
        return draw.choice((*_ERRORS, KeyboardInterrupt))(_MESSAGE)
    return draw.choice(_ERRORS)(_MESSAGE)


def _half_done(model: nn.Module, grads: dict[str, Tensor | None], whole: Gradients) -> list[str]:
    """Parameters whose gradient is neither what it was nor that plus the whole gradient."""
    found = []
    for name, parameter in model.named_parameters():
        before, now = grads[name], parameter.grad
        start = torch.zeros_like(parameter) if before is None else before
        is_before = now is None if before is None else now is not None and torch.equal(now, before)
        if not is_before and (now is None or _error(now, start + whole[name]) >= TOLERANCE):
            found.append(name)
    return found


def _error(tensor: Tensor, reference: Tensor) -> float:
    return float((tensor - reference).norm() / reference.norm().clamp_min(1e-6))


@contextmanager
def _faulted(kind: str, subject: Subject, point: float, failure: BaseException) -> Iterator[None]:
    if kind.startswith("allocation"):
        at = int(point * subject.num_operations)
        with _operations_counted(_Failing(at, failure, lasts=kind == "allocations")):
            yield
    elif kind == "hook":
        with mock.patch.object(subject, "hook", _Failing(int(point * subject.num_hooks), failure)):
            yield
    else:
        calls = subject.num_calls_compiling if kind == "compiler" else subject.num_calls
        with _calls_counted(_Failing(int(point * calls), failure)):
            yield


@dataclass
class _Failing:
    """Counts points, and fails at one, or from one on."""

    at: int | None = None
    failure: BaseException | None = None
    lasts: bool = False
    number: int = 0

    def __call__(self) -> None:
        number, self.number = self.number, self.number + 1
        if self.failure is None or self.at is None:
            return
        if number == self.at or (self.lasts and number > self.at):
            raise self.failure


class _CountedOperations(TorchDispatchMode):
    def __init__(self, point: _Failing) -> None:
        super().__init__()
        self._point = point

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._point()
        return func(*args, **(kwargs or {}))


@contextmanager
def _operations_counted(point: _Failing | None = None) -> Iterator[_Failing]:
    """Every operation inside a chunk is a point."""
    counter = _Failing() if point is None else point
    attempt = chunk_faults._attempt

    def watched(*args: Any) -> str | None:
        with _CountedOperations(counter):  # only here: where such a mode is on, compiled code does not run
            return attempt(*args)

    with mock.patch.object(chunk_faults, "_attempt", watched):
        yield counter


@contextmanager
def _calls_counted(point: _Failing | None = None) -> Iterator[_Failing]:
    """Every call of a function of memfine_fx in this thread is a point."""
    counter = _Failing() if point is None else point

    def profile(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            counter()

    sys.setprofile(profile)
    try:
        yield counter
    finally:
        sys.setprofile(None)
