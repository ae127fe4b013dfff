"""A body's regions through read, check, plan and lower; `heads` does the same for its heads."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

import memfine_fx.runtime.op  # noqa: F401  # registers the ops
from memfine_fx.compiler.captured_graph import CapturedGraph, LoweredRegion
from memfine_fx.compiler.leftovers import as_told_by_attempts, check_leftover_shapes
from memfine_fx.compiler.own_code import compare_with_own_code
from memfine_fx.compiler.own_code_runs import CompileGraph
from memfine_fx.compiler.session import Session, next_region_id
from memfine_fx.config import Config
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.kernels.choice import why_compiled_functions_run
from memfine_fx.kernels.experts import KernelExperts
from memfine_fx.memory.region_bytes import RegionBytes
from memfine_fx.memory.step import RegionMemory
from memfine_fx.passes.dataflow import Dataflow, tensor_of
from memfine_fx.passes.lower.arguments import argument_specs, wanted_gradients
from memfine_fx.passes.lower.bodies import ExpertBodies, bodies_for
from memfine_fx.passes.lower.lift import can_lift
from memfine_fx.passes.lower.region import lower_region
from memfine_fx.passes.lower.sharded import drop_unread_tables, own_exchanges, sharded_experts, tell_why_gathered
from memfine_fx.passes.lower.terms import num_tokens_hint, num_tokens_of, region_bytes
from memfine_fx.passes.modes import modes_at
from memfine_fx.passes.pass_list import is_disabled, run_pass
from memfine_fx.passes.read.dropped import drop_unread_ids
from memfine_fx.passes.read.guards import discharge_guards, refuse_guards
from memfine_fx.passes.read.masked_ids import restore_masks
from memfine_fx.passes.read.regions import read_regions
from memfine_fx.passes.read.tables import restore_tables
from memfine_fx.passes.verify.gradient_check import check_gradients
from memfine_fx.plan.budget import choose_plan
from memfine_fx.plan.knee import measured_knee
from memfine_fx.plan.rows import KNEE_ROWS
from memfine_fx.records import Modes, MoERegion, Refusal, SavePolicy
from memfine_fx.runtime.mact import ChunkTuner
from memfine_fx.runtime.store import LiveRegion, register

__all__ = ["BodyRegions", "lower_regions", "plan_regions", "read_bodies"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BodyRegions:
    """Regions and refusals of one body of a captured graph.

    Args:
        body: the graph itself, or that of a higher-order op in it.
        modes: in which it begins.
        outcomes: its regions and refusals, in graph order.
    """

    body: fx.GraphModule
    modes: Modes
    outcomes: list[LoweredRegion | Refusal]


def plan_regions(
    body: fx.GraphModule,
    modes: Modes,
    session: Session,
    record: CapturedGraph,
    inputs: Sequence[object],
    compile_graph: CompileGraph,
) -> BodyRegions:
    """The regions of one body, each with the op's counterpart; but for ids of masks, the graph is as it was.

    Args:
        inputs: of the body in the call that is being compiled; () where they are not known.
        compile_graph: compiles the captured graph of a layer alone, for the comparison with its own code.

    Raises:
        LeftoverShapes: see `leftovers`.
        GuardRefused: a loop that skips experts without rows cannot be run for all of them.
    """
    with session.diagnostics.timed("read"):
        cuts = run_pass("guards", body, lambda: discharge_guards(body), None)
        if cuts is None:
            cuts = refuse_guards(body)
        candidates = [] if is_disabled("regions") else read_regions(body, modes)
    at = modes_at(body.graph, modes)
    outcomes = _separable(
        body.graph, [_checked_and_planned(candidate, at, session, record) for candidate in candidates]
    )
    region_ids = {outcome.live.region_id for outcome in outcomes if isinstance(outcome, LoweredRegion)}
    outcomes = compare_with_own_code(body.graph, outcomes, inputs, session, compile_graph)
    for region_id in region_ids - {
        outcome.live.region_id for outcome in outcomes if isinstance(outcome, LoweredRegion)
    }:
        del record.step.regions[region_id]
    if not any(isinstance(outcome, LoweredRegion) for outcome in outcomes):
        outcomes = [*own_exchanges(body.graph), *outcomes]
    if session.capture_flags:
        check_leftover_shapes(body, outcomes, session.diagnostics.refused_in_attempts, cuts)
    return BodyRegions(body, modes, as_told_by_attempts(outcomes, session.diagnostics.refused_in_attempts))


def lower_regions(found: BodyRegions, session: Session) -> None:
    """Rewrite the regions of one body."""
    run_pass("regions", found.body, lambda: _lower(found, session), None)


def _lower(found: BodyRegions, session: Session) -> None:
    lowered = [outcome for outcome in found.outcomes if isinstance(outcome, LoweredRegion)]
    if lowered and session.observer.lowers:
        flow = Dataflow(found.body.graph)
        for outcome in reversed(lowered):  # last first: a region may feed the next one
            live = outcome.live
            table_shape = None if live.exchange is None else live.exchange.table_shape
            lower_region(
                found.body, outcome.region, live.region_id, flow=flow, table_shape=table_shape,
                routes_on_device=live.kernels is not None,
            )  # fmt: skip
        if any(outcome.live.exchange is not None for outcome in lowered):
            drop_unread_tables(found.body)
        found.body.graph.lint()
        found.body.recompile()
    drop_unread_ids(found.body)
    restore_masks(found.body)
    restore_tables(found.body)
    if session.observer.lowers:
        refusals = [outcome for outcome in found.outcomes if isinstance(outcome, Refusal)]
        tell_why_gathered(found.body.graph, refusals)


def read_bodies(session: Session) -> None:
    """Take the peaks of all bodies of a session from the code that would be compiled, where nothing is to be built."""
    for lowered in session.lowered:
        if isinstance(lowered.live.bodies, ExpertBodies):
            lowered.live.bodies.read_code()


def _checked_and_planned(
    region: MoERegion | Refusal, modes: dict[fx.Node, Modes], session: Session, record: CapturedGraph
) -> LoweredRegion | Refusal:
    """One region as it will be lowered; nothing has touched the graph when it is refused."""
    if isinstance(region, Refusal):
        return region
    try:
        with session.diagnostics.timed("plan"):
            bodies = _bodies(region, session.config)
            bodies.backward(wanted_gradients(region, bodies))  # traces it, which the check would else be timed for
        with session.diagnostics.timed("check"):
            uncompared = _check(region, bodies, modes[region.cut.exit], session.config)
        with session.diagnostics.timed("plan"):
            region, live = _plan(region, bodies, session, record)
        picture = session.observer.picture_of(region)
        return LoweredRegion(region, live, num_tokens_hint(region), graph=picture, uncompared=uncompared)
    except CannotChunk as refusal:
        return Refusal(region.where, refusal.reason, refusal.details, refusal.node)
    except Exception as error:  # NOTE: a bug of ours must not take down a model that compiles without us
        log.warning("memfine_fx failed on %s; the region stays as it was", region.where, exc_info=True)
        return Refusal(
            region.where, Reason.INTERNAL_ERROR, f"internal error, please report it: {type(error).__name__}: {error}"
        )


def _check(region: MoERegion, bodies: ExpertBodies, modes: Modes, config: Config) -> str:
    """See `passes.verify.gradient_check`; an expert's own body stands for one over several experts."""
    single_bodies = _build_bodies(region, config, takes_group=False) if bodies.takes_group else bodies
    return check_gradients(region, single_bodies, modes)


def _separable(graph: fx.Graph, outcomes: list[LoweredRegion | Refusal]) -> list[LoweredRegion | Refusal]:
    """Regions that share nodes with an earlier one become refusals, unless each has a result of its own of them.

    Experts that run on all tokens once, for two routers, are two regions that each compute what their tokens chose.
    """
    claimed: set[fx.Node] = set()
    exits: set[fx.Node] = set()
    flow: Dataflow | None = None
    result: list[LoweredRegion | Refusal] = []
    for outcome in outcomes:
        if not isinstance(outcome, LoweredRegion):
            result.append(outcome)
            continue
        nodes, region_exit = set(outcome.region.cut.nodes), outcome.region.cut.exit
        shared = nodes & claimed
        if shared:
            flow = flow or Dataflow(graph)
            is_written = any(node in flow.mutations or flow.is_written(node) for node in shared)
            if is_written or region_exit in claimed or nodes & exits:
                details = "it shares its dispatch with another region"
                result.append(Refusal(outcome.region.where, Reason.SHARED_DISPATCH, details))
                continue
        claimed |= nodes
        exits.add(region_exit)
        result.append(outcome)
    return result


def _plan(
    region: MoERegion, bodies: ExpertBodies, session: Session, record: CapturedGraph
) -> tuple[MoERegion, LiveRegion]:
    """The region as it lowers, and how its plan will be chosen once T is known."""
    config = session.config
    output = tensor_of(region.cut.exit)
    chunk_rows = config.rows_per_chunk or KNEE_ROWS.get(output.device.type, KNEE_ROWS["cuda"])
    region, exchange = sharded_experts(region, bodies.key, config.axis, chunk_rows, bodies.flops_per_row)
    form, why_bodies = bodies.kernel_form, "experts on several ranks"
    if exchange is None:
        tensors = [tensor_of(node) for node in (region.hidden, *region.params)]
        why_bodies = why_compiled_functions_run(form, tensors, region.dims.top_k, config.axis)
    kernels = None if form is None or why_bodies else KernelExperts(form)
    form = None if kernels is None else kernels.form
    # Bodies know more once they are compiled.
    terms_of = functools.partial(region_bytes, region, bodies, output, exchange, form)
    terms = terms_of("nothing")  # traces them now, outside of any other compilation
    if config.rows_per_chunk is None and session.observer.runs_here:
        knee = measured_knee(terms, tensor_of(region.hidden).dtype)
        terms_of = functools.partial(_with_knee, terms_of, knee)
    region_id = next_region_id(bodies.key)
    live = LiveRegion(
        region_id=region_id,
        bodies=bodies,
        num_experts=region.dims.num_experts,
        top_k=region.dims.top_k,
        out_dtype=output.dtype,
        out_of_range=region.out_of_range,
        choose_plan=functools.partial(choose_plan, region_id, session.steps, record, output.device),
        tuner=ChunkTuner(config.bins, keeps_slices=config.tokens_per_chunk is not None),
        warn=functools.partial(session.diagnostics.warn_of_failure, region.where),
        exchange=exchange,
        kernels=kernels,
        runs_in=_runs_in(why_bodies, output.device),
        name=region.where.module or str(region.where),
        context=session.steps.context_key,
    )
    register(live)
    record.step.regions[region_id] = RegionMemory(terms_of, num_tokens_of(region), config.axis, lambda: bodies.revision)
    return region, live


def _runs_in(why_bodies: str, device: torch.device) -> str:
    if not why_bodies:
        return "GPU kernels"
    return f"bodies ({why_bodies})" if device.type == "cuda" else ""


def _with_knee(terms_of: Callable[[SavePolicy], RegionBytes], knee: int | None, policy: SavePolicy) -> RegionBytes:
    return replace(terms_of(policy), knee_rows=knee)


def _bodies(region: MoERegion, config: Config) -> ExpertBodies:
    """Bodies over a chunk's range of experts where that is possible and pays, else over one expert."""
    specs = argument_specs(region)
    may_lift = specs[0].device.type == "cuda" and config.axis == "rows" and not is_disabled("lift")
    if may_lift and can_lift(region.expert_fn, specs):
        try:
            return _build_bodies(region, config, takes_group=True)
        except CannotChunk as refusal:
            log.info("experts run one by one at %s: %s", region.where, refusal)
    return _build_bodies(region, config, takes_group=False)


def _build_bodies(region: MoERegion, config: Config, *, takes_group: bool) -> ExpertBodies:
    return bodies_for(
        region.expert_fn,
        argument_specs(region),
        takes_group=takes_group,
        inner=config.inner_backend,
    )
