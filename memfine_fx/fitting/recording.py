"""Record the memory of one training step, run on fake tensors through the real pipeline."""

from __future__ import annotations

import contextlib
import functools
import re
import unittest.mock
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import sympy
import torch

from memfine_fx.capture.implementation import switch_experts
from memfine_fx.compat.nn import plain_call
from memfine_fx.compat.settings import CONSTANT_FLOATS
from memfine_fx.compat.tensors import FakeTensorMode
from memfine_fx.compiler.optimized import captured
from memfine_fx.compiler.recorder import PlainRecorder, Reads, Recorder
from memfine_fx.compiler.regions import read_compiled_code
from memfine_fx.compiler.reporting import report_of
from memfine_fx.compiler.session import Session
from memfine_fx.compiler.sessions import open_session
from memfine_fx.config import Config
from memfine_fx.errors import ConfigError, MemfineError
from memfine_fx.fitting.setup import Setup, made_optimizer
from memfine_fx.memory.step import RunMemory
from memfine_fx.plan.problem import saving_nothing

__all__ = [
    "ESTIMATED",
    "NUM_INPUTS",
    "PLANS",
    "TOKEN_BYTES",
    "UNIFORM_PLANS",
    "RecordedStep",
    "attention_of",
    "record_step",
    "what_failed",
]

SizeT = TypeVar("SizeT", int, sympy.Expr)
TOKEN_BYTES = 8
NUM_INPUTS = 2
"""Tokens and labels."""
PLANS = ("least", "most")
"""Plans of the smallest budget that works, and of one that nothing exceeds."""
UNIFORM_PLANS = ("most", "recompute_all", "recompute_pointwise")
"""Plans that treat equal layers alike."""
ESTIMATED = "most estimated"
"""Plan by which "most" is chosen, where "most" itself is read from code."""


@dataclass(frozen=True)
class RecordedStep:
    """The memory record of one training step at one batch and sequence length.

    Args:
        runs: of its graphs, by plan: "asked" is that of the setup's own budget (or of none).
        batch, seq: it was recorded with.
        chunked: layers whose experts are chunked.
        refused: (where, why) of what stays as it was written.
        decision: of the plan that was asked for, in words.
        is_of_graph: it was read from the graph's operations alone.
        is_plain: of torch.compile alone.
        constant_inputs: bytes of inputs whose size no batch or length changes: buffers, and numbers as tensors.
        guards: for each run of "asked" the conditions on its graph's symbols under which the record holds.
    """

    runs: Mapping[str, tuple[RunMemory, ...]]
    batch: int
    seq: int
    chunked: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    decision: str
    is_of_graph: bool = False
    is_plain: bool = False
    constant_inputs: int = 0
    guards: tuple[tuple[sympy.Basic, ...], ...] = ()

    @property
    def estimated(self) -> tuple[str, ...]:
        """Return the plans except "asked" whose bytes are an estimate, to which `MARGIN_PERCENT` is added."""
        if self.is_plain:
            return ()
        others = [plan for plan in self.runs if plan != "asked"]
        return tuple(others) if self.is_of_graph else tuple(plan for plan in others if plan == ESTIMATED)

    @property
    def has_batch(self) -> bool:
        """Return whether the record holds for other batches: the batch is a symbol, and no guard fixes it."""
        is_symbol = any(self.batch in run.sizes.values() for run in self.runs["asked"])
        return is_symbol and any(self._allows(other, self.seq) for other in _others(self.batch))

    @property
    def has_seq(self) -> bool:
        """Return whether the record holds for other sequence lengths, as `has_batch`.

        A model that walks blocks of tokens in Python has as many steps in its graph as the recorded length has blocks.
        """
        is_symbol = any(self.seq in run.sizes.values() for run in self.runs["asked"])
        return is_symbol and any(self._allows(self.batch, other) for other in _others(self.seq))

    def _allows(self, batch: int, seq: int) -> bool:
        """Return whether no guard of a graph is broken at another batch and length."""
        for run, guards in zip(self.runs["asked"], self.guards, strict=False):
            values = {**run.sizes, **self.in_sizes(run, batch, seq)}
            for guard in guards:
                sizes = {symbol: values[str(symbol)] for symbol in guard.free_symbols if str(symbol) in values}
                if guard.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()}) is sympy.false:
                    return False
        return True

    def in_sizes(self, run: RunMemory, batch: SizeT, seq: SizeT) -> dict[str, SizeT]:
        """Return the values of a graph's symbols at another batch and length; each graph has names of its own.

        A symbol as large as the number of all tokens is their product: a graph after a graph break may be flattened.
        """
        others = {self.batch * self.seq: batch * seq, self.batch: batch, self.seq: seq}
        return {name: others[size] for name, size in run.sizes.items() if size in others}

    def sized(self, plan: str, batch: int, seq: int) -> tuple[RunMemory, ...]:
        """Return the runs of a plan at another batch and sequence length.

        Raises:
            ConfigError: the graphs hold for the recorded batch or length alone.
        """
        for what, wanted, recorded, has in (
            ("batch", batch, self.batch, self.has_batch), ("seq", seq, self.seq, self.has_seq),
        ):  # fmt: skip
            if wanted != recorded and not has:
                raise ConfigError(f"{what}={wanted}: the model's code fixes it in its graphs, recorded with {recorded}")
        runs: list[RunMemory] = []
        saved = 0
        for run in self.runs[plan]:
            runs.append(replace(run, sizes={**run.sizes, **self.in_sizes(run, batch, seq)}, saved_bytes=saved))
            if run.step.backward is not None:
                saved += runs[-1].left_bytes
        return tuple(runs)


def _others(size: int) -> tuple[int, ...]:
    """Return sizes far from a recorded one; a guard that all of them break fixes it."""
    return (2 * size, 4 * size, max(2, size // 2))


def record_step(
    model: torch.nn.Module,
    setup: Setup,
    mode: FakeTensorMode,
    config: Config,
    reads: Reads,
    shares: tuple[float, ...] | None = None,
    plans: tuple[str, ...] = PLANS,
    *,
    is_of_one_sequence: bool = False,
) -> RecordedStep:
    """Record forward and backward of a fake model as a causal language model.

    Args:
        model: of this mode's tensors.
        config: options of `optimize`.
        reads: what records are read from: the graph's operations, or the code.
        shares: where the step is recorded as torch.compile takes it, for which values of functorch's
            `activation_memory_budget` beside 1; None where memfine_fx compiles it.
        plans: recorded beside "asked" where there are no shares; see `Recorder`.
        is_of_one_sequence: record one sequence as it is; the record holds for no other batch.

    Returns:
        Its runs by plan: "asked" and `plans`; with shares those of torch.compile alone, "asked" and each share.

    Raises:
        ConfigError: the step fails for these sizes.
        MemfineError: nothing of it could be captured.
    """
    # NOTE: a size of 1 is no symbol, and equal sizes are one symbol. Records hold for all sizes, so others stand in.
    batch = 1 if is_of_one_sequence else max(2, setup.batch)
    seq = setup.seq + 1 if setup.seq == batch else setup.seq
    runs_here = setup.device == "cpu"
    recorder = (
        Recorder(reads, plans, runs_here=runs_here)
        if shares is None
        else PlainRecorder(reads, shares, runs_here=runs_here)
    )
    session = open_session(config, holds_compiled=True, observer=recorder)
    # NOTE: code is read as a real run would have it, with the floats that are inputs there; that changes its kernels.
    floats = CONSTANT_FLOATS.applied() if reads == "graph" else contextlib.nullcontext()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = made_optimizer(trained, setup.optimizer)  # it lives while plans are made: its state counts in budgets
    with mode, floats, attention_of(setup.device):
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        labels = tokens.clone()  # a trainer's are a tensor of their own, and alive until its loss
        if shares is None:
            session.diagnostics.notes.extend(switch_experts(model))
        call = captured(model, [functools.partial(plain_call, model)], session, fullgraph=False, dynamic=True)
        try:
            call(0, input_ids=tokens, labels=labels).loss.backward()
        except MemfineError:
            raise
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"a step of the model fails: {type(error).__name__}: {what_failed(error)}") from error
    if reads == "code":  # estimates of many layers stay what they are: as a step's first plan has them
        read_compiled_code(session)
    recorded = _recorded(session, recorder, batch, seq)
    del optimizer
    return recorded


def what_failed(error: Exception) -> str:
    """Return one line of an error: what was raised, also within Dynamo's own text, and the last line of code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = re.search(r"got (\w+\(.*\))$", str(error), re.MULTILINE)
    message = raised[1] if raised else lines[0] if lines else ""
    place = max((place for place, line in enumerate(lines) if line.startswith('File "')), default=None)
    return message if place is None else f"{message}, at {' '.join(lines[place : place + 2])}"


@contextlib.contextmanager
def attention_of(device: str) -> Iterator[None]:
    """Patch attention to allocate what a device's kernels do, for values narrower than queries (latent attention).

    A CPU's fused kernel needs one width, and without it scores of all pairs of tokens are allocated. CUDA's kernels
    allocate none of them: values are padded to the queries' width here, as for FlashAttention, a little more than other
    kernels take.
    """
    if device != "cuda":
        yield
        return
    plain = torch.nn.functional.scaled_dot_product_attention

    def fused(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        width = value.shape[-1]
        if width >= query.shape[-1]:
            return plain(query, key, value, *args, **kwargs)
        padded = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
        return plain(query, key, padded, *args, **kwargs)[..., :width]

    with unittest.mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", fused):
        yield


def _recorded(session: Session, recorder: Recorder, batch: int, seq: int) -> RecordedStep:
    # NOTE: the rows that a run keeps are of its own sizes; a record, which holds for others too, has all or none.
    passed = tuple(replace(run, saved=frozenset()) for run in session.steps.latest_runs())
    if not any(run.step.forward is not None for run in passed):
        raise MemfineError("nothing of the model could be captured as a graph; TORCH_LOGS=graph_breaks shows why")
    # Activations that are saved where that is free leave the peak as it is without them.
    runs = {"asked": passed if session.config.has_budget else tuple(map(saving_nothing, passed))}
    plans = [*recorder.plans, ESTIMATED] if recorder.reads == "code" and "most" in recorder.plans else recorder.plans
    for plan in plans:
        runs[plan] = tuple(replace(run, step=recorder.step_under(plan, run.step)) for run in passed)
    report = report_of(session)
    refused = [(str(region.where), region.reason) for region in report.regions if region.status == "refused"]
    refused += [(f"head {head.where}", head.reason) for head in report.heads if head.status == "refused"]
    return RecordedStep(
        runs,
        batch,
        seq,
        tuple(region.where.module or str(region.where) for region in report.regions if region.status == "chunked"),
        tuple(refused),
        "" if report.step is None else report.step.decision,
        recorder.reads == "graph",
        isinstance(recorder, PlainRecorder),
        session.steps.static_terms()["inputs and buffers"] - NUM_INPUTS * TOKEN_BYTES * batch * seq,
        tuple(recorder.guards_on_sizes(run.step) for run in passed),
    )
