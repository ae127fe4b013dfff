"""What an expert's forward may keep for its backward, and the pair of bodies that does.

Terms
    joint       forward and vjp of the expert function in one graph, (grad, *arguments) -> (value, *gradients)
    free        what does not depend on `grad`: backward computes it again, or finds it kept

Two choices beyond recomputing all:
    projections   results of the free matmuls that backward reads: most FLOPs per byte
    operands      these, and the free tensors that backward's own matmuls read: elementwise results that it would
                  otherwise write to memory a second time. Everything else is fused into what reads it, and the rows
                  themselves are gathered again, which reads as many bytes as keeping them would.

Products that meet in a sum alone, as a projection's and its adapter's do, are kept as that sum.

Steps: find the kept nodes; cut the joint graph there into a forward that returns them and a backward that takes them.
A product of the function's own arguments is not returned: the loop makes it where it stays, and forward takes it.
A kept tensor has one row for each routed row and is contiguous; what is not so is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.operators import is_view, op_name
from memfine_fx.passes.ops import TRANSPOSES, name_of
from memfine_fx.passes.tracing import TracedBody, is_transpose
from memfine_fx.records import Keep
from memfine_fx.runtime.bodies import GivenProduct, KeptTensor, Operand

__all__ = ["KeptCut", "cut_joint", "kept_nodes", "matmul_flops_per_row", "through_transposes"]

aten = torch.ops.aten


@dataclass(frozen=True)
class KeptCut:
    """Both sides of a cut joint graph.

    Args:
        forward: (rows, weight, *params, *those of kept that are given) -> [value, *the others].
        backward: (grad, rows, weight, *params, *kept) -> gradients.
        kept: the tensors on the cut.
        flops_per_row: of the free matmuls that backward is spared.
        given: how the loop makes each of `kept`, None where the body does.
    """

    forward: TracedBody
    backward: TracedBody
    kept: tuple[KeptTensor, ...]
    flops_per_row: int
    given: tuple[GivenProduct | None, ...]


def cut_joint(joint: TracedBody, keep: Keep) -> KeptCut | None:
    """The joint graph cut where `keep` says, or None where there is nothing to keep."""
    found = [(node, _kept_tensor(node, joint)) for node in kept_nodes(joint.graph_module.graph, keep)]
    nodes = [node for node, tensor in found if tensor is not None]
    if not nodes:
        return None
    grad, *others = (node for node in joint.graph_module.graph.nodes if node.op == "placeholder")
    # The vjp returns the value first, so that both sides can be cut from one graph.
    value, *gradients = _results(joint.graph_module.graph)
    given = tuple(_given_product(node, others) for node in nodes)
    taken = [node for node, product in zip(nodes, given, strict=True) if product is not None]
    returned = [node for node in nodes if node not in taken]
    return KeptCut(
        _extracted(joint, [*others, *taken], [value, *returned]),
        _extracted(joint, [grad, *others, *nodes], gradients),
        tuple(tensor for _, tensor in found if tensor is not None),
        sum(_flops_per_row(product) for node in nodes for product in _summed(node) or [node] if _is_matmul(product)),
        given,
    )


def _given_product(node: fx.Node, arguments: Sequence[fx.Node]) -> GivenProduct | None:
    """The product that a node is, where it is one of the function's arguments alone."""
    if node.kwargs or node.target not in (aten.mm.default, aten.addmm.default):
        return None
    *added, left, right = (_argument(source, arguments) for source in node.args)
    if left is None or right is None or None in added:
        return None
    return GivenProduct(left, right, *added)


def _argument(node: Any, arguments: Sequence[fx.Node]) -> Operand | None:
    source, is_transposed = through_transposes(node)
    return Operand(True, arguments.index(source), is_transposed) if source in arguments else None


def through_transposes(node: fx.Node) -> tuple[fx.Node, bool]:
    """What a matrix is a transpose of, and whether it is."""
    is_transposed = False
    while name_of(node) in TRANSPOSES and isinstance(node.args[0], fx.Node) and node.meta["val"].ndim == 2:
        is_transposed ^= is_transpose(node)
        node = node.args[0]
    return node, is_transposed


def kept_nodes(joint: fx.Graph, keep: Keep) -> list[fx.Node]:
    """What `keep` keeps, in graph order."""
    dependent = _dependents(joint)
    free = [node for node in joint.nodes if node.op == "call_function" and node not in dependent]
    wanted = _ancestors(_results(joint)[1:])
    products = list(dict.fromkeys(_sum_of(node) for node in free if _is_matmul(node) and node in wanted))
    if keep == "projections":
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
    are_products = all(_is_matmul(one) and len(one.users) == 1 for one in addends)
    is_one_shape = len({str(one.meta["val"].shape) for one in (node, *addends)}) == 1  # sizes may be symbols
    return addends if are_products and is_one_shape else []


def _dependents(joint: fx.Graph) -> set[fx.Node]:
    """What depends on the first placeholder, `grad`."""
    found = {next(iter(joint.nodes))}
    for node in joint.nodes:
        if node.op == "call_function" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _results(graph: fx.Graph) -> list[fx.Node]:
    (results,) = next(iter(reversed(graph.nodes))).args
    assert isinstance(results, (tuple, list))
    return [node for node in results if isinstance(node, fx.Node)]


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending.extend(node.all_input_nodes)
    return reached


def _is_matmul(node: fx.Node) -> bool:
    name = _name(node)
    return name in ("mm", "addmm", "bmm", "baddbmm") or "grouped_mm" in name


def _name(node: fx.Node) -> str:
    return op_name(node.target)


def _base(node: fx.Node) -> fx.Node:
    while is_view(node.target) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _kept_tensor(node: fx.Node, joint: TracedBody) -> KeptTensor | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.ndim < 1 or not value.is_contiguous():
        return None
    # Only what has one row a routed row can be cut to the rows of a chunk.
    rows, *rest = (size.node.expr if isinstance(size, torch.SymInt) else size for size in _sizes(value))
    if rows != joint.rows or not all(isinstance(size, int) for size in rest):
        return None
    return KeptTensor(tuple(rest), value.dtype)


def _sizes(value: torch.Tensor) -> Sequence[Any]:
    return value.shape


def matmul_flops_per_row(graph: fx.Graph) -> int:
    """Of the matmuls of a function over rows, on one row."""
    return sum(_flops_per_row(node) for node in graph.nodes if node.op == "call_function" and _is_matmul(node))


def _flops_per_row(node: fx.Node) -> int:
    """2 x inner x width of a matmul whose result has a row for each routed row."""
    left = node.args[1] if "add" in _name(node) else node.args[0]
    assert isinstance(left, fx.Node)
    inner = int(left.meta["val"].shape[-1])
    return 2 * inner * math.prod(int(size) for size in node.meta["val"].shape[1:])


def _extracted(joint: TracedBody, inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> TracedBody:
    """The part of the joint graph that leads from `inputs` to `results`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)
    needed = _reached(results, set(inputs))
    for node in joint.graph_module.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    module = fx.GraphModule(joint.graph_module, graph)
    fakes = tuple(node.meta["val"] for node in inputs)
    return TracedBody(module, joint.fake_mode, fakes, joint.rows, joint.groups)


def _reached(results: Iterable[fx.Node], stops: set[fx.Node]) -> set[fx.Node]:
    """What results are computed of, up to and without `stops`."""
    reached: set[fx.Node] = set()
    pending = [node for node in results if node not in stops]
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending.extend(source for source in node.all_input_nodes if source not in stops)
    return reached
