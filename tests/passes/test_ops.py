"""The table of operators against what torch itself says and does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from memfine_fx.compat.operators import OpOverloadPacket, is_pointwise, is_view
from memfine_fx.passes import ops

aten = torch.ops.aten
NO_KIND_OF_OURS = {
    "adjoint", "ccol_indices", "coalesce", "col_indices", "conj", "cpu", "crow_indices", "cuda", "indices", "mH",
    "pin_memory", "positive", "resolve_conj", "resolve_neg", "row_indices", "to", "slice_inverse", "values",
}  # fmt: skip
"""Methods whose schemas say that they may give a view: of complex or sparse numbers, and on other devices."""


def called(function: Callable[..., Any], *args: Any, method: bool = False) -> fx.Node:
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"arg{place}") for place in range(2)]
    operands = tuple(placeholders[arg] if isinstance(arg, int) else arg for arg in args)
    return graph.call_method(function, operands) if method else graph.call_function(function, operands)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("node", "name"),
    [
        (called(operator.mul, 0, 1), "mul"),
        (called(torch.multiply, 0, 1), "mul"),
        (called("__rmul__", 0, 1, method=True), "mul"),
        (called(aten.mul.Tensor, 0, 1), "mul"),
        (called(operator.imul, 0, 1), "mul_"),
        (called("__iadd__", 0, 1, method=True), "add_"),
        (called("mul_", 0, 1, method=True), "mul_"),
        (called(operator.truediv, 0, 1), "div"),
        (called(operator.itruediv, 0, 1), "div_"),
        (called(operator.and_, 0, 1), "bitwise_and"),
        (called(operator.iand, 0, 1), "bitwise_and_"),
        (called(torch.greater, 0, 1), "gt"),
        (called("swapaxes", 0, 1, method=True), "transpose"),
        (called(operator.getitem, 0, 1), "getitem"),
        (called(getattr, 0, "T"), "T"),
        (called(getattr, 0, "shape"), "getattr"),
        # The operands of these change places, so they are no subtraction of the second from the first.
        (called("__rsub__", 0, 1, method=True), "rsub"),
        (called("__rtruediv__", 0, 1, method=True), "rtruediv"),
        (called("index_add_", 0, 1, method=True), "index_add_"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_spelling_of_an_operator_has_one_name(node: fx.Node, name: str) -> None:
    assert ops.name_of(node) == name
    assert ops.base_name_of(node) == name.rstrip("_")


def test_what_calls_nothing_has_no_name() -> None:
    graph = fx.Graph()
    assert ops.name_of(graph.placeholder("view")) == ""
    assert ops.name_of(graph.output(())) == ""


def test_methods_that_may_give_a_view_are_in_the_table() -> None:
    names = [name for name in dir(torch.Tensor) if not name.startswith("_")]
    packets = {name: getattr(aten, name, None) for name in names}
    overloads = {
        name: [getattr(packet, overload) for overload in packet.overloads()]
        for name, packet in packets.items()
        if isinstance(packet, OpOverloadPacket)
    }
    views = {name for name, targets in overloads.items() if any(map(is_view, targets))}
    assert {"view", "unbind", "narrow", "mT"} <= views, "the schemas are read"
    synonyms = {"moveaxis", "swapaxes", "swapdims"}
    assert views - ops.VIEWS - synonyms == NO_KIND_OF_OURS & views


X = torch.arange(12.0).reshape(3, 4)
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(4, 3), "reshape": lambda x: x.reshape(2, 6), "flatten": torch.flatten,
    "ravel": torch.ravel, "unflatten": lambda x: x.unflatten(1, (2, 2)), "squeeze": torch.squeeze,
    "unsqueeze": lambda x: x.unsqueeze(1), "view_as": lambda x: x.view_as(torch.empty(4, 3)),
    "reshape_as": lambda x: x.reshape_as(torch.empty(4, 3)), "_unsafe_view": lambda x: aten._unsafe_view(x, (4, 3)),
    "_reshape_alias": lambda x: aten._reshape_alias(x, (4, 3), (3, 1)), "permute": lambda x: x.permute(1, 0),
    "transpose": lambda x: x.transpose(0, 1), "t": torch.t, "T": lambda x: x.T, "mT": lambda x: x.mT,
    "numpy_T": lambda x: aten.numpy_T(x), "movedim": lambda x: x.movedim(0, 1), "contiguous": Tensor.contiguous,
    "clone": torch.clone, "alias": lambda x: aten.alias(x), "detach": torch.detach,
    "expand": lambda x: x.expand(2, 3, 4), "expand_as": lambda x: x.expand_as(torch.empty(2, 3, 4)),
    "broadcast_to": lambda x: x.broadcast_to((2, 3, 4)), "chunk": lambda x: x.chunk(2, 1),
    "split": lambda x: x.split(2), "split_with_sizes": lambda x: x.split_with_sizes([1, 3], 1),
    "tensor_split": lambda x: x.tensor_split(2), "unbind": torch.unbind, "unsafe_chunk": lambda x: x.unsafe_chunk(2),
    "unsafe_split": lambda x: x.unsafe_split(2), "hsplit": lambda x: x.hsplit(2), "vsplit": lambda x: x.vsplit(3),
    "dsplit": lambda x: x.reshape(1, 3, 4).dsplit(2), "repeat": lambda x: x.repeat(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0), "tile": lambda x: x.tile(2),
}  # fmt: skip


def test_every_layout_split_and_repeat_is_tried() -> None:
    assert CALLS.keys() == ops.LAYOUTS | ops.SPLITS | ops.REPEATS


@pytest.mark.parametrize("name", CALLS)
def test_layouts_give_every_entry_and_no_other(name: str) -> None:
    result = CALLS[name](X)
    parts = result if isinstance(result, (tuple, list)) else [result]
    entries = torch.cat([part.flatten() for part in parts])
    if name in ops.RESHAPES | ops.COPIES | {"detach"}:
        assert torch.equal(entries, X.flatten()), "in the same order"
    elif name in ops.TRANSPOSES | ops.SPLITS:
        assert torch.equal(entries.sort().values, X.flatten())
    else:
        assert torch.equal(entries.sort().values, X.flatten().repeat_interleave(2))
    if name in ops.VIEWS - {"contiguous"} and not name.startswith("unsafe_"):
        assert all(part.untyped_storage().data_ptr() == X.untyped_storage().data_ptr() for part in parts)
    if name in ops.REPEATS | {"clone"}:
        assert all(part.untyped_storage().data_ptr() != X.untyped_storage().data_ptr() for part in parts)


@pytest.mark.parametrize("name", sorted(ops.LIKE_FACTORIES))
def test_factories_read_no_entry(name: str) -> None:
    results = []
    for operand in (torch.zeros(2), torch.full((2,), torch.nan)):
        torch.manual_seed(0)
        arguments: dict[str, tuple[Any, ...]] = {"full_like": (3.0,), "randint_like": (9,), "new_full": ((2,), 3.0)}
        if name.startswith("new_"):
            result = getattr(operand, name)(*arguments.get(name, ((2,),)))
        else:
            result = getattr(torch, name)(operand, *arguments.get(name, ()))
        results.append(torch.zeros(2) if "empty" in name else result)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        ("multinomial", True),
        ("bernoulli_", True),
        ("dropout", True),
        ("scaled_dot_product_attention", True),
        ("gumbel_softmax", True),
        ("dropout2d", True),
        ("uniform", True),
        ("topk", False),
        ("add_", False),
    ],
)
def test_what_draws_random_numbers(name: str, draws: bool) -> None:
    assert ops.is_random(name) is draws


@pytest.mark.parametrize(
    ("target", "is_one"),
    [(aten.mul.Tensor, True), (aten.leaky_relu.default, True), (aten.sum.default, False), ("a name", False)],
    ids=str,
)
def test_pointwise_overloads(target: object, is_one: bool) -> None:
    assert is_pointwise(target) is is_one


@pytest.mark.parametrize(
    ("target", "is_one"),
    [
        (aten.view.default, True),
        (aten._unsafe_view.default, True),
        (aten.split.Tensor, True),
        (aten.add_.Tensor, False),
        (aten.clone.default, False),
        (aten.index.Tensor, False),
        (operator.getitem, False),
    ],
    ids=str,
)
def test_overloads_that_give_views(target: object, is_one: bool) -> None:
    assert is_view(target) is is_one
