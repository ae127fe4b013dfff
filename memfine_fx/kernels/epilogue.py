"""Epilogue: what experts do between their projections, as Triton source of one tile in fp32.

Before:  mul(silu(clamp_max(gate, 10.0)), clamp(up, -10.0, 10.0))      (pointwise ATen between products)
After:   Pointwise("def forward(gate, up): ...  def backward(gate, up, grad): ...")

The derivative is autograd's, traced once. Refused: an operator that `_EXPRESSIONS` does not print, a number that is not
finite, and anything of another shape or that reads something else than gate and up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memfine_fx.kernels.tables import Pointwise
from memfine_fx.passes.tracing import TensorSpec, trace_rows

__all__ = ["as_pointwise", "written"]

aten = torch.ops.aten
_ALL = "propagate_nan=tl.PropagateNan.ALL"
_MOST_POWER = 8
_WIDTH = 8  # of rows that are traced; any would do


Uncast = Callable[[fx.Node], fx.Node]
"""Returns the node before casts that do not matter to tiles in fp32."""


def as_pointwise(result: fx.Node, leaves: Sequence[fx.Node], uncast: Uncast) -> Pointwise | None:
    """Return the source of `result` as a function of one or two leaves [R,F]; None where it cannot be written."""
    function = _between(result, leaves, uncast)
    return None if function is None else written(function, len(leaves))


def written(function: Callable[..., torch.Tensor], num_inputs: int) -> Pointwise | None:
    """Return the source of a pointwise function of gate and up, or of one tensor; None where it cannot be written."""
    row = TensorSpec((_WIDTH,), torch.float32, torch.device("cpu"), per_row=True)

    def gradients(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *inputs, grad = arguments
        _, pull = torch.func.vjp(function, *inputs)  # type: ignore[misc]  # two, without has_aux
        return pull(grad)  # type: ignore[no-any-return]  # gradients of the inputs

    def results(*inputs: torch.Tensor) -> torch.Tensor:  # tracing counts the arguments of what it is given
        return function(*inputs)

    forward = trace_rows(results, [row] * num_inputs).graph_module.graph
    backward = trace_rows(gradients, [row] * (num_inputs + 1)).graph_module.graph
    names = ["gate", "up"][:num_inputs]
    printed = [_printed(forward, names, 1), _printed(backward, [*names, "grad"], 2)]
    if None in printed:
        return None
    heads = ("def forward(gate, up):", "def backward(gate, up, grad):")
    parts = [f"@triton.jit\n{head}\n{body}\n" for head, body in zip(heads, printed, strict=True)]
    return Pointwise("\n\n".join(parts), has_up=num_inputs == 2)


def _between(result: fx.Node, leaves: Sequence[fx.Node], uncast: Uncast) -> Callable[..., torch.Tensor] | None:
    """Return the nodes from the leaves to the result as a function; None where the function cannot be copied."""
    graph, shape = fx.Graph(), result.meta["val"].shape
    copied: dict[fx.Node, fx.Node | None] = {
        leaf: graph.placeholder(f"leaf{place}") for place, leaf in enumerate(leaves)
    }

    def copy(node: fx.Node) -> fx.Node | None:
        node = uncast(node)
        if node not in copied:
            copied[node] = None
            if node.target in _EXPRESSIONS and node.meta["val"].shape == shape:
                arguments = {input_node: copy(input_node) for input_node in node.all_input_nodes}
                if arguments and None not in arguments.values():
                    copied[node] = graph.node_copy(node, lambda input_node: arguments[input_node])
        return copied[node]

    out = copy(result)
    if out is None:
        return None
    graph.output(out)
    return fx.GraphModule(torch.nn.Module(), graph)


def _printed(graph: fx.Graph, names: Sequence[str], num_results: int) -> str | None:
    """Return the statements of a function's body, or None where an operator has no source.

    There are `num_results` results: where the graph has fewer, its first one stands for the gradient of an input that
    does not exist.
    """
    values: dict[fx.Node, str] = {}
    lines: list[str] = []
    inputs = graph.find_nodes(op="placeholder")
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = names[inputs.index(node)]
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else [node.args[0]]
            returned = [values[result_node] for result_node in results]
            lines.append(f"    return {', '.join([*returned, *returned[:1] * (num_results - len(returned))])}")
        else:
            expression = _expression(node, values)
            if expression is None:
                return None
            values[node] = f"value{len(lines)}"
            lines.append(f"    {values[node]} = {expression}")
    return "\n".join(lines)


def _expression(node: fx.Node, values: dict[fx.Node, str]) -> str | None:
    form = _EXPRESSIONS.get(node.target)
    arguments = [_argument(arg, values) for arg in node.args]
    if form is None or any(
        argument is None for argument, arg in zip(arguments, node.args, strict=True) if arg is not None
    ):
        return None
    return form(arguments, node.kwargs) if callable(form) else _filled(form, arguments, node.kwargs)


def _filled(form: str, arguments: Sequence[str | None], kwargs: dict[str, Any]) -> str | None:
    """Return a form with the arguments in place of {0}, {1}; None where there are arguments by name."""
    return None if kwargs else form.format(*arguments)


def _argument(value: Any, values: dict[fx.Node, str]) -> str | None:
    if isinstance(value, fx.Node):
        return values[value]
    return repr(float(value)) if isinstance(value, (int, float)) and math.isfinite(value) else None


_Arguments = Sequence[str | None]


def _sum(sign: str) -> Callable[[_Arguments, dict[str, Any]], str | None]:
    def form(arguments: _Arguments, kwargs: dict[str, Any]) -> str | None:
        scale = kwargs.get("alpha", 1)
        return f"{arguments[0]} {sign} {arguments[1]}" if scale == 1 and len(arguments) == 2 else None

    return form


def _clamp(arguments: _Arguments, kwargs: dict[str, Any]) -> str | None:
    value, low, high = (*arguments, None, None)[:3]
    if kwargs:
        return None
    bounded = value if low is None else f"tl.maximum({value}, {low}, {_ALL})"
    return bounded if high is None else f"tl.minimum({bounded}, {high}, {_ALL})"


def _power(arguments: _Arguments, kwargs: dict[str, Any]) -> str | None:
    value, exponent = arguments[0], float(arguments[1] or "nan")
    if exponent == 0.5:
        return f"tl.sqrt({value})"
    if exponent == -0.5:
        return f"1.0 / tl.sqrt({value})"
    is_known = exponent.is_integer() and 1 <= abs(exponent) <= _MOST_POWER
    product = " * ".join([str(value)] * int(abs(exponent)))
    return None if not is_known else product if exponent > 0 else f"1.0 / ({product})"


def _gelu(arguments: _Arguments, kwargs: dict[str, Any]) -> str | None:
    value = arguments[0]
    if kwargs.get("approximate", "none") == "tanh":
        inner = f"1.5957691216057308 * ({value} + 0.044715 * {value} * {value} * {value})"
        return f"{value} * tl.sigmoid({inner})"
    return f"0.5 * {value} * (1.0 + tl.erf({value} * 0.7071067811865476))"


def _gelu_backward(arguments: _Arguments, kwargs: dict[str, Any]) -> str | None:
    grad, value = arguments[:2]
    if kwargs.get("approximate", "none") == "tanh":
        share = f"tl.sigmoid(1.5957691216057308 * ({value} + 0.044715 * {value} * {value} * {value}))"
        slope = f"1.5957691216057308 * (1.0 + 0.134145 * {value} * {value})"
        return f"{grad} * {share} * (1.0 + {value} * (1.0 - {share}) * {slope})"
    below = f"0.5 * (1.0 + tl.erf({value} * 0.7071067811865476))"
    return f"{grad} * ({below} + {value} * 0.3989422804014327 * tl.exp(-0.5 * {value} * {value}))"


def _leaky_relu(arguments: _Arguments, kwargs: dict[str, Any]) -> str | None:
    value, slope = (*arguments, "0.01")[:2]  # a slope that is the default's is not among them
    return f"tl.where({value} > 0.0, {value}, {value} * {slope})"


def _leaky_relu_backward(arguments: _Arguments, kwargs: dict[str, Any]) -> str | None:
    """Return the source of leaky ReLU's gradient.

    The operator's last argument says that the second one is the input, not the result.
    """
    return f"tl.where({arguments[1]} > 0.0, {arguments[0]}, {arguments[0]} * {arguments[2]})"


def _copied(arguments: _Arguments, kwargs: dict[str, Any]) -> str | None:
    """Return the source of a cast to fp32, of a condition to 1 or 0 too; None for any other copy."""
    is_cast = kwargs.keys() == {"dtype"} and kwargs["dtype"] is torch.float32
    return f"{arguments[0]}.to(tl.float32)" if is_cast else None


_EXPRESSIONS: dict[Any, str | Callable[[_Arguments, dict[str, Any]], str | None]] = {
    aten.add.Tensor: _sum("+"),
    aten.sub.Tensor: _sum("-"),
    aten.add.Scalar: _sum("+"),
    aten.sub.Scalar: _sum("-"),
    aten.rsub.Scalar: "{1} - {0}",
    aten.mul.Tensor: "{0} * {1}",
    aten.mul.Scalar: "{0} * {1}",
    aten.div.Tensor: "{0} / {1}",
    aten.div.Scalar: "{0} / {1}",
    aten.neg.default: "-{0}",
    aten.reciprocal.default: "1.0 / {0}",
    aten.abs.default: "tl.abs({0})",
    aten.sgn.default: "tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, 0.0))",
    aten.exp.default: "tl.exp({0})",
    aten.log.default: "tl.log({0})",
    aten.sqrt.default: "tl.sqrt({0})",
    aten.rsqrt.default: "1.0 / tl.sqrt({0})",
    aten.erf.default: "tl.erf({0})",
    aten.pow.Tensor_Scalar: _power,
    aten.relu.default: f"tl.maximum({{0}}, 0.0, {_ALL})",
    aten.sigmoid.default: "tl.sigmoid({0})",
    aten.tanh.default: "2.0 * tl.sigmoid(2.0 * {0}) - 1.0",
    aten.silu.default: "{0} * tl.sigmoid({0})",
    aten.gelu.default: _gelu,
    aten.leaky_relu.default: _leaky_relu,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: f"tl.maximum({{0}}, {{1}}, {_ALL})",
    aten.clamp_max.default: f"tl.minimum({{0}}, {{1}}, {_ALL})",
    aten.maximum.default: f"tl.maximum({{0}}, {{1}}, {_ALL})",
    aten.minimum.default: f"tl.minimum({{0}}, {{1}}, {_ALL})",
    aten.where.self: "tl.where({0}, {1}, {2})",
    aten.masked_fill.Scalar: "tl.where({1}, {2}, {0})",
    aten.eq.Tensor: "{0} == {1}",
    aten.gt.Scalar: "{0} > {1}",
    aten.ge.Scalar: "{0} >= {1}",
    aten.lt.Scalar: "{0} < {1}",
    aten.le.Scalar: "{0} <= {1}",
    aten.gt.Tensor: "{0} > {1}",
    aten.ge.Tensor: "{0} >= {1}",
    aten.lt.Tensor: "{0} < {1}",
    aten.le.Tensor: "{0} <= {1}",
    aten.logical_and.default: "{0} & {1}",
    aten.bitwise_and.Tensor: "{0} & {1}",
    aten.detach.default: "{0}",
    aten.alias.default: "{0}",
    aten._to_copy.default: _copied,
    aten.zeros_like.default: lambda arguments, kwargs: f"tl.zeros_like({arguments[0]})",
    aten.scalar_tensor.default: lambda arguments, kwargs: arguments[0],
    aten.sigmoid_backward.default: "{0} * {1} * (1.0 - {1})",
    aten.tanh_backward.default: "{0} * (1.0 - {1} * {1})",
    aten.silu_backward.default: "{0} * tl.sigmoid({1}) * (1.0 + {1} * (1.0 - tl.sigmoid({1})))",
    aten.gelu_backward.default: _gelu_backward,
    aten.threshold_backward.default: "tl.where({1} <= {2}, 0.0, {0})",
    aten.leaky_relu_backward.default: _leaky_relu_backward,
}
"""Operators of fp32 tiles in Triton: those that experts use between projections, and those of their derivatives."""
