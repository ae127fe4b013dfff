"""A plan as one self-contained HTML page to show in a meeting: figures first, then launch lines, then all the numbers.

Nothing is fetched: styles and SVG are inline. Below 700 px everything stands in one column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from memfine_fx.report.style import palette
from memfine_planner.files import write_text
from memfine_planner.training.figures import figures
from memfine_planner.training.plan import Plan
from memfine_planner.training.reliability_report import reliability_text
from memfine_planner.training.report import NO_PROGRESS, plan_text
from memfine_planner.training.sweep import Study
from memfine_planner.training.sweep_report import study_text
from memfine_planner.training.tuner import Candidate

__all__ = ["write_html"]

_STYLE = (
    palette(":root")
    + """
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);margin:0;background:var(--paper)}
main{max-width:72rem;margin:0 auto;padding:1.5rem 1rem 3rem}
h1{font-size:1.6rem;line-height:1.25;margin:0}
h2{font-size:1.2rem;margin:2.2rem 0 .4rem;border-bottom:2px solid var(--line);padding-bottom:.3rem}
h3{font-size:.95rem;margin:0 0 .3rem}
p.sub{color:var(--soft);margin:.3rem 0 0;overflow-wrap:anywhere}
ul{padding-left:1.2rem}
li{overflow-wrap:anywhere;margin:.3rem 0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.7rem;margin:1.2rem 0}
.card{background:var(--back);border-left:4px solid var(--accent);padding:.6rem .8rem;border-radius:4px}
.card.warn{border-color:var(--bad)}
.card b{display:block;font-size:1.35rem;line-height:1.2}
.card span{color:var(--soft);font-size:.85rem}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(26rem,100%),1fr));gap:1.2rem;margin-top:.8rem}
figure{margin:0;min-width:0;background:#fff;color:#1d2733;border-radius:4px}
svg{width:100%;height:auto;display:block}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:right;padding:.35rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap}
th:last-child,td:last-child{text-align:left}
tr.best td{font-weight:600;background:var(--back)}
pre{background:var(--back);padding:.8rem;overflow-x:auto;font-size:.8rem;line-height:1.45;border-radius:4px}
pre.lines{white-space:pre-wrap;overflow-wrap:anywhere}
summary{cursor:pointer;color:var(--accent);padding:.4rem 0}
@media(max-width:700px){main{padding:1rem .8rem 2rem}h1{font-size:1.25rem}.card b{font-size:1.1rem}
.cards{grid-template-columns:1fr 1fr}
th,td{padding:.3rem .2rem;font-size:.72rem}td:last-child{white-space:normal;overflow-wrap:anywhere;font-size:.64rem}}
@media print{details{display:none}}
"""
)
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
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    arch, system = plan.request.arch, plan.request.system
    title = f"{arch.name} on {plan.strategy.gpus:,} {system.name}"
    drawn = figures(plan, front, found)
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=sub>{escape(plan.strategy.label())}; {plan.strategy.global_batch:,} sequences of "
        f"{plan.strategy.seq:,} tokens a step; {escape(plan.request.routing.kind)} routing</p>",
        _cards(plan),
        "<ul>" + "".join(f"<li>{escape(reason)}</li>" for reason in plan.reasons) + "</ul>",
    ]
    for name, sentence, beginnings in _SECTIONS:
        charts = {key: svg for key, svg in drawn.items() if key.startswith(beginnings)}
        if not charts:
            continue
        body.append(f"<h2>{name}</h2>" + (f"<p class=sub>{sentence}</p>" if sentence else "") + _charts(charts))
        if name == "What could be had":
            body.append(_front_table(front, plan))
        if name == "Failures":
            body.append(_failures(plan))
        if name == "What matters" and found:
            body.append(_details("The tables", study_text(found)))
    body.append("<h2>Launch</h2>")
    for framework, launch in (("Megatron-LM", plan.megatron), ("torchtitan", plan.torchtitan)):
        body.append(f"<h3>{framework}</h3><pre class=lines>{escape(str(launch))}</pre>")
    body.append("<h2>All the numbers</h2>" + _details("The report as text", plan_text(plan, layers=True)))
    page = (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )
    write_text(path, page, "the page")


def _cards(plan: Plan) -> str:
    loaded, best = plan.loaded, plan.faults.best
    risk = dict(plan.risks)[plan.request.routing.kind]
    tightest = max(rank.peak for rank in plan.ranks)
    fits = tightest <= plan.usable_bytes
    days = f"{plan.faults.days:,.1f}" if plan.faults.days < 1e5 else "never"
    cells: Iterable[tuple[str, str, bool]] = (
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
    )
    return (
        "<div class=cards>"
        + "".join(
            f"<div class='card{' warn' if is_bad else ''}'><b>{escape(value)}</b><span>{escape(text)}</span></div>"
            for value, text, is_bad in cells
        )
        + "</div>"
    )


def _charts(charts: Mapping[str, str]) -> str:
    cells = "".join(f"<figure><h3>{escape(title)}</h3>{svg}</figure>" for title, svg in charts.items())
    return f"<div class=charts>{cells}</div>"


def _front_table(front: tuple[Candidate, ...], plan: Plan) -> str:
    rows = []
    for candidate in front[:_SHOWN_FRONT]:
        chosen = " class=best" if candidate.strategy == plan.strategy else ""
        rows.append(
            f"<tr{chosen}><td>{candidate.step.tokens_per_s_per_gpu:,.0f}<td>{candidate.step.utilisation:.1%}"
            f"<td>{candidate.headroom:.1%}<td>{candidate.goodput.fraction:.1%}"
            f"<td>{escape(candidate.strategy.label())}</tr>"
        )
    head = "<tr><th>tokens/s/GPU<th>MFU<th>headroom<th>goodput<th>strategy</tr>"
    return f"<div class=wide><table>{head}{''.join(rows)}</table></div>"


def _failures(plan: Plan) -> str:
    f, best = plan.faults, plan.faults.best
    lines = [
        f"<p>An interruption every {best.mtbf / 3600:,.1f} h; a checkpoint of {f.cost.num_bytes / 1e12:.2f} TB every "
        f"{best.interval / 60:.0f} minutes stops training for {f.cost.blocking:.1f} s; spare nodes: {f.model.spares}. "
        f"Simulated event by event: {f.simulated:.1%} goodput.</p>"
    ]
    if plan.request.reliability:
        lines.append(_details("The history of failures", reliability_text(plan.request.reliability)))
    return "".join(lines)


def _details(summary: str, text: str) -> str:
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
