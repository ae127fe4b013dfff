"""The benchmark harness.

run        measure suites in fresh processes, print their tables and what they show
measure    answer one question in this process
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

from benchmarks import measures
from benchmarks.compare import Tolerances, compare_rows, format_changes
from benchmarks.harness import read_rows, run_rounds
from benchmarks.readme import PAGES, ROOT, filled, write_readme
from benchmarks.records import Row
from benchmarks.report import render_report
from benchmarks.suites import SUITES, Suite, device_of, jobs_of
from benchmarks.tables import conclusions, disagreements, format_tables
from memfine_fx.config import parse_budget


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _run(options: argparse.Namespace) -> int:
    """Suite after suite; the worst exit status."""
    return max(_run_suite(SUITES[name], options) for name in options.suite)


def _run_suite(suite: Suite, options: argparse.Namespace) -> int:
    if suite.device == "cuda" and not torch.cuda.is_available():
        print(f"benchmarks: suite {suite.name!r} needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    file = options.json
    if options.out:
        ending = "json" if suite.compute else "jsonl"
        file = options.out / f"{suite.name}_{device_of(suite)}.{ending}"
        options.out.mkdir(parents=True, exist_ok=True)
    if suite.compute is not None:
        text, as_json = suite.compute(options.quick)
        print(text)
        if file:
            file.write_text(as_json + "\n")
        return 0
    rounds = options.rounds or (suite.quick_rounds if options.quick else suite.rounds)
    peers = options.peers.split(",") if options.peers else None
    try:
        workloads = options.workloads.split(",") if options.workloads else None
        jobs = jobs_of(suite.name, quick=options.quick, peers=peers, steps=options.steps, workloads=workloads)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    rows = run_rounds(
        jobs,
        rounds=rounds,
        json_file=file,
        job_limit_s=suite.job_limit_s,
        total_limit_s=options.time_limit or suite.total_limit_s,
        memory_limit_bytes=parse_budget(options.memory_limit),
        shared_cache=None if suite.empties_caches else options.cache,
        parallel=options.parallel,
    )
    _print(rows)
    failed = [row for row in rows if row.error and not row.is_out_of_memory and not row.is_unavailable]
    return 1 if failed or disagreements(rows) else 0


def _show(options: argparse.Namespace) -> int:
    _print(read_rows(options.file))
    return 0


def _report(options: argparse.Namespace) -> int:
    rows = [row for file in options.files for row in read_rows(file)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(render_report(rows))
    print(f"wrote {options.out}: {len(rows)} rows")
    return 0


def _readme(options: argparse.Namespace) -> int:
    status = 0
    for name in PAGES:
        path = ROOT / name
        if not options.check:
            print(f"{name} written" if write_readme(path) else f"{name} was up to date")
        elif filled(text := path.read_text()) != text:
            print(
                f"benchmarks: {name} differs from benchmarks/results; run: python -m benchmarks readme", file=sys.stderr
            )
            status = 1
    return status


def _compare(options: argparse.Namespace) -> int:
    tolerances = Tolerances(options.bytes_tolerance, None if options.bytes_only else options.time_tolerance)
    changes = compare_rows(read_rows(options.old), read_rows(options.new), tolerances)
    print(format_changes(changes))
    worse = [change for change in changes if change.is_worse]
    print(f"{len(worse)} of {len(changes)} figures worse beyond the tolerance")
    return 1 if worse else 0


def _print(rows: Sequence[Row]) -> None:
    print(format_tables(rows))
    for text in conclusions(rows):
        print(f"\n{text}")


def _suite_names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no suites {unknown}; there are {', '.join(SUITES)}")
    return names


def _job_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of jobs, 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    suites = "; ".join(f"{suite.name}: {suite.about}" for suite in SUITES.values())
    run = commands.add_parser("run", help="measure suites and print their tables", description=suites)
    run.add_argument("--suite", type=_suite_names, required=True, help="one, or several separated by commas")
    run.add_argument("--quick", action="store_true", help="small sizes, one round: shows that all works")
    run.add_argument("--peers", help="only these, separated by commas")
    run.add_argument("--workloads", help="only these, separated by commas")
    run.add_argument("--rounds", type=int, help="times each job runs in a fresh process")
    run.add_argument("--steps", type=int, default=5, help="timed steps in each process (default 5)")
    run.add_argument("--json", type=Path, help="JSON-lines file; finished rows in it are not run again")
    run.add_argument("--out", type=Path, help="the same for several suites: a folder for SUITE_DEVICE.jsonl of each")
    run.add_argument("--time-limit", type=float, help="seconds after which no further job starts")
    run.add_argument("--memory-limit", help="what one child may take, such as 4GiB (default: 0.8 of the machine)")
    run.add_argument("--cache", type=Path, help="folder of compiled code for all jobs: then compile times are not cold")
    run.add_argument("--parallel", type=_job_count, default=1, help="jobs at a time, which disturb each other's times")
    run.set_defaults(run=_run)
    questions = measures.questions()
    about = "\n".join(f"{name:18}{question}" for name, question in questions.items())
    help_ = argparse.RawDescriptionHelpFormatter
    measure = commands.add_parser("measure", help="answer one question", description=about, formatter_class=help_)
    measure.add_argument("name", choices=questions)
    measure.add_argument("options", nargs=argparse.REMAINDER, help="those of the measurement; NAME --help lists them")
    measure.set_defaults(run=lambda options: measures.main(options.name, options.options))
    show = commands.add_parser("show", help="print the tables of a JSON-lines file")
    show.add_argument("file", type=Path)
    show.set_defaults(run=_show)
    report = commands.add_parser("report", help="one HTML page of JSON-lines files")
    report.add_argument("files", type=Path, nargs="+")
    report.add_argument("--out", type=Path, default=Path("build/benchmarks.html"))
    report.set_defaults(run=_report)
    readme = commands.add_parser("readme", help="write README's tables from benchmarks/results")
    readme.add_argument("--check", action="store_true", help="exit with 1 where they differ, write nothing")
    readme.set_defaults(run=_readme)
    compare = commands.add_parser("compare", help="exit with 1 where new rows are worse than old ones")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    compare.add_argument("--bytes-tolerance", type=float, default=0.02, help="relative growth of peaks (default 0.02)")
    compare.add_argument("--time-tolerance", type=float, default=0.10, help="of step times (default 0.10)")
    compare.add_argument("--bytes-only", action="store_true", help="do not compare times")
    compare.set_defaults(run=_compare)
    return parser


if __name__ == "__main__":
    sys.exit(main())
