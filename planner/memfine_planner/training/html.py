"""A plan as an HTML page to show in a meeting: figures first, then launch lines, then all the numbers."""

from __future__ import annotations

from html import escape
from pathlib import Path

from memfine_fx.report.page import cards, charts, details, document, items, section, table
from memfine_planner.files import write_text
from memfine_planner.training.figures import figures
from memfine_planner.training.plan import Plan
from memfine_planner.training.reliability_report import reliability_text
from memfine_planner.training.report import NO_PROGRESS, plan_text
from memfine_planner.training.sweep import Study
from memfine_planner.training.sweep_report import study_text
from memfine_planner.training.tuner import Candidate

__all__ = ["write_html"]

_SECTIONS = (
    ("What could be had", "Strategies that none beats in speed, memory and goodput together.", ("Speed against",)),
    (
        "Where a step goes",
        "The slowest pipeline rank, under the routing's average load.",
        ("Where a step", "Time of a", "Pipeline timeline"),
    ),
    (
        "Memory",
        "Peak of every pipeline rank, and of the tightest one over the iterations of each routing.",
        ("Memory by", "Peak memory"),
    ),
    ("Failures", "", ("Where the time of", "Goodput against")),
    ("What matters", "One factor at a time, the strategy chosen anew at every value.", ("How far", "Elast")),
    ("Factor by factor", "", ("Speed over", "Where time goes")),
)
"""(title, sentence, beginnings of its figures' titles), in the page's order."""
_SHOWN_FRONT = 10


def write_html(plan: Plan, path: Path, front: tuple[Candidate, ...] = (), found: Study | None = None) -> None:
    """Write the page.

    Args:
        front: of the search, where there was one.
        found: sweeps, where there were any.

    Raises:
        ConfigError: the file cannot be written.
    """
    arch, system = plan.request.arch, plan.request.system
    title = f"{arch.name} on {plan.strategy.gpus:,} {system.name}"
    drawn = figures(plan, front, found)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(plan.strategy.label())}; {plan.strategy.global_batch:,} sequences of '
        f"{plan.strategy.seq:,} tokens a step; {escape(plan.request.routing.kind)} routing</p>",
        cards(_cells(plan)),
        items(plan.reasons),
    ]
    more = {"What could be had": _front_table(front, plan), "Failures": _failures(plan)}
    if found:
        more["What matters"] = details("The tables", study_text(found))
    for name, sentence, beginnings in _SECTIONS:
        shown = {key: chart for key, chart in drawn.items() if key.startswith(beginnings)}
        if shown:
            body.append(section(name, f'<p class="soft">{sentence}</p>', charts(shown), more.get(name, "")))
    launches = (("Megatron-LM", plan.megatron), ("torchtitan", plan.torchtitan))
    lines = (f'<h3>{name}</h3><pre class="lines">{escape(str(launch))}</pre>' for name, launch in launches)
    body.append(section("Launch", *lines))
    body.append(section("All the numbers", details("The report as text", plan_text(plan, layers=True))))
    write_text(path, document(title, *body), "the page")


def _cells(plan: Plan) -> list[tuple[str, str, bool]]:
    loaded, best = plan.loaded, plan.faults.best
    risk = dict(plan.risks)[plan.request.routing.kind]
    tightest = max(rank.peak for rank in plan.ranks)
    fits = tightest <= plan.usable_bytes
    days = f"{plan.faults.days:,.1f}" if plan.faults.days < 1e5 else "never"
    return [
        (f"{loaded.tokens_per_s_per_gpu:,.0f}", "tokens/s/GPU", False),
        (f"{loaded.utilisation:.1%}", "of the rate (MFU)", False),
        (f"{loaded.seconds:,.2f} s", "a step", False),
        (days, f"days to {plan.tokens / 1e12:g} T tokens", days == "never"),
        (f"{best.fraction:.1%}", "goodput after failures", best.fraction < 0.5),
        (f"{tightest / 1e9:,.1f} GB", f"peak memory of {plan.usable_bytes / 1e9:,.1f} GB usable, balanced", not fits),
        (
            f"{risk.per_thousand:.1%}",
            f"chance to run out of memory in 1,000 iterations, {plan.request.routing.kind} routing",
            risk.per_iteration > 0,
        ),
        (f"{best.interval / 60:,.0f} min", "between checkpoints", False)
        if best.fraction >= NO_PROGRESS
        else ("none", "interval between checkpoints helps", True),
    ]


def _front_table(front: tuple[Candidate, ...], plan: Plan) -> str:
    shown = front[:_SHOWN_FRONT]
    rows = (
        (
            f"{candidate.step.tokens_per_s_per_gpu:,.0f}",
            f"{candidate.step.utilisation:.1%}",
            f"{candidate.headroom:.1%}",
            f"{candidate.goodput.fraction:.1%}",
            escape(candidate.strategy.label()),
        )
        for candidate in shown
    )
    best = [place for place, candidate in enumerate(shown) if candidate.strategy == plan.strategy]
    return table(("tokens/s/GPU", "MFU", "headroom", "goodput", "strategy"), rows, range(4), best)


def _failures(plan: Plan) -> str:
    f, best = plan.faults, plan.faults.best
    lines = [
        f"<p>An interruption every {best.mtbf / 3600:,.1f} h; a checkpoint of {f.cost.num_bytes / 1e12:.2f} TB every "
        f"{best.interval / 60:.0f} minutes stops training for {f.cost.blocking:.1f} s; spare nodes: {f.model.spares}. "
        f"Simulated event by event: {f.simulated:.1%} goodput.</p>"
    ]
    if plan.request.reliability:
        lines.append(details("The history of failures", reliability_text(plan.request.reliability)))
    return "".join(lines)
