"""Live regions: what the op pair looks up by the string key baked into the compiled graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch

from memfine_fx.records import ChunkPlan, OutOfRange
from memfine_fx.runtime.compiled_expert import CompiledExpert, SavedTensor
from memfine_fx.runtime.live import Live, Registry
from memfine_fx.runtime.loads import LoadHistory, RoundStats
from memfine_fx.runtime.mact import ChunkTuner
from memfine_fx.runtime.routing_replay import Key, key_of

if TYPE_CHECKING:
    from memfine_fx.runtime.loop import SavedRows
    from memfine_fx.runtime.routing import Routed

__all__ = ["ExpertKernels", "LiveRegion", "lookup", "register", "unregister"]


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


class ExpertKernels(Protocol):
    """GPU kernels that run the routed experts of a layer in place of the loop over chunks; see `memfine_fx.kernels`."""

    def can_run(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether they run on tokens [T,H] and parameters of these devices, layouts and dtypes."""
        ...

    def can_save(self, tensors: Sequence[SavedTensor], dtype: torch.dtype) -> bool:
        """Return whether they can save their products where compiled functions on rows of a dtype save `tensors`."""
        ...

    def forward(self, region: LiveRegion, routed: Routed, plan: ChunkPlan, saved: SavedRows | None) -> torch.Tensor:
        """Return the combined outputs [T,H_out] in the region's dtype; write products into what is saved.

        Raises:
            ChunkOutOfMemory: memory ran out with one row at a time.
        """
        ...

    def backward(
        self,
        grad: torch.Tensor,
        region: LiveRegion,
        routed: Routed,
        plan: ChunkPlan,
        wanted: Sequence[bool],
        saved: SavedRows | None,
        onto: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """Return the gradients of what is wanted, in the order hidden, weight, parameters.

        Args:
            grad: of the combined outputs [T,H_out].
            onto: for each parameter an existing gradient that is added to in place and returned, or None.

        Raises:
            ChunkOutOfMemory: memory ran out with one row at a time, or after something was added to.
        """
        ...


class RowExchange(Protocol):
    """Experts of one region that live on several ranks (`memfine_fx.expert_parallel`)."""

    @property
    def table_shape(self) -> tuple[int, int]:
        """Return the shape of the gathered counts that stand in the place of offsets."""
        ...

    def share_counts(
        self, region: LiveRegion, order: torch.Tensor, offsets: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Every rank's counts, and what goes with them; a collective call.

        Raises:
            IndexError: see `LiveRegion.check_ids`; the other ranks raise an error, too.
        """
        ...

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a rank receives."""
        ...

    def room(self, hidden: torch.Tensor, weight: torch.Tensor | None, num_rows: int) -> list[torch.Tensor]:
        """Return tensors for `num_rows` rows that come and are saved for backward."""
        ...

    def forward(self, region: LiveRegion, routed: Routed, saved: SavedRows | None) -> torch.Tensor:
        """[T,H_out], of this rank's tokens; what was gathered stands in the place of the offsets.

        Args:
            saved: tensors of `room`, and what the compiled functions save, if anything is saved.
        """
        ...

    def backward(
        self,
        region: LiveRegion,
        grad: torch.Tensor,
        routed: Routed,
        wanted: tuple[bool, bool],
        wanted_params: Sequence[Sequence[bool]],
        saved: SavedRows | None,
    ) -> list[torch.Tensor]:
        """Gradients of what is wanted, in the order hidden, weight, parameters."""
        ...


@dataclass(kw_only=True)
class LiveRegion(Live[ChunkPlan]):
    """One lowered region.

    Args:
        compiled_expert: what its chunks call.
        num_experts, top_k: E, K.
        out_of_range: what assignments with an expert id outside [0, E) do; negative ones that count from the end were
            made positive before they come here.
        tuner: how many chunks a step's rows get under the plan.
        warn: called with a message when an allocation failed and the plan was lowered.
        exchange: where the experts are sharded over ranks.
        kernels: the GPU kernels that run it; None where its compiled functions do. Copies of it in other dtypes, as
            checks make them, may run in compiled functions all the same.
        runs_in: "GPU kernels", or on a GPU "compiled functions" and why.
        loads: how uneven its routing was.
        key_group: the place of a parameter of the expert function that is an input of the graph, or a view of one: it
            tells layers apart that share a graph. None where there is none.
        takes_slots: whether rows stand in experts' slots, so that tokens have no ids.
        leaves_idle: whether parameters of experts without rows get no gradient, see `Config.idle_gradients`.
    """

    compiled_expert: CompiledExpert
    num_experts: int
    top_k: int
    out_of_range: OutOfRange
    tuner: ChunkTuner = field(default_factory=ChunkTuner)
    warn: Callable[[str], None] = _warn
    exchange: RowExchange | None = None
    kernels: ExpertKernels | None = None
    runs_in: str = ""
    loads: LoadHistory = field(default_factory=LoadHistory)
    key_group: int | None = None
    takes_slots: bool = False
    leaves_idle: bool = False
    largest_chunk: int = 0  # rows, in the latest step
    stages_gradients: bool = False  # whether a gradient was added to more than once in it
    num_added: int = 0  # gradients that it added to where they were, in the latest backward
    rounds: RoundStats | None = None  # of the latest step, where the experts are sharded
    _limits: dict[int, int] = field(default_factory=dict)  # T -> rows that an allocation failure left

    def kernels_for(self, routed: Routed, saved: SavedRows | None) -> ExpertKernels | None:
        """Return the kernels that run a step on these rows, None where compiled functions do.

        NOTE: forward and backward must agree, so that nothing here depends on what may change between them.
        """
        if self.kernels is None:
            return None
        can_save = saved is None or self.kernels.can_save(saved.functions.saved, routed.hidden.dtype)
        tensors = [routed.hidden, *(tensor for group in routed.params for tensor in group)]
        return self.kernels if can_save and self.kernels.can_run(tensors) else None

    def idle_params(self, offsets: torch.Tensor) -> list[int]:
        """Return the places among the flat parameters of those that belong to one expert each, which has no rows.

        Args:
            offsets: [E+1] from `runtime.routing.sort_assignments`.
        """
        if not self.leaves_idle or self.exchange is not None or "each" not in self.compiled_expert.param_kinds:
            return []
        idle = offsets.diff().eq(0).tolist()
        places, first = [], 0
        for kind in self.compiled_expert.param_kinds:
            if kind == "each":
                places += [first + expert for expert, is_idle in enumerate(idle) if is_idle]
            first += self.num_experts if kind == "each" else 1
        return places

    def key(self, params: Sequence[Sequence[torch.Tensor]]) -> Key:
        """Return what a layer is known by in a routing that is recorded or replayed.

        Args:
            params: by parameter of the expert function, see `runtime.routing.Routed`.
        """
        return key_of(self.region_id, None if self.key_group is None else params[self.key_group][0])

    @property
    def decides_saved_rows(self) -> bool:
        """Whether each run decides how many rows are saved; else all rows are where a graph has room.

        NOTE: ranks would have to decide alike.
        """
        return self.exchange is None

    def check_ids(self, order: torch.Tensor, offsets: torch.Tensor) -> None:
        """Raise IndexError where an assignment names no expert and may not be dropped.

        Args:
            order, offsets: from `runtime.routing.sort_assignments`.
        """
        has_smaller, has_larger = bool(offsets[0] != 0), bool(offsets[-1] != order.numel())
        if (has_smaller and self.out_of_range != "dropped") or (has_larger and not self.drops_larger):
            raise IndexError(f"expert ids outside [0, {self.num_experts}) reach a table of {self.num_experts} experts")

    @property
    def drops_larger(self) -> bool:
        """Return whether assignments with ids of E and more are skipped."""
        return self.out_of_range in ("dropped", "larger dropped")

    def _choose(self, num_tokens: int) -> ChunkPlan:
        limits = [rows for tokens, rows in self._limits.items() if tokens <= num_tokens]
        return _at_most(self.choose_plan(num_tokens), min(limits, default=None))

    def use_plan(self, num_tokens: int, plan: ChunkPlan) -> None:
        """Replace the plan for T tokens from the next step on."""
        self._plans[num_tokens, self.context()] = plan

    def forget_steps(self) -> None:
        """Forget plans and figures of steps that were no user's."""
        self.forget_plans()
        self.plan, self.num_tokens, self.num_chunks, self.num_steps = None, 0, 0, 0
        self.loads = LoadHistory()

    def lower(self, num_tokens: int, rows: int) -> None:
        """After an allocation failure with T tokens: no chunk above `rows` for T tokens or more."""
        before = self.plan_for(num_tokens).rows_per_chunk
        self._limits[num_tokens] = min(rows, self._limits.get(num_tokens, rows))
        for key, plan in self._plans.items():
            if key[0] >= num_tokens:
                self._plans[key] = _at_most(plan, rows)
        self.plan = self.plan_for(num_tokens)
        self.warn(
            f"an allocation failed in a chunk of experts, which was then run in parts; the step's result is the same. "
            f"Rows per chunk go from {before} to {min(before, rows)} for {num_tokens} tokens and more, which takes "
            f"less memory and more time: set a memory_budget below what this device has to spare"
        )


def _at_most(plan: ChunkPlan, rows: int | None) -> ChunkPlan:
    """The plan with chunks, and rounds where there are any, of at most `rows`."""
    if rows is None or plan.rows_per_chunk <= rows:
        return plan
    reason = f"lowered from {plan.rows_per_chunk} rows after an allocation failure ({plan.reason})"
    return replace(
        plan,
        rows_per_chunk=rows,
        tokens_per_chunk=min(plan.tokens_per_chunk, rows),
        rows_per_round=min(plan.rows_per_round, rows),
        reason=reason,
    )


_regions: Registry[LiveRegion] = Registry()
register, unregister, lookup = _regions.register, _regions.unregister, _regions.lookup
