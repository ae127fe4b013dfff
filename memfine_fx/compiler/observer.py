"""Observers of the pipeline: they watch the graphs of a session, and say what runs in place of compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from memfine_fx.records import MoERegion
from memfine_fx.report.picture import RegionGraph
from memfine_fx.report.roles import region_graph

if TYPE_CHECKING:
    from memfine_fx.compiler.captured_graph import CapturedGraph
    from memfine_fx.compiler.session import Session

__all__ = ["DryRun", "Observer"]


class Observer:
    """Watches the compilation of a session's graphs. This one sees to it that they are compiled as ever.

    Args:
        runs_here: whether rates that are measured on this machine decide.
    """

    compiles = True
    """Whether graphs are compiled and run for the user; else nothing is compared, logged or warned of."""
    lowers = True
    """Whether regions are rewritten."""

    def __init__(self, *, runs_here: bool = True) -> None:
        self.runs_here = runs_here

    def on_capture(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], session: Session, record: CapturedGraph
    ) -> Callable[..., Any] | None:
        """Return what runs in place of a captured graph in which nothing is looked for; None to look for regions."""
        return None

    def on_lowered(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], session: Session, record: CapturedGraph
    ) -> Callable[..., Any] | None:
        """Return what runs in place of a rewritten graph; None to compile it."""
        return None

    def picture_of(self, region: MoERegion) -> RegionGraph | None:
        """Return the picture of a region that goes into reports, None where none does."""
        return None


class DryRun(Observer):
    """Runs graphs as they were captured: for `explain` and `verify`, which analyse only."""

    compiles = False
    lowers = False

    def on_lowered(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], session: Session, record: CapturedGraph
    ) -> Callable[..., Any] | None:
        return graph_module

    def picture_of(self, region: MoERegion) -> RegionGraph | None:
        return region_graph(region)
