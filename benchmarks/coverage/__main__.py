"""``python -m benchmarks.coverage``: check every family and spelling; write results/coverage.jsonl, docs/coverage.md.

With ``--multimodal`` deep multimodal models with images are checked instead; their rows are in
results/coverage_multimodal.jsonl. With ``--experts-function`` families are chunked by
`experts_implementation="memfine"`; their rows are in results/coverage_experts_function.jsonl. With ``--replay``
families follow a routing that they are given; their rows are in results/coverage_replay.jsonl. With ``--packages`` the
layers of the packages that packages.txt names are checked instead, in the environment that has them (``make
coverage-packages``); their rows are in results/coverage_packages.jsonl. With ``--version`` five families are checked in
the version of transformers that is installed (``make coverage-versions``).

The work is done by a child process that prints a row per model; when it dies or hangs on one, that one's row
says so, and a fresh child goes on with the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.coverage.families import moe_families
from benchmarks.coverage.multimodal import MULTIMODAL
from benchmarks.coverage.packages import PACKAGED
from benchmarks.coverage.rows import (
    EXPERTS_FUNCTION,
    ROUTING_REPLAY,
    CoverageRow,
    MultimodalRow,
    PackageRow,
    VersionRow,
)
from benchmarks.coverage.spellings import SPELLINGS
from benchmarks.coverage.table import coverage_page

RESULTS = Path(__file__).parents[1] / "results" / "coverage.jsonl"
MULTIMODAL_RESULTS = RESULTS.with_name("coverage_multimodal.jsonl")
FUNCTION_RESULTS = RESULTS.with_name("coverage_experts_function.jsonl")
REPLAY_RESULTS = RESULTS.with_name("coverage_replay.jsonl")
PACKAGE_RESULTS = RESULTS.with_name("coverage_packages.jsonl")
VERSION_RESULTS = RESULTS.with_name("coverage_versions.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
FAMILIES_OF_VERSIONS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe")
_KINDS = {"experts function of ": EXPERTS_FUNCTION, "routing replay of ": ROUTING_REPLAY}
"""Before the name of a family that is checked otherwise: what its row is about."""
_FUNCTION, _REPLAY = _KINDS
_SECONDS_PER_MODEL, _SECONDS_PER_DEEP_MODEL = 300, 1500


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="families or spellings; others keep their rows")
    parser.add_argument("--packages", action="store_true", help="layers as their packages ship them, not the others")
    parser.add_argument("--multimodal", action="store_true", help="deep models with images, not the others")
    parser.add_argument("--experts-function", action="store_true", help="families chunked by their experts' function")
    parser.add_argument("--replay", action="store_true", help="families under a routing that they are given")
    parser.add_argument("--version", action="store_true", help="five families in this version of transformers")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help="only write the table again from the stored rows")
    options = parser.parse_args(arguments)
    if options.child is not None:
        return _child(options.child)
    if options.version:
        _check_version()
        return 0
    names, stored, results = _names(), stored_rows, RESULTS
    if options.packages:
        names, stored, results = list(PACKAGED), stored_package_rows, PACKAGE_RESULTS
    elif options.multimodal:
        names, stored, results = list(MULTIMODAL), stored_multimodal_rows, MULTIMODAL_RESULTS
    elif options.experts_function:
        names, results = [f"{_FUNCTION}{family.name}" for family in moe_families()], FUNCTION_RESULTS
        stored = functools.partial(_stored, results)
    elif options.replay:
        names, results = [f"{_REPLAY}{family.name}" for family in moe_families()], REPLAY_RESULTS
        stored = functools.partial(_stored, results)
    rows: dict[str, CoverageRow] = {**stored()}
    if not options.table:
        wanted = [name for name in names if options.only is None or name in options.only]
        for row in _run(wanted):
            rows[row.name] = row
            print(_line(row), flush=True)
            _store([rows[name] for name in names if name in rows], results)
    of_page = stored_rows()
    PAGE.write_text(page_of([of_page[name] for name in _names() if name in of_page]), encoding="utf-8")
    return 0


def _check_version() -> None:
    """Check the installed transformers, and keep the rows of others; the page is written from all by `--table`."""
    installed = version("transformers")
    kept = [row for row in stored_version_rows() if row.version != installed]
    for row in _run(list(FAMILIES_OF_VERSIONS)):
        kept.append(VersionRow(**{**dataclasses.asdict(row), "version": installed}))
        print(installed, _line(row), flush=True)
        kept.sort(key=lambda one: [int(part) for part in one.version.split(".")])
        _store(kept, VERSION_RESULTS)


def page_of(rows: list[CoverageRow]) -> str:
    """The page of these rows of families and spellings, and of the packages' layers as stored."""
    packaged = stored_package_rows()
    versions = f"transformers {version('transformers')}, torch {version('torch').partition('+')[0]}"
    rows_of_packages = [packaged[name] for name in PACKAGED if name in packaged]
    multimodal = stored_multimodal_rows()
    missing = {name: MultimodalRow("multimodal", name, failure="not measured yet") for name in MULTIMODAL}
    rows_of_multimodal = [multimodal.get(name, missing[name]) for name in MULTIMODAL]
    of_kinds = {kind: rows_of(kind) for kind in (EXPERTS_FUNCTION, ROUTING_REPLAY)}
    return coverage_page(rows, rows_of_packages, stored_version_rows(), rows_of_multimodal, versions, of_kinds)


def _names() -> list[str]:
    return [*SPELLINGS, *(family.name for family in moe_families())]


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
        seconds = _SECONDS_PER_DEEP_MODEL if names[0] in MULTIMODAL else _SECONDS_PER_MODEL
        timer = threading.Timer(seconds, child.kill)
        timer.start()
        for line in child.stdout:
            timer.cancel()
            if not line.startswith("{"):
                continue
            yield _row_class(rest[finished]).from_json(line)
            finished += 1
            timer = threading.Timer(seconds, child.kill)
            timer.start()
        timer.cancel()
        status = child.wait()
        if finished < len(rest):
            yield _ended(rest[finished], f"the process ended with status {status}")
            finished += 1
        rest = rest[finished:]


def _row_class(name: str) -> type[CoverageRow]:
    return PackageRow if name in PACKAGED else MultimodalRow if name in MULTIMODAL else CoverageRow


def _ended(name: str, failure: str) -> CoverageRow:
    """The row of a model whose process did not live to tell."""
    if name in MULTIMODAL:
        return MultimodalRow("multimodal", name, failure=failure)
    if name in PACKAGED:
        entry = PACKAGED[name]
        installed = entry.installed or entry.version
        return PackageRow("package", name, failure=failure, package=entry.package, version=installed)
    for prefix, kind in _KINDS.items():
        if name.startswith(prefix):
            return CoverageRow(kind, name, failure=failure)
    return CoverageRow("spelling" if name in SPELLINGS else "family", name, failure=failure)


def _child(names: list[str]) -> int:
    from benchmarks.coverage.check import (
        check_experts_function,
        check_family,
        check_multimodal,
        check_package,
        check_replay,
        check_spelling,
    )

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    families = {family.name: family for family in moe_families()}
    for name in names:
        if name in PACKAGED:
            row: CoverageRow = check_package(PACKAGED[name])
        elif name in MULTIMODAL:
            row = check_multimodal(name)
        elif name.startswith(_FUNCTION):
            row = dataclasses.replace(check_experts_function(families[name.removeprefix(_FUNCTION)]), name=name)
        elif name.startswith(_REPLAY):
            row = dataclasses.replace(check_replay(families[name.removeprefix(_REPLAY)]), name=name)
        else:
            row = check_spelling(name) if name in SPELLINGS else check_family(families[name])
        print(row.to_json(), file=out, flush=True)
    return 0


def stored_rows() -> dict[str, CoverageRow]:
    return _stored(RESULTS)


def _stored(path: Path) -> dict[str, CoverageRow]:
    return {row.name: row for row in map(CoverageRow.from_json, _lines(path))}


def stored_package_rows() -> dict[str, PackageRow]:
    return {row.name: row for row in map(PackageRow.from_json, _lines(PACKAGE_RESULTS))}


def stored_multimodal_rows() -> dict[str, MultimodalRow]:
    return {row.name: row for row in map(MultimodalRow.from_json, _lines(MULTIMODAL_RESULTS))}


def rows_of(kind: str) -> list[CoverageRow]:
    """The stored rows of EXPERTS_FUNCTION or ROUTING_REPLAY, by the names of their families."""
    prefix, path = (_FUNCTION, FUNCTION_RESULTS) if kind == EXPERTS_FUNCTION else (_REPLAY, REPLAY_RESULTS)
    return [dataclasses.replace(row, name=row.name.removeprefix(prefix)) for row in _stored(path).values()]


def stored_version_rows() -> list[VersionRow]:
    return [VersionRow.from_json(line) for line in _lines(VERSION_RESULTS)]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _store(rows: Sequence[CoverageRow], path: Path) -> None:
    path.write_text("".join(f"{row.to_json()}\n" for row in rows), encoding="utf-8")


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
