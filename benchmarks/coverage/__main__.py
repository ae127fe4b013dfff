"""``python -m benchmarks.coverage``: check every family and spelling; write results/coverage.jsonl, docs/coverage.md.

The work is done by a child process that prints a row per model; when it dies or hangs on one, that one's row
says so, and a fresh child goes on with the rest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.coverage.families import moe_families
from benchmarks.coverage.rows import CoverageRow
from benchmarks.coverage.spellings import SPELLINGS
from benchmarks.coverage.table import coverage_page

RESULTS = Path(__file__).parents[1] / "results" / "coverage.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
_SECONDS_PER_MODEL = 300


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="families or spellings; others keep their rows")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help="only write the table again from the stored rows")
    options = parser.parse_args(arguments)
    if options.child is not None:
        return _child(options.child)
    names = [*SPELLINGS, *(family.name for family in moe_families())]
    rows = stored_rows()
    if not options.table:
        wanted = [name for name in names if options.only is None or name in options.only]
        for row in _run(wanted):
            rows[row.name] = row
            print(_line(row), flush=True)
            _store([rows[name] for name in names if name in rows])
    PAGE.write_text(page_of([rows[name] for name in names if name in rows]), encoding="utf-8")
    return 0


def page_of(rows: list[CoverageRow]) -> str:
    return coverage_page(rows, f"transformers {version('transformers')}, torch {version('torch').partition('+')[0]}")


def _run(names: list[str]) -> Iterator[CoverageRow]:
    rest = list(names)
    while rest:
        finished = 0
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.coverage", "--child", *rest],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
        )
        assert child.stdout is not None
        timer = threading.Timer(_SECONDS_PER_MODEL, child.kill)
        timer.start()
        for line in child.stdout:
            timer.cancel()
            if not line.startswith("{"):
                continue
            yield CoverageRow.from_json(line)
            finished += 1
            timer = threading.Timer(_SECONDS_PER_MODEL, child.kill)
            timer.start()
        timer.cancel()
        status = child.wait()
        if finished < len(rest):
            kind = "spelling" if rest[finished] in SPELLINGS else "family"
            yield CoverageRow(kind, rest[finished], failure=f"the process ended with status {status}")
            finished += 1
        rest = rest[finished:]


def _child(names: list[str]) -> int:
    from benchmarks.coverage.check import check_family, check_spelling

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    families = {family.name: family for family in moe_families()}
    for name in names:
        row = check_spelling(name) if name in SPELLINGS else check_family(families[name])
        print(row.to_json(), file=out, flush=True)
    return 0


def stored_rows() -> dict[str, CoverageRow]:
    if not RESULTS.exists():
        return {}
    rows = [CoverageRow.from_json(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {row.name: row for row in rows}


def _store(rows: list[CoverageRow]) -> None:
    RESULTS.write_text("".join(f"{row.to_json()}\n" for row in rows), encoding="utf-8")


def _line(row: CoverageRow) -> str:
    if row.failure:
        return f"FAIL {row.name}: {row.failure}"
    error = "-" if row.worst_error is None else f"{row.worst_error:.1e} ({row.worst_name})"
    ratio = "-" if row.peak_ratio is None else f"{row.peak_ratio:.2f}"
    mark = "ok  " if row.is_whole else "PART" if row.num_raised else "NONE"
    return (
        f"{mark} {row.name}: raised {row.num_raised} found {row.num_found} of {row.num_layers} layers, "
        f"{row.num_graphs} graphs, error {error}, peak x{ratio} {'; '.join(row.reasons)}"
    )


if __name__ == "__main__":
    sys.exit(main())
