"""Measurements that answer one question each: ``python -m benchmarks measure NAME``, with ``--help`` for its options.

Each module here has one function, `measure`. The module's docstring is its question; the function's arguments are the
command's options, and it returns an `Answer`.
"""

import argparse
import ast
import inspect
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from benchmarks.machine import describe_machine

__all__ = ["Answer", "Dtype", "chunk_sweep", "device_here", "main", "questions"]

RESULTS = Path(__file__).parents[1] / "results"
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Answer:
    """What was found.

    Args:
        lines: for a reader.
        row: figures by name, one line of results/NAME.jsonl; None where the lines say all.
        is_met: whether it is what the project set out to reach.
    """

    lines: Sequence[str] = ()
    row: dict[str, Any] | None = None
    is_met: bool = True


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def chunk_sweep(rows: Sequence[int], timed: Callable[[int], float], rounds: int) -> Answer:
    """Seconds by rows a chunk. Rounds go through all of them in turn, so that a slow minute meets each.

    Args:
        timed: seconds of one run with so many rows a chunk, warm.
    """
    seconds = list(zip(*([timed(one) for one in rows] for _ in range(rounds)), strict=True))
    medians = [statistics.median(times) for times in seconds]
    lines = [
        f"R={one:6d}  median {median:.4f} s  min {min(times):.4f} s"
        for one, median, times in zip(rows, medians, seconds, strict=True)
    ]
    return Answer(lines, {"rows": list(rows), "median_seconds": [round(median, 4) for median in medians]})


def questions() -> dict[str, str]:
    """The first line of every measurement's docstring by its name, read without importing anything."""
    found = {}
    for one in iter_modules(__path__):
        doc = ast.get_docstring(ast.parse((Path(__path__[0]) / f"{one.name}.py").read_text(encoding="utf-8")))
        found[one.name] = (doc or "").partition("\n")[0]
    return found


def main(name: str, arguments: Sequence[str]) -> int:
    """Measure as the command line asks; 1 where a target was missed."""
    module = import_module(f"{__name__}.{name}")
    options = vars(_parser(name, module).parse_args(arguments))
    is_kept = options.pop("keep")
    answer: Answer = module.measure(**options)
    for line in answer.lines:
        print(line)
    if answer.row is not None:
        given = {key: value for key, value in options.items() if value is not None}
        line = json.dumps({**given, **answer.row, "machine": str(describe_machine(device_here()))})
        print(line)
        if is_kept:
            with (RESULTS / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
    return 0 if answer.is_met else 1


def _parser(name: str, module: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks measure {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = get_type_hints(module.measure)
    for parameter in inspect.signature(module.measure).parameters.values():
        _add_option(parser, parameter.name, kinds[parameter.name], parameter.default)
    parser.add_argument("--keep", action="store_true", help=f"append the row to results/{name}.jsonl")
    return parser


def _add_option(parser: argparse.ArgumentParser, name: str, kind: Any, default: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        parser.add_argument(flag, action="store_true")
        return
    only = kind
    if get_origin(kind) is not Literal:
        only = next((one for one in get_args(kind) if one is not type(None)), kind)  # X of `X | None`
    wanted: dict[str, Any] = {"choices": get_args(only)} if get_origin(only) is Literal else {"type": only}
    parser.add_argument(flag, default=default, help=f"default {default}", **wanted)
