"""Reports of a session: its regions, heads and refusals, the latest step, and the line after the first one."""

from __future__ import annotations

import functools
import inspect
import logging
import posixpath
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from memfine_fx.capture.structure import moe_layers
from memfine_fx.compat.tensors import is_sharded
from memfine_fx.compiler.captured_graph import CapturedGraph, LoweredHead, LoweredRegion
from memfine_fx.compiler.session import Session
from memfine_fx.errors import Reason
from memfine_fx.memory.measure import MemoryTrace
from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.memory.step import peak_expression, step_peak
from memfine_fx.memory.timeline import Prediction, timeline_of
from memfine_fx.plan.budget import budget_bytes, describe_budget, device_of
from memfine_fx.records import MoERegion, Refusal, Where
from memfine_fx.records.verification import VerifyReport
from memfine_fx.report.entries import HeadReport, RegionReport, StepReport
from memfine_fx.report.reports import Report, by_reason, first_step_line, unchunked_layers
from memfine_fx.runtime.store import lookup

__all__ = [
    "dynamo_reasons",
    "head_report",
    "largest_chunk",
    "log_first_step",
    "outcome_report",
    "report_of",
    "verify_report_of",
]


def report_of(session: Session, measured: MemoryTrace | None = None, *, has_run: bool = True) -> Report:
    """Return a report of the regions and of the latest step.

    Args:
        measured: the memory of a step that was traced.
        has_run: whether a call of the model has returned.
    """
    regions = tuple(_regions_in_models(session, has_run=has_run or bool(session.graphs)))
    predicted = [region.plan.predicted_bytes for region in regions if region.plan is not None]
    measured_bytes = None if measured is None else measured.peak_bytes
    step = _step_report(session)
    foreseen = [] if step is None else [Prediction(None, step.peak.num_bytes)]
    timeline = None if measured is None else timeline_of(measured, _names_of_regions(session), foreseen)
    notes = list(session.diagnostics.notes)
    if session.diagnostics.hint and not session.has_chunked:
        notes.append(session.diagnostics.hint.removeprefix("; "))
    if any(region.refused_for in _OUTSIDE for region in regions) and (reasons := dynamo_reasons(session)):
        notes.append(reasons)
    return Report(
        regions,
        len(session.graphs),
        max(predicted, default=None),
        measured_bytes,
        timeline,
        step,
        tuple(notes),
        tuple(map(head_report, _latest_heads(session))),
        has_run or len(session.graphs) > 0,
        session.diagnostics.stage_seconds.get("compare", 0.0),
        dict(session.diagnostics.stage_seconds),
    )


def _step_report(session: Session) -> StepReport | None:
    """Return the report of the latest step that trained; None where none did."""
    runs = session.steps.history.latest_pass(session.graphs)
    memories = [run.memory for run in runs]
    chunk_of = functools.partial(largest_chunk, session)
    peak = step_peak(memories, chunk_of)
    if peak is None:
        return None
    steps = {id(memory.step): memory.step for memory in memories}
    decision = "; ".join(step.decision for step in steps.values() if step.decision)
    expression = functools.partial(peak_expression, memories, chunk_of)
    budget = describe_budget(session.config, memories, _device_bytes(session))
    return StepReport(tuple(session.steps.static_terms().items()), peak, decision, expression, budget)


def _device_bytes(session: Session) -> int | None:
    """Return the bytes of the accelerator, where these limit the graphs."""
    limited = [] if session.config.has_budget else [graph for graph in session.graphs if graph.is_limited]
    return budget_bytes(session.steps, device_of(limited[-1])) if limited else None


def largest_chunk(session: Session, region_id: str, num_tokens: int) -> ChunkSize:
    """Return the largest chunk of the latest step; before one has run, as many rows as there are routed rows."""
    head = next((head.live for head in session.lowered_heads if head.live.region_id == region_id), None)
    if head is not None:
        return ChunkSize(num_tokens if head.plan is None else head.plan.tokens_per_chunk)
    live = lookup(region_id)
    if not live.num_steps:
        return ChunkSize(num_tokens * live.top_k)
    return ChunkSize(live.largest_chunk, live.stages_gradients)


def _names_of_regions(session: Session) -> dict[str, str]:
    """Return the module of each lowered region by the region's id."""
    lowered: list[LoweredRegion | LoweredHead] = [*session.lowered, *session.lowered_heads]
    return {outcome.live.region_id: outcome.region.where.module or str(outcome.region.where) for outcome in lowered}


def log_first_step(session: Session) -> None:
    """Log how much was chunked, or warn of layers that run as written."""
    report = report_of(session)
    line, left = first_step_line(report, session.config.memory_budget), unchunked_layers(report)
    if not left or session.diagnostics.has_warned:
        logging.getLogger("memfine_fx").info("%s", line)
        return
    reasons = by_reason(left)
    if any(region.refused_for in _OUTSIDE for region in left) and (dynamo := dynamo_reasons(session)):
        reasons += f"; {dynamo}"
    warnings.warn(
        f"memfine_fx: {line}. The others run as written: {reasons}. print(memfine_fx.report(model)) has what can be "
        "done about each",
        stacklevel=2,
    )


def verify_report_of(session: Session) -> VerifyReport:
    """Return what the comparison with autograd measured, and what was refused for other reasons."""
    verified = tuple(verification for graph in session.graphs for verification in graph.verifications)
    refused = [outcome for outcome in session.outcomes if isinstance(outcome, Refusal)]
    return VerifyReport(
        verified, tuple(refusal for refusal in refused if refusal.reason is not Reason.VERIFICATION_FAILED)
    )


def _latest_heads(session: Session) -> list[LoweredHead | Refusal]:
    """Return the heads of `_latest_graphs`, one for each place in the source."""
    latest: dict[object, LoweredHead | Refusal] = {}
    for graph in _latest_graphs(session):
        for number, head in enumerate(graph.heads):
            where = head.where if isinstance(head, Refusal) else head.region.where
            latest[where.source, graph.parameter_ids, number] = head
    return list(latest.values())


def _latest(session: Session) -> list[LoweredRegion | Refusal]:
    """Return the latest outcome of each place in the source, since a recompilation replaces what was there before."""
    latest: dict[object, LoweredRegion | Refusal] = {}
    for graph in _latest_graphs(session):
        counts: Counter[object] = Counter()
        parameter_ids = graph.parameter_ids
        for outcome in graph.outcomes:
            place = (_place(outcome), parameter_ids)
            counts[place] += 1
            latest[place, counts[place]] = outcome
    return [*latest.values(), *_refused_in_attempts(session, latest.values())]


def _refused_in_attempts(session: Session, outcomes: Collection[LoweredRegion | Refusal]) -> list[Refusal]:
    """Return why attempts under Dynamo's flags did not chunk layers that the compiled graphs say nothing of.

    These are loops that stay as written, and layers that only an attempt saw whole: without the flags a graph breaks at
    the router or before it, and holds no routing decision.
    """
    refused = {outcome.where for outcome in outcomes if isinstance(outcome, Refusal)}
    chunked = [outcome.region.where.module for outcome in outcomes if isinstance(outcome, LoweredRegion)]
    layers = {where.module for where in refused} | {where.module.rpartition(".")[0] for where in refused}
    left: dict[object, Refusal] = {}
    for refusal in session.diagnostics.refused_in_attempts:
        where = refusal.where
        is_loop = refusal.reason is Reason.BODY_NOT_RUN
        is_known = where in refused or (not is_loop and where.module in layers)
        if not is_known and not any(module.startswith(where.module) for module in chunked):
            left.setdefault(where if is_loop else where.module, refusal)
    return list(left.values())


def _regions_in_models(session: Session, *, has_run: bool) -> list[RegionReport]:
    """Return reports of the regions by the paths of their modules, and of layers that no graph reads.

    A region's own path begins at the frame in which it was captured, which is a layer where graphs break between
    layers. So its module is known by the end of its path and by the parameters that its graph reads.
    """
    models = [dict(model.named_modules()) for model in list(session.models)]
    layers = [moe_layers(modules[""]) for modules in models]
    read_by: dict[int, list[frozenset[int]]] = {}  # by the id of an outcome, the parameters of each caller of its graph
    numbers: dict[int, int] = {}  # of outcomes in their graph
    graphs: list[frozenset[int]] = []
    for graph in session.graphs:
        callers = graph.parameter_ids_by_caller
        read_by |= dict.fromkeys(map(id, graph.outcomes), callers)
        numbers |= {id(outcome): number for number, outcome in enumerate(graph.outcomes)}
        graphs += callers
    by_place: dict[object, RegionReport] = {}  # a layer that was trained and evaluated in two graphs is one
    kinds: set[type[torch.nn.Module]] = set()
    for outcome in _latest(session):
        report = outcome_report(outcome)
        of_callers = [
            [(modules, path) for modules in models for path in _paths_of(report.where.module, modules, read)]
            for read in read_by.get(id(outcome), [])
        ]
        known = dict.fromkeys(places[0][1] for places in of_callers if len(places) == 1)
        for path in known or [report.where.module]:
            is_of_frame = known and not report.where.module
            place = (path, report.where.source, numbers[id(outcome)]) if is_of_frame else (id(outcome), path)
            by_place[place] = replace(report, where=replace(report.where, module=path))
        if isinstance(outcome, LoweredRegion):
            around = [(_layer_around(path, modules), modules[""]) for places in of_callers for modules, path in places]
            kinds |= {type(layer) for layer, model in around if layer is not model}
    reports = _without_cut_routers(list(by_place.values()), [path for paths in layers for path in paths])
    explained = {report.where.module for report in reports}
    for modules, paths in zip(models, layers, strict=True) if has_run else ():
        looks = [*paths, *(path for path, module in modules.items() if type(module) in kinds)]
        unread = _unread_layers(modules, looks, paths, graphs, explained)
        breaks = session.diagnostics.graph_breaks
        for path, refusal in unread.items():
            reports.append(outcome_report(replace(refusal, obstacle=_break_in(modules[path], breaks))))
    return reports


def _paths_of(path: str, modules: Mapping[str, torch.nn.Module], read: frozenset[int]) -> list[str]:
    """Return the paths in a model that an outcome may have, by the end of its own path and what its graph reads."""
    if not path:  # the frame was the layer's own: it is the module around all that it reads
        owners = [
            _owner_of(name).replace(".", "/")
            for name, parameter in modules[""].named_parameters()
            if id(parameter) in read
        ]
        around = posixpath.commonpath(owners) if owners else ""
        return [around.replace("/", ".")] if around else []
    ends = [path] if path in modules else [name for name in modules if name.endswith(f".{path}")]
    return [name for name in ends if name and _reads(read, modules[name])]


def _owner_of(parameter: str) -> str:
    """Return the path of the module that a parameter belongs to, behind what parametrizes it."""
    owner, _, parametrized = parameter.partition(".parametrizations.")
    return owner if parametrized else parameter.rpartition(".")[0]


def _is_in(path: str, layer: str) -> bool:
    """Whether the path of a module is a layer's, or that of a part of it."""
    return not layer or path == layer or path.startswith(f"{layer}.")


def _without_cut_routers(reports: Sequence[RegionReport], layers: Sequence[str]) -> list[RegionReport]:
    """Return the reports without routers whose experts are chunked in another graph, behind a graph break.

    Args:
        layers: paths of MoE layers.
    """

    def layer_of(report: RegionReport) -> str | None:
        return next((layer for layer in layers if _is_in(report.where.module, layer)), None)

    chunked = {layer_of(report) for report in reports if report.status == "chunked"} - {None}
    is_cut = [report.refused_for == Reason.GRAPH_BREAK.name and layer_of(report) in chunked for report in reports]
    return [report for report, cut in zip(reports, is_cut, strict=True) if not cut]


def _unread_layers(
    modules: Mapping[str, torch.nn.Module],
    candidates: Sequence[str],
    layers: Collection[str],
    graphs: Sequence[frozenset[int]],
    explained: Collection[str],
) -> dict[str, Refusal]:
    """Return refusals of layers that no graph reads, or that no graph reads whole, by path.

    Args:
        modules: of a model, by path.
        candidates: paths of what may be layers: of chunked kinds, or by their parameters.
        layers: those of them that have a router and experts by their parameters.
        graphs: ids of the parameters that each graph reads in each of its calls.
        explained: paths that have a report.
    """
    model, read = modules[""], frozenset[int]().union(*graphs)
    # What FSDP2 gathers for a layer's call is no parameter of the model.
    if any(map(is_sharded, model.parameters())) or (read and not _reads(read, model)):
        return {}
    unread: dict[str, Refusal] = {}
    reported = [frozenset(map(id, modules[path].parameters())) for path in explained if path in modules]
    for path in dict.fromkeys(candidates):
        ids, where = frozenset(map(id, modules[path].parameters())), Where(path or type(model).__name__, "")
        has_report = any(_is_in(other, path) for other in explained)
        has_report = has_report or any(own and own <= ids for own in reported)  # layers may share their experts
        if read.isdisjoint(ids):
            unread[path] = Refusal(where, Reason.NOT_CAPTURED, "no compiled graph reads its parameters")
        elif path in layers and not has_report and not any(ids <= graph for graph in graphs):
            details = "no compiled graph reads all of its parameters, and none that reads some holds its routing"
            unread[path] = Refusal(where, Reason.NOT_CAPTURED, details)
    outermost = [path for path in unread if not any(other != path and _is_in(path, other) for other in unread)]
    return {path: unread[path] for path in outermost if path not in explained}


def _break_in(layer: torch.nn.Module, breaks: Sequence[str]) -> str:
    """Return the "file:line" at which Dynamo broke a graph in the code of a layer's modules; "" where it did in none.

    Args:
        breaks: Dynamo's reasons, "reason at file:line".
    """
    kinds = {type(module) for module in layer.modules() if not type(module).__module__.startswith("torch.")}
    methods = (method for kind in kinds for method in vars(kind).values())
    codes = [method.__code__ for method in methods if inspect.isfunction(method)]
    lines = {f"{code.co_filename}:{line}" for code in codes for _, _, line in code.co_lines()}
    places = (text.rpartition(" at ")[2] for text in breaks)
    return next((place for place in places if place in lines), "")


def dynamo_reasons(session: Session) -> str:
    """Return Dynamo's reasons for code that it leaves out of the graphs of the session's models; "" without any."""
    reasons = session.diagnostics.graph_breaks
    more = f"; {len(reasons) - _MOST_REASONS} more" if len(reasons) > _MOST_REASONS else ""
    return f"Dynamo leaves code out of the graphs: {'; '.join(reasons[:_MOST_REASONS])}{more}" if reasons else ""


_MOST_REASONS = 3
_OUTSIDE = (Reason.NOT_CAPTURED.name, Reason.GRAPH_BREAK.name)
"""Refusals of code outside of the graphs."""


def _layer_around(path: str, modules: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """Return the innermost module at or around a path whose class is not torch's own, such as a list of experts."""
    while path and type(modules[path]).__module__.startswith("torch.nn."):
        path = path.rpartition(".")[0]
    return modules[path]


def _reads(parameter_ids: frozenset[int], module: torch.nn.Module) -> bool:
    return any(id(parameter) in parameter_ids for parameter in module.parameters())


def _latest_graphs(session: Session) -> list[CapturedGraph]:
    """Return all graphs, those of the latest step that trained at the end: they stand for their places in a report."""
    trained = {id(run.graph) for run in session.steps.history.latest_pass(session.graphs)}
    return sorted(session.graphs, key=lambda graph: id(graph) in trained)


def _place(outcome: LoweredRegion | Refusal) -> object:
    where = outcome.region.where if isinstance(outcome, LoweredRegion) else outcome.where
    return (where.module, where.source) if where.module else id(outcome)


def outcome_report(outcome: LoweredRegion | Refusal) -> RegionReport:
    """Return the report's entry for one region or refusal, in its current state."""
    if isinstance(outcome, Refusal):
        return RegionReport(
            "refused",
            outcome.where,
            outcome.details,
            node=outcome.node,
            obstacle=outcome.obstacle,
            refused_for=outcome.reason.name,
            hint=outcome.reason.hint,
        )
    region, live = outcome.region, outcome.live
    return RegionReport(
        "chunked",
        region.where,
        "raised, proved row-wise and lowered" if live.plan is None else live.plan.reason,
        family=region.family,
        dims=region.dims,
        plan=live.plan,
        num_tokens=live.num_tokens,
        num_chunks=live.num_chunks,
        largest_chunk=live.largest_chunk,
        imbalance=live.loads.summary(),
        num_ranks=1 if live.exchange is None else live.exchange.table_shape[0],
        rounds=live.rounds,
        num_added=live.num_added,
        body_key=live.compiled_expert.key,
        verified_error=_verified_error(outcome),
        graph=outcome.graph,
        uncompared=outcome.uncompared,
        not_compared_with_code=outcome.not_compared_with_code,
        makes_tables=_made_tables(region, live.compiled_expert.num_factored),
        why_expanded=outcome.region.why_expanded,
        runs_in=live.runs_in,
    )


def head_report(head: LoweredHead | Refusal) -> HeadReport:
    """Return the report's entry for one head or refusal, in its current state."""
    if isinstance(head, Refusal):
        return HeadReport(
            "refused", head.where, head.details, node=head.node, obstacle=head.obstacle,
            refused_for=head.reason.name, hint=head.reason.hint,
        )  # fmt: skip
    live = head.live
    return HeadReport(
        "chunked",
        head.region.where,
        "only the loss reads the logits" if live.plan is None else live.plan.reason,
        dims=head.region.dims,
        plan=live.plan,
        num_tokens=live.num_tokens,
        num_chunks=live.num_chunks,
        drops_logits=bool(head.region.results) and not head.region.saves_logits,
        verified_error=_verified_error(head),
    )


def _made_tables(region: MoERegion, num_factored: int) -> str:
    """How tables that are computed are made, "" where none is."""
    if not region.makes_tables:
        return ""
    return "each expert's tables made when it runs" + (", low-rank terms factor by factor" if num_factored else "")


def _verified_error(outcome: LoweredRegion | LoweredHead) -> float | None:
    verification = outcome.verification
    return None if verification is None or verification.worst is None else verification.worst.error
