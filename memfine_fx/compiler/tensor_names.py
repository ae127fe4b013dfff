"""Name tensors of a compiled graph by the module and the operator that made them, for reports and errors.

1. A tensor of a graph is a node, which has its module and function from Dynamo, in backward those of forward.
2. A buffer of Inductor's code has in its wrapper the last node that its kernel computes. A kernel of a CPU has only its
   own name, of operators: its tensors are named by these, and by the module of what comes next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import replace

from torch import fx

from memfine_fx.compat.operators import OpOverload, op_name
from memfine_fx.memory.liveness import Allocation, GraphMemory
from memfine_fx.passes.dataflow import clean_module_path

__all__ = ["with_labels"]

_MOST_OPERATORS = 3
_FUSED = re.compile(r"^(?:cpp|triton_[a-z]+)_fused_(.*?)_?\d*$")


def with_labels(memory: GraphMemory, graph: fx.Graph) -> GraphMemory:
    """Return a graph's memory record whose allocations say in words what they are.

    Args:
        graph: the graph that the record was read from, or whose code it was.
    """
    nodes = dict(_named_nodes(graph))
    names = {op_name(operator).strip("_") for node in graph.nodes for operator in _operators_of(node)}
    labels: list[str] = []
    next_module = ""
    for allocation in reversed(memory.allocations):
        node = nodes.get(allocation.origin or allocation.name)
        fused = _FUSED.match(allocation.origin)
        if node is not None:
            next_module = "" if allocation.is_input else _module_of(node) or next_module
            labels.append(_label_of(node, allocation))
        elif fused is not None:
            operators = list(_operators_in(fused[1], names))
            more = ", ..." if len(operators) > _MOST_OPERATORS else ""
            place = f"before {next_module}" if next_module else "at the end"
            labels.append(f"{place}: {', '.join(operators[:_MOST_OPERATORS])}{more}")
        else:
            is_scratch = allocation.name.startswith(("scratch of ", "sums of "))
            labels.append("scratch of a kernel" if is_scratch else "a tensor of the compiled code")
    labelled = zip(memory.allocations, reversed(labels), strict=True)
    return replace(memory, allocations=tuple(replace(allocation, label=label) for allocation, label in labelled))


def _named_nodes(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    """Yield each node by the name of its function in the model, and by its own, which comes last and holds."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    for node in nodes:
        if node.meta.get("source_fn_stack"):
            yield str(node.meta["source_fn_stack"][-1][0]), node
    for node in nodes:
        yield node.name, node


def _operators_of(node: fx.Node) -> list[OpOverload]:
    """Return the operator of a node, and that of the model which it comes from."""
    return [target for target in (node.target, node.meta.get("original_aten")) if isinstance(target, OpOverload)]


def _operators_in(text: str, names: Set[str]) -> Iterator[str]:
    """Yield the operators whose names, joined by underscores, are the name of a fused kernel."""
    words = [word for word in text.split("_") if word]
    while words:
        counts = (count for count in range(len(words), 0, -1) if "_".join(words[:count]) in names)
        count = next(counts, 1)
        yield "_".join(words[:count])
        del words[:count]


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entry = next(reversed(stack.values()), "")
    return clean_module_path(entry[0] if isinstance(entry, tuple) else str(entry))


def _label_of(node: fx.Node, allocation: Allocation) -> str:
    sources = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack")
    operator = re.sub(r"_\d+$", "", str(sources[-1][0]) if sources else node.name)
    module = _module_of(node)
    if allocation.result_of is not None:
        operator = "gradients of the experts"
    elif allocation.saved_by:
        operator = "rows that the experts save"
    elif not sources and node.op == "placeholder":
        return "an input of the graph" if node.name.startswith("primals") else "the gradient that backward is given"
    elif allocation.is_input:
        operator += ", saved for backward"
    elif node.meta.get("fwd_source_fn_stack") and not node.meta.get("source_fn_stack"):
        operator += ", its gradient"
    return f"{module}: {operator}" if module else operator
