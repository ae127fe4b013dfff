"""One self-contained HTML page: machine and commands on top, sortable tables, what they show, figures inline."""

import base64
import html
from collections.abc import Sequence

from benchmarks.figures import pictures_of
from benchmarks.records import Row
from benchmarks.suites import SUITES
from benchmarks.tables import Table, conclusions, machine_lines, tables_of

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 78em; margin: 2em auto; padding: 0 1.5em; }
h1 { font-size: 1.6em; } h2 { margin-top: 2.2em; border-bottom: 2px solid #0a7d5a; } h3 { font-size: 1em; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th { cursor: pointer; text-align: right; background: #f2f5f4; } th:hover { background: #dfeae5; }
th, td { padding: 3px 9px; border-bottom: 1px solid #e3e3e3; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tr.ours td { background: #eef7f3; }
.scroll { overflow-x: auto; } .failures { color: #8a3b1f; font-size: 13px; }
pre { background: #f7f7f7; padding: 1em; overflow-x: auto; font-size: 12.5px; line-height: 1.35; }
figure { display: inline-block; margin: 1em 1em 0 0; }
img { max-width: 100%; } figcaption { font-size: 13px; color: #555; }
"""
_SCRIPT = """
document.querySelectorAll('th').forEach(head => head.addEventListener('click', () => {
  const body = head.closest('table').tBodies[0], place = head.cellIndex, up = head.dataset.up !== '1';
  const key = row => { const text = row.cells[place].textContent.replace(/,/g, ''), number = parseFloat(text);
    return isNaN(number) ? text : number; };
  const compare = (a, b) => typeof key(a) === typeof key(b) ? (key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0)
    : typeof key(a) === 'number' ? -1 : 1;
  [...body.rows].sort((a, b) => up ? compare(a, b) : compare(b, a)).forEach(row => body.appendChild(row));
  head.dataset.up = up ? '1' : '0';
}));
"""


def render_report(rows: Sequence[Row]) -> str:
    """The page of these rows, of any number of suites.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    suites = list(dict.fromkeys(row.job.suite for row in rows))
    machines = "".join(f"<li>{html.escape(line)}</li>" for line in machine_lines(rows))
    sections = "".join(_section(name, [row for row in rows if row.job.suite == name]) for name in suites)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>memfine_fx benchmarks</title>"
        f"<style>{_STYLE}</style></head><body><h1>memfine_fx benchmarks</h1>"
        "<p>A fresh process per row; peaks are exact allocator bytes beyond parameters and gradients; times are "
        "medians of interleaved rounds; outputs, losses and gradients are compared within each table. Click a column "
        f"to sort.</p><ul>{machines}</ul>{sections}<script>{_SCRIPT}</script></body></html>\n"
    )


def _section(name: str, rows: Sequence[Row]) -> str:
    about = SUITES[name].about if name in SUITES else ""
    command = f"python -m benchmarks run --suite {name}"
    said = "".join(f"<pre>{html.escape(text)}</pre>" for text in conclusions(rows))
    tables = "".join(map(_table, tables_of(rows)))
    return (
        f"<h2>{html.escape(name)}: {html.escape(about)}</h2><p><code>{html.escape(command)}</code></p>"
        f"{said}{tables}{_figures(rows)}"
    )


def _table(table: Table) -> str:
    header = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    body = "".join(
        f"<tr{' class=ours' if cells[0].startswith('memfine') else ''}>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for cells in table.cells
    )
    failures = "".join(f"<li>{html.escape(line)}</li>" for line in table.failures)
    return (
        f"<h3>{html.escape(table.title)}</h3><div class='scroll'><table><thead><tr>{header}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>" + (f"<ul class='failures'>{failures}</ul>" if failures else "")
    )


def _figures(rows: Sequence[Row]) -> str:
    return "".join(
        f"<figure><img alt='{html.escape(picture.caption)}' "
        f"src='data:image/png;base64,{base64.b64encode(picture.png).decode()}'>"
        f"<figcaption>{html.escape(picture.caption)}</figcaption></figure>"
        for picture in pictures_of(rows)
    )
