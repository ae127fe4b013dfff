"""A plan as one self-contained HTML page."""

from __future__ import annotations

from html import escape
from pathlib import Path

from memfine_fx.planning.training.figures import figures
from memfine_fx.planning.training.plan import Plan
from memfine_fx.planning.training.report import front_table, plan_text
from memfine_fx.planning.training.tuner import Candidate

__all__ = ["write_html"]

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "pre{background:#f6f6f6;padding:.8rem;overflow-x:auto;font-size:13px}svg{max-width:100%;height:auto}"
)


def write_html(plan: Plan, path: Path, front: tuple[Candidate, ...] = ()) -> None:
    """Write the report with its figures inside."""
    title = f"{plan.request.arch.name} on {plan.strategy.gpus} {plan.request.system.name}"
    drawn = "".join(f"<h2>{escape(name)}</h2>{svg}" for name, svg in figures(plan).items())
    table = f"<pre>{escape(front_table(front))}</pre>" if front else ""
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1>{table}<pre>{escape(plan_text(plan, layers=True))}</pre>{drawn}</html>\n"
    )
