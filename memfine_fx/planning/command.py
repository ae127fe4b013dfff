"""`memfine plan PLANNER`: one table of planners, each in a module with `add_parser` and `run`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["PLANNERS", "Planner", "run"]


@dataclass(frozen=True)
class Planner:
    """A planner: the module that holds its command, and what it answers in a line."""

    module: str
    help: str


PLANNERS = {
    "training": Planner("memfine_fx.planning.training.command", "which strategy trains a model fastest on a cluster"),
    "serving": Planner("memfine_fx.planning.serving.command", "which devices prefill, which decode, and how many"),
    "split": Planner("memfine_fx.planning.splitting.command", "where to cut a model between devices and a server"),
}
"""Every planner by the name that `memfine plan` knows it by. Its module is imported only when it is asked for."""


class _Command(Protocol):
    def add_parser(self, commands: Commands) -> argparse.ArgumentParser: ...

    def run(self, options: argparse.Namespace) -> int: ...


def run(arguments: Sequence[str]) -> int:
    """Run `memfine plan ARGUMENTS`, whose first is a planner's name.

    Raises:
        MemfineError: the planner refuses its input.
        ImportError: a package that the planner needs is not installed.
    """
    command = cast(_Command, import_module(PLANNERS[arguments[0]].module))
    parser = argparse.ArgumentParser(prog="memfine plan")
    command.add_parser(parser.add_subparsers(required=True, metavar="PLANNER"))
    return command.run(parser.parse_args(arguments))
