"""What is told once an optimizer has taken its first step: how much was chunked, or that the model was passed by.

By then every graph of a training step is there. A model whose parameters have gradients though none of its calls has
arrived here was called in another way than any that is stood in for; nobody would notice but by the memory.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable

import torch

from memfine_fx.capture.standing import replaced_by
from memfine_fx.compiler.optimized import OptimizedCall, living_calls
from memfine_fx.compiler.session import Session
from memfine_fx.report.reports import RegionReport, Report

__all__ = ["summary", "tell_of_first_step"]

log = logging.getLogger("memfine_fx")


def tell_of_first_step(optimizer: torch.optim.Optimizer, sessions: Iterable[Session]) -> None:
    """Log the summary of each session that has trained, and warn of models that were passed by; once for each."""
    for session in sessions:
        if not (session.is_dry or session.has_told):
            session.has_told = True
            _tell(session)
    parameters = {id(one) for group in optimizer.param_groups for one in group["params"] if one.grad is not None}
    for call in living_calls():
        if not call.has_run and any(id(one) in parameters for one in call.model.parameters()):
            call.has_run = True  # told once
            warnings.warn(
                f"memfine_fx.optimize has no part in training: {type(call.model).__name__} has gradients, but none of "
                f"its calls was ours. {_what_helps(call)}",
                stacklevel=2,
            )


def _tell(session: Session) -> None:
    report = session.report()
    refused = list(_refused_layers(report).values())
    line = summary(report, session.config.memory_budget)
    if not refused or session.has_warned:
        log.info("%s", line)
        return
    reasons = "; ".join(f"{region.where}: {region.reason}" for region in refused)
    warnings.warn(
        f"memfine_fx: {line}. The others run as written: {reasons}. print(memfine_fx.report(model)) has what can be "
        "done about each",
        stacklevel=2,
    )


def summary(report: Report, budget: object = None) -> str:
    """One line: layers chunked of layers found, the predicted peak of the step, the budget."""
    chunked, refused = _chunked_layers(report), _refused_layers(report)
    line = f"{len(chunked)} of {len(chunked) + len(refused)} MoE layers chunked"
    if report.predicted_peak_bytes is not None:
        line += f", {_readable(report.predicted_peak_bytes)} predicted"
    return line + f", budget {_budget(budget)}"


def _budget(budget: object) -> str:
    if budget is None:
        return "automatic"
    return _readable(budget) if isinstance(budget, int) else str(budget)


def _readable(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _chunked_layers(report: Report) -> dict[object, RegionReport]:
    return {_layer(region): region for region in report.regions if region.status == "chunked"}


def _refused_layers(report: Report) -> dict[object, RegionReport]:
    """Layers that were chunked in no graph; a choice without experts behind it is no layer."""
    refused = (one for one in report.regions if one.status == "refused" and one.has_experts)
    chunked = _chunked_layers(report)
    return {_layer(region): region for region in refused if _layer(region) not in chunked}


def _layer(region: RegionReport) -> object:
    """Its module, which training, evaluation and recompiled graphs have in common."""
    return region.where.module or id(region)


def _what_helps(call: OptimizedCall) -> str:
    stands = next(((part, found) for part in call.parts if (found := replaced_by(part)) is not None), None)
    if stands is None:
        return (
            "Its layers are called one by one, or its class's forward directly: call memfine_fx.optimize on the "
            "module that the training loop calls"
        )
    part, forward = stands
    return (
        f"The forward of {type(part).__name__} was replaced by {_described(forward)}: call "
        "memfine_fx.optimize(model) again, after that"
    )


def _described(forward: object) -> str:
    function = getattr(forward, "__func__", forward)
    named = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    return str(named) if code is None else f"{named} ({code.co_filename}:{code.co_firstlineno})"
