"""A body's regions through read, check, plan and lower; `heads` does the same for its heads.

Dynamo's flags let data-dependent shapes into a graph, and an attempt under them is accepted only if none is left over
outside of regions. Without the flags the loop over experts is outside the graph, where nothing says why it was not
chunked; the attempt said so. So the refusals of the attempt are stored, and reported in the place of graph breaks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

import memfine_fx.runtime.op  # noqa: F401  # registers the ops
from memfine_fx.capture.experts_call import inline_calls, restore_calls
from memfine_fx.compiler.captured_graph import CapturedGraph, LoweredRegion
from memfine_fx.compiler.own_code_runs import CompileGraph
from memfine_fx.compiler.session import Session, next_region_id
from memfine_fx.config import Config
from memfine_fx.errors import CannotChunk, GuardRefused, LeftoverShapes, Reason
from memfine_fx.kernels.choice import why_compiled_functions_run
from memfine_fx.kernels.experts import KernelExperts
from memfine_fx.memory.region_bytes import RegionBytes
from memfine_fx.memory.step import RegionMemory
from memfine_fx.passes.dataflow import Dataflow, has_unbacked_shape, is_only_asserted, provenance, refusal_of, tensor_of
from memfine_fx.passes.lower.compiled_expert import CompiledExpertFunction, compiled_expert_for
from memfine_fx.passes.lower.lift import can_lift
from memfine_fx.passes.lower.region import lower_region
from memfine_fx.passes.lower.replay import choices_of, replay_choices
from memfine_fx.passes.lower.sharded import drop_unread_tables, own_exchanges, say_why_gathered, sharded_experts
from memfine_fx.passes.lower.terms import argument_specs, num_tokens_hint, num_tokens_of, region_bytes, wanted_gradients
from memfine_fx.passes.modes import modes_at
from memfine_fx.passes.ops import LAYOUTS, name_of
from memfine_fx.passes.pass_list import is_disabled, run_pass
from memfine_fx.passes.read.dropped import drop_unread_ids
from memfine_fx.passes.read.guards import GUARDED, OpenCut, discharge_guards, is_total, refuse_guards
from memfine_fx.passes.read.masked_ids import restore_masks
from memfine_fx.passes.read.regions import read_regions
from memfine_fx.passes.read.tables import restore_tables
from memfine_fx.passes.verify.gradient_check import check_gradients
from memfine_fx.plan.budget import choose_plan
from memfine_fx.plan.rates import measured_knee
from memfine_fx.plan.rows import KNEE_ROWS
from memfine_fx.records import Modes, MoERegion, Refusal, SavePolicy, short_place
from memfine_fx.runtime.mact import ChunkTuner
from memfine_fx.runtime.routing import group_params
from memfine_fx.runtime.store import LiveRegion, register

__all__ = ["check_leftover_shapes", "lower_regions", "plan_regions", "read_compiled_code", "with_reasons_of_attempts"]

log = logging.getLogger(__name__)


def plan_regions(
    body: fx.GraphModule,
    modes: Modes,
    session: Session,
    record: CapturedGraph,
    inputs: Sequence[object],
    compile_graph: CompileGraph,
) -> list[LoweredRegion | Refusal]:
    """Return the regions and refusals of one body in graph order, each region with the op's counterpart; but for ids of
    masks, the graph is as it was.

    Args:
        body: a captured graph, or that of a higher-order op in it.
        modes: in which it begins.
        inputs: of the body in the call that is being compiled; () where they are not known.
        compile_graph: compiles the captured graph of a layer alone, for the comparison with its own code.

    Raises:
        LeftoverShapes: data-dependent shapes are in no region; the attempt that let them in is given up.
        GuardRefused: a loop that skips experts without rows cannot be run for all of them.
    """
    with session.diagnostics.timed("read"):
        if not is_disabled("regions"):
            inline_calls(body)
        cuts = run_pass("guards", body, lambda: discharge_guards(body), None)
        if cuts is None:
            cuts = refuse_guards(body)
        candidates = [] if is_disabled("regions") else read_regions(body, modes)
    at = modes_at(body.graph, modes)
    outcomes = _separable(
        body.graph, [_checked_and_planned(candidate, at, session, record) for candidate in candidates]
    )
    region_ids = {outcome.live.region_id for outcome in outcomes if isinstance(outcome, LoweredRegion)}
    if not session.config.gives_up_comparison_with_eager:
        from memfine_fx.compiler.own_code import compare_with_own_code

        outcomes = compare_with_own_code(body.graph, outcomes, inputs, session, compile_graph)
    for region_id in region_ids - {
        outcome.live.region_id for outcome in outcomes if isinstance(outcome, LoweredRegion)
    }:
        del record.step.regions[region_id]
    if not any(isinstance(outcome, LoweredRegion) for outcome in outcomes):
        outcomes = [*own_exchanges(body.graph), *outcomes]
    if session.capture_flags:
        check_leftover_shapes(body, outcomes, session.diagnostics.refused_in_attempts, cuts)
    return with_reasons_of_attempts(outcomes, session.diagnostics.refused_in_attempts)


def lower_regions(body: fx.GraphModule, outcomes: Sequence[LoweredRegion | Refusal], session: Session) -> None:
    """Rewrite the regions of one body."""
    run_pass("regions", body, lambda: _lower(body, outcomes, session), None)


def _lower(body: fx.GraphModule, outcomes: Sequence[LoweredRegion | Refusal], session: Session) -> None:
    lowered = [outcome for outcome in outcomes if isinstance(outcome, LoweredRegion)]
    if lowered and session.observer.lowers:
        flow = Dataflow(body.graph)
        choices = [choices_of(outcome.region) for outcome in lowered] if session.replays_routing else []
        for outcome in reversed(lowered):  # last first: a region may feed the next one
            live = outcome.live
            table_shape = None if live.exchange is None else live.exchange.table_shape
            lower_region(
                body, outcome.region, live.region_id, flow=flow, table_shape=table_shape,
                routes_on_device=live.kernels is not None,
            )  # fmt: skip
        for outcome, of_region in zip(lowered, choices, strict=False):
            parameter = None if outcome.live.exchange is not None else _key_parameter(outcome.region)[1]
            replay_choices(outcome.region, of_region, outcome.live.region_id, parameter)
        if any(outcome.live.exchange is not None for outcome in lowered):
            drop_unread_tables(body)
        body.graph.lint()
        body.recompile()
    drop_unread_ids(body)
    restore_masks(body)
    restore_tables(body)
    restore_calls(body)
    if session.observer.lowers:
        refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
        say_why_gathered(body.graph, refusals)


def read_compiled_code(session: Session) -> None:
    """Take the peaks of all compiled functions of a session from the code that would be compiled, where nothing is to
    be built.
    """
    for lowered in session.lowered:
        if isinstance(lowered.live.compiled_expert, CompiledExpertFunction):
            lowered.live.compiled_expert.read_code()


def _checked_and_planned(
    region: MoERegion | Refusal, modes: dict[fx.Node, Modes], session: Session, record: CapturedGraph
) -> LoweredRegion | Refusal:
    """One region as it will be lowered; nothing has touched the graph when it is refused."""
    if isinstance(region, Refusal):
        return region
    try:
        with session.diagnostics.timed("plan"):
            compiled_expert = _compiled_expert(region, session.config)
            compiled_expert.backward(
                wanted_gradients(region, compiled_expert)
            )  # traces it, which the check would else be timed for
        with session.diagnostics.timed("check"):
            uncompared = _check(region, compiled_expert, modes[region.cut.exit], session.config)
        with session.diagnostics.timed("plan"):
            region, live = _plan(region, compiled_expert, session, record)
        picture = session.observer.picture_of(region)
        return LoweredRegion(region, live, num_tokens_hint(region), graph=picture, uncompared=uncompared)
    except CannotChunk as refusal:
        return refusal_of(region.where, refusal)
    except Exception as error:  # NOTE: a bug of ours must not take down a model that compiles without us
        log.warning("memfine_fx failed on %s; the region stays as it was", region.where, exc_info=True)
        return Refusal(
            region.where, Reason.INTERNAL_ERROR, f"internal error, please report it: {type(error).__name__}: {error}"
        )


def _check(region: MoERegion, compiled_expert: CompiledExpertFunction, modes: Modes, config: Config) -> str:
    """See `passes.verify.gradient_check`; one expert's compiled function stands for one over several experts."""
    single_expert = _build_expert(region, config, takes_group=False) if compiled_expert.takes_group else compiled_expert
    return check_gradients(region, single_expert, modes)


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
    region: MoERegion, compiled_expert: CompiledExpertFunction, session: Session, record: CapturedGraph
) -> tuple[MoERegion, LiveRegion]:
    """The region as it lowers, and how its plan will be chosen once T is known."""
    config = session.config
    output = tensor_of(region.cut.exit)
    chunk_rows = config.rows_per_chunk or KNEE_ROWS.get(output.device.type, KNEE_ROWS["cuda"])
    region, exchange = sharded_experts(
        region, compiled_expert.key, config.axis, chunk_rows, compiled_expert.flops_per_row
    )
    form, why_compiled = compiled_expert.kernel_form, "experts on several ranks"
    if exchange is None:
        tensors = [tensor_of(node) for node in (region.hidden, *region.params)]
        why_compiled = why_compiled_functions_run(form, tensors, region.dims.top_k, config.axis)
    kernels = None if form is None or why_compiled else KernelExperts(form)
    form = None if kernels is None else kernels.form
    # Compiled functions know more once they are compiled.
    terms_of = functools.partial(region_bytes, region, compiled_expert, output, exchange, form)
    terms = terms_of("nothing")  # traces them now, outside of any other compilation
    if config.rows_per_chunk is None and session.observer.runs_here:
        knee = measured_knee(terms, tensor_of(region.hidden).dtype)
        terms_of = functools.partial(_with_knee, terms_of, knee)
    region_id = next_region_id(compiled_expert.key)
    live = LiveRegion(
        region_id=region_id,
        compiled_expert=compiled_expert,
        num_experts=region.dims.num_experts,
        top_k=region.dims.top_k,
        out_dtype=output.dtype,
        out_of_range=region.out_of_range,
        choose_plan=functools.partial(choose_plan, region_id, session.steps, record, output.device),
        tuner=ChunkTuner(config.bins, keeps_slices=config.tokens_per_chunk is not None),
        warn=functools.partial(session.diagnostics.warn_of_failure, region.where),
        exchange=exchange,
        kernels=kernels,
        runs_in=_runs_in(why_compiled, output.device),
        name=region.where.module or str(region.where),
        context=session.steps.context_key,
        key_group=None if exchange is not None else _key_parameter(region)[0],
        takes_slots=region.slot_dim is not None,
        leaves_idle=config.idle_gradients == "none",
    )
    register(live)
    record.step.regions[region_id] = RegionMemory(
        terms_of, num_tokens_of(region), config.axis, lambda: compiled_expert.revision
    )
    return region, live


def _key_parameter(region: MoERegion) -> tuple[int | None, fx.Node | None]:
    """Return a parameter of the expert function that is an input of the graph, or a view of one: its place, the input.

    See `LiveRegion.key_group`.
    """
    for place, (node, *_) in enumerate(
        group_params(region.params, region.expert_fn.param_kinds, region.dims.num_experts)
    ):
        while name_of(node) in LAYOUTS - {"clone", "contiguous"} and isinstance(node.args[0], fx.Node):
            node = node.args[0]  # in the memory of the input
        if node.op in ("placeholder", "get_attr"):
            return place, node
    return None, None


def _runs_in(why_compiled: str, device: torch.device) -> str:
    if not why_compiled:
        return "GPU kernels"
    return f"compiled functions ({why_compiled})" if device.type == "cuda" else ""


def _with_knee(terms_of: Callable[[SavePolicy], RegionBytes], knee: int | None, policy: SavePolicy) -> RegionBytes:
    return replace(terms_of(policy), knee_rows=knee)


def _compiled_expert(region: MoERegion, config: Config) -> CompiledExpertFunction:
    """Return compiled functions over a chunk's range of experts where that is possible and pays, else over one."""
    specs = argument_specs(region)
    may_lift = specs[0].device.type == "cuda" and config.axis == "rows" and not is_disabled("lift")
    if may_lift and can_lift(region.expert_fn, specs):
        try:
            return _build_expert(region, config, takes_group=True)
        except CannotChunk as refusal:
            log.info("experts run one by one at %s: %s", region.where, refusal)
    return _build_expert(region, config, takes_group=False)


def _build_expert(region: MoERegion, config: Config, *, takes_group: bool) -> CompiledExpertFunction:
    return compiled_expert_for(
        region.expert_fn,
        argument_specs(region),
        takes_group=takes_group,
        inner=config.inner_backend,
    )


def check_leftover_shapes(
    body: fx.GraphModule,
    outcomes: Sequence[LoweredRegion | Refusal],
    whole_layers: list[Refusal],
    cuts: Sequence[OpenCut] = (),
) -> None:
    """Refuse an attempt that helped nothing here, or that runs skipped bodies which may raise without rows.

    Data-dependent shapes beside a loop that was raised are left to the compiler: it fails now or never.

    Args:
        whole_layers: extended by the refusals of layers that the attempt saw whole.
        cuts: that only a region proves which swallows them.

    Raises:
        LeftoverShapes: the attempt is given up.
        GuardRefused: a rewritten loop is not proved.
    """
    lowered = [outcome for outcome in outcomes if isinstance(outcome, LoweredRegion)]
    has_loop = any(outcome.region.family == "loops" for outcome in lowered)
    swallowed = {node for outcome in lowered for node in outcome.region.cut.nodes}
    for cut in cuts:
        if not swallowed.issuperset(cut.nodes):
            raise cut.refusal
    _check_rewritten(body.graph, swallowed, [outcome for outcome in outcomes if isinstance(outcome, Refusal)])
    for node in body.graph.nodes:
        may_raise = GUARDED in node.meta and not is_total(node)
        is_left = may_raise or (not has_loop and has_unbacked_shape(node))
        if node not in swallowed and is_left and not is_only_asserted(node):
            refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
            whole_layers.extend(
                refusal for refusal in refusals if refusal.reason not in (Reason.GRAPH_BREAK, Reason.NO_EXPERTS)
            )
            reason = f"; refused: {'; '.join(refusal.details for refusal in refusals)}" if refusals else ""
            raise LeftoverShapes(f"{node} at {provenance(node)} has a data-dependent shape and is in no region{reason}")


def _check_rewritten(graph: fx.Graph, swallowed: set[fx.Node], refusals: Sequence[Refusal]) -> None:
    """Refuse rewritten loops of a module in which nothing is chunked: nobody compares them with the code as written."""
    chunked = {node.meta[GUARDED][1] for node in swallowed if GUARDED in node.meta}
    for node in graph.nodes:
        where, module = node.meta.get(GUARDED, ("", ""))
        if where and module not in chunked:
            of_module = [refusal for refusal in refusals if refusal.where.module.startswith(module)]
            reasons = [
                f"{refusal.details} ({short_place(refusal.obstacle or refusal.where.source)})" for refusal in of_module
            ]
            because = f": {'; '.join(dict.fromkeys(reasons))}" if reasons else ""
            raise GuardRefused(f"its experts are in no chunked layer{because}", where, module)


def with_reasons_of_attempts(
    outcomes: Sequence[LoweredRegion | Refusal], whole_layers: Sequence[Refusal]
) -> list[LoweredRegion | Refusal]:
    """Outcomes in which a graph break before the experts is what an attempt without that break refused them for."""
    return [_explain(outcome, whole_layers) if isinstance(outcome, Refusal) else outcome for outcome in outcomes]


def _explain(refusal: Refusal, whole_layers: Sequence[Refusal]) -> Refusal:
    layer = refusal.where.module.rpartition(".")[0]  # a router and its experts stand in one module
    of_layer = [candidate for candidate in whole_layers if not layer or candidate.where.module.startswith(f"{layer}.")]
    return of_layer[0] if of_layer and refusal.reason is Reason.GRAPH_BREAK else refusal
