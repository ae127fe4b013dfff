"""Partition: what the backward of a graph with chunked regions finds saved, and what it computes again.

AOT autograd splits one joint graph into forward and backward with functorch's min-cut partitioner. This pass
stands in front of it and says, by tags, what it must not decide otherwise:

* the index arrays of a region are saved: routing is never redone, under nobody's checkpoint policy;
* a head's gradients, which its forward makes, are saved;
* the experts' output is never recomputed, because no backward of a region reads it: where something after
  a checkpointed layer reads it (the final norm), it is saved;
* in checkpointed layers that hold a region, the output of fused attention is saved: one [T,H] tensor buys back the
  recomputation whose cost grows with the square of the sequence. A policy of the user that demands recomputation
  (MUST_RECOMPUTE) is obeyed.

Without a budget and without checkpoints of the model's own, elementwise work is recomputed: see `costly_results`; and
regions save what a run has room for: see `fit.give_room`. With a budget of bytes it also decides how much of the rest
of the model (projections, attention, head) and of the regions is recomputed: see `fit`.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import memfine_fx.kernels.experts
import memfine_fx.runtime.head
import memfine_fx.runtime.op  # both register ops
from memfine_fx.compat import functorch, inductor
from memfine_fx.compat.functorch import frees_tangents, min_cut_partition, random_state_ops
from memfine_fx.compat.inductor import CustomPartitionerFn, get_hash_for_files
from memfine_fx.compat.operators import OpOverload
from memfine_fx.compat.tensors import tree_leaves
from memfine_fx.memory.graph_peak import read_graph
from memfine_fx.memory.liveness import CountedInputs
from memfine_fx.memory.step import GraphStep
from memfine_fx.memory.wrapper_code import READER_FILES
from memfine_fx.passes.ops import has_random_tag
from memfine_fx.passes.pass_list import run_pass
from memfine_fx.passes.read.normal_form import fake_mode_of
from memfine_fx.passes.step.costly_results import (
    costly_results,
    has_checkpoints,
    is_attention,
    must_save,
    recomputing_pointwise,
)
from memfine_fx.passes.step.fit import Uniform, fit, give_room, uniform
from memfine_fx.passes.step.fusible_gradients import fusible_weight_gradients
from memfine_fx.plan.budget import GraphBudget
from memfine_fx.plan.cost import DeviceRates

__all__ = ["StepPartitioner", "counted_inputs", "give_values", "partitioned_as_is"]

_FILES = (
    *sorted(str(path) for path in Path(__file__).parent.glob("*.py")),
    *READER_FILES,
    functorch.__file__,
    inductor.__file__,
    memfine_fx.runtime.head.__file__,
    memfine_fx.runtime.loop.__file__,
    memfine_fx.kernels.experts.__file__,
    memfine_fx.runtime.op.__file__,
    memfine_fx.runtime.routing_hooks.__file__,
)
"""What decides a partition, its record, and the layouts of our operators' results: cached graphs are those of these."""
_KNOWN_NAMESPACES = ("aten", "prims", "prim", "memfine")
_NEVER_RECOMPUTED = (
    torch.ops.memfine.route.default,
    torch.ops.memfine.route_on_device.default,
    torch.ops.memfine.route_shared.default,
    torch.ops.memfine.replayed_ids.default,
    torch.ops.memfine.experts.default,
    torch.ops.memfine.head_loss.default,
)


class StepPartitioner(CustomPartitionerFn):
    """The partitioner of graphs that hold chunked regions.

    Args:
        is_fused: whether the compiler behind fuses elementwise chains, for the estimates.
        budget: what the step may use; None without a budget.
        rates: of the device, where regions may save what a run has room for (`fit.give_room`); None where they may not.
        kind: this partition, whatever fits; None where the budget, or its absence, decides.
        report: called with the partition that was chosen.
        key: what `fits` depends on, as text: part of the identity of compiled code.
    """

    def __init__(
        self,
        *,
        is_fused: bool = True,
        budget: GraphBudget | None = None,
        rates: Callable[[], DeviceRates] | None = None,
        kind: Uniform | None = None,
        report: Callable[[GraphStep], None] | None = None,
        key: str = "",
    ) -> None:
        self._is_fused = is_fused
        self._budget = budget
        self._rates = rates
        self._kind = kind
        self._report = report
        self._key = key

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        _save_what_backward_must_not_repeat(gm, kwargs.get("static_lifetime_input_indices") or ())
        num_outputs = kwargs["num_fwd_outputs"]
        fusible_gradients: Mapping[tuple[str, int], int] = {}
        fusible_gradients = run_pass(
            "fuse_gradients", gm, lambda: fusible_weight_gradients(gm.graph, num_outputs), fusible_gradients
        )
        partition = functools.partial(_partition, joint_inputs, kwargs, self._is_fused)
        chosen = run_pass("partition", gm, lambda: self._chosen(gm, num_outputs, partition), None)
        if chosen is None:
            chosen = replace(partition(gm), is_least=True)
        chosen = replace(chosen, fusible_gradients=fusible_gradients)
        if self._report is not None:
            self._report(chosen)
        forward, backward = chosen.modules
        return forward, backward

    def _chosen(self, gm: fx.GraphModule, num_outputs: int, partition: Callable[..., GraphStep]) -> GraphStep:
        if self._kind is not None:
            return uniform(gm, num_outputs, partition, self._kind)
        if self._budget is not None and (self._budget.is_asked or not has_checkpoints(gm.graph)):
            return fit(gm, num_outputs, partition, self._budget)
        results = costly_results(gm.graph, num_outputs) if self._is_fused else []
        rates, optional = self._rates, dict[str, float]()
        if rates is not None:
            optional = run_pass("save_rows", gm, lambda: give_room(gm.graph, rates), optional)
        recomputes = self._is_fused and not has_checkpoints(gm.graph)  # else the model's own checkpoints decide
        chosen = recomputing_pointwise(gm, results, partition) if recomputes else partition(gm)
        # Whatever the budget, nothing else is made without one that is asked for.
        return replace(chosen, optional=optional, is_least=True)

    def uuid(self) -> Any:
        return get_hash_for_files(_FILES, self._key)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepPartitioner:
        """Inductor copies and pickles its options; only what identifies the partitioner goes along."""
        return StepPartitioner(is_fused=self._is_fused, key=self._key)


def partitioned_as_is(gm: fx.GraphModule, joint_inputs: Sequence[object], options: dict[str, Any]) -> GraphStep:
    """Return functorch's partition of a joint graph without regions; products of matrices are marks in its record."""
    return _partition(joint_inputs, options, True, gm, marks=True)


def _partition(
    joint_inputs: Sequence[object],
    options: dict[str, Any],
    is_fused: bool,
    gm: fx.GraphModule,
    decision: str = "",
    *,
    marks: bool = False,
) -> GraphStep:
    forward, backward = min_cut_partition(gm, joint_inputs, **options)
    for module in (forward, backward):
        give_values(module.graph)
    return GraphStep(
        forward=read_graph(forward.graph, is_fused=is_fused, marks=marks),
        backward=read_graph(backward.graph, is_fused=is_fused, inputs=counted_inputs(backward.graph), marks=marks),
        decision=decision,
        modules=(forward, backward),
    )


def give_values(graph: fx.Graph) -> None:
    """Results of operations that save or set a random state, which the partitioner leaves without values."""
    with_state = random_state_ops()
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in with_state or "val" in node.meta:
            continue
        place = next(place for place, arg in enumerate(node.args) if isinstance(arg, OpOverload))
        # Where generators are inputs of the graph the state comes by name, which the operator itself does not know.
        known_kwargs = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
        args, kwargs = fx.map_arg((node.args[place + 1 :], known_kwargs), lambda source: source.meta["val"])
        fake_mode = fake_mode_of(tree_leaves((args, kwargs)))
        with fake_mode or contextlib.nullcontext(), torch.no_grad():
            result = node.args[place](*args, **kwargs)
        states = [user.meta.get("val") for user in node.users if user.args[1:] == (0,)]
        node.meta["val"] = (*states[:1], result) if node.target is with_state[0] else result


def counted_inputs(backward: fx.Graph) -> CountedInputs:
    """Inputs of a backward graph that are not the model's own: saved tensors go with their last reader, and tangents
    do too where autograd lets go of them."""
    names = [str(node.target) for node in backward.nodes if node.op == "placeholder"]
    counted = [name for name in names if not name.startswith("primals_")]
    held_tangents = [] if frees_tangents() else [name for name in counted if name.startswith("tangents_")]
    return CountedInputs(tuple(name for name in counted if name not in held_tangents), tuple(held_tangents))


def _save_what_backward_must_not_repeat(gm: fx.GraphModule, parameters: Collection[int]) -> None:
    """Tag routing, experts, attention of a checkpoint that holds experts, random numbers, and unknown operators.

    The last two outside of checkpoints: inside, functorch draws the same numbers again, from a saved random state.
    Elsewhere it knows three random operators and would call any other once more, for other numbers. Operators of other
    libraries and higher-order ones may do anything, and cost anything. Those that read parameters alone are left to the
    partitioner all the same: they dequantize weights, which nobody would hold from forward to backward.

    Args:
        parameters: places of the graph's inputs that are parameters or buffers.
    """
    with_regions = {
        node.meta.get("ac_graph_id") for node in gm.graph.nodes if node.target is torch.ops.memfine.experts.default
    }
    inputs = gm.graph.find_nodes(op="placeholder")
    fixed = {node for place, node in enumerate(inputs) if place in parameters}
    for node in gm.graph.nodes:
        policy = node.meta.get("recompute")
        is_asked = policy is CheckpointPolicy.PREFER_RECOMPUTE
        is_dear = is_asked and node.meta.get("ac_graph_id") in with_regions and is_attention(node)
        is_random = _draws_numbers(node)
        if node.op == "get_attr" or (node.all_input_nodes and not is_random and fixed.issuperset(node.all_input_nodes)):
            fixed.add(node)
        is_to_save = is_random or (_is_unknown(node) and node not in fixed)
        if node.target in _NEVER_RECOMPUTED or is_dear or (policy is None and is_to_save):
            must_save(node)


def _is_unknown(node: fx.Node) -> bool:
    """Whether a call is neither of torch's own operators, nor of ours, nor of a Python function on sizes."""
    if node.op != "call_function" or isinstance(node.target, (types.FunctionType, types.BuiltinFunctionType)):
        return False
    return not isinstance(node.target, OpOverload) or node.target.namespace not in _KNOWN_NAMESPACES


def _draws_numbers(node: fx.Node) -> bool:
    """Whether an operator, or a graph that a higher-order operator calls, draws random numbers."""
    if has_random_tag(node.target):
        return True
    names = [source.target for source in node.all_input_nodes if source.op == "get_attr"]
    called = [getattr(node.graph.owning_module, str(name), None) for name in names]
    return any(
        _draws_numbers(inner) for body in called if isinstance(body, fx.GraphModule) for inner in body.graph.nodes
    )
