"""Records: what each stage of the pipeline learned, one frozen record per concept.

Of regions here, of heads in `heads`, of what verifying gave in `verification`. Every room may hold records and hand
them on; they hold nodes, sizes and text, and know no room themselves. A stage that learns more makes a new record, so
what an earlier one said stays true.

Dimension legend, used everywhere: T tokens, H hidden, E experts, K top-k, F expert width, N = T*K routed
rows, R rows in a chunk.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from memfine_fx.errors import Reason

__all__ = [
    "ChunkPlan",
    "Cut",
    "ExpertFunction",
    "MoERegion",
    "Modes",
    "ParamKind",
    "Refusal",
    "RegionDims",
    "SavePolicy",
    "SavingOp",
    "Where",
    "short_place",
]

ParamKind = Literal["expert", "each", "shared"]
"""How an expert finds its parameter: its entry of a table [E,...], one of E tensors, or a tensor all share."""

SavePolicy = Literal["nothing", "received", "projections", "operands"]
"""What a region's forward saves of its routed rows for backward: nothing, so that all is recomputed; the results of the
projections that backward would recompute; or, with them, whatever its matmuls read, so that nothing is written twice.
Where experts live on several ranks, the rows that came from them: "received" alone, or beside the others."""


@dataclass(frozen=True)
class SavingOp:
    """A region's backward op that reads saved tensors.

    Args:
        region_id: key of the region.
        policy: how much.
        wanted: gradients, as `runtime.compiled_expert.CompiledExpert.saving` is asked for them.
    """

    region_id: str
    policy: SavePolicy
    wanted: tuple[bool, ...]


@dataclass(frozen=True)
class Where:
    """Provenance of a node: for reports, never for decisions.

    Args:
        module: dotted module path, "" when the trace lost it.
        source: "file:line", "" when the trace lost it.
    """

    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        place = f"({short_place(self.source)})" if self.source else ""
        return " ".join(part for part in (self.module, place) if part) or "?"


def short_place(place: str) -> str:
    """Return "file:line" with the file relative to the current folder or to where Python found its package."""
    folders = sorted((os.path.abspath(folder) for folder in ("", *sys.path)), key=len, reverse=True)
    inside = (folder for folder in folders if place.startswith(os.path.join(folder, "")))
    folder = next(inside, "")
    return place[len(os.path.join(folder, "")) :] if folder else place


@dataclass(frozen=True)
class Modes:
    """State beyond what was ambient when the graph was captured.

    Args:
        disables_grad: whether the graph has switched gradients off.
        autocast: arguments of the autocast contexts entered and not left, outermost first.
    """

    disables_grad: bool = False
    autocast: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True)
class Cut:
    """The place of a region in its graph: its index, its exit and everything between.

    Args:
        expert_index: integer node of the tokens' experts, stays outside: [T,K], or [B,S,K] where tokens were
            never flattened; without K where a token has one expert. None where rows stand in experts' slots.
        exit: [T,H] (or [B,S,H]) float node, the combined output, the last node inside.
        nodes: the nodes inside, in graph order, `exit` last.
        inputs: the nodes outside that the inside reads.
        num_token_dims: how many leading dimensions of the index are tokens.
    """

    expert_index: fx.Node | None
    exit: fx.Node
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    num_token_dims: int = 1


@dataclass(frozen=True)
class Refusal:
    """A region (or a seed without one) that stays as it was, and why.

    Args:
        where: the region's module and line.
        node: the graph node where the proof stopped.
        obstacle: that node's "file:line" where it is another one than the region's.
    """

    where: Where
    reason: Reason
    details: str
    node: str | None = None
    obstacle: str = ""


@dataclass(frozen=True)
class RegionDims:
    """Sizes of a region. T is text because it may be symbolic; F is None where no projection shows it."""

    tokens: str
    hidden: int
    num_experts: int
    top_k: int
    expert_width: int | None


@dataclass(frozen=True)
class ExpertFunction:
    """One expert on its rows, proved row-wise.

    Args:
        graph_module: (rows [R,H], weight [R] if `has_weight`, one tensor per parameter) -> [R,H_out];
            an "expert" parameter comes without its leading E, an "each" one as the expert's own tensor, a
            "shared" one whole.
        has_weight: whether the routing weight is an argument.
        param_kinds: kind of each parameter, in argument order.
    """

    graph_module: fx.GraphModule
    has_weight: bool
    param_kinds: tuple[ParamKind, ...]


OutOfRange = Literal["error", "larger dropped", "dropped", "from the end"]
"""What assignments do whose expert id is not in [0, E): raise IndexError; those of E and more are skipped and negative
ones raise (offsets of grouped matmuls); all are skipped (masks); negative ones count from the last expert (the index of
a table) and others raise."""


@dataclass(frozen=True)
class MoERegion:
    """The record at the centre: every spelling of MoE is raised to this.

    Args:
        cut: where it was in the graph.
        family: the spelling that matched.
        hidden: [T,H] node, input of the experts.
        expert_index: [T,K] integer node.
        routing_weight: [T,K] float node, or None when the experts' outputs are summed unweighted.
        params: the parameters of `expert_fn` in order, flat: one node for the "expert" kind (a table [E,...])
            and the "shared" kind, E nodes for the "each" kind (see `runtime.routing.group_params`).
        expert_fn: one expert on its rows.
        dims: sizes.
        first_matmul: the experts' first in graph order, which the report names; without one, the exit of the cut.
        where: its provenance.
        out_of_range: what this spelling does with assignments whose expert id is not in [0, E), see `OutOfRange`.
        base: [T,H] node that the combined output is added to, or None.
        gathers_weight: whether `routing_weight` is [T,E], to be gathered by the index.
        weight_columns: where it is not one tensor but every expert's own column, [T] or [T,1]: those, in order.
        slot_dim: the dimension of experts in `hidden` and in the output where rows stand in their experts' slots; then
            there is neither index nor weight, and T is the number of slots. Else None.
        expert_dims: the dimension of experts in each of `params`; () once it is the first in all (`read.tables`).
        makes_tables: whether tables are computed, each expert's when it runs.
        why_expanded: why tables that are computed (base weights and an adapter's product) are computed whole, ahead of
            the experts; "" where each expert's is made when it runs, or where none is computed.
        stops: nodes of the cut that let no gradient through, as `expert_fn` does not where they stood.
        seed: the routing decision that it was read from.
    """

    cut: Cut
    family: str
    hidden: fx.Node
    expert_index: fx.Node | None
    routing_weight: fx.Node | None
    params: tuple[fx.Node, ...]
    expert_fn: ExpertFunction
    dims: RegionDims
    first_matmul: fx.Node
    where: Where
    out_of_range: OutOfRange
    base: fx.Node | None = None
    gathers_weight: bool = False
    weight_columns: tuple[fx.Node, ...] = ()
    slot_dim: int | None = None
    expert_dims: tuple[int, ...] = ()
    makes_tables: bool = False
    why_expanded: str = ""
    stops: tuple[fx.Node, ...] = ()
    seed: fx.Node | None = None


@dataclass(frozen=True)
class ChunkPlan:
    """How one region runs in one step.

    Args:
        axis: "rows" or "tokens".
        rows_per_chunk: R, the most routed rows in one chunk.
        tokens_per_chunk: tokens in a slice; 0 on axis "rows", and where ranks agree upon slices in each step.
        predicted_bytes: peak of the region's own working set in backward: chunk temporaries, output and
            accumulators, index arrays and the expert weight gradients.
        reason: why this and not another.
        policy: what forward saves for backward: what the compiled graph has room for, or nothing.
        num_saved_rows: of how many routed rows, the first in expert order: 0 where it saves nothing, at most N.
        rows_per_round: the most rows that come to this rank at once, where experts live on several ranks and the axis
            is "rows"; else 0.
    """

    axis: Literal["rows", "tokens"]
    rows_per_chunk: int
    tokens_per_chunk: int
    predicted_bytes: int
    reason: str
    policy: SavePolicy = "nothing"
    rows_per_round: int = 0
    num_saved_rows: int = 0

    @property
    def size_in_words(self) -> str:
        return f"{self.rows_per_chunk} rows"

    @property
    def rows_at_once(self) -> int:
        """Rows that come to this rank at once."""
        return self.rows_per_round or self.rows_per_chunk
