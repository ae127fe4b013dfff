"""Operators of torch.ops: their classes and schemas, by which calls in a graph are recognised."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from memfine_fx.compat.checks import expect

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "check_schemas",
    "is_pointwise",
    "is_view",
    "op_name",
    "qualified_name",
    "schema_arguments",
    "viewed_arguments",
    "without_write",
]


def qualified_name(target: object) -> str:
    """ "aten::add" of torch.ops.aten.add.Tensor, "" of anything that is not an overload."""
    return str(target._schema.name) if isinstance(target, OpOverload) else ""


def op_name(target: object) -> str:
    """ "add" of torch.ops.aten.add.Tensor, "" of anything that is not an overload."""
    return qualified_name(target).split("::")[-1]


def schema_arguments(target: OpOverload) -> list[Any]:
    """Arguments by position, with their `name` and `alias_info` (None, or whether they are written)."""
    return list(target._schema.arguments)


def viewed_arguments(target: OpOverload) -> list[int | None]:
    """For each result the place of the argument that it is always a view of, as the schema says; else None."""
    places = {
        name: place
        for place, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and not argument.alias_info.is_write
        for name in argument.alias_info.before_set
    }
    infos = [result.alias_info for result in target._schema.returns]
    names = [min(info.before_set, default="") if info is not None and not info.is_write else "" for info in infos]
    return [places.get(name) for name in names]


@functools.cache
def is_view(target: object) -> bool:
    """Return whether an overload's results are views of its first argument, as its schema says."""
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    return viewed_arguments(target)[:1] == [0] or op_name(target) in _UNSAID_VIEWS


_UNSAID_VIEWS = frozenset(("_unsafe_view", "split", "split_with_sizes", "unbind"))
"""Of one whose result must not be written into, and of lists of views, schemas name no argument."""


@functools.cache
def is_pointwise(target: object) -> bool:
    """Return whether each entry of an overload's result follows from the entries in its place alone."""
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or target in _UNTAGGED)


_UNTAGGED = (torch.ops.aten.leaky_relu.default, torch.ops.aten.hardswish.default)
"""torch 2.11 tags neither, 2.13 the first."""


def without_write(target: OpOverload) -> OpOverload | None:
    """The overload that gives in a new tensor what this one writes; itself where it writes nothing, None if none is."""
    if not target._schema.is_mutable:
        return target
    packet = getattr(getattr(torch.ops, target.namespace), op_name(target).removesuffix("_"), None)
    overload = getattr(packet, target._overloadname, None)
    return overload if isinstance(overload, OpOverload) and not overload._schema.is_mutable else None


def check_schemas() -> None:
    add, add_ = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
    expect(isinstance(add, OpOverload) and isinstance(torch.ops.aten.add, OpOverloadPacket), f"add is a {type(add)}")
    names = (qualified_name(add), op_name(add_), str(add))
    expect(names == ("aten::add", "add_", "aten.add.Tensor"), f"operators are called {names}")
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema_arguments(add_)]
    expect(written == [True, False, False], f"add_ writes {written}")
    expect(schema_arguments(add)[0].alias_info is None, "add writes its argument")
    views = [viewed_arguments(overload) for overload in (add, add_, torch.ops.aten.view_as_complex.default)]
    expect(views == [[None], [None], [0]], f"results of add, add_ and view_as_complex are views of {views}")
    expect(without_write(add_) is add and without_write(add) is add, "add_ without its write is not add")
