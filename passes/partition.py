"""Partition: what the backward of a graph with chunked regions finds saved, and what it computes again.

AOT autograd splits one joint graph into forward and backward with functorch's min-cut partitioner. This pass
stands in front of it and says, by tags, what it must not decide otherwise:

* the index arrays of a region are saved: routing is never redone, under nobody's checkpoint policy;
* the experts' output is never computed again, because no backward of a region reads it: where something after
  a checkpointed layer reads it (the final norm), it is saved;
* in checkpointed layers that hold a region, the output of fused attention is saved (`Config.saves_attention`):
  one [T,H] tensor buys back the recomputation whose cost grows with the square of the sequence. A policy of
  the user that demands recomputation (MUST_RECOMPUTE) is obeyed.

With a budget of bytes it also decides how much of the dense part (projections, attention, head) is computed
again: see `_fit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

import memfine_fx.runtime.op  # noqa: F401  # registers the ops
from memfine_fx.memory.graph_peak import read_graph
from memfine_fx.memory.liveness import GraphMemory
from memfine_fx.passes.dense import DenseResult, dense_results

__all__ = ["Partition", "StepPartitioner"]

_NEVER_RECOMPUTED = (torch.ops.memfine.route.default, torch.ops.memfine.experts.default)
_FREE_TO_RECOMPUTE = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
    "ban_recompute_not_in_allowlist": False,
}


@dataclass(frozen=True)
class Partition:
    """A forward and a backward graph, what each would hold, and what was decided."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_memory: GraphMemory
    backward_memory: GraphMemory
    decision: str = ""


Fits = Callable[[GraphMemory, GraphMemory], bool]


class StepPartitioner(CustomPartitionerFn):
    """The partitioner of graphs that hold chunked regions.

    Args:
        saves_attention: keep the output of fused attention in checkpointed layers with a region.
        is_fused: whether the compiler behind fuses elementwise chains, for the estimates.
        fits: whether a step with this forward and backward stays within the budget; None without one.
        report: told the partition that was chosen.
        key: what `fits` depends on, as text: part of the identity of compiled code.
    """

    def __init__(
        self,
        *,
        saves_attention: bool,
        is_fused: bool = True,
        fits: Fits | None = None,
        report: Callable[[Partition], None] | None = None,
        key: str = "",
    ) -> None:
        self._saves_attention = saves_attention
        self._is_fused = is_fused
        self._fits = fits
        self._report = report
        self._key = key

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        _save_what_is_dear(gm.graph, self._saves_attention)
        partition = functools.partial(_partition, joint_inputs, kwargs, self._is_fused)
        chosen = partition(gm) if self._fits is None else _fit(gm, kwargs["num_fwd_outputs"], partition, self._fits)
        if self._report is not None:
            self._report(chosen)
        return chosen.forward, chosen.backward

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,), f"{self._saves_attention} {self._key}")

    def __deepcopy__(self, memo: dict[int, Any]) -> StepPartitioner:
        """Inductor copies and pickles its options; only what identifies the partitioner goes along."""
        return StepPartitioner(saves_attention=self._saves_attention, is_fused=self._is_fused, key=self._key)


def _fit(gm: fx.GraphModule, num_forward_outputs: int, partition: Callable[..., Partition], fits: Fits) -> Partition:
    """The partition that computes least again and still fits.

    1. Checkpoints of the model are a wish to save memory; the budget says how much is wanted, so their tags go
       (except where a policy of the user demands something) and the plain partition is tried.
    2. If it does not fit, elementwise work is recomputed freely, and dense results are kept from the front of a
       list: those of the last layer first, whose backward begins at once, then by FLOPs bought per byte kept.
       The longest front that fits is found by bisection.
    3. If none fits, nothing dense is kept; rows per chunk have to do the rest.
    """
    _drop_wishes(gm.graph)
    plain = partition(_copied(gm))
    if fits(plain.forward_memory, plain.backward_memory):
        return partition(gm, decision="nothing dense is computed again")
    results = dense_results(gm.graph, num_forward_outputs)

    def keeping(count: int, module: fx.GraphModule) -> Partition:
        _recompute(module.graph, results[count:])
        decision = f"{count} of {len(results)} dense results are kept, the others computed again in backward"
        with functorch_config.patch(_FREE_TO_RECOMPUTE):
            return partition(module, decision=decision)

    def fits_with(count: int) -> bool:
        trial = keeping(count, _copied(gm))
        return fits(trial.forward_memory, trial.backward_memory)

    low, high = 0, len(results) + 1  # `low` fits or is all there is, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits_with(middle) else (low, middle)
    return keeping(low, gm)


def _partition(
    joint_inputs: Sequence[object],
    options: dict[str, Any],
    is_fused: bool,
    gm: fx.GraphModule,
    decision: str = "",
) -> Partition:
    forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
    return Partition(
        forward,
        backward,
        read_graph(forward.graph, is_fused=is_fused),
        read_graph(backward.graph, is_fused=is_fused, frees_inputs=freed_inputs(backward.graph)),
        decision,
    )


def freed_inputs(backward: fx.Graph) -> list[str]:
    """Inputs of a backward graph that nobody else holds: saved tensors and tangents, not the model's own inputs."""
    names = [str(node.target) for node in backward.nodes if node.op == "placeholder"]
    return [name for name in names if not name.startswith("primals_")]


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph in nodes of its own, under the same names."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(gm, graph)


def _drop_wishes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.meta.get("recompute") in (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.PREFER_SAVE):
            del node.meta["recompute"]


def _recompute(graph: fx.Graph, results: Sequence[DenseResult]) -> None:
    wanted = {result.name for result in results}
    for node in graph.nodes:
        if node.name in wanted:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _save_what_is_dear(graph: fx.Graph, saves_attention: bool) -> None:
    with_regions = {
        node.meta.get("ac_graph_id") for node in graph.nodes if node.target is torch.ops.memfine.experts.default
    }
    for node in graph.nodes:
        is_wanted = saves_attention and node.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE
        is_attention = is_wanted and node.meta.get("ac_graph_id") in with_regions and _is_attention(node)
        if node.target in _NEVER_RECOMPUTED or is_attention:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            for user in node.users:
                if _is_getitem(user):
                    user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _is_attention(node: fx.Node) -> bool:
    """Fused attention: quadratic work in the sequence behind an output of one tensor's size."""
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return name.startswith("aten::_scaled_dot_product_") and not name.endswith("_backward")
