"""Record the step of a model that is shortened to a few of its equal layers; in a process of its own, if wanted.

An answer needs two such records, of a few layers and of one unit more, which take most of its time. Where the command
`memfine fit` has two processors, `recorded_meanwhile` records one of them in a process beside this one. That process is
started anew, not forked, because torch's threads do not survive a fork. Whatever goes wrong in it costs time only: the
record is then made here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import torch

from memfine_fx.compat.tensors import FakeTensorMode
from memfine_fx.config import Config
from memfine_fx.fitting.models import fake_model
from memfine_fx.fitting.recording import UNIFORM_PLANS, RecordedStep, record_step
from memfine_fx.fitting.setup import Setup
from memfine_fx.fitting.stack import find_stack, shortened
from memfine_fx.fitting.stretch import fewest_repeats
from memfine_fx.memory.step import GraphStep, RunMemory
from memfine_fx.progress import silenced_packages, stages

__all__ = [
    "Request",
    "can_record_meanwhile",
    "few_collections",
    "new_mode",
    "portable",
    "record_shortened",
    "recorded_meanwhile",
]


@dataclass(frozen=True)
class Request:
    """A step to record: of a model that is shortened to the fewest units of its stack that are analysed, or to more.

    Args:
        source: whatever `fake_model` takes; for another process a config of transformers.
        config: options of `optimize`.
        num_more: units beyond the fewest, 0 or 1.
        shares: as for `record_step`.
    """

    source: object
    setup: Setup
    config: Config
    num_more: int
    shares: tuple[float, ...] | None = None


def new_mode() -> FakeTensorMode:
    """Return a mode for the fake tensors of one record."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def record_shortened(request: Request, built: tuple[torch.nn.Module, FakeTensorMode] | None = None) -> RecordedStep:
    """Record the step in this process.

    Args:
        built: the request's model, which is shortened in place, and the mode of its tensors; None builds them.

    Raises:
        LookupError: no unit of layers occurs often enough.
    """
    if built is None:
        mode = new_mode()
        built = fake_model(request.source, request.setup, mode), mode
    model, mode = built
    stack = find_stack(model)
    if stack is None:
        raise LookupError("no layers that are repeated five times")
    repeats = fewest_repeats(stack.unit) + request.num_more
    shortened(model, stack, repeats)
    stages.info("recording a step of %d of the %d equal units of layers", repeats, stack.repeats)
    return record_step(model, request.setup, mode, request.config, "graph", request.shares, UNIFORM_PLANS)


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Let Python look for garbage once in 100,000 new objects, not in 700.

    Tracing makes millions of objects that live on, and a tenth of its time went to looking at them.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def can_record_meanwhile(source: object) -> bool:
    """Return whether another process can record a model: it has a processor, and builds the same from transformers."""
    has_processor = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1
    return has_processor and type(source).__module__.startswith("transformers.")


@contextlib.contextmanager
def recorded_meanwhile(request: Request) -> Iterator[Callable[[], RecordedStep]]:
    """Record the step in a process of its own, and give a function that waits for the record.

    Where the process fails, the function records here. Leaving the context ends the process.
    """
    with contextlib.ExitStack() as stack:
        try:
            payload = pickle.dumps(request)
            environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                )
            )
            stack.callback(process.kill)
            assert process.stdin is not None
            process.stdin.write(payload)
            process.stdin.close()
            process.stdin = None  # `communicate` would write to it
        except (OSError, pickle.PicklingError, TypeError, AttributeError):
            yield lambda: record_shortened(request)
            return
        yield lambda: _record_of(process) or record_shortened(request)


def _record_of(process: subprocess.Popen[bytes]) -> RecordedStep | None:
    """Return the record that a process writes, None where it ends without one."""
    written, _ = process.communicate()
    if process.returncode != 0:
        return None
    with contextlib.suppress(pickle.UnpicklingError, EOFError, ImportError, AttributeError):
        record = pickle.loads(written)
        return record if isinstance(record, RecordedStep) else None
    return None


def portable(record: RecordedStep) -> RecordedStep:
    """Return a record that can be pickled."""
    steps: dict[int, GraphStep] = {}

    def without_compiled_experts(run: RunMemory) -> RunMemory:
        if id(run.step) not in steps:
            steps[id(run.step)] = run.step.without_compiled_experts()
        return dataclasses.replace(run, step=steps[id(run.step)])

    runs = {plan: tuple(map(without_compiled_experts, plan_runs)) for plan, plan_runs in record.runs.items()}
    return dataclasses.replace(record, runs=runs)


def _answer_request(read: IO[bytes], write: IO[bytes]) -> None:
    request = pickle.load(read)
    with silenced_packages(), few_collections():
        record = portable(record_shortened(request))
    pickle.dump(record, write)


if __name__ == "__main__":
    from memfine_fx.fitting import shortened as imported  # classes are pickled by the names of the imported module

    with os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)  # what libraries print must not stand among the results
        imported._answer_request(sys.stdin.buffer, results)
