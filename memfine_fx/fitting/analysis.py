"""Compute a model's peak memory by plan, batch and sequence length, without recording anything again."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from memfine_fx.config import Config, parse_budget
from memfine_fx.fitting.recording import ESTIMATED, NUM_INPUTS, TOKEN_BYTES, RecordedStep
from memfine_fx.fitting.setup import OptimizerBytes, Setup
from memfine_fx.fitting.stack import Stack
from memfine_fx.fitting.stretch import PARTS, Moment, aligned, is_uniform, moments_of, stretched
from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.memory.step import RunMemory, SizeOf
from memfine_fx.plan.budget import MARGIN_PERCENT, SCALAR_BYTES, unbounded_rows
from memfine_fx.plan.rows import LEAST_ROWS, LEAST_TOKENS, knee_tokens
from memfine_fx.plan.solve import largest

__all__ = ["Analysis", "StaticBytes", "StepTotal"]

_GATHERED_LAYERS = 2  # the one that runs, and the one that is gathered meanwhile


@dataclass(frozen=True)
class StaticBytes:
    """The bytes that are allocated throughout every step.

    Args:
        parameters, trained: all, with scales of those in 4 bits, and of them those that are trained.
        buffers: of the model.
        optimizer: its bytes.
        layer: parameters of the largest layer; trained_layer: those of them that are trained.
        root: parameters that are in no layer.
        experts, trained_experts: parameters that are expert weights.
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
    """The peak memory of a whole step.

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
    """The records of a model's step from `record_step`, and how often the repeated layers occur in the model.

    Args:
        records: one, of the whole model; or two, of a few repeats and of one more.
        more: repeats of the model beyond those of the first record.
        static: its bytes, of the whole model.
        has_even_routing: rows are spread evenly over experts; otherwise one expert gets a row of every token.
        stack: the repeated layers; None where the model was recorded whole.
        of_one_sequence: records for a batch of one, whose code differs from that for all others; () where that was not
            recorded.
    """

    records: tuple[RecordedStep, ...]
    more: int
    static: StaticBytes
    setup: Setup
    config: Config
    has_even_routing: bool = False
    stack: Stack | None = None
    of_one_sequence: tuple[RecordedStep, ...] = ()

    def for_batch(self, batch: int) -> Analysis:
        """Return the analysis that is closest to a batch of so many sequences, at every sequence length."""
        return self._for_one_sequence if batch == 1 and self.of_one_sequence else self

    @functools.cached_property
    def _for_one_sequence(self) -> Analysis:
        return dataclasses.replace(self, records=self.of_one_sequence, of_one_sequence=())

    def total(self, plan: str, batch: int, seq: int, rows: int | None = None) -> StepTotal:
        """Return the peak of a whole step.

        Args:
            plan: one of the records' runs.
            rows: that a chunk may have; None for as many as the plan has.

        For a plan other than "asked" it is the budget that the plan is chosen under: where its bytes are an estimate,
        with the margin that the planner leaves too.
        """
        own = self.for_batch(batch)
        if own is not self:
            return own.total(plan, batch, seq, rows)
        if plan == "least":
            rows = LEAST_ROWS if rows is None else rows
            totals = [self._total(candidate, batch, seq, rows) for candidate in self.least_plans]
            return min(totals, key=lambda total: total.num_bytes)
        if plan == "most":
            return max(
                (self._total(candidate, batch, seq, rows) for candidate in self.most_plans),
                key=lambda total: total.num_bytes,
            )
        return self._total(plan, batch, seq, rows)

    @property
    def most_plans(self) -> tuple[str, ...]:
        """Return the plans whose larger peak is the budget under which nothing is recomputed: it must hold both."""
        return ("most", ESTIMATED) if ESTIMATED in self.records[0].runs else ("most",)

    @functools.cached_property
    def is_asked_known(self) -> bool:
        """Return whether "asked" holds for every layer: extended layers must all save the same."""
        return len(self.records) == 1 or is_uniform(*(record.runs["asked"] for record in self.records))

    def alike(self, plan: str) -> list[tuple[int, int]]:
        """Return the stretches that two records of a plan share, see `aligned`, at the sizes that were recorded."""
        if plan not in self._alike:
            short, long = (record.runs[plan] for record in self.records)
            self._alike[plan] = aligned(short, long)
        return self._alike[plan]

    @functools.cached_property
    def _alike(self) -> dict[str, list[tuple[int, int]]]:
        return {}

    @property
    def has_batch(self) -> bool:
        """Return whether the records hold for other batches."""
        return all(record.has_batch for record in self.records)

    @property
    def has_seq(self) -> bool:
        """Return whether the records hold for other sequence lengths."""
        return all(record.has_seq for record in self.records)

    @property
    def constant_inputs(self) -> int:
        """Return the bytes of inputs that are the same at any batch and length, the model's buffers among them."""
        return max(self.static.buffers, self.records[0].constant_inputs)

    def lightest(self, batch: int, seq: int) -> StepTotal:
        """Return the smallest peak of the step: under the smallest budget, or as it was asked for.

        A budget drops a model's own checkpoints for what it recomputes itself. Without one they stay, with chunks
        inside of them, and that may hold less.
        """
        least = self.total("least", batch, seq)
        if self.setup.budget is not None or not self.is_asked_known:
            return least
        return min(least, self.peak_as_asked(batch, seq), key=lambda total: total.num_bytes)

    @functools.cached_property
    def least_plans(self) -> tuple[str, ...]:
        """Return the plans whose smallest peak is the smallest budget; of extended layers only those that save alike.

        The plan for the smallest budget recomputes what costs least of the whole step, which is another share of a few
        layers than of many. The planner has the even plans too, or less, so their bytes are enough.
        """
        if len(self.records) == 1:
            return ("least",)
        short, long = self.records
        uniform_plans = [
            plan for plan in ("recompute_all", "recompute_pointwise") if is_uniform(short.runs[plan], long.runs[plan])
        ]
        return (*uniform_plans, "most")

    def _total(self, plan: str, batch: int, seq: int, rows: int | None) -> StepTotal:
        moments_by_record = [
            moments_of(runs, self._size_of(runs, rows))
            for runs in (self.in_micro_batch(record.sized(plan, batch, seq)) for record in self.records)
        ]
        if len(moments_by_record) == 1:
            moments = [moment for stretches in moments_by_record[0] for moment in stretches]
            peak = max(moments, key=lambda moment: moment.num_bytes)
        else:
            peak = stretched(moments_by_record[0], moments_by_record[1], self.more, self.alike(plan))
        percent = MARGIN_PERCENT if plan in self.records[0].estimated else 0
        return self._with_static(peak, batch, seq, peak.num_bytes * percent // 100)

    def in_micro_batch(self, runs: tuple[RunMemory, ...]) -> tuple[RunMemory, ...]:
        """Return the runs of the last micro-batch: regions add to gradients of earlier ones what they can in place."""
        if self.setup.accumulate == 1:
            return runs
        return tuple(dataclasses.replace(run, added=frozenset(run.step.fusible_gradients)) for run in runs)

    @property
    def earlier_gradients(self) -> int:
        """Return the bytes of the gradients that exist before the last micro-batch begins, on one rank."""
        return self._gradients_on_rank if self.setup.accumulate > 1 else 0

    @property
    def _gradients_on_rank(self) -> int:
        return self._on_rank(self.static.trained, self.static.trained_experts)

    def peak_as_asked(self, batch: int, seq: int) -> StepTotal:
        """Return the peak under the setup's own budget, with chunks as large as it allows.

        Where not even the smallest chunks meet it, the plan of the smallest budget is taken; where that exceeds the
        budget too, its peak with the smallest chunks is returned.
        """
        budget = parse_budget(self.setup.budget)
        free = self.total("asked", batch, seq)
        if budget is None or free.num_bytes <= budget:
            return free
        plan = "asked" if self.total("asked", batch, seq, LEAST_ROWS).num_bytes <= budget else "least"
        if self.total(plan, batch, seq, LEAST_ROWS).num_bytes > budget:
            return self.total(plan, batch, seq, LEAST_ROWS)
        rows = largest(
            LEAST_ROWS, batch * seq + 1, lambda candidate: self.total(plan, batch, seq, candidate).num_bytes <= budget
        )
        return self.total(plan, batch, seq, rows)

    def _size_of(self, runs: tuple[RunMemory, ...], rows: int | None) -> SizeOf:
        steps = [run.step for run in runs]

        def size_of(region_id: str, num_tokens: int) -> ChunkSize:
            head = next((step.heads[region_id] for step in steps if region_id in step.heads), None)
            if head is not None:
                knee = self.config.tokens_per_head_chunk or knee_tokens(head.terms)
                return ChunkSize(LEAST_TOKENS if rows is not None else knee)
            region = next(step.regions[region_id] for step in steps if region_id in step.regions)
            terms = region.terms_now("nothing")
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
        parts["gradients of earlier micro-batches"] = self.earlier_gradients
        within = StepTotal(peak.where, _sorted(always | parts))
        stepping = {
            "gradients": self._gradients_on_rank,
            "working set of the optimizer": -(-optimizer.working // self.setup.fsdp),
        }
        after = StepTotal("optimizer step", _sorted(always | stepping))
        return max(within, after, key=lambda total: total.num_bytes)

    def _of_experts(self, num_bytes: int) -> int:
        """Return the part of `num_bytes` that belongs to experts, if bytes are proportional to trained parameters."""
        return num_bytes * self.static.trained_experts // max(1, self.static.trained)

    def _on_rank(self, num_bytes: int, of_experts: int) -> int:
        """Return one rank's share of bytes that are sharded with the parameters."""
        if self.setup.fsdp > 1:
            return -(-num_bytes // self.setup.fsdp)
        return num_bytes - of_experts + -(-of_experts // self.setup.expert_parallel)


def _sorted(terms: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(
        sorted(((name, num_bytes) for name, num_bytes in terms.items() if num_bytes), key=lambda term: -term[1])
    )
