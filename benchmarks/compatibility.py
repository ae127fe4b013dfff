"""The compatibility page: what the fast tests and the tests marked `trainers` said under each torch.

    make test-torch TORCH=2.15.0   # the fast tests in an environment of its own: one row of the first table
    make examples                  # the trainers' tests, with the versions they ran beside: the columns of the others

Outcomes are kept by torch version in benchmarks/results/compatibility.json; a run replaces those of its own version,
of the files of tests that it ran, and of its own Python for the fast tests, so that versions are added one environment
at a time. The newest version under which trainers ran says which of their tests there are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

__all__ = ["Environment", "FastTests", "fast_tests_of", "merged", "outcomes_of", "table"]

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
_PACKAGES = ("transformers", "accelerate", "peft", "lightning", "tensorboard", "deepspeed", "trl")
_MATRIX = "test_matrix"
_KINDS = {"full": "in full", "attention": "LoRA on attention", "experts": "LoRA on attention and experts"}
_WAYS = {"optimize": "`optimize`", "backend": "backend's name"}
_FILES = {
    _MATRIX: "By trainer, what is trained, and the way in",
    "test_config_files": "By a config file alone",
    "test_examples": "Examples",
    "test_wherever_called": "What hosts do around it and into it, one thing at a time",
    "test_adapters": "PEFT and computed expert weights",
    "test_compile_ways": "Ways to compile, copies, threads, start",
    "test_observability": "Observability",
    "test_training_loops": "Plain PyTorch loops",
    "test_distributed": "DDP and FSDP2 on two processes",
    "test_deepspeed": "DeepSpeed ZeRO on two processes",
    "test_transformers_trainer": "transformers.Trainer by its own arguments",
    "test_registration": "Names",
}


@dataclass(frozen=True)
class FastTests:
    """What the fast tests said in one run.

    Args:
        torch: full version with its build, e.g. "2.15.0+cu132".
        failed: names, "FILE::TEST".
    """

    torch: str
    passed: int
    skipped: int
    failed: tuple[str, ...] = ()


@dataclass
class Environment:
    """One torch, what was installed beside it, and what its tests said.

    Args:
        torch: version, e.g. "2.13.0".
        beside: Python's and the trainers' versions, in words; "" where the trainers' tests were not run.
        outcomes: "FILE::TEST" -> "works", "**fails**" or "not run".
        fast: fast tests by version of Python.
    """

    torch: str
    beside: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)
    fast: dict[str, FastTests] = field(default_factory=dict)

    @staticmethod
    def read(kept: Mapping[str, Any]) -> Environment:
        """From its JSON."""
        fast = {
            python: FastTests(**{**one, "failed": tuple(one["failed"])}) for python, one in kept.get("fast", {}).items()
        }
        return Environment(kept["torch"], kept["beside"], kept["outcomes"], fast)


def outcomes_of(*reports: str) -> dict[str, str]:
    """Outcomes by "FILE::TEST" of the files that have a section in the table.

    Args:
        reports: pytest's, in JUnit XML; a test that one of them ran counts as it ran there, since some packages stand
            in environments of their own.
    """
    found: dict[str, str] = {}
    for name, outcome in _cases(reports):
        if name.split("::")[0] in _FILES and (name not in found or outcome != "not run"):
            found[name] = outcome
    return dict(sorted(found.items()))  # not as parallel workers happened to run them


def merged(kept: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    """Outcomes by "FILE::TEST": those found, and of files that are not among them those that were kept."""
    files = {name.split("::")[0] for name in found}
    rest = {name: outcome for name, outcome in kept.items() if name.split("::")[0] not in files}
    return dict(sorted({**rest, **found}.items()))


def fast_tests_of(torch: str, *reports: str) -> FastTests:
    """The fast tests' outcomes, of reports that may each hold a part of them.

    A test that a later report ran again, once what failed was mended, counts as it ran there.
    """
    cases = {(case.get("classname"), case.get("name")): case for case in _elements(reports)}
    count = Counter(map(_outcome, cases.values()))
    failed = tuple(sorted(_name(case) for case in cases.values() if _outcome(case) == "**fails**"))
    return FastTests(torch, count["works"], count["not run"], failed)


def _cases(reports: Iterable[str]) -> Iterator[tuple[str, str]]:
    for case in _elements(reports):
        yield _name(case), _outcome(case)


def _elements(reports: Iterable[str]) -> Iterator[ElementTree.Element]:
    for report in reports:
        yield from ElementTree.fromstring(report).iter("testcase")


def _name(case: ElementTree.Element) -> str:
    """FILE::TEST"""
    return f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name', '')}"


def table(environments: Mapping[str, Environment]) -> str:
    """A page with a table for each file of tests, a column for each torch.

    Args:
        environments: by minor version of torch; those in which trainers' tests ran have a column.
    """
    newest = max((version for version, one in environments.items() if one.outcomes), key=_numbers)
    tests = list(environments[newest].outcomes)
    versions = [version for version in SUPPORTED if version in environments and environments[version].outcomes]
    head = f"| what was tested | {' | '.join(f'torch {version}' for version in versions)} |"
    sections = [_matrix(newest, environments[newest].outcomes)]
    for file, title in _FILES.items():
        if file == _MATRIX:
            continue
        rows = _rows([test for test in tests if test.startswith(f"{file}::")], [environments[one] for one in versions])
        if rows:
            sections.append("\n".join([f"## {title}", "", head, "|---|" + "---|" * len(versions), *rows]))
    page = [
        "# Compatibility",
        "Written by `make test-torch TORCH=VERSION` (the fast tests) and `make examples` (the tests of trainers) from\n"
        "`benchmarks/results/compatibility.json`; do not edit.",
        *([_fast_table(environments)] if any(one.fast for one in environments.values()) else []),
        "## Trainers and examples",
        '"Not run": the packages were not installed. "Untried": not in the run of that version.',
        "\n".join(f"- torch {one.torch}: {one.beside}" for _, one in _sorted(environments) if one.beside),
    ]
    return "\n\n".join([*page, *filter(None, sections)]) + "\n"


def _matrix(torch: str, outcomes: Mapping[str, str]) -> str:
    """A row for each host of tests/trainers/test_matrix.py, a column for what is trained and each way in."""
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for test, outcome in outcomes.items():
        file, _, name = test.partition("::")
        if file == _MATRIX:
            host, kind, way = name.partition("[")[2].rstrip("]").rsplit("-", 2)
            cells.setdefault(host, {})[kind, way] = outcome
    if not cells:
        return ""
    columns = [(kind, way) for kind in _KINDS for way in _WAYS]
    held = [one for row in cells.values() for one in row.values() if one != "not run"]
    return "\n".join(
        [
            f"## {_FILES[_MATRIX]}",
            "",
            f"Under torch {torch}, {held.count('works')} of {len(held)} cells work: every layer is chunked, and losses",
            "are those of the same run without memfine_fx. `torch.compile` with the backend's name alone cannot",
            "prepare PEFT's adapters on stacked experts; the warning names `optimize`.",
            "",
            "| host | " + " | ".join(f"{_KINDS[kind]}, {_WAYS[way]}" for kind, way in columns) + " |",
            "|---|" + "---|" * len(columns),
            *(
                f"| {host} | " + " | ".join(row.get(one, "untried") for one in columns) + " |"
                for host, row in cells.items()
            ),
        ]
    )


def _fast_table(environments: Mapping[str, Environment]) -> str:
    lines = [
        "## The fast tests",
        "",
        "| torch | Python | passed | skipped | failed | which |",
        "|---|---|---|---|---|---|",
    ]
    for _, environment in _sorted(environments):
        for python, one in sorted(environment.fast.items(), key=lambda item: _numbers(item[0])):
            cells = (one.torch, python, one.passed, one.skipped, len(one.failed), ", ".join(one.failed) or "-")
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _sorted(environments: Mapping[str, Environment]) -> list[tuple[str, Environment]]:
    return sorted(environments.items(), key=lambda item: _numbers(item[0]))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _rows(tests: Sequence[str], environments: Sequence[Environment]) -> list[str]:
    """A row for each test; cases of one test with the same outcomes share it."""
    cases: dict[tuple[str, str], list[str]] = {}
    for test in tests:
        base, _, parameters = test.split("::", 1)[1].partition("[")
        words = base.removeprefix("test_").replace("_", " ")
        outcomes = " | ".join(one.outcomes.get(test) or "untried" for one in environments)
        cases.setdefault((words, outcomes), []).extend([parameters.rstrip("]")] if parameters else [])
    return [
        f"| {words}: {'; '.join(names)} | {outcomes} |" if names else f"| {words} | {outcomes} |"
        for (words, outcomes), names in cases.items()
    ]


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "**fails**"
    for held in case.iter("property"):
        if held.get("name") == "outcome":
            return held.get("value", "")
    return "not run" if case.find("skipped") is not None else "works"


def _version(package: str) -> str:
    try:
        return re.split("[+]", importlib.metadata.version(package))[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def _beside() -> str:
    found = [f"{package} {_version(package)}" if _version(package) else f"no {package}" for package in _PACKAGES]
    return ", ".join([f"Python {platform.python_version()}", *found])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reports", type=Path, nargs="*", help="of this interpreter's torch; none: only write the page")
    parser.add_argument("--fast", action="store_true", help="the reports are of the fast tests, not of the trainers'")
    parser.add_argument("--kept", type=Path, default=ROOT / "benchmarks" / "results" / "compatibility.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "compatibility.md")
    chosen = parser.parse_args()
    kept = {}
    if chosen.kept.exists():
        kept = {key: Environment.read(one) for key, one in json.loads(chosen.kept.read_text(encoding="utf-8")).items()}
    if chosen.reports:
        torch = _version("torch")
        mine = kept.setdefault(".".join(torch.split(".")[:2]), Environment(torch))
        reports = [report.read_text(encoding="utf-8") for report in chosen.reports]
        if chosen.fast:
            build = importlib.metadata.version("torch")
            mine.fast[platform.python_version()] = fast_tests_of(build, *reports)
        else:
            mine.torch, mine.beside, mine.outcomes = torch, _beside(), merged(mine.outcomes, outcomes_of(*reports))
    text = json.dumps({key: asdict(one) for key, one in _sorted(kept)}, indent=1)
    chosen.kept.write_text(text + "\n", encoding="utf-8")
    chosen.out.write_text(table(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
