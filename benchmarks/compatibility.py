"""The compatibility table: what the tests marked `trainers` said, with the versions that they ran under.

make examples      # runs them and writes docs/compatibility.md
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["table"]

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "lightning", "tensorboard")
_FILES = {
    "test_examples": "Examples",
    "test_adapters": "PEFT and computed expert weights",
    "test_compile_ways": "Ways to compile, copies, threads, start",
    "test_observability": "Observability",
    "test_training_loops": "Plain PyTorch loops",
    "test_distributed": "DDP and FSDP2 on two processes",
    "test_transformers_trainer": "transformers.Trainer by its own arguments",
    "test_registration": "Names",
}


def table(*reports: str) -> str:
    """A page of tables, a file of tests each.

    Args:
        reports: pytest's, in JUnit XML.
    """
    rows: dict[str, list[str]] = {}
    for case in (case for report in reports for case in ElementTree.fromstring(report).iter("testcase")):
        name = _FILES.get(case.get("classname", "").rsplit(".", 1)[-1])
        if name is not None:
            rows.setdefault(name, []).append(f"| {_sentence(case.get('name', ''))} | {_outcome(case)} |")
    sections = [
        "\n".join([f"## {name}", "", "| what was tested | |", "|---|---|", *rows[name]])
        for name in _FILES.values()
        if name in rows
    ]
    head = (
        "# Compatibility\n\nWritten by `make examples` from the tests marked `trainers`; do not edit.\n"
        f"Ran with Python {platform.python_version()}, {_versions()}."
    )
    return "\n\n".join([head, *sections]) + "\n"


def _sentence(name: str) -> str:
    base, _, parameters = name.partition("[")
    words = base.removeprefix("test_").replace("_", " ")
    return f"{words}: {parameters.rstrip(']')}" if parameters else words


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "**fails**"
    return "not run" if case.find("skipped") is not None else "works"


def _versions() -> str:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {re.split('[+]', importlib.metadata.version(package))[0]}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/compatibility.md"))
    chosen = parser.parse_args()
    reports = [report.read_text(encoding="utf-8") for report in chosen.reports]
    chosen.out.write_text(table(*reports), encoding="utf-8")


if __name__ == "__main__":
    main()
