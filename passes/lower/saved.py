"""Select what an expert's forward may save for its backward, and build the pair of compiled functions that saves it.

Terms
    joint       forward and vjp of the expert function in one graph, (grad, *arguments) -> (value, *gradients)
    free        nodes that do not depend on `grad`: backward recomputes them, or reads them saved

Two choices besides recomputing all:
    projections   results of the free matmuls that backward reads: most FLOPs per byte
    operands      these, and the free tensors that backward's own matmuls read: elementwise results that it would
                  otherwise write to memory a second time. Everything else is fused into what reads it, and the rows
                  themselves are gathered again, which reads as many bytes as saving them would.

Products that meet in a sum alone, as a projection's and its adapter's do, are saved as that sum.

Steps: find the nodes to save; cut the joint graph there into a forward that returns them and a backward that takes
them. A product of the function's own arguments is not returned: the loop computes it where it stays, and forward takes
it. A saved tensor has one row for each routed row and is contiguous; any other tensor is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.operators import is_view, op_name
from memfine_fx.passes.dataflow import computed_from
from memfine_fx.passes.ops import TRANSPOSES, name_of
from memfine_fx.passes.tracing import TracedFunction, is_transpose
from memfine_fx.records import SavePolicy
from memfine_fx.runtime.compiled_expert import (
    Compiled,
    CompiledBackward,
    Operand,
    Product,
    SavedTensor,
    SavingFunctions,
)

__all__ = ["cut_joint", "matmul_flops_per_row", "nodes_to_save", "through_transposes"]

aten = torch.ops.aten


def cut_joint(
    joint: TracedFunction,
    policy: SavePolicy,
    forward_of: Callable[[TracedFunction], Compiled],
    backward_of: Callable[[TracedFunction], CompiledBackward],
) -> SavingFunctions | None:
    """Return both sides of the joint graph, cut as a policy says and compiled; None where there is nothing to save.

    Args:
        forward_of: compiles (rows, weight, *params, *saved tensors that are given) -> [value, *other saved tensors].
        backward_of: compiles (grad, rows, weight, *params, *saved tensors) -> gradients.
    """
    candidates = [(node, _saved_tensor(node, joint)) for node in nodes_to_save(joint.graph_module.graph, policy)]
    nodes = [node for node, tensor in candidates if tensor is not None]
    if not nodes:
        return None
    grad, *others = (node for node in joint.graph_module.graph.nodes if node.op == "placeholder")
    # The vjp returns the value first, so that both sides can be cut from one graph.
    value, *gradients = _results(joint.graph_module.graph)
    given_products = tuple(_given_product(node, others) for node in nodes)
    given_nodes = [node for node, product in zip(nodes, given_products, strict=True) if product is not None]
    returned = [node for node in nodes if node not in given_nodes]
    return SavingFunctions(
        forward_of(_extracted(joint, [*others, *given_nodes], [value, *returned])),
        backward_of(_extracted(joint, [grad, *others, *nodes], gradients)),
        tuple(tensor for _, tensor in candidates if tensor is not None),
        sum(_flops_per_row(product) for node in nodes for product in _summed(node) or [node] if _is_matmul(product)),
        given_products,
    )


def _given_product(node: fx.Node, arguments: Sequence[fx.Node]) -> Product | None:
    """The product that a node is, where it is one of the function's arguments alone."""
    if node.kwargs or node.target not in (aten.mm.default, aten.addmm.default):
        return None
    *added, left, right = (_argument(source, arguments) for source in node.args)
    if left is None or right is None or None in added:
        return None
    return Product(left, right, *added)


def _argument(node: Any, arguments: Sequence[fx.Node]) -> Operand | None:
    source, is_transposed = through_transposes(node)
    return Operand(True, arguments.index(source), is_transposed) if source in arguments else None


def through_transposes(node: fx.Node) -> tuple[fx.Node, bool]:
    """Return the matrix under a chain of transposes, and whether the chain transposes it."""
    is_transposed = False
    while name_of(node) in TRANSPOSES and isinstance(node.args[0], fx.Node) and node.meta["val"].ndim == 2:
        is_transposed ^= is_transpose(node)
        node = node.args[0]
    return node, is_transposed


def nodes_to_save(joint: fx.Graph, policy: SavePolicy) -> list[fx.Node]:
    """Return the nodes that the choice `policy` saves, in graph order."""
    dependent = _dependents(joint)
    free = [node for node in joint.nodes if node.op == "call_function" and node not in dependent]
    wanted = computed_from(_results(joint)[1:])
    products = list(dict.fromkeys(_sum_of(node) for node in free if _is_matmul(node) and node in wanted))
    if policy == "projections":
        return [node for node in free if node in products]
    # A view costs nothing, and its base is what would be written.
    read = {_base(source) for node in dependent if _is_matmul(node) for source in node.all_input_nodes}
    return [node for node in free if node in read or node in products]


def _sum_of(product: fx.Node) -> fx.Node:
    """The sum that a product is read by, where nothing else reads either addend; else the product."""
    (reader, *others) = product.users
    return product if others or product not in _summed(reader) else reader


def _summed(node: fx.Node) -> list[fx.Node]:
    """Both products of a plain sum that nothing else reads; none where it is no such sum."""
    addends = node.all_input_nodes
    if node.target is not aten.add.Tensor or len(addends) != 2 or node.kwargs:
        return []
    are_products = all(_is_matmul(addend) and len(addend.users) == 1 for addend in addends)
    is_one_shape = len({str(term.meta["val"].shape) for term in (node, *addends)}) == 1  # sizes may be symbols
    return addends if are_products and is_one_shape else []


def _dependents(joint: fx.Graph) -> set[fx.Node]:
    """Return the first placeholder, `grad`, and the nodes that depend on it."""
    dependents = {next(iter(joint.nodes))}
    for node in joint.nodes:
        if node.op == "call_function" and any(source in dependents for source in node.all_input_nodes):
            dependents.add(node)
    return dependents


def _results(graph: fx.Graph) -> list[fx.Node]:
    (results,) = next(iter(reversed(graph.nodes))).args
    assert isinstance(results, (tuple, list))
    return [node for node in results if isinstance(node, fx.Node)]


def _is_matmul(node: fx.Node) -> bool:
    name = op_name(node.target)
    return name in ("mm", "addmm", "bmm", "baddbmm") or "grouped_mm" in name


def _base(node: fx.Node) -> fx.Node:
    while is_view(node.target) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _saved_tensor(node: fx.Node, joint: TracedFunction) -> SavedTensor | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.ndim < 1 or not value.is_contiguous():
        return None
    # Only what has one row a routed row can be cut to the rows of a chunk.
    sizes: Sequence[Any] = value.shape
    rows, *rest = (size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)
    if rows != joint.rows or not all(isinstance(size, int) for size in rest):
        return None
    return SavedTensor(tuple(rest), value.dtype)


def matmul_flops_per_row(graph: fx.Graph) -> int:
    """Return the FLOPs of the matmuls of a function over rows, on one row."""
    return sum(_flops_per_row(node) for node in graph.nodes if node.op == "call_function" and _is_matmul(node))


def _flops_per_row(node: fx.Node) -> int:
    """2 x inner x width of a matmul whose result has a row for each routed row."""
    left = node.args[1] if "add" in op_name(node.target) else node.args[0]
    assert isinstance(left, fx.Node)
    inner = int(left.meta["val"].shape[-1])
    return 2 * inner * math.prod(int(size) for size in node.meta["val"].shape[1:])


def _extracted(joint: TracedFunction, inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> TracedFunction:
    """The part of the joint graph that leads from `inputs` to `results`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)
    needed = computed_from(results, set(inputs).__contains__)
    for node in joint.graph_module.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    module = fx.GraphModule(joint.graph_module, graph)
    fakes = tuple(node.meta["val"] for node in inputs)
    return TracedFunction(module, joint.fake_mode, fakes, joint.rows, joint.groups)
