"""One HTML page: machine and commands on top, sortable tables, what they show, charts."""

from collections.abc import Sequence
from html import escape

from benchmarks.figures import charts_of
from benchmarks.records import Row
from benchmarks.suites import SUITES
from benchmarks.tables import Table, conclusions, machine_lines, tables_of
from memfine_fx.report.page import charts, document, items, section, table

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
    """Return the page of these rows, of any number of suites."""
    suites = dict.fromkeys(row.job.suite for row in rows)
    return document(
        "memfine_fx benchmarks",
        "<h1>memfine_fx benchmarks</h1><p>A fresh process per row; peaks are exact allocator bytes beyond parameters "
        "and gradients; times are medians of interleaved rounds; outputs, losses and gradients are compared within "
        "each table. Click a column to sort.</p>",
        items(machine_lines(rows)),
        *(_suite(name, [row for row in rows if row.job.suite == name]) for name in suites),
        script=f"<script>{_SCRIPT}</script>",
    )


def _suite(name: str, rows: Sequence[Row]) -> str:
    about = SUITES[name].about if name in SUITES else ""
    command = f"<p><code>python -m benchmarks run --suite {escape(name)}</code></p>"
    lines = (f"<pre>{escape(text)}</pre>" for text in conclusions(rows))
    return section(f"{name}: {about}", command, *lines, *map(_table, tables_of(rows)), charts(charts_of(rows)))


def _table(found: Table) -> str:
    ours = [place for place, cells in enumerate(found.cells) if cells[0].startswith("memfine")]
    cells = ([escape(cell) for cell in row] for row in found.cells)
    drawn = table(found.header, cells, range(1, len(found.header)), ours)
    return f"<h3>{escape(found.title)}</h3>{drawn}{items(found.failures) if found.failures else ''}"
