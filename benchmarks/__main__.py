"""``python -m benchmarks run --suite layer|model|gpu`` and ``python -m benchmarks show FILE``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import read_rows, run_rounds
from benchmarks.suites import SUITES, jobs_of
from benchmarks.tables import format_tables

_DEFAULT_ROUNDS = {"layer": 3, "model": 3, "gpu": 1}
# The GPU suite is made for machines lent by the minute: it stops by itself, and goes on when run again.
_TOTAL_LIMIT_S = {"layer": float("inf"), "model": float("inf"), "gpu": 400.0}
_JOB_LIMIT_S = {"layer": 1800.0, "model": 1800.0, "gpu": 140.0}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "show":
        print(format_tables(read_rows(options.file)))
        return 0
    if options.suite == "gpu" and not torch.cuda.is_available():
        print("benchmarks: suite 'gpu' needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    rounds = options.rounds or (1 if options.quick else _DEFAULT_ROUNDS[options.suite])
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
        job_limit_s=_JOB_LIMIT_S[options.suite],
        total_limit_s=options.time_limit or _TOTAL_LIMIT_S[options.suite],
    )
    print(format_tables(rows))
    return 1 if any(row.error is not None and not row.is_out_of_memory for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure a suite and print its tables")
    run.add_argument("--suite", choices=SUITES, required=True)
    run.add_argument("--quick", action="store_true", help="small sizes, one round: shows that all works")
    run.add_argument("--peers", help="only these, separated by commas")
    run.add_argument("--rounds", type=int, help="times each job runs in a fresh process")
    run.add_argument("--steps", type=int, default=5, help="timed steps in each process (default 5)")
    run.add_argument("--json", type=Path, help="JSON-lines file; finished rows in it are not run again")
    run.add_argument("--time-limit", type=float, help="seconds after which no further job starts")
    show = commands.add_parser("show", help="print the tables of a JSON-lines file")
    show.add_argument("file", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
