"""How often Dynamo may compile one code while a model is called: once for each kind of call, and for each layer."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from memfine_fx.capture.structure import may_hold_experts
from memfine_fx.compat.settings import RECOMPILE_LIMIT

if TYPE_CHECKING:  # what plans imports sympy, which would be most of the package's import time
    from memfine_fx.compiler.captured_graph import CapturedGraph

__all__ = ["RecompileLimit"]


class RecompileLimit:
    """The limit of compilations of one code that fits a model.

    Where graphs break between layers, the copies of a layer are compilations of one code. Each of them is compiled for
    calls with and without gradients, for one size and for any size, and whatever else the user's limit is meant for. So
    that limit counts for each copy that is compiled alone. A model in one graph has nothing of it: under a high limit,
    one that compiles in every step would never stop.

    Args:
        model: that is called. Experts alone are no copies: there are hundreds.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        kinds = Counter(type(module) for module in model.modules() if may_hold_experts(module))
        self._num_copies = max(kinds.values(), default=0)
        most_common = kinds.most_common(1)[0][0] if kinds else None
        self._copy_of = {  # by the id of a parameter
            id(parameter): number
            for number, module in enumerate(module for module in model.modules() if type(module) is most_common)
            for parameter in module.parameters()
        }
        self._num_graphs, self._most_in_a_graph = 0, 1

    def applied(self, graphs: Sequence[CapturedGraph]) -> contextlib.AbstractContextManager[object]:
        """Return a context manager in which the limit holds.

        Args:
            graphs: that calls of the model were compiled to until now.
        """
        if len(graphs) != self._num_graphs:
            callers = (ids for graph in graphs for ids in graph.parameter_ids_by_caller)
            copies = (len({self._copy_of[id_] for id_ in ids & self._copy_of.keys()}) for ids in callers)
            self._num_graphs, self._most_in_a_graph = len(graphs), max(copies, default=1)
        num_alone = max(1, self._num_copies // max(1, self._most_in_a_graph))
        config = RECOMPILE_LIMIT.config
        limit = int(config.recompile_limit) * num_alone + self._num_copies
        total = max(int(config.accumulated_recompile_limit), limit)
        return RECOMPILE_LIMIT.applied({"recompile_limit": limit, "accumulated_recompile_limit": total})
