"""Diagnostics of the pipeline while it compiles: warnings, logs, records of TORCH_TRACE, and dumped graphs."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import fx

from memfine_fx import progress
from memfine_fx.capture.adapters import hint_for_adapters
from memfine_fx.capture.output_recorders import hint_for_recording
from memfine_fx.capture.quantized import hint_for_packed_layers
from memfine_fx.capture.ranks import hint_for_cut_graphs
from memfine_fx.capture.structure import moe_layers
from memfine_fx.compat.dynamo import trace_artifact
from memfine_fx.compat.interpreter import running_model
from memfine_fx.compat.tensors import is_sharded
from memfine_fx.compiler.captured_graph import CapturedGraph
from memfine_fx.compiler.reporting import dynamo_reasons, head_report, outcome_report, report_of
from memfine_fx.compiler.session import Session
from memfine_fx.config import dump_folder
from memfine_fx.errors import Reason
from memfine_fx.passes.pass_list import PassObserver, observed_by
from memfine_fx.report.reports import by_reason, chunked_in_words

__all__ = ["dump_graph", "log_regions", "observed_passes", "said_to_compile", "silenced", "warn_without_regions"]

_numbers = itertools.count(1)  # of dumps, in the order in which they were written
passes_log = logging.getLogger("memfine_fx.passes")
_is_silent: contextvars.ContextVar[bool] = contextvars.ContextVar("is_silent", default=False)
for _log in (passes_log, logging.getLogger("memfine_fx.plans")):
    _log.addFilter(lambda record: not _is_silent.get())


def warn_without_regions(session: Session) -> None:
    """One clear warning when a compiled model holds no MoE region that was chunked: asked while the model runs.

    Models compiled by the backend's name with equal options share a session; only the running one's graphs count. An
    optimized model has a session of its own, and graphs that know its parameters by other names where they are sharded.
    """
    model = None if session.holds_compiled else running_model()
    # What FSDP2 gathers for a layer's call is no parameter of the model, so its graphs look like those of another.
    is_known = model is not None and not any(map(is_sharded, model.parameters()))
    part = session.without_regions(model if is_known else None)
    if part is None:
        return
    report = report_of(part)
    has_head = any(head.status == "chunked" for head in report.heads)
    recording = hint_for_recording()
    if has_head and not report.regions and not recording:
        return
    summary = "no experts to chunk, only the head" if has_head else "nothing to chunk"
    texts = dict.fromkeys(str(region) for region in report.regions if region.refused_for != Reason.NOT_CAPTURED.name)
    left = [region for region in report.regions if region.refused_for == Reason.NOT_CAPTURED.name]
    reasons = "; ".join([*texts, *([by_reason(left)] if left else [])]) or "no routing decision was found"
    dynamo = dynamo_reasons(session)
    reasons += f"; {dynamo}" if dynamo else ""
    packed = session.diagnostics.hint if model is None else hint_for_packed_layers(model)
    reasons += hint_for_cut_graphs() + recording + hint_for_adapters(model) + packed
    warnings.warn(
        f"memfine_fx found {summary} and compiled the model as plain {session.config.inner_backend}: {reasons}",
        stacklevel=2,
    )


def said_to_compile(session: Session, model: torch.nn.Module | None) -> AbstractContextManager[None]:
    """Return a context in which a model, or another graph of it, is compiled, and which says so.

    Args:
        model: None where it is not known.
    """

    def title() -> str:
        name = "a model" if model is None else type(model).__name__
        if session.graphs:
            return f"compiling graph {len(session.graphs) + 1} of {name}, for other sizes or code behind a graph break"
        num_layers = 0 if model is None else len(moe_layers(model))
        what = f"{num_layers} MoE layer{'s' if num_layers > 1 else ''} ({name})" if num_layers else name
        return f"compiling {what}; later steps reuse it"

    return progress.working(title, "compiled", lambda: chunked_in_words(report_of(session)))


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Log, dump and trace no graphs and plans: what is compiled inside is not what the user's model runs."""
    token = _is_silent.set(True)
    try:
        yield
    finally:
        _is_silent.reset(token)


def dump_graph(subject: object, session: Session, state: str) -> None:
    """Write a graph, or a list of kernels, to the folder of dumps, if there is one."""
    folder = dump_folder()
    if folder is None or _is_silent.get():
        return
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"graph_{len(session.graphs):03d}_{state}.py")
    if isinstance(subject, fx.GraphModule):
        text = subject.print_readable(print_output=False)
    else:
        text = "".join(f"{kernel}\n" for kernel in subject) if isinstance(subject, list) else str(subject)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


@contextlib.contextmanager
def observed_passes(session: Session) -> Iterator[None]:
    """Have passes that run inside timed by a session, dumped, and skipped where its config disables them."""

    def note(name: str, moment: str, subject: object) -> None:
        dump_graph(subject, session, f"pass_{next(_numbers):03d}_{moment}_{name}")

    with observed_by(PassObserver(session.config.disable_passes, session.diagnostics.timed, note)):
        yield


def log_regions(graph_module: fx.GraphModule, session: Session, record: CapturedGraph) -> None:
    """Write the regions and refusals of a graph to the log and to TORCH_TRACE."""
    number = len(session.graphs)
    lines = [f"graph {number}: {outcome_report(outcome)}" for outcome in record.outcomes]
    lines += [f"graph {number}: {head_report(head)}" for head in record.heads]
    for line in lines or [f"graph {number}: no routing decision"]:
        passes_log.info("%s", line)
    if (record.outcomes or record.heads) and not _is_silent.get():
        trace_artifact("memfine_regions", "\n".join(lines))
        trace_artifact("memfine_graph", graph_module.print_readable(print_output=False))
