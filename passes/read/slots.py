"""The second walk: from the first rows that stand in their experts' slots, [...,E,...,H].

A capacity model counts tokens against each other, so what fills the slots is no function of one row and stays outside,
whatever it is. The walk begins where that tensor meets the experts, and ends with their last results that stand in the
same slots; everything between is read by the same rules as routed rows.
"""

from __future__ import annotations

from collections.abc import Set

from torch import fx

from memfine_fx.passes.dataflow import static_size
from memfine_fx.passes.read.expressions import Input
from memfine_fx.passes.read.frame import Slots
from memfine_fx.passes.read.reader import Reader
from memfine_fx.passes.read.values import Rows

__all__ = ["SlotReader"]


class SlotReader(Reader):
    """Reads what experts do with the slots that one routing decision fills."""

    _reached: Set[fx.Node] = frozenset()
    _last: tuple[fx.Node, Rows] | None = None

    def read_slots(self, reached: Set[fx.Node], later: set[fx.Node]) -> tuple[fx.Node, Rows] | None:
        """Walk until one of the `later` routing decisions, or the graph's end.

        Args:
            reached: the nodes that the routing decision reaches.

        Returns:
            The last of the experts' results that stand in the same slots, and what they are.
        """
        self._reached = reached
        self._end = min(map(self.flow.position.__getitem__, later), default=self._end)
        self._form.reading(self._walk)
        return self._last

    def _walk(self) -> None:
        for node in list(self.flow.graph.nodes)[: self._end]:
            if node not in self._reached:
                continue
            if self.slots is None:
                self._place_slots(node)
            is_call = node.op in ("call_function", "call_method")
            if is_call and self.slots is not None and any(map(self._is_active, node.all_input_nodes)):
                self._run(node)

    def _settle(self, node: fx.Node, *, is_pulled: bool = False) -> None:
        super()._settle(node, is_pulled=is_pulled)
        for tensor in self._results_of(node):
            value = self._value_of(tensor, node)
            is_slots = isinstance(value, Rows) and self.slots is not None and value.labels is self.slots.labels
            if is_slots and value.is_dispatched and node in self.expert_nodes:
                self._last = node, value

    def _place_slots(self, node: fx.Node) -> None:
        """Set the slots where experts' weights meet a tensor that the routing fills, or it is taken apart by expert."""
        for source in node.all_input_nodes:
            dim = self._sinking.expert_dim(node, source) if self._is_filled(source) else None
            if dim is None:
                continue
            (tensor,) = self._form.tensors(self._form.result(source))
            self.slots = Slots(source, dim, tuple(tensor.shape))
            self.num_experts = static_size(tensor.shape[dim])
            expr = self.expressions.input(Input("rows", source))
            self._give_tensor(tensor, Rows(self.slots.labels, expr, is_dispatched=True))
            return

    def _is_filled(self, node: fx.Node) -> bool:
        """Whether the routing reaches a tensor, or something that is written into it."""
        root = self.flow.root(node)
        return node in self._reached or any(
            mutation in self._reached and root in map(self.flow.root, targets)
            for mutation, targets in self.flow.mutations.items()
        )
