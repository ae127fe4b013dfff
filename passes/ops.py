"""The table of operators: passes ask it which kind of call a node is.

Dynamo's graphs call functions of torch, methods of tensors and Python's operators; ATen graphs call overloads.
`name_of` gives all of them one name, that of ATen's operator: "mul" of `a * b`, `a.mul(b)`, `torch.multiply(a, b)` and
`aten.mul.Tensor(a, b)`; "mul_" where the call writes into its first operand.

A kind is a set of these names. What torch's schemas and tags know is asked of them: `is_random` here, and `is_view` and
`is_pointwise` of `memfine_fx.compat.operators`, for graphs of overloads. The other kinds are listed here, and
tests/passes/test_ops.py compares the lists with the schemas.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.operators import OpOverload, OpOverloadPacket, op_name

__all__ = [
    "ASSERTIONS",
    "BROADCASTS",
    "CASTS",
    "CHOOSERS",
    "COMPARISONS",
    "COPIES",
    "DROPOUTS",
    "FACTORIES",
    "FLOAT_CASTS",
    "GROUPED_MATMULS",
    "LAYOUTS",
    "LIKE_FACTORIES",
    "LOOKUPS",
    "MATMULS",
    "PLACES",
    "PUTS",
    "REPEATS",
    "RESHAPES",
    "SORTS",
    "SPLITS",
    "TRANSPOSES",
    "VIEWS",
    "base_name_of",
    "has_random_tag",
    "is_random",
    "name_of",
    "target_name",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Layouts: all entries of the operand, and no others.

RESHAPES = _names(
    "view reshape flatten ravel unflatten squeeze unsqueeze view_as reshape_as _unsafe_view _reshape_alias"
)
"""Same entries in the same row-major order, in other dimensions."""
TRANSPOSES = _names("permute transpose t T numpy_T mT movedim")
"""Same entries, dimensions in another order."""
BROADCASTS = _names("expand expand_as broadcast_to")
"""Same entries, each several times, in the same memory."""
COPIES = _names("contiguous clone alias")
"""Same entries and dimensions; the memory may be another."""
LAYOUTS = RESHAPES | TRANSPOSES | BROADCASTS | COPIES | {"detach"}

# Parts of the operand.

SPLITS = _names("chunk split split_with_sizes tensor_split unbind unsafe_chunk unsafe_split hsplit vsplit dsplit")
"""A tuple of parts that are together the operand."""
_SLICES = _names("select slice narrow diagonal getitem as_strided unfold real imag view_as_real view_as_complex")
VIEWS = (LAYOUTS - {"clone"}) | SPLITS | _SLICES
"""Results that may share memory with the first operand. An item is a copy where a tensor says which entries."""
LOOKUPS = _names("getitem index index_select gather take take_along_dim embedding")
"""Entries that integers name: (operand, ..., integers), or (integers, table) of embedding's function."""
REPEATS = _names("repeat repeat_interleave tile")
"""Same entries, each several times, in new memory."""

# Other results of the same entries.

FLOAT_CASTS = _names("float double half bfloat16")
CASTS = FLOAT_CASTS | _names("to _to_copy long int bool type type_as")
"""Same entries in another dtype, or on another device."""
PUTS = _names("index_add index_copy scatter scatter_add scatter_reduce index_put index_fill masked_scatter masked_fill")
"""The first operand but for some entries, which an index or a mask names."""

# Computed.

MATMULS = _names("mm bmm matmul addmm baddbmm einsum linear dot")
GROUPED_MATMULS = _names("grouped_mm _grouped_mm grouped_mm_fallback")
COMPARISONS = _names("eq ne lt le gt ge")
PLACES = _names("where nonzero argwhere")
"""With one operand, the places of its entries that are not zero."""
CHOOSERS = _names("topk argmax max argmin min")
"""Choose along one dimension; their integers are a routing decision that can be read."""
SORTS = _names("sort argsort")
DROPOUTS = _names("dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout")

# Made of no entries.

FACTORIES = _names("arange zeros ones empty full tensor")
LIKE_FACTORIES = _names(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full"
)
"""They take only sizes, dtype and device of their operand."""
ASSERTIONS = _names(
    "_assert_scalar _check _check_is_size _assert_async _assert sym_constrain_range sym_constrain_range_for_size"
)

_SYNONYMS = {
    "absolute": "abs", "and": "bitwise_and", "and_": "bitwise_and", "concat": "cat", "concatenate": "cat",
    "divide": "div", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "mod": "remainder",
    "moveaxis": "movedim", "multiply": "mul", "not_equal": "ne", "or": "bitwise_or", "or_": "bitwise_or",
    "subtract": "sub", "swapaxes": "transpose", "swapdims": "transpose", "true_divide": "div", "truediv": "div",
}  # fmt: skip
_OPERATORS = _names("add sub mul truediv floordiv mod pow matmul and or xor lshift rshift")
_RANDOM_FUNCTIONS = DROPOUTS | _names(
    "gumbel_softmax multi_head_attention_forward fractional_max_pool2d fractional_max_pool3d "
    "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices svd_lowrank pca_lowrank"
)
"""Functions of torch that draw random numbers and are no operators, so that no tag says so."""


def target_name(node: fx.Node) -> str:
    """Return the short name of what a call calls, as it is written: "topk", "__mul__", "iadd", "getitem"."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, OpOverload):
        return op_name(node.target)
    return getattr(node.target, "__name__", str(node.target))


def name_of(node: fx.Node) -> str:
    """Return the name of the operator that a call calls; "" of a node that calls nothing."""
    if node.op not in ("call_function", "call_method"):
        return ""
    name = target_name(node)
    if name == "getattr" and len(node.args) > 1 and node.args[1] in ("T", "mT"):
        return str(node.args[1])
    return _canonical(name)


def base_name_of(node: fx.Node) -> str:
    """Return the same name for a call that writes into its first operand and for one that does not."""
    return name_of(node).rstrip("_")


@functools.cache
def _canonical(name: str) -> str:
    has_underscores = name.startswith("__") and name.endswith("__")
    bare = name[2:-2] if has_underscores else name
    if bare[:1] == "i" and bare[1:] in _OPERATORS:  # iadd, __iadd__
        return f"{_canonical(bare[1:])}_"
    if has_underscores and bare in ("radd", "rmul", "rand", "ror"):  # of the others the operands change places
        bare = bare[1:]
    return _SYNONYMS.get(bare, bare)


def has_random_tag(target: object) -> bool:
    """Return whether torch's tag of an operator says that it draws random numbers; False of any other callable."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_random(name: str) -> bool:
    """Return whether an operator or a function of this name draws random numbers."""
    bare = name.rstrip("_")
    return bare in _RANDOM_FUNCTIONS or torch.Tag.nondeterministic_seeded in _tags((bare, f"{bare}_"))


@functools.cache
def _tags(names: tuple[str, ...]) -> frozenset[torch.Tag]:
    """Return the tags that any overload of ATen's operators of these names has."""
    packets = [getattr(torch.ops.aten, name, None) for name in names if name]
    known: list[Any] = [packet for packet in packets if isinstance(packet, OpOverloadPacket)]
    return frozenset(tag for packet in known for name in packet.overloads() for tag in getattr(packet, name).tags)
