"""Quantized tables: each library's operator that makes a table of numbers is one rule.

An expert's entry depends on its own part of the packed numbers and of their scales alone, where these are stored one
expert behind the other and no block of numbers with one scale lies across a border. NOTE: bitsandbytes' CPU kernel
gives other numbers where a row is shorter than a block (0.50), so rows must be whole blocks.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memfine_fx.compat.bitsandbytes import DEQUANTIZE_4BIT
from memfine_fx.compat.operators import qualified_name
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import static_size
from memfine_fx.passes.read.leads import Lead
from memfine_fx.passes.read.normal_form import Call
from memfine_fx.passes.read.reader import Reader, Rule
from memfine_fx.passes.read.values import Leaf, Rows

__all__ = ["quantized_rule"]

aten = torch.ops.aten


def quantized_rule(target: Any) -> Rule | None:
    """The rule of a library's dequantizing operator, or None."""
    return _RULES.get(qualified_name(target))


def _dequantize_4bit(reader: Reader, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows:
    packed, absmax, block_size, quant_type, shape, dtype = (*args, *kwargs.values())
    sizes = [static_size(size) for size in shape]
    if len(sizes) < 3 or None in sizes or not isinstance(packed, Leaf) or not isinstance(absmax, Leaf):
        raise CannotChunk(Reason.ROWS_NOT_FOLLOWED, f"a tensor {tuple(shape)} in 4 bits is no table", call.node)
    num_experts, num_each = int(shape[0]), math.prod(shape[1:])
    num_bytes, num_scales = call.args[0].numel() * call.args[0].element_size(), call.args[1].numel()
    is_split = shape[-1] % block_size == 0 and num_each % (2 * call.args[0].element_size()) == 0
    if not is_split or 2 * num_bytes != num_experts * num_each or num_scales * block_size != num_experts * num_each:
        raise CannotChunk(
            Reason.ROWS_NOT_FOLLOWED,
            f"blocks of {block_size} numbers lie across the borders of rows of {shape[-1]}",
            call.node,
        )
    own = [reader.part_of_table(leaf, num_experts, call) for leaf in (packed, absmax)]
    expr = reader.emit(call.target, *own, block_size, quant_type, list(shape[1:]), dtype)
    return Rows(Lead.EXPERT, reader.emit(aten.unsqueeze.default, expr, 0), per_row=False, is_dispatched=True)


_RULES: dict[str, Rule] = {DEQUANTIZE_4BIT: _dequantize_4bit}
