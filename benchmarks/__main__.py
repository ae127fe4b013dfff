"""The benchmark harness.

run        measure a suite in fresh processes, print its tables and what they show
show       print the tables of a JSON-lines file
report     one self-contained HTML page with tables and figures, of any number of JSON-lines files
readme     write README's tables from the committed rows, or check that they agree
compare    exit with 1 where new rows are worse than old ones beyond a tolerance
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import read_rows, run_rounds
from benchmarks.jobs import jobs_of
from benchmarks.records import Row
from benchmarks.suites import SUITES
from benchmarks.tables import conclusions, disagreements, format_tables
from memfine_fx.config import parse_budget


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _run(options: argparse.Namespace) -> int:
    suite = SUITES[options.suite]
    if suite.device == "cuda" and not torch.cuda.is_available():
        print(f"benchmarks: suite {suite.name!r} needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    rounds = options.rounds or (suite.quick_rounds if options.quick else suite.rounds)
    peers = options.peers.split(",") if options.peers else None
    try:
        jobs = jobs_of(options.suite, quick=options.quick, peers=peers, steps=options.steps)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    rows = run_rounds(
        jobs,
        rounds=rounds,
        json_file=options.json,
        job_limit_s=suite.job_limit_s,
        total_limit_s=options.time_limit or suite.total_limit_s,
        memory_limit_bytes=parse_budget(options.memory_limit),
    )
    _print(rows)
    failed = [row for row in rows if row.error and not row.is_out_of_memory and not row.is_unavailable]
    return 1 if failed or disagreements(rows) else 0


def _show(options: argparse.Namespace) -> int:
    _print(read_rows(options.file))
    return 0


def _print(rows: Sequence[Row]) -> None:
    print(format_tables(rows))
    for text in conclusions(rows):
        print(f"\n{text}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    suites = "; ".join(f"{suite.name}: {suite.about}" for suite in SUITES.values())
    run = commands.add_parser("run", help="measure a suite and print its tables", description=suites)
    run.add_argument("--suite", choices=tuple(SUITES), required=True)
    run.add_argument("--quick", action="store_true", help="small sizes, one round: shows that all works")
    run.add_argument("--peers", help="only these, separated by commas")
    run.add_argument("--rounds", type=int, help="times each job runs in a fresh process")
    run.add_argument("--steps", type=int, default=5, help="timed steps in each process (default 5)")
    run.add_argument("--json", type=Path, help="JSON-lines file; finished rows in it are not run again")
    run.add_argument("--time-limit", type=float, help="seconds after which no further job starts")
    run.add_argument("--memory-limit", help="what one child may take, such as 4GiB (default: 0.8 of the machine)")
    run.set_defaults(run=_run)
    show = commands.add_parser("show", help="print the tables of a JSON-lines file")
    show.add_argument("file", type=Path)
    show.set_defaults(run=_show)
    return parser


if __name__ == "__main__":
    sys.exit(main())
