"""The chunk loop: gather rows, run the compiled expert, add into the tokens; backward recomputes chunk by chunk.

No [N,H] or [N,F] tensor is ever allocated: a chunk's rows are gathered when its turn comes, and everything allocated
for a chunk is freed before the next. In low precision the sums over a token's choices run in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import sympy
import torch

from memfine_fx.compat.autograd import without_autocast
from memfine_fx.memory.sizes import GROUPS, ROWS
from memfine_fx.records import ChunkPlan
from memfine_fx.runtime.compiled_expert import CompiledBackward, CompiledExpert, Product, SavingFunctions
from memfine_fx.runtime.gradients import ParamGradient
from memfine_fx.runtime.halving import Progress, run_chunks
from memfine_fx.runtime.mact import ChunkTuner
from memfine_fx.runtime.routing import Routed
from memfine_fx.runtime.schedule import Chunk, cut_at

__all__ = ["Places", "SavedRows", "accumulator_dtype", "chunks_of", "open_gradients", "run_backward", "run_forward"]


def _ignore(rows: int) -> None:
    """Ignore the rows that a chunk may have after an allocation failed."""


@dataclass(frozen=True)
class SavedRows:
    """Compiled functions that save tensors in forward for backward, and the saved tensors of the first rows in expert
    order.

    Args:
        functions: see `runtime.compiled_expert`; rows of which nothing is saved go through the region's plain
            functions.
        tensors: [M,...].
        num_rows: M; None: all, however many there are.
    """

    functions: SavingFunctions
    tensors: Sequence[torch.Tensor] = ()
    num_rows: int | None = None

    def of_rows(self, total: int) -> SavedRows | None:
        """Return the saved rows of `total` routed rows: None where there are none, without a border where all are."""
        return replace(self, num_rows=None if self.num_rows == total else self.num_rows) if self.num_rows != 0 else None

    def holds(self, chunk: Chunk) -> bool:
        """Return whether the rows of a chunk are saved."""
        return self.num_rows is None or chunk.stop <= self.num_rows

    def cut(self, chunks: list[Chunk]) -> list[Chunk]:
        """Cut chunks so that of each all rows are saved, or none."""
        return chunks if self.num_rows is None else cut_at(chunks, self.num_rows)

    @property
    def copied(self) -> Sequence[torch.Tensor]:
        """Return the saved tensors that a compiled function computes elsewhere, so that they are copied."""
        return [tensor for tensor, product in zip(self.tensors, self.functions.given, strict=True) if product is None]

    def give(self, arguments: Sequence[torch.Tensor], chunk: Chunk) -> list[torch.Tensor]:
        """Compute in place a chunk's part of the saved tensors that are products of its arguments; return the parts."""
        parts = []
        for tensor, product in zip(self.tensors, self.functions.given, strict=True):
            if product is not None:
                parts.append(tensor[chunk.start : chunk.stop])
                product.into(parts[-1], arguments)
        return parts

    @staticmethod
    def empty(functions: SavingFunctions, hidden: torch.Tensor, num_rows: int) -> SavedRows:
        """Allocate the tensors that a forward will save; rows of dropped assignments are never written."""
        tensors = [hidden.new_empty((num_rows, *saved.shape), dtype=saved.dtype) for saved in functions.saved]
        return SavedRows(functions, tensors, num_rows)


@dataclass(frozen=True)
class Places:
    """Tensors in which gradients of rows are set, not summed, in a layer with K = 1 all of whose rows are in chunks.

    Args:
        rows: [n,H], or None where it is not wanted; may be the gradient of the rows' outputs, whose own rows are read
            before.
        weight: [n], or None.
    """

    rows: torch.Tensor | None
    weight: torch.Tensor | None


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which contributions of `dtype` are summed per token."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def chunks_of(
    routed: Routed,
    compiled_expert: CompiledExpert,
    plan: ChunkPlan,
    tuner: ChunkTuner | None = None,
    saved: SavedRows | None = None,
    *,
    is_new_step: bool = True,
) -> list[Chunk]:
    """The layer's chunks under a plan.

    Args:
        tuner: of the region; without one, slices of the tokens axis are the plan's.
        saved: saved tensors; no chunk has saved rows beside others.
        is_new_step: False where backward walks the rows of an earlier forward.
    """
    chunks = (tuner or ChunkTuner(keeps_slices=True)).chunks(
        plan,
        routed.order,
        routed.offsets,
        top_k=routed.top_k,
        num_tokens=routed.num_tokens,
        groups=compiled_expert.takes_group,
        is_new_step=is_new_step,
    )
    return chunks if saved is None else saved.cut(chunks)


def run_forward(
    routed: Routed,
    compiled_expert: CompiledExpert,
    chunks: Sequence[Chunk],
    out_dtype: torch.dtype,
    on_failure: Callable[[int], None] = _ignore,
    saved: SavedRows | None = None,
    place: torch.Tensor | None = None,
) -> torch.Tensor:
    """Combined outputs, [T,H_out] of `out_dtype`.

    Args:
        place: of a layer with K = 1 all of whose rows are in chunks: contributions are set there, not summed.
        saved: compiled functions that save tensors for backward, and where to write these.
        on_failure: called with the rows that a chunk may have from now on, after an allocation failed and the chunks
            were halved.

    Raises:
        ChunkOutOfMemory: memory ran out in a chunk of a single row.
    """
    plain = saved.functions.forward if saved is not None and saved.num_rows is None else compiled_expert.forward()
    hidden = routed.hidden
    write = _add_rows if place is None else _set_rows_of
    copied = () if saved is None else saved.copied
    out = place
    if out is None:
        out = hidden.new_zeros((hidden.shape[0], compiled_expert.out_width), dtype=accumulator_dtype(out_dtype))

    def run(chunk: Chunk, progress: Progress) -> None:
        assignments, tokens = routed.places(chunk)
        arguments = routed.arguments(compiled_expert, chunk, assignments, tokens)
        if saved is None or not saved.holds(chunk):
            (contribution,) = plain(*arguments)
            progress.complete([partial(write, out, tokens, contribution)])
            return
        contribution, *values = saved.functions.forward(*arguments, *saved.give(arguments, chunk))
        writes = [partial(_set_rows, *both, chunk) for both in zip(copied, values, strict=True)]
        progress.complete([partial(write, out, tokens, contribution), *writes])

    def needs() -> list[tuple[str, int]]:
        return _row_terms(routed, compiled_expert.out_width, plain.peak_bytes)

    with without_autocast():
        limit = run_chunks(chunks, run, groups=compiled_expert.takes_group, needs=needs)
    if limit is not None:
        on_failure(limit)
    return out if place is not None else out.to(out_dtype)


def run_backward(
    grad: torch.Tensor,
    routed: Routed,
    compiled_expert: CompiledExpert,
    chunks: Sequence[Chunk],
    wanted: tuple[bool, bool],
    wanted_params: Sequence[Sequence[bool]],
    on_failure: Callable[[int], None] = _ignore,
    saved: SavedRows | None = None,
    into: Sequence[ParamGradient | None] | None = None,
    places: Places | None = None,
    onto: Sequence[Sequence[torch.Tensor | None]] = (),
) -> list[torch.Tensor]:
    """Gradients of what is wanted, in the order hidden, weight, parameters.

    Args:
        grad: [T,H_out] gradient of the output; may be expanded.
        wanted: hidden, weight.
        wanted_params: per parameter, whether each of its tensors wants its gradient.
        on_failure: as in `run_forward`.
        saved: compiled functions that read saved tensors, and the tensors that their forward wrote.
        into: gradients of the parameters that others add to as well; they are added to and not returned.
        places: for the gradients of rows and weights, which are not returned then.
        onto: per parameter, gradients of its tensors that are there and are added to, and returned as they are then.

    Raises:
        ChunkOutOfMemory: memory ran out in a chunk of a single row.
    """
    if saved is not None and saved.num_rows is None:
        plain = saved.functions.backward
    else:
        plain = compiled_expert.backward((*wanted, *map(any, wanted_params)))
    hidden, weight = routed.hidden, routed.flat_weight
    grad_hidden = grad_weight = None
    if places is None and plain.rows_grad is not None:
        grad_hidden = torch.zeros(hidden.shape, dtype=accumulator_dtype(hidden.dtype), device=hidden.device)
    if plain.weight_grad is not None:
        assert weight is not None
        grad_weight = torch.zeros_like(weight) if places is None else places.weight
    params = open_gradients(plain, routed.params, compiled_expert, wanted_params, onto) if into is None else into

    def run(chunk: Chunk, progress: Progress) -> None:
        assignments, tokens = routed.places(chunk)
        rows_grad = grad.index_select(0, tokens).to(compiled_expert.contribution_dtype)
        arguments = [rows_grad, *routed.arguments(compiled_expert, chunk, assignments, tokens)]
        backward = plain
        if saved is not None and saved.holds(chunk):
            backward = saved.functions.backward
            arguments += [tensor[chunk.start : chunk.stop] for tensor in saved.tensors]
        results = backward.call(*arguments)
        effects: list[Callable[[], object]] = []
        # Always in this order: what is walked again after a failure skips as many effects as had happened.
        if grad_hidden is not None and backward.rows_grad is not None:
            effects.append(partial(_add_rows, grad_hidden, tokens, results[backward.rows_grad]))
        if grad_weight is not None and backward.weight_grad is not None:
            effects.append(partial(grad_weight.index_copy_, 0, assignments, results[backward.weight_grad]))
        effects.extend(_param_effects(params, backward, chunk, arguments, results, groups=compiled_expert.takes_group))
        if places is not None and places.rows is not None and backward.rows_grad is not None:
            effects.append(
                partial(_set_rows_of, places.rows, tokens, results[backward.rows_grad])
            )  # last: it may end `grad`
        progress.complete(effects)

    def needs() -> list[tuple[str, int]]:
        staged = max((param.staged_bytes for param in params if param is not None), default=0)
        return [
            *_row_terms(routed, compiled_expert.out_width, plain.peak_bytes),
            ("gradient staging of an expert", staged),
        ]

    with without_autocast():
        limit = run_chunks(chunks, run, groups=compiled_expert.takes_group, needs=needs)
    if limit is not None:
        on_failure(limit)
    grads: list[torch.Tensor] = []
    if grad_hidden is not None:
        grads.append(grad_hidden.to(hidden.dtype))
    if places is None and grad_weight is not None:
        grads.append(grad_weight.view(-1, routed.top_k))
    for param in params if into is None else ():
        grads.extend([] if param is None else param.finish_all())
    return grads


def open_gradients(
    backward: CompiledBackward,
    params: Sequence[Sequence[torch.Tensor]],
    compiled_expert: CompiledExpert,
    wanted_params: Sequence[Sequence[bool]],
    onto: Sequence[Sequence[torch.Tensor | None]] = (),
) -> list[ParamGradient | None]:
    """Allocate the gradients of the parameters that `backward` gives; None where it gives none."""
    existing = onto or [()] * len(params)
    groups = zip(backward.param_grads, params, compiled_expert.param_kinds, wanted_params, existing, strict=True)
    return [
        None if how is None else ParamGradient(tensors, kind, flags, onto=gradients)
        for how, tensors, kind, flags, gradients in groups
    ]


def _add_rows(total: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    total.index_add_(0, tokens, rows.to(total.dtype))


def _set_rows_of(total: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    total.index_copy_(0, tokens, rows.to(total.dtype))


def _set_rows(place: torch.Tensor, rows: torch.Tensor, chunk: Chunk) -> None:
    place[chunk.start : chunk.stop].copy_(rows)


def _param_effects(
    params: Sequence[ParamGradient | None],
    backward: CompiledBackward,
    chunk: Chunk,
    arguments: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    *,
    groups: bool,
) -> Iterator[Callable[[], object]]:
    """Two effects a parameter, for any part of a chunk: adding, and finishing where the chunk completes."""
    expert = chunk.first_expert
    for param, how in zip(params, backward.param_grads, strict=True):
        if param is None:
            continue
        if isinstance(how, Product):
            left, right = how.left.value(arguments, results), how.right.value(arguments, results)
            yield partial(param.add_product, expert, left, right, is_part=chunk.is_part)
        elif how is not None and groups:
            yield partial(_add_group, param, chunk, results[how])
        elif how is not None:
            yield partial(param.add_tensor, expert, results[how], is_part=chunk.is_part)
        yield partial(param.finish, expert) if chunk.completes else _nothing


def _nothing() -> None:
    """The effect of finishing what has more chunks to come."""


def _row_terms(routed: Routed, out_width: int, peak: sympy.Expr) -> list[tuple[str, int]]:
    """Return (name, bytes) of what a chunk of one row of one expert needs, beyond what is alive outside it."""
    hidden = routed.hidden
    rows = hidden.shape[1] * hidden.element_size() + out_width * 4
    return [("expert function", int(peak.subs({ROWS: 1, GROUPS: 1}))), ("gathered row", rows)]


def _add_group(param: ParamGradient, chunk: Chunk, gradient: torch.Tensor) -> None:
    if chunk.is_part:
        param.add_tensor(chunk.first_expert, gradient[0], is_part=True)
    else:
        param.add_range(chunk.first_expert, gradient)
