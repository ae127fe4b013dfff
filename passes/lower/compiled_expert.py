"""Compiled functions: the expert function's forward and backward as compiled functions over R rows.

Steps:
1. the forward is the expert function retraced with concrete parameter layouts and symbolic R (the routing
   weight folded in, if asked);
2. the backward is its vjp (functorch), traced to ATen; what only the forward's result needs is dropped, so
   recomputation stops where backward no longer asks;
3. the last matmul of a parameter's gradient is peeled off: the function returns its two factors, and the loop
   multiplies straight into the gradient's slice (no temporary, no extra pass);
4. Inductor compiles each once; equal compiled functions of different layers share everything.

Where the plan lets forward save rows for backward, both are cut out of their joint graph instead (`saved`).

On CUDA in bf16 the function is lifted over the experts of a chunk (`lift`): one grouped matmul in place of a
matmul per expert.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memfine_fx.config import InnerBackend
from memfine_fx.kernels.matching import kernel_form
from memfine_fx.kernels.tables import KernelForm
from memfine_fx.passes.lower.compiled_function import CompiledFunction, making, outputs_of, set_outputs
from memfine_fx.passes.lower.fold_weight import fold_weight
from memfine_fx.passes.lower.lift import lift_over_experts
from memfine_fx.passes.lower.low_rank import split_low_rank
from memfine_fx.passes.lower.saved import cut_joint, matmul_flops_per_row, through_transposes
from memfine_fx.passes.ops import RESHAPES, name_of
from memfine_fx.passes.pass_list import is_disabled, run_pass
from memfine_fx.passes.tracing import TensorSpec, TracedFunction, trace_rows
from memfine_fx.records import ExpertFunction, ParamKind, SavePolicy
from memfine_fx.runtime.compiled_expert import (
    Compiled,
    CompiledBackward,
    Operand,
    Product,
    SavingFunctions,
)

__all__ = ["CompiledExpertFunction", "compiled_expert_for"]

aten = torch.ops.aten
_cache: dict[str, CompiledExpertFunction] = {}


def compiled_expert_for(
    expert_fn: ExpertFunction,
    specs: Sequence[TensorSpec],
    *,
    folds_weight: bool = True,
    takes_group: bool,
    inner: InnerBackend,
) -> CompiledExpertFunction:
    """The compiled functions of an expert function on arguments of the given specs, from the cache if known.

    Args:
        expert_fn: the function.
        specs: rows, weight (if any), parameters of one expert.
        folds_weight: fold the routing weight before the last projection where possible.
        takes_group: lift over the experts of a chunk.
        inner: compiler of the compiled functions.
    """
    # All that compiled code depends on: layers with equal recipes share it, whatever their parameters are called.
    recipe = (
        expert_fn.graph_module.code,
        tuple(specs),
        expert_fn.param_kinds,
        folds_weight,
        takes_group,
        inner,
        is_disabled("fold_weight"),
        is_disabled("low_rank"),
    )
    key = hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]
    with making:
        if key not in _cache:
            _cache[key] = CompiledExpertFunction(key, expert_fn, tuple(specs), folds_weight, takes_group, inner)
        return _cache[key]


class CompiledExpertFunction:
    """See `memfine_fx.runtime.compiled_expert.CompiledExpert`; compiles on first use."""

    def __init__(
        self,
        key: str,
        expert_fn: ExpertFunction,
        specs: tuple[TensorSpec, ...],
        folds_weight: bool,
        takes_group: bool,
        inner: InnerBackend,
    ) -> None:
        self.key = key
        self.has_weight = expert_fn.has_weight
        self.param_kinds: tuple[ParamKind, ...] = expert_fn.param_kinds
        self.takes_group = takes_group
        self._inner = inner
        self._function, self.is_folded, self.num_factored = _prepare(
            expert_fn, specs, folds_weight and expert_fn.has_weight
        )
        result = outputs_of(self._function.graph_module)[0].meta["val"]
        self.out_width = int(result.shape[1])
        self.contribution_dtype: torch.dtype = result.dtype
        self._specs = specs
        self._of_one = self._function
        if takes_group:
            self._function, self._specs = lift_over_experts(self._function, specs, expert_fn)
        self._num_read = 0
        self._made: list[CompiledFunction] = []
        self._joints: dict[tuple[bool, ...], TracedFunction] = {}  # forward and vjp in one graph, cut for each choice
        self._forward: Compiled | None = None
        self._backward: dict[tuple[bool, ...], CompiledBackward] = {}
        self._saving: dict[tuple[SavePolicy, tuple[bool, ...]], SavingFunctions | None] = {}

    @functools.cached_property
    def kernel_form(self) -> KernelForm | None:
        """Return the kernel form of the function on one expert, before it is lifted over several; None without one."""
        kinds = set(self.param_kinds)
        if kinds not in ({"expert"}, {"each"}) or not (self.is_folded or not self.has_weight):
            return None
        form = kernel_form(self._of_one.graph_module.graph, has_weight=self.has_weight)
        if form is None or kinds == {"expert"}:
            return form
        has_more = form.has_bias or form.sources or form.adapters
        return None if has_more else replace(form, is_list=True)

    def forward(self) -> Compiled:
        with making:
            if self._forward is None:
                self._forward = self._compiled(self._function)
            return self._forward

    def backward(self, wanted: tuple[bool, ...]) -> CompiledBackward:
        with making:
            if wanted not in self._backward:
                self._backward[wanted] = self._build_backward(wanted)
            return self._backward[wanted]

    @property
    def revision(self) -> int:
        """How many of its compiled functions were read so far: it grows whenever their peaks change."""
        return self._num_read

    def read_code(self) -> None:
        """Know the peaks of all compiled functions that were made so far as if they had been compiled; nothing is
        built.
        """
        with making:
            for function in self._made:
                function.read_code()

    def _compiled(self, traced: TracedFunction) -> CompiledFunction:
        function = CompiledFunction(traced, self._inner, self._note_read)
        self._made.append(function)
        return function

    def _note_read(self) -> None:
        self._num_read += 1

    @property
    def flops_per_row(self) -> int:
        """Return the FLOPs of the function's matmuls on one row, in forward."""
        return matmul_flops_per_row(self._function.graph_module.graph)

    def graph(self) -> fx.GraphModule:
        """The forward as ATen, for reports and dumps."""
        return self._function.graph_module

    def saving(self, policy: SavePolicy, wanted: tuple[bool, ...]) -> SavingFunctions | None:
        with making:
            if (policy, wanted) not in self._saving:
                self._saving[policy, wanted] = self._build_saving(policy, wanted)
            return self._saving[policy, wanted]

    def _build_backward(self, wanted: tuple[bool, ...]) -> CompiledBackward:
        differentiated = self._differentiated(wanted)
        traced = trace_rows(_Vjp(self._function.graph_module, differentiated), self._backward_specs())
        return self._compiled_backward(traced, differentiated)

    def _build_saving(self, policy: SavePolicy, wanted: tuple[bool, ...]) -> SavingFunctions | None:
        if policy == "received":
            return SavingFunctions(self.forward(), self.backward(wanted), (), 0)
        differentiated = self._differentiated(wanted)
        if wanted not in self._joints:
            function = _Vjp(self._function.graph_module, differentiated, returns_value=True)
            self._joints[wanted] = trace_rows(function, self._backward_specs())
        compiled_backward = functools.partial(self._compiled_backward, differentiated=differentiated)
        return cut_joint(self._joints[wanted], policy, self._compiled, compiled_backward)

    def _differentiated(self, wanted: tuple[bool, ...]) -> tuple[int, ...]:
        """Which arguments of the function want their gradient."""
        # Wanted gradients always have a place for the weight, arguments only where there is one.
        flags = [wanted[0], *([wanted[1]] if self.has_weight else []), *wanted[2:]]
        return tuple(position for position, flag in enumerate(flags) if flag)

    def _compiled_backward(self, traced: TracedFunction, differentiated: tuple[int, ...]) -> CompiledBackward:
        """The function of a graph that returns the gradients of these arguments."""
        num_lead = 2 if self.has_weight else 1
        gradients = dict(zip(differentiated, outputs_of(traced.graph_module), strict=True))
        results: list[fx.Node] = []
        rows_grad = _place(results, gradients.pop(0, None))
        weight_grad = _place(results, gradients.pop(1, None)) if self.has_weight else None
        param_grads = [_param_grad(results, gradients.get(num_lead + i)) for i in range(len(self.param_kinds))]
        set_outputs(traced.graph_module, results)
        return CompiledBackward(self._compiled(traced), rows_grad, weight_grad, tuple(param_grads))

    def _backward_specs(self) -> list[TensorSpec]:
        rows = self._specs[0]
        grad = TensorSpec((self.out_width,), self.contribution_dtype, rows.device, per_row=True)
        return [grad, *self._specs]


@dataclass(frozen=True)
class _Vjp:
    """(grad, *arguments) -> gradients of the `differentiated` arguments, the function's value before them if asked."""

    function: Callable[..., Any]
    differentiated: tuple[int, ...]
    returns_value: bool = False

    def __call__(self, grad: torch.Tensor, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def partial(*chosen: torch.Tensor) -> torch.Tensor:
            full = list(args)
            for position, value in zip(self.differentiated, chosen, strict=True):
                full[position] = value
            result: torch.Tensor | Sequence[torch.Tensor] = self.function(*full)
            return result if isinstance(result, torch.Tensor) else result[0]

        # vjp of chosen arguments alone: what is frozen gets no gradient, not even a dead one.
        value, pullback = torch.func.vjp(partial, *(args[position] for position in self.differentiated))[:2]
        return (value, *pullback(grad)) if self.returns_value else tuple(pullback(grad))


def _prepare(expert_fn: ExpertFunction, specs: Sequence[TensorSpec], folds: bool) -> tuple[TracedFunction, bool, int]:
    """The function as it is compiled; whether its weight was folded, and how many low-rank sums were taken apart."""
    traced = trace_rows(expert_fn.graph_module, specs)
    placeholders = [node for node in traced.graph_module.graph.nodes if node.op == "placeholder"]
    module = traced.graph_module
    is_folded = folds and run_pass("fold_weight", module, lambda: fold_weight(module, placeholders[1]), False)
    # Afterwards: a weight is folded into what a single matmul reads.
    num_factored = run_pass("low_rank", module, lambda: split_low_rank(module), 0)
    return traced, is_folded, num_factored


def _place(results: list[fx.Node], node: fx.Node | None) -> int | None:
    """Index of `node` among the results, added if it is not there yet."""
    if node is None:
        return None
    if node not in results:
        results.append(node)
    return results.index(node)


def _param_grad(results: list[fx.Node], gradient: fx.Node | None) -> Product | int | None:
    """Peel the last matmul off a parameter's gradient."""
    if gradient is None:
        return None
    product, is_transposed = through_transposes(gradient)
    # A factor that was scaled or summed afterwards is no product any more, and comes whole.
    if product.target is not aten.mm.default:
        index = _place(results, _unrounded(gradient))
        assert index is not None
        return index
    left, right = (_operand(results, argument) for argument in product.args[:2])
    # (A B)^T is B^T A^T.
    if is_transposed:
        left, right = _flip(right), _flip(left)
    return Product(left, right)


def _unrounded(gradient: fx.Node) -> fx.Node:
    """A sum over rows in low precision, made in fp32: an expert's chunks are added up before anything is rounded."""
    views, total = [], gradient
    while name_of(total) in RESHAPES and isinstance(total.args[0], fx.Node):
        views.append(total)
        total = total.args[0]
    is_sum = total.target is aten.sum.dim_IntList and 0 in total.args[1]  # type: ignore[operator]  # a list of ints
    if not is_sum or total.meta["val"].dtype not in (torch.bfloat16, torch.float16):
        return gradient
    with total.graph.inserting_after(gradient):
        result = total.graph.call_function(aten.sum.dim_IntList, total.args, {**total.kwargs, "dtype": torch.float32})
    result.meta["val"] = _in_fp32(total.meta["val"])
    for view in reversed(views):
        with view.graph.inserting_after(result):
            result = view.graph.call_function(view.target, (result, *view.args[1:]))  # type: ignore[arg-type]
        result.meta["val"] = _in_fp32(view.meta["val"])
    return result


def _in_fp32(value: Any) -> Any:
    """A traced tensor in fp32; of its own mode, because bodies are also cut while another mode is on, as `fit`'s."""
    with value.fake_mode:
        return value.float()


def _operand(results: list[fx.Node], argument: Any) -> Operand:
    node, is_transposed = through_transposes(argument)
    if node.op == "placeholder":
        placeholders = [other for other in node.graph.nodes if other.op == "placeholder"]
        return Operand(True, placeholders.index(node), is_transposed)
    index = _place(results, node)
    assert index is not None
    return Operand(False, index, is_transposed)


def _flip(operand: Operand) -> Operand:
    return Operand(operand.is_argument, operand.index, not operand.is_transposed)
