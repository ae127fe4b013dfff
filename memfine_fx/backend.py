"""The pipeline: capture -> find -> raise -> plan -> lower -> compile, as one readable function.

Dynamo hands over one torch-level graph at a time, with symbolic shapes; bodies of higher-order ops (gradient
checkpointing) are graphs of their own inside it. Each stage returns records; a refusal at any stage leaves
that region as the user wrote it.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

import memfine_fx.runtime.op  # noqa: F401  # registers the ops
from memfine_fx.budget import choose_plan
from memfine_fx.capture.buckets import hint_for_cut_graphs
from memfine_fx.capture.recorded import hint_for_recording
from memfine_fx.compat.interpreter import running_model
from memfine_fx.compat.shapes import hints_of_symbols
from memfine_fx.compat.traces import trace_artifact
from memfine_fx.compiled_graph import CompiledGraph
from memfine_fx.config import Config, dump_folder
from memfine_fx.errors import CannotChunk, LeftoverShapes, MemfineError
from memfine_fx.expert_parallel.lowering import (
    drop_unread_tables,
    own_exchanges,
    sharded_experts,
    tell_why_gathered,
)
from memfine_fx.expert_parallel.sharded import ShardedExperts
from memfine_fx.heads import lower_heads, lowered_heads, plan_heads
from memfine_fx.inner import compile_plain
from memfine_fx.memory.kernel_scratch import product_scratch
from memfine_fx.memory.region_bytes import RegionBytes, added_bytes
from memfine_fx.memory.step import RegionMemory
from memfine_fx.passes.bodies import ExpertBodies, bodies_for
from memfine_fx.passes.dataflow import has_unbacked_shape, is_only_asserted, provenance, tensor_of
from memfine_fx.passes.dispatch_masks import conceal, expose
from memfine_fx.passes.draw import region_graph
from memfine_fx.passes.find import find_candidates
from memfine_fx.passes.gradient_check import check_gradients
from memfine_fx.passes.lift import can_lift
from memfine_fx.passes.loops.harmless import is_harmless_marker
from memfine_fx.passes.loops.marker import LOOP_MARKERS
from memfine_fx.passes.lower import lower_region
from memfine_fx.passes.modes import Modes, called_bodies, modes_at
from memfine_fx.passes.raising import raise_region
from memfine_fx.passes.tracing import TensorSpec
from memfine_fx.records import Candidate, Keep, MoERegion, Refusal
from memfine_fx.runtime.loop import accumulator_dtype
from memfine_fx.runtime.mact import ChunkTuner
from memfine_fx.runtime.params import group_params
from memfine_fx.runtime.store import LiveRegion, register
from memfine_fx.session import (
    CapturedGraph,
    LoweredHead,
    LoweredRegion,
    Session,
    head_report,
    next_site,
    outcome_report,
)
from memfine_fx.verifier import verify_heads, verify_outcomes

__all__ = ["compile_graph", "warn_without_regions"]

log = logging.getLogger(__name__)
passes_log = logging.getLogger("memfine_fx.passes")


def compile_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any], session: Session) -> Callable[..., Any]:
    """Compile one captured graph.

    Args:
        graph_module: from Dynamo; rewritten in place where regions are raised, untouched elsewhere.
        example_inputs: its fake inputs.
        session: collects what was found, chosen and refused.

    Returns:
        A callable with the graph's signature.
    """
    record = session.add_graph(example_inputs)
    try:
        return _compile(graph_module, example_inputs, session, record)
    except MemfineError:
        raise
    except BaseException:  # Dynamo restarts its analysis by exceptions, and will call again for the same code
        session.drop_graph(record)
        raise


def _compile(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], session: Session, record: CapturedGraph
) -> Callable[..., Any]:
    _dump(graph_module, session, "captured")
    found = []
    exposures = {}
    for body, modes in list(called_bodies(graph_module)):
        exposures[body] = expose(body)
        outcomes = _outcomes(body, modes, session, record)
        if session.capture_flags:
            _check_leftover_shapes(body, outcomes)
        found.append((body, modes, outcomes))
    with session.timed("heads"):
        record.heads.extend(plan_heads(graph_module, session, record))
    if session.config.verify:
        record.verifications, found = verify_outcomes(graph_module, example_inputs, found)
        kept = {one.live.site for _, _, outcomes in found for one in outcomes if isinstance(one, LoweredRegion)}
        for site in record.step.regions.keys() - kept:
            del record.step.regions[site]
        of_heads, record.heads = verify_heads(graph_module, example_inputs, record.heads)
        record.verifications += of_heads
        left = {head.live.site for head in lowered_heads(record)}
        for site in record.step.heads.keys() - left:
            del record.step.heads[site]
    lower_heads(graph_module, record)  # first: what they read may be a region's exit
    for body, _, outcomes in found:
        exposed = exposures[body]
        for outcome in reversed(outcomes):  # last first: a region may feed the next one
            if isinstance(outcome, LoweredRegion):
                _lower(body, outcome.region, outcome.live, session)
        conceal(body, exposed)
        if not session.is_dry:
            tell_why_gathered(body.graph, [outcome for outcome in outcomes if isinstance(outcome, Refusal)])
        record.outcomes.extend(outcomes)
    _dump(graph_module, session, "rewritten")
    _tell(graph_module, session, record)
    if session.is_dry:
        return graph_module
    lowered: list[LoweredRegion | LoweredHead] = list(lowered_heads(record))
    lowered += [outcome for outcome in record.outcomes if isinstance(outcome, LoweredRegion)]
    if not lowered or session.config.inner_backend == "eager":
        return compile_plain(graph_module, example_inputs, session.config.inner_backend, session.mode)
    hidden = tensor_of(lowered[0].region.hidden)
    return CompiledGraph(graph_module, example_inputs, session, record, hidden).__call__


def _outcomes(
    body: fx.GraphModule, modes: Modes, session: Session, record: CapturedGraph
) -> list[LoweredRegion | Refusal]:
    with session.timed("find"):
        candidates = find_candidates(body, modes)
    outcomes = _disjoint([_raise_and_plan(candidate, session, record) for candidate in candidates])
    is_lowered = any(isinstance(outcome, LoweredRegion) for outcome in outcomes)
    return outcomes if is_lowered else [*own_exchanges(body.graph), *outcomes]


def _raise_and_plan(candidate: Candidate | Refusal, session: Session, record: CapturedGraph) -> LoweredRegion | Refusal:
    """One candidate through raise and plan; nothing has touched the graph when either refuses."""
    if isinstance(candidate, Refusal):
        return candidate
    try:
        with session.timed("raise"):
            region = raise_region(candidate)
        with session.timed("plan"):
            bodies = _bodies(region, session.config)
            bodies.backward(_wanted(region, bodies))  # traces it, which the check would else be timed for
        with session.timed("check"):
            uncompared = _check(region, bodies, candidate, session.config)
        with session.timed("plan"):
            region, live = _plan(region, bodies, session, record)
        graph = region_graph(region) if session.is_dry else None
        return LoweredRegion(region, live, _num_tokens_hint(region), graph=graph, uncompared=uncompared)
    except CannotChunk as refusal:
        return Refusal(candidate.where, refusal.reason, refusal.node)
    except Exception as error:  # NOTE: a bug of ours must not take down a model that compiles without us
        log.warning("memfine_fx failed on %s; the region stays as it was", candidate.where, exc_info=True)
        return Refusal(candidate.where, f"internal error, please report it: {type(error).__name__}: {error}")


def _check(region: MoERegion, bodies: ExpertBodies, candidate: Candidate, config: Config) -> str:
    """See `passes.gradient_check`; an expert's own body stands for one over several experts."""
    one = _build_bodies(region, config, takes_group=False) if bodies.takes_group else bodies
    modes = modes_at(candidate.graph_module.graph, candidate.start)[region.cut.exit]
    return check_gradients(region, one, modes)


def _disjoint(outcomes: list[LoweredRegion | Refusal]) -> list[LoweredRegion | Refusal]:
    """Regions that share nodes with an earlier one become refusals."""
    taken: set[fx.Node] = set()
    result: list[LoweredRegion | Refusal] = []
    for outcome in outcomes:
        nodes = set(outcome.region.cut.nodes) if isinstance(outcome, LoweredRegion) else set()
        if isinstance(outcome, LoweredRegion) and nodes & taken:
            result.append(Refusal(outcome.region.where, "it shares its dispatch with another region"))
        else:
            taken |= nodes
            result.append(outcome)
    return result


def _check_leftover_shapes(body: fx.GraphModule, outcomes: list[LoweredRegion | Refusal]) -> None:
    """Refuse an attempt that helped nothing here, or whose rewritten loops are not proved.

    Data-dependent shapes beside a loop that was raised are left to the compiler: it fails now or never.
    """
    lowered = [one for one in outcomes if isinstance(one, LoweredRegion)]
    has_loop = any(one.region.family == "loops" for one in lowered)
    swallowed = {node for one in lowered for node in one.region.cut.nodes}
    for node in body.graph.nodes:
        is_unproved = node.target in LOOP_MARKERS and not (has_loop and is_harmless_marker(node))
        is_left = is_unproved or (not has_loop and has_unbacked_shape(node))
        if node not in swallowed and is_left and not is_only_asserted(node):
            refusals = [one.reason for one in outcomes if isinstance(one, Refusal)]
            reason = f"; refused: {'; '.join(refusals)}" if refusals else ""
            raise LeftoverShapes(f"{node} at {provenance(node)} has a data-dependent shape and is in no region{reason}")


def _plan(
    region: MoERegion, bodies: ExpertBodies, session: Session, record: CapturedGraph
) -> tuple[MoERegion, LiveRegion]:
    """The region as it lowers, and how its plan will be chosen once T is known."""
    config = session.config
    output = tensor_of(region.cut.exit)
    region, exchange = sharded_experts(region, bodies.key, config.axis)
    region_bytes = functools.partial(_region_bytes, region, bodies, output, exchange)  # bodies know more once compiled
    region_bytes("nothing")  # traces them now, outside of any other compilation
    site = next_site(bodies.key)
    live = LiveRegion(
        site=site,
        bodies=bodies,
        num_experts=region.dims.num_experts,
        top_k=region.dims.top_k,
        out_dtype=output.dtype,
        drops_out_of_range=region.drops_out_of_range,
        choose_plan=functools.partial(choose_plan, site, session, record, output.device),
        tuner=ChunkTuner(config.bins, keeps_slices=config.tokens_per_chunk is not None),
        warn=functools.partial(session.warn_of_failure, region.where),
        exchange=exchange,
        name=region.where.module or str(region.where),
        context=session.situation_key,
    )
    register(live)
    record.step.regions[site] = RegionMemory(region_bytes, _num_tokens(region), config.axis)
    return region, live


def _bodies(region: MoERegion, config: Config) -> ExpertBodies:
    """Bodies over a chunk's range of experts where that is possible and pays, else over one expert."""
    specs = _argument_specs(region)
    if specs[0].device.type == "cuda" and config.axis == "rows" and can_lift(region.expert_fn, specs):
        try:
            return _build_bodies(region, config, takes_group=True)
        except CannotChunk as refusal:
            log.info("experts run one by one at %s: %s", region.where, refusal)
    return _build_bodies(region, config, takes_group=False)


def _build_bodies(region: MoERegion, config: Config, *, takes_group: bool) -> ExpertBodies:
    return bodies_for(
        region.expert_fn,
        _argument_specs(region),
        takes_group=takes_group,
        inner=config.inner_backend,
    )


def _lower(body: fx.GraphModule, region: MoERegion, live: LiveRegion, session: Session) -> None:
    if session.is_dry:
        return
    lower_region(body, region, live.site, shares_counts=live.exchange is not None)
    if live.exchange is not None:
        drop_unread_tables(body)


def _argument_specs(region: MoERegion) -> tuple[TensorSpec, ...]:
    """Specs of the expert function's arguments: rows, weight if any, parameters of one expert."""
    hidden = tensor_of(region.hidden)
    specs = [TensorSpec((region.dims.hidden,), hidden.dtype, hidden.device, per_row=True)]
    if region.routing_weight is not None:
        weight = tensor_of(region.routing_weight)
        specs.append(TensorSpec((), weight.dtype, weight.device, per_row=True))
    for tensors, kind in zip(_param_groups(region), region.expert_fn.param_kinds, strict=True):
        param = tensors[0]
        skipped = 1 if kind == "expert" else 0
        shape = tuple(int(size) for size in param.shape[skipped:])
        stride = tuple(int(step) for step in param.stride()[skipped:])
        specs.append(TensorSpec(shape, param.dtype, param.device, stride=stride))
    return tuple(specs)


def _param_groups(region: MoERegion) -> list[tuple[torch.Tensor, ...]]:
    """The tensors of each parameter of the expert function."""
    tensors = [tensor_of(node) for node in region.params]
    return group_params(tensors, region.expert_fn.param_kinds, region.dims.num_experts)


def _region_bytes(
    region: MoERegion, bodies: ExpertBodies, output: torch.Tensor, exchange: ShardedExperts | None, keep: Keep
) -> RegionBytes:
    hidden = tensor_of(region.hidden)
    params = [tensor_of(node) for node in region.params]
    wanted = _wanted(region, bodies)
    trained = [param for param in params if param.requires_grad]
    low_precision = [param.dtype for param in trained if accumulator_dtype(param.dtype) is not param.dtype]
    shapes = _gradient_shapes(region) if low_precision else []
    elements = [math.prod(shape) for shape in shapes]
    weight = None if region.routing_weight is None else tensor_of(region.routing_weight)
    keeping = None if keep == "nothing" else bodies.keeping(keep, wanted)
    pairs = [] if keeping is None else [(keeping.forward, keeping.backward)]
    if keeping is None or exchange is not None:  # of ranks only some rounds are kept, the others run as without
        pairs.append((bodies.forward(), bodies.backward(wanted)))
    return RegionBytes(
        top_k=region.dims.top_k,
        num_experts=region.dims.num_experts,
        hidden=region.dims.hidden,
        out_width=bodies.out_width,
        item_bytes=hidden.dtype.itemsize,
        out_item_bytes=output.dtype.itemsize,
        contribution_item_bytes=bodies.contribution_dtype.itemsize,
        accumulator_item_bytes=accumulator_dtype(output.dtype).itemsize,
        weight_item_bytes=0 if weight is None else weight.dtype.itemsize,
        param_bytes=sum(_num_bytes(param) for param in trained),
        staging_bytes=4 * sum(elements),
        added_bytes=added_bytes(max(elements, default=0), 2, output.device.type),
        forward_peak=sympy.Max(*(forward.peak_bytes for forward, _ in pairs)),
        backward_peak=sympy.Max(*(backward.peak_bytes for _, backward in pairs)),
        takes_group=bodies.takes_group,
        flops_per_row=bodies.flops_per_row,
        forward_results=sympy.Max(*(forward.results_bytes for forward, _ in pairs)),
        backward_results=sympy.Max(*(backward.results_bytes for _, backward in pairs)),
        device_type=output.device.type,
        product_scratch=product_scratch(shapes, (low_precision or [hidden.dtype])[0], output.device.type),
        travel=None if exchange is None else exchange.travel,
    )


def _wanted(region: MoERegion, bodies: ExpertBodies) -> tuple[bool, ...]:
    """Gradients that a step may want: of rows, of weights if any, and of parameters that are trained."""
    trained_groups = (any(param.requires_grad for param in group) for group in _param_groups(region))
    return (True, bodies.has_weight, *trained_groups)


def _gradient_shapes(region: MoERegion) -> list[tuple[int, ...]]:
    """Of one expert, by parameter whose gradient is wanted."""
    return [
        tuple(map(int, group[0].shape[1 if kind == "expert" else 0 :]))
        for group, kind in zip(_param_groups(region), region.expert_fn.param_kinds, strict=True)
        if any(param.requires_grad for param in group)
    ]


def _num_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * tensor.dtype.itemsize


def _num_tokens(region: MoERegion) -> sympy.Expr:
    """T as an expression in the graph's symbols; numbers that are no sizes (a capacity factor) as they are now."""
    num_tokens: Any = _count_of_tokens(region)
    if not isinstance(num_tokens, torch.SymInt):
        return sympy.Integer(num_tokens)
    expr: sympy.Expr = num_tokens.node.expr
    values = hints_of_symbols(num_tokens)
    return expr.subs({symbol: values[symbol] for symbol in expr.free_symbols if not symbol.is_integer})


def _count_of_tokens(region: MoERegion) -> Any:
    """T, an int or a symbol: tokens of the routing, or slots where there is a layout instead of an index."""
    if region.expert_index is None:
        return math.prod(tensor_of(region.hidden).shape[:-1])
    return math.prod(tensor_of(region.expert_index).shape) // region.dims.top_k


def _num_tokens_hint(region: MoERegion) -> int | None:
    """T of the captured call: a number, or the hint of its symbol; None where it is data-dependent."""
    num_tokens: Any = _count_of_tokens(region)
    if isinstance(num_tokens, torch.SymInt):
        return None if num_tokens.node.hint is None else int(num_tokens.node.hint)
    return int(num_tokens)


def warn_without_regions(session: Session) -> None:
    """One clear warning when a compiled model holds no MoE region that was chunked: asked while the model runs.

    Models compiled by the backend's name with equal options share a session; only the running one's graphs count.
    """
    part = session.without_regions(running_model())
    if part is None:
        return
    report = part.report()
    has_head = any(head.status == "chunked" for head in report.heads)
    recording = hint_for_recording()
    if has_head and not report.regions and not recording:
        return
    found = "no experts to chunk, only the head" if has_head else "nothing to chunk"
    reasons = "; ".join(str(region) for region in report.regions) or "no routing decision was found"
    reasons += hint_for_cut_graphs() + recording
    warnings.warn(
        f"memfine_fx found {found} and compiled the model as plain {session.config.inner_backend}: {reasons}",
        stacklevel=2,
    )


def _dump(graph_module: fx.GraphModule, session: Session, state: str) -> None:
    folder = dump_folder()
    if folder is None:
        return
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"graph_{session.num_graphs:03d}_{state}.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(graph_module.print_readable(print_output=False))


def _tell(graph_module: fx.GraphModule, session: Session, record: CapturedGraph) -> None:
    """What was found in a graph, to the log and to TORCH_TRACE."""
    number = session.num_graphs
    lines = [f"graph {number}: {outcome_report(outcome)}" for outcome in record.outcomes]
    lines += [f"graph {number}: {head_report(head)}" for head in record.heads]
    for line in lines or [f"graph {number}: no routing decision"]:
        passes_log.info("%s", line)
    if record.outcomes or record.heads:
        trace_artifact("memfine_regions", "string", "\n".join(lines))
        trace_artifact("memfine_graph", "string", graph_module.print_readable(print_output=False))
