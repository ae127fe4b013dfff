"""Quantized tables: each library's operator that makes a table of numbers is one rule.

An expert's entry depends on its own part of the packed numbers and of their scales alone, where these are stored one
expert behind the other and no block of numbers with one scale lies across a border. NOTE: bitsandbytes' CPU kernel
gives other numbers where a row is shorter than a block (0.50), so rows must be whole blocks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from memfine_fx.compat.bitsandbytes import DEQUANTIZE_4BIT, LINEAR_4BIT, SCALES_A_BLOCK
from memfine_fx.compat.operators import qualified_name
from memfine_fx.errors import Reason
from memfine_fx.passes.dataflow import static_size
from memfine_fx.passes.read.dim_labels import DimLabels
from memfine_fx.passes.read.normal_form import Call
from memfine_fx.passes.read.reader import Args, Kwargs, Reader, Rule
from memfine_fx.passes.read.values import Leaf, Rows

__all__ = ["quantized_rule"]

aten = torch.ops.aten


def quantized_rule(target: Any) -> Rule | None:
    """The rule of a library's dequantizing operator, or None."""
    return _RULES.get(qualified_name(target))


def _dequantize_4bit(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Rows:
    packed, absmax, block_size, quant_type, shape, dtype = (*args, *kwargs.values())
    sizes = [static_size(size) for size in shape]
    if len(sizes) < 3 or None in sizes or not isinstance(packed, Leaf) or not isinstance(absmax, Leaf):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"a tensor {tuple(shape)} in 4 bits is no table")
    num_experts, num_each = int(shape[0]), math.prod(shape[1:])
    num_bytes, num_scales = call.args[0].numel() * call.args[0].element_size(), call.args[1].numel()
    is_split = shape[-1] % block_size == 0 and num_each % (2 * call.args[0].element_size()) == 0
    if not is_split or 2 * num_bytes != num_experts * num_each or num_scales * block_size != num_experts * num_each:
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED, f"blocks of {block_size} numbers lie across the borders of rows of {shape[-1]}"
        )
    own = [reader.part_of_table(leaf, num_experts, call) for leaf in (packed, absmax)]
    expr = reader.emit(call.target, *own, block_size, quant_type, list(shape[1:]), dtype)
    return Rows(DimLabels.EXPERT, reader.emit(aten.unsqueeze.default, expr, 0), per_row=False, is_dispatched=True)


def _linear_4bit(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Rows:
    """Rows times a matrix of one expert, which is made of its own packed numbers when it runs."""
    values, packed, scales, block_size, quant_type, out = args
    rows = reader.as_rows(values, call)
    is_row_wise = rows.per_row and rows.labels.num_dims == 1
    if not is_row_wise or not all(isinstance(leaf, Leaf) for leaf in (packed, *scales)):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"{rows.labels.in_words} by a matrix in 4 bits")
    width, dtype = int(call.shape()[-1]), call.out.dtype
    absmax, *twice = map(reader.whole_of, scales)
    if twice:
        dequantize = torch.ops.bitsandbytes.dequantize_blockwise.default
        absmax = reader.emit(dequantize, absmax, *twice[:2], SCALES_A_BLOCK, torch.float32)
        absmax = reader.emit(aten.add.Tensor, absmax, twice[2])
    dequantize = torch.ops.bitsandbytes.dequantize_4bit.default
    matrix = reader.emit(dequantize, reader.whole_of(packed), absmax, block_size, quant_type, [out, width], dtype)
    if rows.iteration.expert is not None:
        reader.note_experts(call, "loops", width)
        reader.note_made(call.node)
    expr = reader.emit(aten.mm.default, rows.expr, reader.emit(aten.t.default, matrix))
    is_dispatched = rows.is_dispatched or rows.iteration.expert is not None
    return replace(rows, expr=expr, fill_value=0.0 if rows.fill_value == 0 else None, is_dispatched=is_dispatched)


_RULES: dict[str, Rule] = {DEQUANTIZE_4BIT: _dequantize_4bit, LINEAR_4BIT: _linear_4bit}
