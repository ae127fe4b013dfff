"""The answer of `fit`, in words and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from memfine_fx.config import parse_budget
from memfine_fx.errors import ConfigError
from memfine_fx.fitting.alternatives import Alternative
from memfine_fx.fitting.analysis import Analysis, StepTotal
from memfine_fx.fitting.changes import Change
from memfine_fx.fitting.devices import CudaTerm
from memfine_fx.fitting.export import Exported
from memfine_fx.fitting.setup import TRAININGS, Setup
from memfine_fx.report.page import document, items, section
from memfine_fx.units import budget_text, readable_bytes

__all__ = ["FitReport"]

_MIB = 1 << 20


@dataclass(frozen=True)
class FitReport:
    """The answer of `fit`: whether a model trains within a device's memory, and what uses the bytes.

    Args:
        model: the model that was analysed, with the number of parameters.
        setup: how it is trained.
        memory_bytes: of the device, None where none was given.
        asked: the step under the setup's own budget, or without one; None where only budgets could be answered: where
            layers were extended and not all of them save the same.
        least: the same under the smallest budget that works.
        most: the same where nothing is recomputed.
        longest_seq, largest_batch: with which `lightest` fits in the memory, the other as it is; 0 for none, None where
            the model's code fixes it in its graphs, so that their bytes at others are not known.
        cuda_terms: device memory beyond the step's tensors, unmeasured; () on a CPU.
        chunked: layers whose experts are chunked.
        refused: (where, why) of what is counted as it was written.
        decision: what the asked plan recomputes, in words.
        how: what was analysed, in words.
        changes: setups that would need less, best first; only where it does not fit.
        alternatives: the same step without memfine_fx; only where it was asked for.
        estimates: what makes numbers estimates beyond what `how` says.
        analysis: the records that the numbers come from, for other sizes.
    """

    model: str
    setup: Setup
    memory_bytes: int | None
    asked: StepTotal | None
    least: StepTotal
    most: StepTotal
    longest_seq: int | None
    largest_batch: int | None
    cuda_terms: tuple[CudaTerm, ...]
    chunked: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    decision: str
    how: str
    changes: tuple[Change, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    estimates: tuple[str, ...] = ()
    analysis: Analysis | None = field(default=None, repr=False, compare=False)

    @property
    def beside_bytes(self) -> int:
        """Return the bytes that the device takes beyond the step's tensors."""
        return sum(term.num_bytes for term in self.cuda_terms)

    @property
    def fits(self) -> bool | None:
        """Return whether the step fits in the memory, under some budget or without; None where no memory was given."""
        if self.memory_bytes is None:
            return None
        return self.lightest.num_bytes + self.beside_bytes <= self.memory_bytes

    @property
    def lightest(self) -> StepTotal:
        """Return the smallest peak of the step: under the smallest budget, or as it was asked for.

        The latter where the model's own checkpoints save less: a budget drops them for what it recomputes itself.
        """
        if self.asked is None or self.setup.budget is not None:
            return self.least
        return min(self.least, self.asked, key=lambda total: total.num_bytes)

    @property
    def shown(self) -> StepTotal:
        """Return the step that is described: as asked for where that is known and fits, else with the fewest bytes."""
        if self.asked is None:
            return self.least
        limit = self.memory_bytes
        is_too_much = limit is not None and self.asked.num_bytes + self.beside_bytes > limit
        return self.lightest if is_too_much else self.asked

    @property
    def line(self) -> str:
        """Return the line to write in a training script; "" where nothing fits."""
        if self.fits is False:
            return ""
        if self.lightest is not self.least:
            return "memfine_fx.optimize(model)"
        least = self.least.num_bytes
        if self.memory_bytes is None:
            return _optimize_line(-(-max(least, self.most.num_bytes) // _MIB) * _MIB)
        budget = self.memory_bytes - self.beside_bytes
        # NOTE: whole MiB below the smallest budget would be refused.
        return _optimize_line(budget // _MIB * _MIB if budget // _MIB * _MIB >= least else budget)

    def to_json(self) -> str:
        """Return the whole answer as one JSON object; sizes are bytes."""
        others = tuple(replace(alternative, analysis=None) for alternative in self.alternatives)
        fields: dict[str, Any] = asdict(replace(self, analysis=None, alternatives=others))
        for answer_fields in (fields, *fields["alternatives"]):
            del answer_fields["analysis"]
        for name in ("asked", "least", "most"):
            total = getattr(self, name)
            if total is not None:
                fields[name] = {"num_bytes": total.num_bytes, "where": total.where, "terms": dict(total.terms)}
        for shown, alternative in zip(fields["alternatives"], self.alternatives, strict=True):
            if alternative.total is not None:
                shown["total"] = {"num_bytes": alternative.total.num_bytes, **shown["total"]}
        return json.dumps({"fits": self.fits, "line": self.line, **fields}, indent=2)

    def to_html(self, path: str | Path) -> None:
        """Write one file that needs nothing beside it: memory over the step, with sliders for sizes and memory.

        Raises:
            ConfigError: something in the step has no counterpart on a page; the message names it.
        """
        Path(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        return "\n".join([*self._answer(), *self._terms(), *self._budgets(), *self._without_us(), *self._remarks()])

    def _answer(self) -> list[str]:
        shown, setup = self.shown, self.setup
        what = f"{self.model}, {TRAININGS[setup.train]} training in {setup.dtype}, {setup.batch} x {setup.seq:,} tokens"
        what += f" in each of {setup.accumulate} micro-batches" if setup.accumulate > 1 else ""
        needs = shown.num_bytes + self.beside_bytes
        peak = f"its peak is {readable_bytes(needs)}, in the {shown.where}"
        if self.fits is None:
            return [f"{what}: {peak}"]
        plan = "" if shown is self.asked else " under the smallest budget"
        verdict = "fits" if self.fits else "does not fit"
        return [f"{what}: {verdict} in {readable_bytes(self.memory_bytes or 0)}{plan}; {peak}"]

    def _terms(self) -> list[str]:
        lines = [f"  {readable_bytes(num_bytes):>10}  {name}" for name, num_bytes in self.shown.terms]
        lines += [
            f"  {readable_bytes(term.num_bytes):>10}  {term.name} (CUDA, unmeasured: {term.source})"
            for term in self.cuda_terms
        ]
        return lines

    def _budgets(self) -> list[str]:
        note = "" if self.lightest is self.least else ", more than without a budget, which leaves checkpoints in place"
        least, most = self.least.num_bytes, self.most.num_bytes
        lines = [
            f"smallest budget that works: {budget_text(least)} ({least} bytes){note}",
            f"budget under which nothing is recomputed: {budget_text(most)} ({most} bytes)",
        ]
        if self.memory_bytes is not None:
            lines.append(
                f"within the memory: sequences of {_up_to(self.longest_seq)} tokens at batch {self.setup.batch}, "
                f"or a batch of {_up_to(self.largest_batch)} at {self.setup.seq:,} tokens"
            )
        if self.line:
            lines.append(f"use: {self.line}")
        for change in self.changes:
            verdict = "" if change.fits is None else ": fits" if change.fits else ": still too much"
            lines.append(f"with {change.what} the smallest budget is {readable_bytes(change.least_bytes)}{verdict}")
        return lines

    def _without_us(self) -> list[str]:
        lines = ["without memfine_fx:"] if self.alternatives else []
        for other in self.alternatives:
            if other.total is None:
                lines.append(f"  {other.what}: {other.remark}")
                continue
            needs = other.total.num_bytes + self.beside_bytes
            fits = "" if self.memory_bytes is None else ", fits" if needs <= self.memory_bytes else ", does not fit"
            longest = "" if self.memory_bytes is None else f"; sequences of {_up_to(other.longest_seq)} tokens"
            remark = f" ({other.remark})" if other.remark else ""
            lines.append(f"  {other.what}: {readable_bytes(needs)} in the {other.total.where}{fits}{longest}{remark}")
        return lines

    def _remarks(self) -> list[str]:
        lines = [f"{len(self.chunked)} of the analysed layers are chunked; {self.how}"]
        if self.decision and self.shown is self.asked:
            lines.append(self.decision)
        lines += self.estimates
        lines += [f"counted as it was written: {where}: {why}" for where, why in self.refused]
        return lines


def _optimize_line(budget: int) -> str:
    """Return the call whose steps were recorded, with symbols as sizes; code for one size alone may take more bytes."""
    text = str(budget) if budget % _MIB else f'"{budget // _MIB}MiB"'
    return f"memfine_fx.optimize(model, memory_budget={text}, dynamic=True)"


def _up_to(most: int | None) -> str:
    return "an unknown number of" if most is None else f"up to {most:,}"


_PLANS = ("asked", "least", "most")
_ROOM = 1.25  # of the memory that the page begins with, where none was given
_CHOSEN = (
    "What forward saves for backward was chosen at {batch} x {seq:,} tokens. The page assumes the same choice at other "
    "sizes, where memfine fit may choose otherwise. The plan that recomputes nothing is the same at all sizes."
)
_DRAWN = (
    "Of equal layers only a few were recorded. The chart shows the most memory between the experts of two layers, and "
    "draws layers between the first and the last on a line; the peak is extended exactly."
)


def page(report: FitReport) -> str:
    """Return the whole HTML document.

    Raises:
        ConfigError: the report has no records, or something in them has no counterpart on a page.
    """
    if report.analysis is None:
        raise ConfigError("this report has no records of the step to write a page from")
    files = resources.files("memfine_fx.fitting")
    setup = report.setup
    about = f"{TRAININGS[setup.train]} training in {setup.dtype} with {setup.optimizer}"
    about += ", gradient checkpointing of layers" if setup.checkpointing else ""
    about += f", {setup.accumulate} accumulated micro-batches" if setup.accumulate > 1 else ""
    more = "" if report.alternatives else "<p>More of them with <code>memfine fit --alternatives</code>.</p>"
    body = Template(files.joinpath("page.html").read_text(encoding="utf-8"))
    data = json.dumps(_data(report), separators=(",", ":")).replace("<", "\\u003c")
    script = files.joinpath("page.js").read_text(encoding="utf-8")
    return document(
        report.model,
        f"<h1>{escape(report.model)}</h1>",
        body.substitute(about=escape(about), alternatives=more),
        section("What these numbers are", items(_notes(report))),
        script=f'<script type="application/json" id="data">{data}</script><script>{script}</script>',
    )


def _data(report: FitReport) -> dict[str, Any]:
    assert report.analysis is not None
    exported, setup = Exported(), report.setup
    others = [
        {
            "what": other.what,
            "remark": other.remark,
            "plan": other.plan,
            "analysis": None if other.analysis is None else exported.add(other.analysis, (other.plan,)),
        }
        for other in report.alternatives
    ]
    analysis = exported.add(report.analysis, _PLANS if report.analysis.is_asked_known else _PLANS[1:])
    memory = report.memory_bytes or int(_ROOM * (report.lightest.num_bytes + report.beside_bytes))
    return {
        "analysis": analysis,
        "alternatives": others,
        "budget": parse_budget(setup.budget),
        "beside": report.beside_bytes,
        "terms": [[f"{term.name} (CUDA, unmeasured)", term.num_bytes] for term in report.cuda_terms],
        "start": {"batch": setup.batch, "seq": setup.seq, "memory": memory},
        "tables": exported.tables,
    }


def _notes(report: FitReport) -> list[str]:
    assert report.analysis is not None
    setup = report.setup
    notes = [report.how, _CHOSEN.format(batch=setup.batch, seq=setup.seq)]
    notes += [_DRAWN] if len(report.analysis.records) > 1 else []
    notes += report.estimates
    notes += [f"{term.name}: {readable_bytes(term.num_bytes)}, unmeasured: {term.source}" for term in report.cuda_terms]
    notes += [f"counted as it was written: {where}: {why}" for where, why in report.refused]
    return notes
