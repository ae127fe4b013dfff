"""A model's peaks by plan, batch and sequence length, without recording anything again."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from memfine_fx.config import Config, parse_budget
from memfine_fx.fitting.recording import ESTIMATED, NUM_INPUTS, TOKEN_BYTES, RecordedStep
from memfine_fx.fitting.setup import OptimizerBytes, Setup
from memfine_fx.fitting.stack import Stack
from memfine_fx.fitting.stretch import PARTS, Moment, aligned, is_even, moments_of, stretched
from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.memory.step import RunMemory, SizeOf
from memfine_fx.plan.budget import MARGIN_PERCENT, SCALAR_BYTES, unbounded_rows
from memfine_fx.plan.rows import LEAST_ROWS, LEAST_TOKENS, knee_tokens
from memfine_fx.plan.solve import largest

__all__ = ["Analysis", "StaticBytes", "StepTotal"]

_GATHERED_LAYERS = 2  # the one that runs, and the one that is gathered meanwhile


@dataclass(frozen=True)
class StaticBytes:
    """What is there in every step.

    Args:
        parameters, trained: all, with scales of those in 4 bits, and of them those that are trained.
        buffers: of the model.
        optimizer: its bytes.
        layer: parameters of the largest layer; trained_layer: those of them that are trained.
        root: parameters that are in no layer.
        experts, trained_experts: parameters that are tables over experts.
        num_parameters: how many numbers they are.
    """

    parameters: int
    trained: int
    buffers: int
    optimizer: OptimizerBytes
    layer: int = 0
    trained_layer: int = 0
    root: int = 0
    experts: int = 0
    trained_experts: int = 0
    num_parameters: int = 0


@dataclass(frozen=True)
class StepTotal:
    """The most bytes of a whole step.

    Args:
        where: "forward", "backward" or "optimizer step".
        terms: (name, bytes), largest first; they add up to `num_bytes`.
    """

    where: str
    terms: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.terms)


@dataclass(frozen=True)
class Analysis:
    """What `record_step` found, and how often the repeated layers stand in the model.

    Args:
        records: one, of the whole model; or two, of a few repeats and of one more.
        more: repeats of the model beyond those of the first record.
        static: its bytes, of the whole model.
        has_even_routing: rows are spread evenly over experts; otherwise one expert gets a row of every token.
        stack: the repeated layers; None where the model was recorded whole.
    """

    records: tuple[RecordedStep, ...]
    more: int
    static: StaticBytes
    setup: Setup
    config: Config
    has_even_routing: bool = False
    stack: Stack | None = None

    def total(self, plan: str, batch: int, seq: int, rows: int | None = None) -> StepTotal:
        """The peak of a whole step.

        Args:
            plan: one of the records' runs.
            rows: a chunk may have; None for as many as the plan has.

        For a plan other than "asked" it is the budget that the plan is chosen under: where its bytes are an estimate,
        with the margin that the planner leaves too.
        """
        if plan == "least":
            rows = LEAST_ROWS if rows is None else rows
            totals = [self._total(one, batch, seq, rows) for one in self.least_plans]
            return min(totals, key=lambda one: one.num_bytes)
        if plan == "most":
            return max((self._total(one, batch, seq, rows) for one in self.most_plans), key=lambda one: one.num_bytes)
        return self._total(plan, batch, seq, rows)

    @property
    def most_plans(self) -> tuple[str, ...]:
        """Those whose larger one is the budget that nothing is computed again under: it must hold both."""
        return ("most", ESTIMATED) if ESTIMATED in self.records[0].runs else ("most",)

    @functools.cached_property
    def is_asked_known(self) -> bool:
        """Whether "asked" holds for every layer: what was extended must keep the same of each."""
        return len(self.records) == 1 or is_even(*(one.runs["asked"] for one in self.records))

    def alike(self, plan: str) -> list[tuple[int, int]]:
        """Of a plan of two records, see `aligned`; as they were recorded, whatever sizes are asked."""
        if plan not in self._alike:
            short, long = (one.runs[plan] for one in self.records)
            self._alike[plan] = aligned(short, long)
        return self._alike[plan]

    @functools.cached_property
    def _alike(self) -> dict[str, list[tuple[int, int]]]:
        return {}

    @property
    def has_batch(self) -> bool:
        """Whether the records hold for other batches."""
        return all(one.has_batch for one in self.records)

    @property
    def has_seq(self) -> bool:
        """Whether the records hold for other lengths."""
        return all(one.has_seq for one in self.records)

    @property
    def constant_inputs(self) -> int:
        """Bytes of inputs of any batch and length, the model's buffers among them."""
        return max(self.static.buffers, self.records[0].constant_inputs)

    def lightest(self, batch: int, seq: int) -> StepTotal:
        """What the step needs at least: under the smallest budget, or as it was asked for.

        A budget drops a model's own checkpoints for what it computes again itself. Without one they stay, with chunks
        inside of them, and that may hold less.
        """
        least = self.total("least", batch, seq)
        if self.setup.budget is not None or not self.is_asked_known:
            return least
        return min(least, self.asked(batch, seq), key=lambda one: one.num_bytes)

    @functools.cached_property
    def least_plans(self) -> tuple[str, ...]:
        """Those whose smaller one is the smallest budget's; of extended layers only what keeps the same of each.

        The plan for the smallest budget computes again what costs least of the whole step, which is another share of a
        few layers than of many. The planner has the even ones too, or less, so their bytes are enough.
        """
        if len(self.records) == 1:
            return ("least",)
        short, long = self.records
        evens = [plan for plan in ("lean", "spare") if is_even(short.runs[plan], long.runs[plan])]
        return (*evens, "most")

    def _total(self, plan: str, batch: int, seq: int, rows: int | None) -> StepTotal:
        found = [
            moments_of(runs, self._size_of(runs, rows))
            for runs in (one.sized(plan, batch, seq) for one in self.records)
        ]
        if len(found) == 1:
            moments = [moment for stretches in found[0] for moment in stretches]
            peak = max(moments, key=lambda one: one.num_bytes)
        else:
            peak = stretched(found[0], found[1], self.more, self.alike(plan))
        percent = MARGIN_PERCENT if plan in self.records[0].estimated else 0
        return self._with_static(peak, batch, seq, peak.num_bytes * percent // 100)

    def asked(self, batch: int, seq: int) -> StepTotal:
        """Under the setup's own budget: chunks as large as it allows.

        Where not even the smallest keep it, the plan of the smallest budget is taken, and else what that needs.
        """
        budget = parse_budget(self.setup.budget)
        free = self.total("asked", batch, seq)
        if budget is None or free.num_bytes <= budget:
            return free
        plan = "asked" if self.total("asked", batch, seq, LEAST_ROWS).num_bytes <= budget else "least"
        if self.total(plan, batch, seq, LEAST_ROWS).num_bytes > budget:
            return self.total(plan, batch, seq, LEAST_ROWS)
        rows = largest(LEAST_ROWS, batch * seq + 1, lambda one: self.total(plan, batch, seq, one).num_bytes <= budget)
        return self.total(plan, batch, seq, rows)

    def _size_of(self, runs: tuple[RunMemory, ...], rows: int | None) -> SizeOf:
        steps = [run.step for run in runs]

        def size_of(site: str, num_tokens: int) -> ChunkSize:
            head = next((step.heads[site] for step in steps if site in step.heads), None)
            if head is not None:
                knee = self.config.tokens_per_head_chunk or knee_tokens(head.terms)
                return ChunkSize(LEAST_TOKENS if rows is not None else knee)
            terms = next(step.regions[site] for step in steps if site in step.regions).terms("nothing")
            wanted = unbounded_rows(self.config, terms, num_tokens)
            wanted = wanted if rows is None else min(rows, wanted)
            if terms.takes_group:
                return ChunkSize(wanted)
            # a chunk is of one expert, which has at most one row of each token
            of_expert = -(-num_tokens * terms.top_k // terms.num_experts) if self.has_even_routing else num_tokens
            return ChunkSize(min(wanted, of_expert), stages=of_expert > wanted)

        return size_of

    def _with_static(self, peak: Moment, batch: int, seq: int, margin: int) -> StepTotal:
        static, optimizer = self.static, self.static.optimizer
        always = {
            "parameters": self._on_rank(static.parameters, static.experts),
            "fp32 copies of parameters": self._on_rank(optimizer.masters, self._of_experts(optimizer.masters)),
            "optimizer state": self._on_rank(optimizer.state, self._of_experts(optimizer.state)),
            "inputs and buffers": self.constant_inputs + NUM_INPUTS * TOKEN_BYTES * batch * seq + SCALAR_BYTES,
        }
        parts = dict(zip(PARTS, peak.parts, strict=True))
        gradients = parts["gradients"]
        parts["gradients"] = self._on_rank(gradients, self._of_experts(gradients))
        if self.setup.fsdp > 1:
            parts["parameters gathered by FSDP"] = static.root + _GATHERED_LAYERS * static.layer
            parts["gradients that FSDP has not reduced"] = min(gradients, static.trained_layer)
        parts["margin of the estimate"] = margin
        within = StepTotal(peak.where, _sorted(always | parts))
        held = self._on_rank(static.trained, static.trained_experts)
        stepping = {"gradients": held, "working set of the optimizer": -(-optimizer.working // self.setup.fsdp)}
        after = StepTotal("optimizer step", _sorted(always | stepping))
        return max(within, after, key=lambda one: one.num_bytes)

    def _of_experts(self, num_bytes: int) -> int:
        """As much of it as belongs to experts, where it goes with trained parameters."""
        return num_bytes * self.static.trained_experts // max(1, self.static.trained)

    def _on_rank(self, num_bytes: int, of_experts: int) -> int:
        """What one rank has of bytes that go with parameters."""
        if self.setup.fsdp > 1:
            return -(-num_bytes // self.setup.fsdp)
        return num_bytes - of_experts + -(-of_experts // self.setup.expert_parallel)


def _sorted(terms: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(((name, one) for name, one in terms.items() if one), key=lambda term: -term[1]))
