"""Find heads: a projection to a vocabulary whose results only a cross-entropy reads.

Terms
    loss       `cross_entropy`, or `nll_loss` of `log_softmax`, of integer labels, summed or averaged
    way        the nodes from the projection to the loss: they scale or cap single logits, cast them to fp32, pick or
               regroup tokens; nothing else, and nothing outside reads them

1. Every loss is a seed; what it reads is followed back along the way to a `linear` or a product with a matrix.
2. What happens to tokens on the way (slices, reshapes) is noted as `RowMove`s, to be done to the hidden states instead.
3. A sum that is divided by one number, once (transformers' `num_items_in_batch`), is a head with that division.

A logits tensor that something else reads stays: z-losses, accuracies, distillation and returned logits need it whole.
The last can be given up for training (`Config.returns_logits`). Names decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.tensors import FakeTensor
from memfine_fx.config import Config
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import is_only_asserted, node_value, provenance, refusal_of, static_size, tensor_of
from memfine_fx.passes.ops import FLOAT_CASTS, name_of, target_name
from memfine_fx.records import Refusal
from memfine_fx.records.heads import HeadDims, HeadLoss, HeadRegion, RowMove

__all__ = ["as_made", "find_heads", "reads_sizes"]

_AMPLIFICATION = 4
_FEWEST_ENTRIES = 4096
"""Logits of fewer entries, or not this much wider than hidden states, are no tensor that a step's peak is made of."""
_LOSSES = ("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd")


def find_heads(
    graph: fx.Graph, config: Config, *, is_body: bool = False, runs_here: bool = True
) -> list[HeadRegion | Refusal]:
    """The heads of a captured graph in its order, and the losses that lead to none.

    Losses of few classes are left out, unless `config.chunks_head` asks for every head.

    Args:
        graph: torch-level, as captured.
        config: `chunks_head` and `returns_logits` matter.
        is_body: whether it is the body of a higher-order op (a checkpoint).
        runs_here: False where a graph of CPU tensors will run on an accelerator.
    """
    if config.chunks_head is False:
        return []
    outcomes: list[HeadRegion | Refusal] = []
    for node in graph.nodes:
        if node.op != "call_function" or target_name(node) not in _LOSSES:
            continue
        vocab = _num_classes(node)
        if vocab is None or (config.chunks_head is None and vocab < _FEWEST_ENTRIES):
            continue
        try:
            if is_body:
                raise CannotChunk(
                    Reason.OPAQUE, "it is inside of a checkpoint or another function captured whole", node
                )
            head = _raise_head(node, vocab, config, runs_here=runs_here)
            if config.chunks_head is None and vocab <= _AMPLIFICATION * head.dims.hidden:
                continue
            outcomes.append(head)
        except CannotChunk as refusal:
            outcomes.append(refusal_of(provenance(node), refusal))
    return outcomes


@dataclass(frozen=True)
class _Way:
    """State of the walk from the loss back to the projection: the nodes passed and what they do to the logits.

    Args:
        nodes: the nodes passed, the last one in graph order first.
        moves: moves of the tokens, in the order in which the graph does them.
        after, before: factors of the logits after a tanh and before it; without a tanh, `before` has all factors.
        has_tanh: whether a tanh was passed.
        class_dim: dimension of V in the tensor reached.
    """

    nodes: tuple[fx.Node, ...] = ()
    moves: tuple[RowMove, ...] = ()
    after: float = 1.0
    before: float = 1.0
    has_tanh: bool = False
    class_dim: int = -1

    def scaled(self, factor: float) -> _Way:
        return replace(self, before=self.before * factor)

    def capped(self) -> _Way:
        return replace(self, has_tanh=True, after=self.before, before=1.0)


def _num_classes(loss: fx.Node) -> int | None:
    value = node_value(loss.args[0]) if loss.args and isinstance(loss.args[0], fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.ndim < 2:
        return None
    return static_size(value.shape[1])


def _raise_head(loss: fx.Node, vocab: int, config: Config, *, runs_here: bool) -> HeadRegion:
    options = _loss_options(loss)
    labels, logits = _argument(loss, 1, "target"), _argument(loss, 0, "input")
    _check_labels(labels, logits)
    way = _Way(class_dim=1 if tensor_of(logits).ndim > 2 else -1)
    if target_name(loss).startswith("nll_loss"):
        way, logits = _past_log_softmax(logits, way)
    way, projection = _walk_back(logits, way, vocab)
    exit_node, divisor = _division(loss, options.reduction)
    nodes = (*reversed(way.nodes), loss, *((exit_node,) if divisor is not None else ()))
    hidden, weight, bias, is_transposed = _operands(projection)
    is_trained = tensor_of(exit_node).requires_grad
    results = _outer_results(nodes, exit_node, is_trained=is_trained)
    _check_operands(hidden, weight, bias, tensor_of(projection))
    width = static_size(tensor_of(hidden).shape[-1])
    assert width is not None
    wanted = _wanted(is_trained, hidden, weight, bias)
    saves_logits = config.returns_logits and bool(results)
    if saves_logits and not (
        _can_be_returned(results, projection, way.moves, (weight, bias), runs_here=runs_here)
        and (config.chunks_head or _is_worth_while(tensor_of(labels).numel(), width, wants_weight=wanted[1]))
    ):
        raise CannotChunk(Reason.LOGITS_RETURNED, "the logits are returned beside the loss", projection)
    softcap = way.after if way.has_tanh else None
    return HeadRegion(
        exit=exit_node,
        hidden=hidden,
        weight=weight,
        bias=bias,
        is_transposed=is_transposed,
        labels=labels,
        divisor=divisor,
        moves=way.moves,
        loss=replace(options, scale=way.before, softcap=softcap),
        logits_dtype=tensor_of(projection).dtype,
        nodes=nodes,
        results=results,
        wanted=wanted,
        dims=HeadDims(str(tensor_of(labels).numel()), width, vocab),
        where=provenance(projection),
        saves_logits=saves_logits,
    )


def _loss_options(loss: fx.Node) -> HeadLoss:
    is_nll = target_name(loss).startswith("nll_loss")
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    arguments = dict(zip(names, loss.args, strict=False)) | loss.kwargs
    if arguments.get("weight") is not None:
        raise CannotChunk(Reason.HEAD_UNKNOWN, "the loss weighs classes", loss)
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        raise CannotChunk(
            Reason.HEAD_UNKNOWN, "the loss is asked for by size_average and reduce, which torch has deprecated", loss
        )
    reduction = arguments.get("reduction", "mean")
    if reduction not in ("mean", "sum"):
        raise CannotChunk(
            Reason.LOSS_PER_TOKEN,
            f"the loss has reduction={reduction!r}: every token's loss has a gradient of its own",
            loss,
        )
    smoothing = 0.0 if is_nll else _number(arguments.get("label_smoothing", 0.0), loss)
    ignored = _number(arguments.get("ignore_index", -100), loss)
    return HeadLoss("mean" if reduction == "mean" else "sum", int(ignored), smoothing)


def _number(value: Any, user: fx.Node) -> float:
    """A constant; one that Dynamo made symbolic is taken at its value, which the capture's guards keep sound."""
    if isinstance(value, fx.Node):
        value = node_value(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise CannotChunk(Reason.HEAD_UNKNOWN, "a factor of the logits or an option of the loss is no constant", user)
    return float(value)


def _argument(node: fx.Node, place: int, name: str) -> fx.Node:
    value = node.args[place] if place < len(node.args) else node.kwargs.get(name)
    if not isinstance(value, fx.Node) or not isinstance(node_value(value), torch.Tensor):
        raise CannotChunk(Reason.HEAD_UNKNOWN, f"argument {name!r} is no tensor of the graph", node)
    return value


def _check_labels(labels: fx.Node, logits: fx.Node) -> None:
    value, of_logits = tensor_of(labels), tensor_of(logits)
    if value.dtype is not torch.int64:
        raise CannotChunk(Reason.HEAD_UNKNOWN, "targets are probabilities of classes, not labels", labels)
    if value.ndim != of_logits.ndim - 1:
        raise CannotChunk(
            Reason.HEAD_UNKNOWN, f"labels of {value.ndim} dimensions for logits of {of_logits.ndim}", labels
        )


def _past_log_softmax(node: fx.Node, way: _Way) -> tuple[_Way, fx.Node]:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    ndim = tensor_of(node).ndim
    if target_name(node) != "log_softmax" or not isinstance(dim, int) or dim % ndim != 1:
        raise CannotChunk(
            Reason.HEAD_UNKNOWN, "nll_loss reads something other than a log_softmax over the vocabulary", node
        )
    return replace(way, nodes=(node,)), _argument(node, 0, "input")


def _walk_back(node: fx.Node, way: _Way, vocab: int) -> tuple[_Way, fx.Node]:
    """The whole way, and the projection at its beginning."""
    while not _is_projection(node):
        if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
            raise CannotChunk(
                Reason.HEAD_UNKNOWN, f"the logits are made by {target_name(node)}, not by a projection", node
            )
        way, source = _step_back(node, way, vocab)
        way, node = replace(way, nodes=(*way.nodes, node)), source
    if way.class_dim != -1:
        raise CannotChunk(Reason.HEAD_UNKNOWN, "the vocabulary is not the last dimension of the projection", node)
    return replace(way, nodes=(*way.nodes, node)), node


def _step_back(node: fx.Node, way: _Way, vocab: int) -> tuple[_Way, fx.Node]:
    name = target_name(node)
    if name in ("mul", "truediv", "div", "__mul__", "__truediv__") and not node.kwargs:
        return _past_factor(node, way, name)
    source = _argument(node, 0, "input")
    value, before = tensor_of(node), tensor_of(source)
    if name in ("float", "to", "type", "contiguous") and _is_cast(before, value):
        return way, source
    if name == "tanh" and not way.has_tanh:
        return way.capped(), source
    if name in ("transpose", "permute", "movedim", "swapaxes") and way.class_dim == 1 and _moves_last(node):
        return replace(way, class_dim=-1), source
    if way.class_dim == -1 and static_size(value.shape[-1]) == static_size(before.shape[-1]) == vocab:
        if name == "getitem" and _keeps_last(node.args[1], before.ndim):
            return replace(way, moves=(RowMove("index", node.args[1]), *way.moves)), source
        if name in ("view", "reshape", "flatten"):
            return replace(way, moves=(_reshape_of(node, name), *way.moves)), source
    raise CannotChunk(
        Reason.HEAD_UNKNOWN,
        f"{name} on the way of the logits to the loss is not known to treat tokens one by one",
        node,
    )


def _past_factor(node: fx.Node, way: _Way, name: str) -> tuple[_Way, fx.Node]:
    left, right = node.args
    tensors = [
        operand
        for operand in (left, right)
        if isinstance(operand, fx.Node) and isinstance(node_value(operand), torch.Tensor)
    ]
    if len(tensors) != 1:
        raise CannotChunk(Reason.HEAD_UNKNOWN, f"{name} of the logits with another tensor", node)
    is_division = "div" in name
    if is_division and tensors[0] is not left:
        raise CannotChunk(Reason.HEAD_UNKNOWN, "a number is divided by the logits", node)
    factor = _number(right if tensors[0] is left else left, node)
    if is_division and factor == 0:
        raise CannotChunk(Reason.HEAD_UNKNOWN, "the logits are divided by zero", node)
    return way.scaled(1 / factor if is_division else factor), tensors[0]


def _is_cast(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether a conversion keeps the shape, the device and all digits."""
    is_same = before.ndim == after.ndim and before.device == after.device
    return is_same and (after.dtype is before.dtype or after.dtype is torch.float32)


def _moves_last(node: fx.Node) -> bool:
    """Whether a transposition takes the last of three dimensions to the second place."""
    ndim = tensor_of(node).ndim
    dims = [dim for arg in node.args[1:] for dim in (arg if isinstance(arg, (tuple, list)) else [arg])]
    if ndim != 3 or node.kwargs or not all(isinstance(dim, int) for dim in dims):
        return False
    places = [int(str(dim)) % ndim for dim in dims]
    return places == [0, 2, 1] if target_name(node) == "permute" else sorted(places) == [1, 2]


def _keeps_last(index: Any, ndim: int) -> bool:
    """Whether an index slices leading dimensions only."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is Ellipsis or isinstance(item, (slice, int)) for item in items):
        return False
    if Ellipsis in items:
        return items[-1] is Ellipsis or items[-1] == slice(None)
    return len(items) < ndim or items[-1] == slice(None)


def _reshape_of(node: fx.Node, name: str) -> RowMove:
    """The shape without its last entry; a flattening of leading dimensions has one entry left."""
    if name == "flatten":
        if tensor_of(node).ndim != 2:
            raise CannotChunk(Reason.HEAD_UNKNOWN, "flatten keeps more than tokens and vocabulary apart", node)
        return RowMove("reshape", (-1,))
    sizes = node.args[1:] if len(node.args) > 1 else (node.kwargs.get("shape", node.kwargs.get("size", ())),)
    shape = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else tuple(sizes)
    if len(shape) != tensor_of(node).ndim:
        raise CannotChunk(Reason.HEAD_UNKNOWN, "the shape of a reshape is not written out", node)
    return RowMove("reshape", shape[:-1])


def _division(loss: fx.Node, reduction: str) -> tuple[fx.Node, fx.Node | None]:
    """The exit and the divisor: a sum whose only reader divides it by a tensor of one number that wants no gradient."""
    user = next(iter(loss.users), None)
    if reduction != "sum" or user is None or len(loss.users) != 1:
        return loss, None
    if target_name(user) not in ("truediv", "div", "__truediv__") or user.kwargs or len(user.args) != 2:
        return loss, None
    divisor = user.args[1]
    value = node_value(divisor) if isinstance(divisor, fx.Node) and user.args[0] is loss else None
    if not isinstance(value, torch.Tensor) or value.ndim or value.requires_grad:
        return loss, None
    assert isinstance(divisor, fx.Node)
    return user, divisor


def _is_projection(node: fx.Node) -> bool:
    if target_name(node) == "linear":
        return True
    if target_name(node) not in ("matmul", "__matmul__", "mm") or len(node.args) != 2:
        return False
    right = node_value(node.args[1]) if isinstance(node.args[1], fx.Node) else None
    return isinstance(right, torch.Tensor) and right.ndim == 2


def _operands(projection: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool]:
    hidden = _argument(projection, 0, "input")
    if target_name(projection) != "linear":
        return hidden, _argument(projection, 1, "other"), None, True
    weight = _argument(projection, 1, "weight")
    bias = projection.args[2] if len(projection.args) > 2 else projection.kwargs.get("bias")
    return hidden, weight, bias if isinstance(bias, fx.Node) else None, False


def _check_operands(hidden: fx.Node, weight: fx.Node, bias: fx.Node | None, logits: torch.Tensor) -> None:
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CannotChunk(Reason.HEAD_UNKNOWN, f"logits are {logits.dtype}; the loss is computed in float32", hidden)
    for node in (hidden, weight, *(() if bias is None else (bias,))):
        value = tensor_of(node)
        if type(value) is not torch.nn.Parameter and type(value) is not FakeTensor:
            raise CannotChunk(Reason.HEAD_UNKNOWN, f"an operand of the projection is a {type(value).__name__}", node)
        if static_size(value.shape[-1]) is None:
            raise CannotChunk(Reason.HEAD_UNKNOWN, "the size of an operand of the projection is not known", node)


def _outer_results(nodes: Sequence[fx.Node], exit_node: fx.Node, *, is_trained: bool) -> tuple[fx.Node, ...]:
    """Nodes that the graph's output reads besides; a refusal where anything else does."""
    inside = set(nodes)
    shape = tensor_of(nodes[0]).shape
    returned = []
    for node in nodes:
        if node is exit_node:
            continue
        for user in node.users:
            if user in inside or is_only_asserted(user) or (tensor_of(node).shape == shape and reads_sizes(user)):
                continue
            result = _result_of(node, user)
            if result is None:
                where = provenance(user)
                raise CannotChunk(
                    Reason.LOGITS_USED, f"the logits are used elsewhere, by {target_name(user)} at {where}", user
                )
            if not is_trained:
                raise CannotChunk(
                    Reason.NO_GRADIENTS_WANTED,
                    "the logits are returned, as no gradients are wanted in this graph",
                    node,
                )
            returned.append(result)
    return tuple(returned)


def _result_of(node: fx.Node, user: fx.Node) -> fx.Node | None:
    """Return the node if `user` is the graph's output, or `user` if it is a conversion that only the output reads.

    None for any other user. (accelerate converts all outputs to fp32.)
    """
    if user.op == "output":
        return node
    is_returned = bool(user.users) and all(reader.op == "output" for reader in user.users)
    return user if is_returned and is_conversion(user) else None


def as_made(head_results: Sequence[fx.Node], projection: fx.Node) -> list[fx.Node]:
    """Return those results of a head that are the projection or its conversion and that autograd follows."""
    device = tensor_of(projection).device
    return [
        node
        for node in head_results
        if node is projection or (is_conversion(node) and projection in node.args[:1])
        if tensor_of(node).requires_grad and tensor_of(node).device == device
    ]


def _can_be_returned(
    results: Sequence[fx.Node],
    projection: fx.Node,
    moves: Sequence[RowMove],
    operands: Sequence[fx.Node | None],
    *,
    runs_here: bool,
) -> bool:
    """Whether logits that are made chunk by chunk are those that the graph returns, and who differentiates them can.

    Every token has its logits, in their order, and the gradient beside the graph (`lower.head.take_apart`) finds its
    operands among the inputs. On a CPU the op multiplies low precision in fp32, which takes longer than the products in
    place.
    """
    value = tensor_of(projection)
    is_slow = runs_here and value.device.type == "cpu" and value.dtype is not torch.float32
    are_all = len(as_made(results, projection)) == len(results) and all(move.kind == "reshape" for move in moves)
    return are_all and not is_slow and all(operand is None or operand.op == "placeholder" for operand in operands)


def _is_worth_while(num_tokens: torch.SymInt | int, width: int, *, wants_weight: bool) -> bool:
    """Whether the gradient of returned logits, which chunks spare, is more than what they hold instead.

    That is the gradient of a trained weight [V,H] in fp32, from forward on: as much as the logits of H tokens.
    """
    hint = num_tokens.node.hint if isinstance(num_tokens, torch.SymInt) else num_tokens
    return not wants_weight or hint is None or int(hint) >= width


def is_conversion(node: fx.Node) -> bool:
    """Whether a node is a tensor in another dtype (or, by `to`, on another device)."""
    return name_of(node) in FLOAT_CASTS | {"to", "type"}


def reads_sizes(node: fx.Node) -> bool:
    """Whether a node asks a tensor for its sizes, not for what it holds."""
    is_shape = target_name(node) == "getattr" and node.args[1] == "shape"
    return is_shape or target_name(node) in ("size", "sym_size", "dim")


def _wanted(is_trained: bool, hidden: fx.Node, weight: fx.Node, bias: fx.Node | None) -> tuple[bool, bool, bool]:
    def is_wanted(node: fx.Node | None) -> bool:
        return is_trained and node is not None and tensor_of(node).requires_grad

    return is_wanted(hidden), is_wanted(weight), is_wanted(bias)
