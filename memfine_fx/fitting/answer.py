"""From a config and a setup to the answer: the steps of `fit` in their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from memfine_fx.compat.tensors import FakeTensorMode, storage_id
from memfine_fx.compiler.session import Records
from memfine_fx.config import Config, MemoryBudget, parse_budget
from memfine_fx.errors import ConfigError
from memfine_fx.fitting.analysis import Analysis, StaticBytes
from memfine_fx.fitting.cuda_terms import CUDA_TERMS, CudaTerm
from memfine_fx.fitting.models import fake_model, loaded_config
from memfine_fx.fitting.recording import RecordedStep, record_step
from memfine_fx.fitting.report import Change, FitReport
from memfine_fx.fitting.setup import OptimizerBytes, Setup, optimizer_bytes
from memfine_fx.fitting.stack import Stack, find_stack, shortened
from memfine_fx.fitting.stretch import SHORT, is_even
from memfine_fx.plan.rows import largest

__all__ = ["analyse", "answer"]

_REPEATS = (SHORT, SHORT + 1)
_MOST_TOKENS = 1 << 24
_MOST_SEQUENCES = 1 << 16


def answer(
    source: object, setup: Setup, *, memory: MemoryBudget, device: str, has_even_routing: bool, config: Config
) -> FitReport:
    """See `memfine_fx.fit`."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r} is unknown; expected 'cpu' or 'cuda'")
    if isinstance(memory, float):
        raise ConfigError(f"memory={memory!r}: there is no device to take a fraction of; give bytes")
    memory_bytes = parse_budget(memory)
    source = loaded_config(source)
    analysis, how = analyse(source, setup, config, has_even_routing=has_even_routing)
    terms = CUDA_TERMS if device == "cuda" else ()
    report = _report(source, analysis, how, memory_bytes, terms)
    if report.fits is not False:
        return report
    return dataclasses.replace(report, changes=_changes(report, analysis))


def analyse(source: object, setup: Setup, config: Config, *, has_even_routing: bool = False) -> tuple[Analysis, str]:
    """The records of a model, and what was recorded, in words."""
    whole = fake_model(source, setup, _mode())
    static = _static_bytes(whole, setup)
    stack = find_stack(whole)
    config = dataclasses.replace(config, memory_budget=setup.budget)
    if stack is not None and setup.budget is None:
        pair = tuple(_recorded(source, setup, config, stack, repeats) for repeats in _REPEATS)
        if is_even(pair[0].runs["most"], pair[1].runs["most"]):
            how = (
                f"{stack.repeats} equal units of {stack.unit} layer(s) were analysed as {_REPEATS[0]} and "
                f"{_REPEATS[1]}, from the graph's operations, and counted in full. Under the smallest budget what a "
                "layer keeps depends on how many there are, so that budget is an estimate"
            )
            return Analysis(pair, stack.repeats, static, setup, config, has_even_routing), how
    mode = _mode()
    records: Records = "code" if stack is None else "graph"  # the code of many layers takes minutes to write
    record = record_step(fake_model(source, setup, mode), setup, mode, config, records)
    how = "every layer was analysed, from " + (
        "the code that Inductor would write" if records == "code" else "the graph's operations"
    )
    return Analysis((record,), 0, static, setup, config, has_even_routing), how


def _mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def _recorded(source: object, setup: Setup, config: Config, stack: Stack, repeats: int) -> RecordedStep:
    mode = _mode()
    model = fake_model(source, setup, mode)
    shortened(model, stack, repeats)
    return record_step(model, setup, mode, config, "graph")


def _static_bytes(model: torch.nn.Module, setup: Setup) -> StaticBytes:
    parameters = list(model.parameters())
    return StaticBytes(
        _num_bytes(parameters),
        _num_bytes([one for one in parameters if one.requires_grad]),
        _num_bytes(list(model.buffers())),
        optimizer_bytes(parameters, setup),
    )


def _num_bytes(tensors: list[Any]) -> int:
    return sum({storage_id(one): one.untyped_storage().nbytes() for one in tensors}.values())


def _report(
    source: object, analysis: Analysis, how: str, memory_bytes: int | None, terms: tuple[CudaTerm, ...]
) -> FitReport:
    setup, record = analysis.setup, analysis.records[-1]
    batch, seq = setup.batch, setup.seq
    available = None if memory_bytes is None else memory_bytes - sum(term.num_bytes for term in terms)
    return FitReport(
        f"{_name(source)} of {analysis.static.parameters // setup.torch_dtype.itemsize:,} parameters",
        setup,
        memory_bytes,
        None if len(analysis.records) > 1 else analysis.asked(batch, seq),
        analysis.total("least", batch, seq),
        analysis.total("most", batch, seq),
        _longest(available, _MOST_TOKENS, lambda one: analysis.total("least", batch, one).num_bytes, 2),
        _longest(available, _MOST_SEQUENCES, lambda one: analysis.total("least", one, seq).num_bytes, 1),
        terms,
        record.chunked,
        record.refused,
        "" if len(analysis.records) > 1 else record.decision,
        how,
    )


def _longest(available: int | None, most: int, needed: Callable[[int], int], least: int) -> int:
    if available is None or needed(least) > available:
        return 0
    return largest(least, most + 1, lambda one: needed(one) <= available)


def _changes(report: FitReport, analysis: Analysis) -> tuple[Change, ...]:
    """What would need less and takes no other record: each alone, the fewest bytes first."""
    setup, optimizer = report.setup, analysis.static.optimizer
    available = (report.memory_bytes or 0) - report.beside_bytes
    without = OptimizerBytes(0, optimizer.masters, 0)
    stateless = dataclasses.replace(analysis, static=dataclasses.replace(analysis.static, optimizer=without))
    needed = {"half the sequence": analysis.total("least", setup.batch, max(2, setup.seq // 2)).num_bytes}
    if setup.optimizer != "sgd":
        needed["optimizer='sgd'"] = stateless.total("least", setup.batch, setup.seq).num_bytes
    if setup.batch > 1:
        needed["a batch of 1"] = analysis.total("least", 1, setup.seq).num_bytes
    found = [Change(what, num_bytes, num_bytes <= available) for what, num_bytes in needed.items()]
    return tuple(sorted(found, key=lambda one: one.least_bytes))


def _name(source: Any) -> str:
    return str(getattr(source, "model_type", "") or getattr(source, "__name__", "") or type(source).__name__)
