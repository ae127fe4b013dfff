"""Verify a head: its original subgraph against the chunked op, on the inputs of one real run.

The reference is the original in fp64, as for regions (`region`); the control is an op whose logits are falsified. All
logits exist while this runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from memfine_fx.passes.dataflow import node_value
from memfine_fx.passes.lower.head import lower_head
from memfine_fx.passes.modes import enter_autocast
from memfine_fx.passes.verify.outline import outline
from memfine_fx.passes.verify.real_run import Recorded
from memfine_fx.passes.verify.region import (
    SMALL_CHUNKS,
    TOLERANCES,
    Tensors,
    errors_of,
    failure_of,
    run_exact,
    run_step,
    worst_of,
)
from memfine_fx.records import Cut, Modes
from memfine_fx.records.heads import HeadRegion
from memfine_fx.records.verification import Check, RegionVerification
from memfine_fx.runtime.live import LiveHead, register_head, unregister_head

__all__ = ["cut_of_head", "verify_head"]


def cut_of_head(head: HeadRegion) -> Cut:
    """Return the cut that describes where a head is in its graph, as for regions."""
    inside = set(head.nodes)
    inputs = dict.fromkeys(source for node in head.nodes for source in node.all_input_nodes if source not in inside)
    return Cut(None, head.exit, head.nodes, tuple(inputs))


def verify_head(head: HeadRegion, live: LiveHead, recorded: Recorded, modes: Modes) -> RegionVerification:
    """Compare the two forms of a head.

    Args:
        head: found, not yet lowered.
        live: its registered counterpart; not changed.
        recorded: the values of `cut_of_head` in one real run.
        modes: autocast state at its exit.
    """
    forms = _Forms.of(head, live, modes)
    with torch.inference_mode(False), torch.no_grad(), enter_autocast(modes):
        outlined = {"output": forms.original(*recorded.values)}
    exact = run_exact(forms.original, recorded.values, forms)
    with enter_autocast(modes):
        own = errors_of(run_step(forms.original, recorded.values, forms), exact)
    place = list(cut_of_head(head).inputs).index(head.labels)
    num_tokens = int(recorded.values[place].numel())
    planned = live.plan_for(num_tokens).tokens_per_chunk
    small = max(1, num_tokens // SMALL_CHUNKS)
    checks = []
    for rows in dict.fromkeys((planned, small)):
        errors = errors_of(forms.run_chunked(recorded.values, rows), exact)
        worst = worst_of(errors, own)
        checks.append(Check("captured", rows, worst, errors[worst], own.get(worst, float("inf"))))
    falsified = errors_of(forms.run_chunked(recorded.values, small, falsified=True), exact)
    result = RegionVerification(
        head.where,
        "head",
        "float64",
        TOLERANCES.get(head.logits_dtype, 1e-5),
        tuple(checks),
        errors_of(outlined, {"output": recorded.output})["output"],
        max(falsified.values()) if num_tokens else None,
    )
    return replace(result, failure=failure_of(result))


@dataclass(frozen=True)
class _Forms:
    """A head outlined, and the same outline lowered; see `region.Forms`."""

    original: fx.GraphModule
    chunked: fx.GraphModule
    live: LiveHead
    modes: Modes
    placeholders: tuple[str, ...]
    leaves: tuple[int, ...]
    wants_grad: frozenset[str]

    @staticmethod
    def of(head: HeadRegion, live: LiveHead, modes: Modes) -> _Forms:
        cut = cut_of_head(head)
        original, _ = outline(cut)
        chunked, env = outline(cut)
        for node, copied in env.items():
            copied.meta.update(node.meta)
        region_id = f"{live.region_id}/verify"
        stand_in = replace(live, region_id=region_id)
        register_head(stand_in)
        try:
            lower_head(chunked, _translated(head, env), region_id)
        finally:
            unregister_head(region_id)
        names = tuple(env[node].name for node in cut.inputs)
        trained = (node for node in cut.inputs if _is_trained(node_value(node)))
        wanted = frozenset(env[node].name for node in trained)
        return _Forms(original, chunked, live, modes, names, tuple(range(len(names))), wanted)

    def run_chunked(self, values: Sequence[Any], rows: int, *, falsified: bool = False) -> Tensors:
        region_id, loss = f"{self.live.region_id}/verify", self.live.loss
        if falsified:
            loss = replace(loss, scale=loss.scale * 1.25)
        plan = replace(self.live.plan_for(1), tokens_per_chunk=rows)
        live = replace(self.live, region_id=region_id, loss=loss, choose_plan=lambda _: plan, plan=None, _plans={})
        register_head(live)
        try:
            with enter_autocast(self.modes):
                return run_step(self.chunked, values, self)
        finally:
            unregister_head(region_id)


def _translated(head: HeadRegion, env: dict[fx.Node, Any]) -> HeadRegion:
    """The head as it stands in the outline, which returns the loss alone."""
    moves = tuple(replace(move, argument=fx.map_arg(move.argument, env.__getitem__)) for move in head.moves)
    return replace(
        head,
        exit=env[head.exit],
        hidden=env[head.hidden],
        weight=env[head.weight],
        bias=None if head.bias is None else env[head.bias],
        labels=env[head.labels],
        divisor=None if head.divisor is None else env[head.divisor],
        moves=moves,
        nodes=tuple(env[node] for node in head.nodes),
        results=(),
    )


def _is_trained(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad
