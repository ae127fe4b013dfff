"""HTML of every page: cards, sections, tables, charts and text that unfolds, in one style.

Nothing is loaded: styles and charts are in the file. A page is readable from 390 px on, in the reader's light or dark
scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from memfine_fx.report.chart import Chart
from memfine_fx.report.style import palette

__all__ = ["cards", "charts", "details", "document", "fragment", "items", "section", "table", "wide_chart"]

_STYLE = (
    palette(".memfine")
    + """
.memfine{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0;padding:.8rem;
*{box-sizing:border-box}
main{max-width:72rem;margin:0 auto;padding:.6rem .2rem 2rem}
h1{font-size:1.45rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:1.8rem 0 .5rem;border-bottom:2px solid var(--line);padding-bottom:.3rem}
h3{font-size:.95rem;margin:.6rem 0 .3rem}
p{margin:.4rem 0;overflow-wrap:anywhere}
.soft{color:var(--soft)}
ul{padding-left:1.2rem;margin:.4rem 0}
li{overflow-wrap:anywhere;margin:.3rem 0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(14.5rem,1fr));gap:.7rem;margin:1rem 0}
.card{background:var(--back);border-left:4px solid var(--accent);padding:.6rem .8rem;border-radius:4px}
.card.bad{border-color:var(--bad)}
.card b{display:block;font-size:1.35rem;line-height:1.2}
.card span{color:var(--soft);font-size:.85rem}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(22rem,100%),1fr));gap:1.2rem}
figure{margin:0;min-width:0}
svg{width:100%;height:auto;display:block}
.narrow{display:none}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{text-align:left;vertical-align:top;padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--line)}
th{font-weight:600;color:var(--soft)}
td{overflow-wrap:break-word}
.number{text-align:right;font-variant-numeric:tabular-nums}
td.number{white-space:nowrap}
tr.best td{font-weight:600;background:var(--back)}
.good{color:var(--good)}
.bad{color:var(--bad)}
.meter{background:var(--forward);height:.7rem;min-width:1px;margin-top:.35rem}
pre{background:var(--back);padding:.8rem;overflow-x:auto;font-size:.8rem;line-height:1.45;border-radius:4px}
pre.lines{white-space:pre-wrap;overflow-wrap:anywhere}
summary{cursor:pointer;color:var(--accent);padding:.4rem 0}
}
@media(max-width:700px){.memfine{padding:.5rem;
h1{font-size:1.2rem}.card b{font-size:1.1rem}.cards{grid-template-columns:1fr 1fr}
.full{display:none}.narrow{display:block}
th,td{padding-right:.45rem;font-size:.84rem}
}}
@media print{.memfine details{display:none}}
"""
)


def document(title: str, *parts: str, script: str = "") -> str:
    """Return a whole HTML document.

    Args:
        parts: HTML, in order.
        script: HTML behind them: what makes the page answer its reader.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f'<body class="memfine"><main>\n{"".join(parts)}\n</main>{script}</body></html>\n'
    )


def fragment(*parts: str) -> str:
    """Return HTML with its style for the body of another page, such as a notebook."""
    return f'<div class="memfine"><style>{_STYLE}</style>{"".join(parts)}</div>'


def section(title: str, *parts: str) -> str:
    """Return a heading with HTML below it."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def cards(cells: Iterable[tuple[str, str, bool]]) -> str:
    """Return cards of (value, what it is, whether it is bad)."""
    drawn = (
        f'<div class="card{" bad" if is_bad else ""}"><b>{escape(value)}</b><span>{escape(text)}</span></div>'
        for value, text, is_bad in cells
    )
    return f'<div class="cards">{"".join(drawn)}</div>'


def items(lines: Iterable[str]) -> str:
    """Return a list of texts."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def table(
    names: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = (), best: Iterable[int] = ()
) -> str:
    """Return a table that scrolls sideways where it does not fit.

    Args:
        names: of the columns.
        rows: cells as HTML.
        numbers: columns that are set to the right.
        best: rows that are marked.
    """
    right, marked = set(numbers), set(best)
    kinds = [' class="number"' if place in right else "" for place in range(len(names))]
    head = "".join(
        f"<th{kind}>{escape(name).replace('/', '/<wbr>')}</th>" for kind, name in zip(kinds, names, strict=True)
    )
    lines = (
        f"<tr{' class=best' if place in marked else ''}>"
        + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True))
        for place, row in enumerate(rows)
    )
    body = "".join(f"{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def charts(drawn: Mapping[str, Chart]) -> str:
    """Return charts with their titles, side by side where there is room."""
    cells = (f"<figure><h3>{escape(title)}</h3>{chart.svg()}</figure>" for title, chart in drawn.items())
    return f'<div class="charts">{"".join(cells)}</div>'


def wide_chart(chart: Chart) -> str:
    """Return one chart over the page's width: drawn for a screen and for a phone, of which the style shows one."""
    return f'<figure><div class="full">{chart.svg(1000)}</div><div class="narrow">{chart.svg(400)}</div></figure>'


def details(summary: str, text: str) -> str:
    """Return a text that unfolds."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
