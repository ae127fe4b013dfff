"""The compatibility table: what the tests marked `trainers` said under each torch, with the versions they ran beside.

    make examples      # runs them, keeps their outcomes, writes docs/compatibility.md

Outcomes are kept by torch version in benchmarks/results/compatibility.json; a run replaces those of its own version, so
that versions are added one environment at a time. The newest version's run says which tests there are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["Environment", "outcomes_of", "table"]

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED = ("2.11", "2.12", "2.13")
_PACKAGES = ("transformers", "accelerate", "peft", "lightning", "tensorboard", "deepspeed")
_FILES = {
    "test_examples": "Examples",
    "test_adapters": "PEFT and computed expert weights",
    "test_compile_ways": "Ways to compile, copies, threads, start",
    "test_observability": "Observability",
    "test_training_loops": "Plain PyTorch loops",
    "test_distributed": "DDP and FSDP2 on two processes",
    "test_deepspeed": "DeepSpeed ZeRO on two processes",
    "test_transformers_trainer": "transformers.Trainer by its own arguments",
    "test_registration": "Names",
}


@dataclass
class Environment:
    """One torch, what was installed beside it, and what its tests said.

    Args:
        torch: version, e.g. "2.13.0".
        beside: Python's and the trainers' versions, in words.
        outcomes: "FILE::TEST" -> "works", "**fails**" or "not run".
    """

    torch: str
    beside: str
    outcomes: dict[str, str] = field(default_factory=dict)


def outcomes_of(*reports: str) -> dict[str, str]:
    """Outcomes by "FILE::TEST" of the files that have a section in the table.

    Args:
        reports: pytest's, in JUnit XML.
    """
    found: dict[str, str] = {}
    for case in (case for report in reports for case in ElementTree.fromstring(report).iter("testcase")):
        file = case.get("classname", "").rsplit(".", 1)[-1]
        if file in _FILES:
            found[f"{file}::{case.get('name', '')}"] = _outcome(case)
    return dict(sorted(found.items()))  # not as parallel workers happened to run them


def table(environments: Mapping[str, Environment]) -> str:
    """A page with a table for each file of tests, a column for each torch.

    Args:
        environments: by minor version of torch; one that is absent has a column of "untried".
    """
    newest = max(environments)
    tests = list(environments[newest].outcomes)
    head = f"| what was tested | {' | '.join(f'torch {version}' for version in SUPPORTED)} |"
    sections = []
    for file, title in _FILES.items():
        rows = [_row(test, environments) for test in tests if test.startswith(f"{file}::")]
        if rows:
            sections.append("\n".join([f"## {title}", "", head, "|---|" + "---|" * len(SUPPORTED), *rows]))
    page = [
        "# Compatibility",
        "Written by `make examples` from the tests marked `trainers`; do not edit. Their outcomes are kept in\n"
        '`benchmarks/results/compatibility.json`. "Not run" is a test whose packages were not installed, "untried"\n'
        "one that was not part of that version's run.",
        "\n".join(f"- torch {one.torch}: {one.beside}" for _, one in sorted(environments.items())),
    ]
    return "\n\n".join([*page, *sections]) + "\n"


def _row(test: str, environments: Mapping[str, Environment]) -> str:
    found = [environments[version].outcomes.get(test, "") if version in environments else "" for version in SUPPORTED]
    return f"| {_sentence(test.split('::', 1)[1])} | {' | '.join(one or 'untried' for one in found)} |"


def _sentence(name: str) -> str:
    base, _, parameters = name.partition("[")
    words = base.removeprefix("test_").replace("_", " ")
    return f"{words}: {parameters.rstrip(']')}" if parameters else words


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "**fails**"
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
    parser.add_argument("--kept", type=Path, default=ROOT / "benchmarks" / "results" / "compatibility.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "compatibility.md")
    chosen = parser.parse_args()
    kept = {}
    if chosen.kept.exists():
        kept = {key: Environment(**one) for key, one in json.loads(chosen.kept.read_text(encoding="utf-8")).items()}
    if chosen.reports:
        torch = _version("torch")
        mine = kept.setdefault(".".join(torch.split(".")[:2]), Environment(torch, ""))
        mine.torch, mine.beside = torch, _beside()
        mine.outcomes = outcomes_of(*(report.read_text(encoding="utf-8") for report in chosen.reports))
    text = json.dumps({key: asdict(one) for key, one in sorted(kept.items())}, indent=1)
    chosen.kept.write_text(text + "\n", encoding="utf-8")
    chosen.out.write_text(table(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
