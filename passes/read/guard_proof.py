"""The proof that a body which a model skips for experts without rows does nothing when it is run for them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from memfine_fx.compat.operators import HigherOrderOperator, OpOverload
from memfine_fx.compat.tensors import FakeTensor
from memfine_fx.errors import GuardRefused
from memfine_fx.memory.sizes import size_expr
from memfine_fx.passes.dataflow import (
    computed_from,
    has_unbacked_shape,
    node_value,
    provenance,
    same_size,
)
from memfine_fx.passes.ops import (
    ASSERTIONS,
    CASTS,
    COMPARISONS,
    LAYOUTS,
    LIKE_FACTORIES,
    LOOKUPS,
    PLACES,
    PUTS,
    SPLITS,
    base_name_of,
    is_random,
    name_of,
    target_name,
)
from memfine_fx.passes.read.marker import (
    COLLECTED,
    COMPARE,
    IF_RUN,
    LEAVE_BODY,
    MARKS,
    SAME_NUMBER,
)
from memfine_fx.passes.read.no_rows import GraphIndex, NoRows, is_mask, scales_second

__all__ = ["TAKES_ENTRIES", "GuardProof", "GuardedBody", "is_total", "value_of"]


_NODES_BEFORE = 3
"""How many steps up from a body's nodes others are asked whether they are zero."""
_PROVENANCE = ("nn_module_stack", "source_fn_stack", "stack_trace")

TAKES_ENTRIES = LAYOUTS | CASTS | (LOOKUPS - {"embedding"}) | {"flip", "roll", "select", "masked_select"}
"""Operations that give entries of their operand."""
_MASKED = frozenset("masked_fill masked_scatter index_put".split())
"""Those of `PUTS` whose first argument may be a mask."""
_HIDDEN_WRITES = frozenset(
    "batch_norm instance_norm native_batch_norm sync_batch_norm fused_moving_avg_obs_fake_quant".split()
)
"""Functions that write into operands although neither their names nor their schemas say so."""
_REDUCTIONS = PUTS | LIKE_FACTORIES | frozenset(
    "sum mean any count_nonzero numel size sym_size sym_numel dim matmul mm bmm addmm einsum cat stack setitem "
    "put_rows count_rows bincount".split()
)  # fmt: skip
"""Operations that give elements although an operand has none."""
_TOTAL = _REDUCTIONS | LAYOUTS | CASTS | COMPARISONS | PLACES | SPLITS | frozenset(
    "getitem index_select index gather item linear mul add sub div silu gelu relu sigmoid tanh softmax log_softmax exp "
    "log sqrt rsqrt pow abs neg clamp clamp_min clamp_max select narrow rms_norm layer_norm zeros ones full one_hot "
    "bitwise_and bitwise_or logical_and logical_or maximum minimum square softplus leaky_relu hardtanh relu6 glu "
    "floordiv remainder sym_sum sym_float not invert lerp addcmul erf log1p expm1 sign floor ceil round trunc fmod pad "
    "repeat repeat_interleave arange _set_grad_enabled _enter_autocast _exit_autocast".split()
)  # fmt: skip
"""Operations that give a result for tensors without rows."""
_LINEAR = LAYOUTS | CASTS | {"add", "sub", "neg", "mul", "div", "stack", "cat", "sum", "mean", "where", "getitem"}


@dataclass(eq=False)
class GuardedBody:
    """A body in the graph.

    Args:
        enter: the mark of its condition.
        around: the body that it stands in.
        nodes: from the mark to its end, bodies in it included.
    """

    enter: fx.Node
    around: GuardedBody | None
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def where(self) -> str:
        return str(self.enter.args[4])

    def unproved(self, what: str, node: fx.Node | None = None) -> GuardRefused:
        """Return the refusal of the loop for what a node of the body does."""
        source = "" if node is None else provenance(node).source
        place = f" ({source})" if source else ""
        return GuardRefused(f"{what}, in a body that is skipped{place}", self.where, provenance(self.enter).module)


def is_total(node: fx.Node) -> bool:
    """Return whether a node surely gives a result where operands whose size only the data knows have no elements."""
    has_unbacked_operand = any(map(has_unbacked_shape, node.all_input_nodes))
    return not name_of(node) or base_name_of(node) in _TOTAL | ASSERTIONS or not has_unbacked_operand


class GuardProof:
    """The proof of one body, which gives names their values after it."""

    def __init__(self, body: GuardedBody, index: GraphIndex) -> None:
        self._body, self._index, self._flow = body, index, index.flow
        self._inside = set(body.nodes)
        self._last = max(map(index.flow.position.__getitem__, body.nodes), default=index.flow.position[body.enter])
        self._known = NoRows(index, self._nodes_asked(), body.enter)

    def check(self) -> None:
        """Prove that the body does nothing where its condition skips it.

        Raises:
            GuardRefused: it may do something.
        """
        if self._known.is_nothing:
            raise self._body.unproved("its condition does not ask whether an expert has rows")
        for node in list(self._body.nodes):
            if node.target is SAME_NUMBER:
                self._check_numbers(node)
            elif node.target is COLLECTED:
                self._check_collected(node.args[0])
            elif node.target not in MARKS and node.op in ("call_function", "call_method"):
                self._check_node(node)
        for node in list(self._body.nodes):
            if node.target is IF_RUN and node.args[2] == self._body.where:
                self._replace(node)

    def _nodes_asked(self) -> list[fx.Node]:
        """The body's nodes, those that stand between the body before it and its own, and what these read."""
        nodes, position = self._index.nodes, self._flow.position
        last = first = position[self._body.enter]
        while first and nodes[first - 1].target is not LEAVE_BODY:
            first -= 1
        selected = {*nodes[first:last], *self._body.nodes}
        for _ in range(_NODES_BEFORE):
            selected |= {source for node in selected for source in node.all_input_nodes}
        return sorted(selected, key=position.__getitem__)

    # What a body may do.

    def _check_numbers(self, mark: fx.Node) -> None:
        old, new = (size_expr(value_of(number)) for number in mark.args[:2])
        if sympy.expand(self._known.assumed(new - old)) != 0:
            raise self._body.unproved("a number changes that is read later", mark)

    def _check_collected(self, rows: Any) -> None:
        wholes = [user for user in rows.users if name_of(user) == "cat"]
        if not self._known.is_empty(rows) or not all(self._is_empty_part(rows, whole) for whole in wholes):
            raise self._body.unproved("a list grows by other than an expert's rows")

    def _check_node(self, node: fx.Node) -> None:
        name = name_of(node)
        if name in ASSERTIONS:
            if not all(map(self._holds, node.args[:1])):
                raise self._body.unproved("something is asserted that may not hold for an expert without rows", node)
            return
        if name == "autograd_function_apply":
            raise self._body.unproved("an autograd.Function is called, whose backward only its author knows", node)
        if _may_hide_effects(node):
            raise self._body.unproved(f"what {target_name(node)} writes is not known", node)
        if is_random(name) and not _draws_nothing(node):
            raise self._body.unproved(f"{target_name(node)} draws random numbers", node)
        for target in self._flow.mutations.get(node, ()):
            if not self._is_made_inside(target) and not self._writes_nothing(node):
                raise self._body.unproved(f"{target_name(node)} writes into {target}", node)
        is_empty_read = any(map(self._known.is_empty, node.all_input_nodes))
        if is_empty_read and base_name_of(node) not in _REDUCTIONS and self._has_elements(node):
            raise self._body.unproved(f"{target_name(node)} needs a row", node)
        if isinstance(node_value(node), (torch.Tensor, tuple, list)) or node.target is operator.setitem:
            self._check_readers(node)

    def _check_readers(self, node: fx.Node) -> None:
        """Refuse a tensor that the body makes and somebody else reads; sizes are asked for where they come first."""
        for user in node.users:
            is_put_together = name_of(user) == "cat" and self._is_empty_part(node, user)
            if (
                user not in self._inside
                and user.target not in MARKS
                and not is_put_together
                and self._is_made_inside(node)
            ):
                raise self._body.unproved(f"{node} is computed there and read after it", node)

    def _has_elements(self, node: fx.Node) -> bool:
        value = node_value(node)
        return isinstance(value, torch.Tensor) and not self._known.is_empty(node)

    def _holds(self, condition: object) -> bool:
        value = node_value(condition) if isinstance(condition, fx.Node) else condition
        return self._known.assumed(value.node.expr) == sympy.true if isinstance(value, torch.SymBool) else value is True

    def _is_made_inside(self, node: fx.Node) -> bool:
        """Whether the body has made a node's tensor."""
        maker = self._index.made_by(node)
        return maker is None or maker in self._inside

    def _is_empty_part(self, node: fx.Node, whole: fx.Node) -> bool:
        """Whether a tensor adds no entry to what is put together of it and others."""
        dim = whole.kwargs.get("dim", whole.args[1] if len(whole.args) > 1 else 0)
        value = node_value(node)
        return isinstance(dim, int) and isinstance(value, torch.Tensor) and self._known.is_zero_size(value.shape[dim])

    # What is the same as something else.

    def _writes_nothing(self, node: fx.Node) -> bool:
        """Whether a call that writes in place writes what is there already, or no element."""
        if node.target is operator.setitem:
            target, index, value = node.args
            return self._names_nothing(index) or self._is_own_entry(target, index, value)
        return self._same(node) is not None

    def _names_nothing(self, index: Any) -> bool:
        """Whether an index names no entry."""
        known = self._known
        return any(known.is_empty(part) or (is_mask(part) and known.is_zero(part)) for part in _parts(index))

    def _is_own_entry(self, target: Any, index: Any, value: Any) -> bool:
        """Whether an entry is assigned the value read from it: `x[e] += n` is a getitem, an addition, a setitem."""
        if isinstance(index, list) or any(isinstance(part, (fx.Node, list, tuple, bool)) for part in _parts(index)):
            return False  # what an index tensor or a list takes is a copy, which may be of another time
        source = value
        while isinstance(source, fx.Node) and (name_of(source) != "getitem" or source.args != (target, index)):
            source = self._same(source) if source in self._inside else None
        return isinstance(source, fx.Node)

    def _root(self, node: Any) -> Any:
        """Return the value before the body that a value is proved to equal, itself where nothing is proved."""
        same = self._same(node)
        return node if same is None else self._root(same)

    def _same(self, node: Any) -> fx.Node | None:
        """The operand that a node's result is equal to in every element; None where none is known."""
        if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
            return None
        known, name, first, others = self._known, base_name_of(node), node.args[0], node.args[1:]
        result: Any = None
        if name in PUTS:
            result = first if self._puts_nothing(node) else None
        elif name == "put_rows":
            result = first if known.is_empty(others[0]) else None
        elif name in ("add", "sub"):
            result = self._same_summand(node)
        elif name == "where" and len(node.args) == 3 and known.is_zero(first):
            result = others[1]
        elif node.target is IF_RUN or name in ("clone", "contiguous", "to", "type_as"):
            result = first  # what is chosen where the body is skipped
        return result if isinstance(result, fx.Node) and _are_alike(node, result) else None

    def _puts_nothing(self, node: fx.Node) -> bool:
        """Whether a call names no entry of its first operand: an operand is empty, or the mask holds nowhere."""
        operands = (*node.args[1:], *node.kwargs.values())
        is_masked = base_name_of(node) in _MASKED
        masks = (*node.args[1:2], node.kwargs.get("mask"), node.kwargs.get("indices")) if is_masked else ()
        are_empty = (self._known.is_empty(part) for operand in operands for part in _parts(operand))
        return any(are_empty) or any(map(self._names_nothing, masks))

    def _same_summand(self, node: fx.Node) -> Any:
        left, right = node.args[:2]
        if self._known.is_zero(self._root(right)) or self._known.is_empty(right):
            return left
        is_sum = base_name_of(node) == "add" and not scales_second(node)
        return right if is_sum and self._known.is_zero(self._root(left)) else None

    # Names.

    def _replace(self, node: fx.Node) -> None:
        """Give a name's readers its new value, or a choice between that and its old one."""
        old, new, _ = node.args
        assert isinstance(old, fx.Node) and isinstance(new, fx.Node)
        is_one_tensor = self._is_written_form(new, old)
        is_written_entry = all(user.target is operator.setitem and user.args[2] is node for user in node.users)
        # What was written in place is the old tensor itself, and its writes were proved to write nothing.
        if not is_one_tensor and not is_written_entry:
            self._check_unshared(node, old, new)
        if is_one_tensor or self._root(new) is self._root(old):
            node.replace_all_uses_with(new)
            return
        self._check_choosable(node, old, new)
        before = node.prev
        with self._flow.graph.inserting_before(node):
            chosen = self._call(torch.where, self._has_rows(), new, old)
        self._flow.place_inserted(node)
        around = self._body.around
        while around is not None:  # these are proved after this one
            place = around.nodes.index(node)
            around.nodes[place:place] = _between(before, node)
            around = around.around
        node.replace_all_uses_with(chosen)

    def _is_written_form(self, new: fx.Node, old: fx.Node) -> bool:
        """Whether a tensor is another one after operations in place that return it; views of it are others."""
        while new is not old and new.target is not operator.setitem:
            first = new.args[0] if new.args else None
            if not isinstance(first, fx.Node) or first not in self._flow.mutations.get(new, ()):
                return False
            new = first
        return new is old

    def _check_unshared(self, mark: fx.Node, old: fx.Node, new: fx.Node) -> None:
        """Refuse a name whose old tensor has another name: where it is written later, only one of them may change."""
        later = [
            user
            for alias in self._flow.aliases(old)
            if self._index.made_by(alias) is self._index.made_by(old)
            for user in alias.users
            if user.target not in MARKS and self._flow.position[user] > self._last
        ]
        are_written = [node for node in (old, new) if self._is_written_later(node)]
        if old in are_written or (are_written and later):
            raise self._body.unproved(
                "a name is bound to another tensor, and one of the two is written in place later", mark
            )

    def _is_written_later(self, node: fx.Node) -> bool:
        maker = self._index.made_by(node)
        return any(
            self._flow.position[mutation] > self._last and self._index.made_by(target) is maker
            for mutation, targets in self._flow.mutations.items()
            for target in targets
        )

    def _check_choosable(self, mark: fx.Node, old: fx.Node, new: fx.Node) -> None:
        """Refuse a value that raises, or whose gradient is not a number, where the body is run without rows."""
        if not _are_alike(old, new):
            raise self._body.unproved("a name is bound to a tensor of another shape or dtype", mark)
        means: set[fx.Node] = set()
        for node in self._computed_for(new):
            name = base_name_of(node)
            if name not in _TOTAL:
                raise self._body.unproved(f"{target_name(node)} may not be defined without rows", node)
            if any(map(self._may_be_undefined, _ill_conditioned(node))):
                raise self._body.unproved(f"{target_name(node)} of a number of rows", node)
            is_mean = name == "mean" and self._known.is_empty(node.args[0])
            if is_mean or not means.isdisjoint(node.all_input_nodes):
                # A mean of no rows is not a number: it may be added, and no gradient may pass it.
                factors = [
                    operand for operand in node.all_input_nodes if operand not in means and name in ("mul", "div")
                ]
                if not is_mean and (name not in _LINEAR or factors):
                    raise self._body.unproved(f"{target_name(node)} of a mean over an expert's rows", node)
                means.add(node)

    def _may_be_undefined(self, operand: Any) -> bool:
        """Whether a divisor, or an operand of a logarithm or a root, may be zero where the body is run without rows."""
        known = self._known
        value = node_value(operand) if isinstance(operand, fx.Node) else operand
        if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            expr = value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else sympy.sympify(value)
            return known.assumed(expr).is_zero is not False
        if not isinstance(operand, fx.Node) or known.is_empty(operand):
            return False
        return known.is_zero(operand) or (operand in self._inside and not self._is_positive(operand))

    def _is_positive(self, node: fx.Node) -> bool:
        """Whether a tensor is surely above zero: X.clamp(min=1e-9), or X + 1e-9 where X is not negative."""
        name, others = base_name_of(node), node.args[1:]
        if name in ("clamp", "clamp_min"):
            return _is_above_zero(others[0] if others else node.kwargs.get("min"))
        is_sum = name == "add" and len(others) == 1 and not scales_second(node)
        return is_sum and _is_above_zero(others[0]) and not self._known.may_be_negative(node.args[0])

    def _computed_for(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes of the body that a node is computed from, in graph order."""
        sources = computed_from(node.all_input_nodes, lambda source: source not in self._inside)
        return sorted({node, *sources}, key=self._flow.position.__getitem__)

    def _has_rows(self) -> fx.Node:
        """A truth [] that says whether the body's condition runs it, from what it measures."""
        measure, name, number, skips_if, _ = self._body.enter.args
        if isinstance(node_value(measure), torch.Tensor):  # type: ignore[arg-type]  # a node
            compared = self._call(COMPARE[str(name)], measure, number)
            return self._call(torch.logical_not, compared) if skips_if else compared
        # A number of places is zero where the mask that they are taken from holds nowhere.
        position = self._flow.position
        masks = [node for node in self._known.zeros if is_mask(node) and position[node] < position[self._body.enter]]
        if not masks:
            raise self._body.unproved("a name is bound, and no mask says whether the expert has rows")
        return self._call(torch.any, min(masks, key=position.__getitem__))

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """A call with its fake result, in the body's provenance."""
        node = self._flow.graph.call_function(target, args)
        node.meta.update({key: value for key, value in self._body.enter.meta.items() if key in _PROVENANCE})
        values = [node_value(arg) if isinstance(arg, fx.Node) else arg for arg in args]
        fake_mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
        with fake_mode, torch.no_grad():
            node.meta["example_value"] = target(*values)
        self._index.add(node)
        return node


def _ill_conditioned(node: fx.Node) -> tuple[Any, ...]:
    """The operands of which a call's result, or its gradient, may be no number where they are zero."""
    name, arguments = base_name_of(node), (*node.args, *node.kwargs.values())
    if name in ("div", "floordiv", "floor_divide", "remainder", "fmod"):
        return tuple(operand for operand in arguments[1:] if not isinstance(operand, (str, type(None))))
    if name == "pow" and len(arguments) == 2 and isinstance(arguments[1], (int, float)):
        is_power = arguments[1] >= 1 and arguments[1] == int(arguments[1])
        return () if is_power else arguments[:1]
    return arguments if name in ("log", "log1p", "sqrt", "rsqrt", "pow") else ()


def _is_above_zero(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0


def value_of(value: Any) -> Any:
    return node_value(value) if isinstance(value, fx.Node) else value


def _parts(index: Any) -> Iterator[Any]:
    yield from index if isinstance(index, (tuple, list)) else (index,)


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The nodes behind one and before another."""
    nodes: list[fx.Node] = []
    while first.next is not last:
        first = first.next
        nodes.append(first)
    return nodes


def _are_alike(left: fx.Node, right: fx.Node) -> bool:
    left_value, right_value = node_value(left), node_value(right)
    if not isinstance(left_value, torch.Tensor) or not isinstance(right_value, torch.Tensor):
        return False
    return (
        left_value.dtype is right_value.dtype
        and left_value.ndim == right_value.ndim
        and all(map(same_size, left_value.shape, right_value.shape))
    )


def _may_hide_effects(node: fx.Node) -> bool:
    """Whether a call may write into tensors although neither its name nor its schema says so."""
    if node.op == "call_method" or isinstance(node.target, OpOverload):
        return base_name_of(node) in _HIDDEN_WRITES
    if name_of(node).startswith(("_foreach", "_fused", "_amp")) and name_of(node).endswith("_"):
        return True
    if isinstance(node.target, HigherOrderOperator) or base_name_of(node) in _HIDDEN_WRITES:
        return True
    module = str(getattr(node.target, "__module__", None) or "torch").partition(".")[0]
    return module not in ("torch", "_operator", "operator", "builtins", "math")


def _draws_nothing(node: fx.Node) -> bool:
    """Whether it is a dropout that is off."""
    name = name_of(node)
    if name == "scaled_dot_product_attention":
        return bool((node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)) == 0.0)
    if "dropout" not in name:
        return False
    arguments = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
    probability = arguments.get("p", 0.5)
    if isinstance(probability, fx.Node):  # a module's float, which the capture's guards keep as it is
        value = node_value(probability)
        probability = value.node.hint if isinstance(value, torch.SymFloat) else None
    return bool(probability == 0) or arguments.get("training") is False
