"""Write an answer as one HTML file whose sliders ask again: the browser evaluates the step's own expressions.

What is symbolic is the record: every allocation's bytes in sequences and tokens, and every working set in rows of a
chunk too. What forward saves was chosen at the setup that was asked, by a search that no expression stands for; the
page says so. Nothing is loaded.
"""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any

from memfine_fx.config import parse_budget
from memfine_fx.errors import ConfigError
from memfine_fx.fitting.export import Exported
from memfine_fx.fitting.setup import TRAININGS

if TYPE_CHECKING:
    from memfine_fx.fitting.report import FitReport

__all__ = ["page"]

_PLANS = ("asked", "least", "most")
_ROOM = 1.25  # of the memory that the page begins with, where none was given
_CHOSEN = (
    "What forward keeps for backward was chosen at {batch} x {seq:,} tokens, and the page holds to it at other sizes, "
    "where memfine fit asked again may choose otherwise. What keeps everything is the same at all sizes."
)
_DRAWN = (
    "Equal layers were recorded as a few and one more. The chart shows the most of each stretch between two layers' "
    "experts, and layers between the first and the last lie on a line; the peak is extended exactly."
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
    return Template(files.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        model=escape(report.model),
        about=escape(about),
        alternatives="" if report.alternatives else "<p>More of them with <code>memfine fit --alternatives</code>.</p>",
        notes="".join(f"<li>{escape(note)}</li>" for note in _notes(report)),
        data=json.dumps(_data(report), separators=(",", ":")).replace("<", "\\u003c"),
        script=files.joinpath("page.js").read_text(encoding="utf-8"),
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
    notes += [f"{term.name}: {term.num_bytes:,} B, unmeasured: {term.source}" for term in report.cuda_terms]
    notes += [f"counted as it was written: {where}: {why}" for where, why in report.refused]
    return notes
