"""Proof that [T,E] routing weights are zero wherever a token did not choose the expert.

The masks, scatters and normalisations between the expert index and such weights stay outside a region. To raise a
dense spelling to the routed form, what they leave at the unchosen entries must be the number zero, whatever the
scores are. The proof interprets that part of the graph alone: each value carries the constant that stands at its
unchosen entries (`Rows.off`), or none. Then the entries are constants, so no gradient leaves through them either.

Refuses: weights whose unchosen entries depend on scores (a softmax without a mask), or are another constant.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.tensors import tree_leaves
from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import Dataflow, node_value, same_size, static_size
from memfine_fx.passes.dispatch import DISPATCH_RULES
from memfine_fx.passes.find import cut_weights
from memfine_fx.passes.layouts import Fill, IdKind, Ids, Lead, RowInterpreter, Rows, Rule, Sizes
from memfine_fx.passes.modes import Modes
from memfine_fx.passes.moves import MOVE_RULES
from memfine_fx.passes.normalize import normalize
from memfine_fx.passes.rowwise import ROWWISE_RULES, pointwise_rule
from memfine_fx.records import Cut

__all__ = ["DenseWeights"]

aten = torch.ops.aten


@dataclass(frozen=True)
class _Column(Rows):
    """Numbers about one expert: `off` stands wherever the index names others."""

    expert: int = -1


@dataclass(frozen=True)
class DenseWeights:
    """The inputs of a cut that are made from its expert index: weights of all experts, or of one."""

    cut: Cut
    flow: Dataflow
    modes: Modes
    sizes: Sizes

    @functools.cached_property
    def nodes(self) -> frozenset[fx.Node]:
        if not self.cut.has_dense_weights or self.cut.expert_index is None:
            return frozenset()
        return frozenset(self.cut.inputs) & self.flow.descendants([self.cut.expert_index])

    def columns(self) -> dict[fx.Node, int]:
        """The weights of one expert each, [T] or [T,1], with that expert.

        Raises:
            CannotChunk: one of them is not proved zero where a token chose others.
        """
        columns = {}
        for node in self.nodes:
            value = node_value(node)
            assert isinstance(value, torch.Tensor)
            if all(same_size(size, 1) for size in value.shape[len(self.sizes.token_shape) :]):
                result = self._interpreted(node, None)
                if not isinstance(result, _Column) or result.off != 0:
                    raise CannotChunk("a weight of one expert is not proved zero where a token chose others", node)
                columns[node] = result.expert
        return columns

    def check_zero_elsewhere(self, node: fx.Node, num_experts: int | None) -> None:
        """Prove it for weights of all experts.

        Raises:
            CannotChunk: it is not so, or not provably so.
        """
        result = self._interpreted(node, num_experts)
        if not isinstance(result, Rows) or not result.lead.is_dense or result.off != 0:
            raise CannotChunk("weights of all experts are not proved zero where a token chose others", node)

    def _interpreted(self, node: fx.Node, num_experts: int | None) -> Any:
        assert self.cut.expert_index is not None
        region = normalize(cut_weights(self.flow, self.cut.expert_index, node, self.cut.num_token_dims), self.modes)
        rules = {**ROWWISE_RULES, **MOVE_RULES, **DISPATCH_RULES}
        proof = _WeightInterpreter(region, self.cut.expert_index, self.sizes, [("", _RULES)], rules, _pointwise)
        proof.num_experts = num_experts
        return proof.run()


def _pointwise(target: Any) -> Rule | None:
    """The pointwise rule; what it makes of numbers about one expert is about that expert."""
    rule = pointwise_rule(target)
    return None if rule is None else functools.partial(_about_one_expert, rule)


def _about_one_expert(
    rule: Rule, interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    experts = {value.expert for value in tree_leaves((args, kwargs)) if isinstance(value, _Column)}
    if len(experts) > 1:
        raise CannotChunk(f"weights of experts {sorted(experts)} meet", node)
    rows = rule(interpreter, node, args, kwargs)
    if not experts:
        return rows
    return _Column(rows.lead, rows.expr, rows.per_row, rows.off, experts.pop())


class _WeightInterpreter(RowInterpreter):
    """Any tensor from outside may take part; only what stands at unchosen entries is followed."""

    def _resolve(self, outer: fx.Node, node: fx.Node) -> Rows:
        value = node_value(outer)
        assert isinstance(value, torch.Tensor)
        names = ["t"] if len(self.sizes.token_shape) == 1 else ["b", "s"]
        groups = list(names)
        for size in value.shape[len(names) :]:
            groups.append(self._group(size))
        has_tokens = all(same_size(a, b) for a, b in zip(value.shape, self.sizes.token_shape, strict=False))
        if value.ndim < len(names) or not has_tokens:
            groups = [self._group(size) for size in value.shape]
        return Rows(Lead(*groups), self._placeholder(f"outside_{outer.name}", outer), per_row=True)

    def _group(self, size: int | torch.SymInt) -> str:
        if same_size(size, 1):
            return ""
        if self.num_experts is not None and same_size(size, self.num_experts):
            return "e"
        return "k" if same_size(size, self.sizes.top_k) else "?"


def _constant(interpreter: RowInterpreter) -> fx.Node:
    return interpreter.emit(aten.ones.default, [1])


def _scatter(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A constant tensor [T,E] with something written at the chosen entries."""
    base, dim, index = args[:3]
    num_dims = interpreter.fake(node).ndim
    is_dense = isinstance(index, Ids) and index.kind is IdKind.EXPERT and dim % num_dims == num_dims - 1
    if not is_dense or not isinstance(base, Fill) or base.value is None or kwargs.get("reduce"):
        raise CannotChunk("a scatter other than by expert into a constant tensor of all experts", node)
    width = static_size(interpreter.fake(node).shape[-1])
    if width is None:
        raise CannotChunk("a scatter over a symbolic number of experts", node)
    interpreter.check_num_experts(width, node)
    return Rows(Lead(*index.lead.groups[:-1], "e"), _constant(interpreter), True, base.value)


def _equals(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """ids == arange(E): one-hot of the chosen experts."""
    ids = next((value for value in args if isinstance(value, Ids) and value.kind is IdKind.EXPERT), None)
    other = next((value for value in args if isinstance(value, Ids) and value is not ids), None)
    if ids is None or other is None or other.kind is not IdKind.EACH:
        return NotImplemented
    if not ids.lead.groups or ids.lead.groups[-1]:
        return NotImplemented
    is_equal = node.target is aten.eq.Tensor
    return Rows(Lead(*ids.lead.groups[:-1], "e"), _constant(interpreter), True, 0.0 if is_equal else 1.0)


def _arange(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    end = static_size(args[-1]) if len(args) < 3 else None
    if end is None or interpreter.num_experts not in (None, end) or (len(args) == 2 and args[0] != 0):
        return NotImplemented
    interpreter.check_num_experts(end, node)
    return Ids(IdKind.EACH, Lead.EXPERT, is_iota=True)


def _over_lead(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums, maxima and softmax over choices or experts of a token."""
    rows = interpreter.as_rows(args[0], node)
    dims = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    num_dims = interpreter.fake(node.args[0]).ndim  # type: ignore[arg-type]  # a node
    places = [dim % num_dims for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]
    if not rows.lead.num_dims or max(places) >= rows.lead.num_dims:
        return NotImplemented
    if node.target in (aten._softmax.default, aten.softmax.int):
        is_masked = [rows.lead.groups[place] for place in places] == ["e"] and rows.off == -torch.inf
        return replace(rows, off=0.0 if is_masked else None)
    keeps = (args[2] if len(args) > 2 else kwargs.get("keepdim")) or False
    groups = ["" if place in places else group for place, group in enumerate(rows.lead.groups)]
    kept = [group for place, group in enumerate(groups) if keeps or place not in places]
    sums_choices = all(rows.lead.groups[place] == "k" for place in places)
    off = 0.0 if sums_choices and rows.off == 0 else None
    return replace(rows, lead=Lead(*kept), off=off)


def _where(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A choice by a mask takes, at unchosen entries, the branch that the mask names there."""
    if node.target is aten.where.self:
        mask, chosen, other = args
    else:
        other, mask, chosen = args
    if not isinstance(mask, Rows) or mask.off is None:
        return NotImplemented
    taken = chosen if mask.off else other
    off = taken.off if isinstance(taken, Rows) else taken.value if isinstance(taken, Fill) else taken
    constant = float(off) if isinstance(off, (int, float)) else None
    return replace(mask, off=constant)


def _column(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One expert's entries out of all experts'."""
    rows = args[0]
    num_dims = interpreter.fake(node.args[0]).ndim  # type: ignore[arg-type]  # a node
    dim = args[1] % num_dims if len(args) > 1 else 0
    if not isinstance(rows, Rows) or dim >= rows.lead.num_dims or rows.lead.groups[dim] != "e":
        return NotImplemented
    groups = rows.lead.groups
    if node.target is aten.select.int:
        return _Column(Lead(*groups[:dim], *groups[dim + 1 :]), rows.expr, True, rows.off, args[2])
    is_one = static_size(interpreter.fake(node).shape[dim]) == 1
    if not is_one:
        return NotImplemented
    return _Column(Lead(*groups[:dim], "", *groups[dim + 1 :]), rows.expr, True, rows.off, args[2])


def _equals_number(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """ids == e: where the index names expert e."""
    if not isinstance(args[0], Ids) or args[0].kind is not IdKind.EXPERT or not isinstance(args[1], int):
        return NotImplemented
    off = 0.0 if node.target is aten.eq.Scalar else 1.0
    return _Column(args[0].lead, _constant(interpreter), True, off, args[1])


def _ones(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return Fill(1.0)


_RULES: dict[Any, Rule] = {
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_add.default: _scatter,
    aten.eq.Scalar: _equals_number,
    aten.ne.Scalar: _equals_number,
    aten.select.int: _column,
    aten.slice.Tensor: _column,
    aten.eq.Tensor: _equals,
    aten.ne.Tensor: _equals,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.sum.dim_IntList: _over_lead,
    aten.amax.default: _over_lead,
    aten.any.dim: _over_lead,
    aten.any.dims: _over_lead,
    aten._softmax.default: _over_lead,
    aten.softmax.int: _over_lead,
    aten.where.self: _where,
    aten.masked_fill.Scalar: _where,
    aten.masked_fill.Tensor: _where,
    aten.ones_like.default: _ones,
    aten.ones.default: _ones,
}
