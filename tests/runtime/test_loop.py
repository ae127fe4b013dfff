"""The chunk loop against plain autograd, assignment by assignment: outputs and every wanted gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from memfine_fx.memory.measure import trace_memory
from memfine_fx.records import ChunkPlan, ParamKind, SavePolicy
from memfine_fx.runtime.loop import SavedRows, chunks_of, run_backward, run_forward
from memfine_fx.runtime.routing import Routed, sort_assignments
from tests.helpers import HIDDEN, NUM_EXPERTS, WIDTH, compiled_expert_of, largest_error, mlp, mlp_params, naive_combine

EXPERT: ParamKind = "expert"
SHARED: ParamKind = "shared"


def unweighted(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(rows @ up) @ down


def weight_on_input(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu((rows * weight.unsqueeze(1)) @ up) @ down


def with_shared(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    return (torch.relu(rows @ up * scale) @ down) * weight.unsqueeze(1)


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One layer's step: its function, inputs and plan."""

    function: Callable[..., Tensor] = mlp
    has_weight: bool = True
    has_shared: bool = False
    num_tokens: int = 11
    top_k: int = 3
    axis: str = "rows"
    size: int = 4
    folds_weight: bool = True
    dtype: torch.dtype = torch.float32
    index: tuple[tuple[int, ...], ...] | None = None
    policy: SavePolicy = "nothing"
    saved_share: float | None = None

    @property
    def kinds(self) -> list[ParamKind]:
        return [EXPERT, EXPERT, *([SHARED] if self.has_shared else [])]

    def params(self) -> list[Tensor]:
        extra = [torch.rand(16).to(self.dtype) + 0.5] if self.has_shared else []
        return [*mlp_params(self.dtype), *extra]

    def num_saved_rows(self, num_rows: int) -> int | None:
        return None if self.saved_share is None else round(self.saved_share * num_rows)

    def expert_index(self) -> Tensor:
        if self.index is not None:
            return torch.tensor(self.index)
        return torch.rand(self.num_tokens, NUM_EXPERTS).topk(self.top_k, dim=-1).indices

    def plan(self) -> ChunkPlan:
        if self.axis == "rows":
            return ChunkPlan("rows", self.size, 0, 0, "")
        return ChunkPlan("tokens", self.size, self.size, 0, "")


@dataclass(frozen=True)
class Step:
    """What one forward and backward computed, in the order output, hidden, weight, parameters."""

    results: list[Tensor]

    def assert_close(self, reference: Step, tolerance: float = 1e-5) -> None:
        for got, expected in zip(self.results, reference.results, strict=True):
            assert got.shape == expected.shape
            assert got.dtype == expected.dtype
            assert largest_error(got, expected) < tolerance


def run(
    case: Case,
    hidden: Tensor,
    weight: Tensor | None,
    index: Tensor,
    params: Sequence[Tensor],
    grad: Tensor,
    wanted: Sequence[bool] | None = None,
) -> Step:
    compiled_expert = compiled_expert_of(
        case.function, params, case.kinds, has_weight=case.has_weight, folds_weight=case.folds_weight
    )
    routed = Routed(
        hidden, weight, *sort_assignments(index, NUM_EXPERTS), [[param] for param in params], index.shape[1]
    )
    chunks = chunks_of(routed, compiled_expert, case.plan())
    flags = (True, case.has_weight, *[True] * len(params)) if wanted is None else tuple(wanted)
    with torch.no_grad():
        saving = None if case.policy == "nothing" else compiled_expert.saving(case.policy, flags)
        rows = routed.order.shape[0]
        num_saved = case.num_saved_rows(rows)
        num_rows = rows if num_saved is None else num_saved
        saved = None if saving is None else SavedRows.empty(saving, hidden, num_rows).of_rows(rows)
        chunks = chunks if saved is None else saved.cut(chunks)
        out = run_forward(routed, compiled_expert, chunks, hidden.dtype, saved=saved)
        wanted_params = [[flag] for flag in flags[2:]]
        return Step([out, *run_backward(grad, routed, compiled_expert, chunks, flags[:2], wanted_params, saved=saved)])


def reference(
    case: Case, hidden: Tensor, weight: Tensor | None, index: Tensor, params: Sequence[Tensor], grad: Tensor
) -> Step:
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (hidden, weight, *params) if leaf is not None]
    tail = leaves[2:] if case.has_weight else leaves[1:]
    out = naive_combine(case.function, leaves[0], leaves[1] if case.has_weight else None, index, tail, case.kinds)
    grads = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    zeroed = [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, grads, strict=True)]
    return Step([out.detach(), *zeroed])


def inputs_of(case: Case) -> tuple[Tensor, Tensor | None, Tensor, list[Tensor], Tensor]:
    index = case.expert_index()
    hidden = torch.randn(index.shape[0], HIDDEN).to(case.dtype)
    weight = torch.rand(index.shape).to(case.dtype) if case.has_weight else None
    return hidden, weight, index, case.params(), torch.randn_like(hidden)


CASES = {
    "plain": Case(),
    "weight not folded": Case(folds_weight=False),
    "no weight": Case(unweighted, has_weight=False),
    "weight on the input": Case(weight_on_input),
    "a shared parameter": Case(with_shared, has_shared=True),
    "one choice": Case(top_k=1),
    "one token": Case(num_tokens=1),
    "no tokens": Case(num_tokens=0),
    "empty experts": Case(index=((2, 3), (2, 3), (3, 2), (2, 3), (2, 3), (2, 3))),
    "one expert takes all": Case(index=((1,),) * 9, top_k=1),
    "dropped assignments": Case(index=((-1, 0), (4, 2), (2, 0), (9, -7), (1, 1), (3, 0))),
    "chunks of one row": Case(size=1),
    "one chunk an expert": Case(size=1000),
}


@pytest.mark.parametrize("policy", ["nothing", "projections", "operands"])
@pytest.mark.parametrize("axis", ["rows", "tokens"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_autograd(name: str, axis: str, policy: SavePolicy) -> None:
    case = replace(CASES[name], axis=axis, policy=policy)
    inputs = inputs_of(case)
    run(case, *inputs).assert_close(reference(case, *inputs))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.77])
@pytest.mark.parametrize("axis", ["rows", "tokens"])
@pytest.mark.parametrize("name", CASES)
def test_part_of_the_rows_is_kept_wherever_the_border_falls(name: str, axis: str, share: float) -> None:
    case = replace(CASES[name], axis=axis, policy="projections", saved_share=share)
    inputs = inputs_of(case)
    run(case, *inputs).assert_close(reference(case, *inputs))


@pytest.mark.parametrize("axis", ["rows", "tokens"])
@pytest.mark.parametrize(
    "wanted",
    [
        (True, True, True, True),
        (False, True, True, True),
        (True, False, True, True),
        (True, True, False, True),
        (True, True, True, False),
        (False, False, True, False),
        (True, False, False, False),
        (False, True, False, False),
    ],
)
def test_only_wanted_gradients_come_back(wanted: tuple[bool, ...], axis: str) -> None:
    case = Case(axis=axis)
    inputs = inputs_of(case)
    out, *grads = reference(case, *inputs).results
    chosen = [grad for grad, is_wanted in zip(grads, wanted, strict=True) if is_wanted]
    run(case, *inputs, wanted=wanted).assert_close(Step([out, *chosen]))


@pytest.mark.parametrize("axis", ["rows", "tokens"])
def test_an_expanded_gradient_is_read_as_it_stands(axis: str) -> None:
    case = Case(axis=axis)
    hidden, weight, index, params, _ = inputs_of(case)
    grad = torch.tensor(0.3).expand(hidden.shape)
    run(case, hidden, weight, index, params, grad).assert_close(
        reference(case, hidden, weight, index, params, grad.contiguous())
    )


def test_non_contiguous_inputs_are_read_as_they_stand() -> None:
    case = Case()
    hidden, weight, index, params, grad = inputs_of(case)
    assert weight is not None
    strided = hidden.t().contiguous().t(), weight.t().contiguous().t(), index.t().contiguous().t()
    transposed = [param.transpose(1, 2).contiguous().transpose(1, 2) for param in params]
    run(case, *strided, transposed, grad.t().contiguous().t()).assert_close(
        reference(case, hidden, weight, index, params, grad)
    )


def test_gradients_of_transposed_parameters_keep_their_layout() -> None:
    case = Case()
    hidden, weight, index, params, grad = inputs_of(case)
    transposed = [param.transpose(1, 2).contiguous().transpose(1, 2) for param in params]
    grads = run(case, hidden, weight, index, transposed, grad).results[3:]
    assert [one.stride() for one in grads] == [param.stride() for param in transposed]


def test_the_chunk_size_changes_nothing_but_rounding() -> None:
    case = Case(num_tokens=30)
    inputs = inputs_of(case)
    whole = run(replace(case, size=1000), *inputs)
    for size in (1, 7):
        run(replace(case, size=size), *inputs).assert_close(whole)


@pytest.mark.parametrize("axis", ["rows", "tokens"])
def test_bf16_sums_are_no_worse_than_eager_bf16(axis: str) -> None:
    case = Case(axis=axis, num_tokens=60, dtype=torch.bfloat16, size=3)
    hidden, weight, index, params, grad = inputs_of(case)
    assert weight is not None
    double = [tensor.double() for tensor in (hidden, weight)], [param.double() for param in params]
    exact = reference(case, *double[0], index, double[1], grad.double())
    ours = run(case, hidden, weight, index, params, grad)
    theirs = reference(case, hidden, weight, index, params, grad)
    for got, eager, truth in zip(ours.results, theirs.results, exact.results, strict=True):
        assert (got.double() - truth).norm() <= 1.25 * (eager.double() - truth).norm()


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_low_precision_sums_over_choices_round_once(dtype: torch.dtype, large: float) -> None:
    """Adding 1 to `large` in `dtype` changes nothing; adding 3 does."""
    scale = torch.tensor([[large], [1], [1], [1]]).to(dtype)
    compiled_expert = compiled_expert_of(lambda rows, scale: rows * scale, [scale], [EXPERT], has_weight=False)
    hidden = torch.ones(1, HIDDEN, dtype=dtype)
    routed = Routed(hidden, None, *sort_assignments(torch.tensor([[0, 1, 2, 3]]), NUM_EXPERTS), [[scale]], 4)
    chunks = chunks_of(routed, compiled_expert, ChunkPlan("rows", 4, 0, 0, ""))
    out = run_forward(routed, compiled_expert, chunks, dtype)
    (grad_hidden,) = run_backward(hidden, routed, compiled_expert, chunks, (True, False), [[False]])
    expected = torch.tensor(large + 3).to(dtype)
    assert bool((out == expected).all())
    assert bool((grad_hidden == expected).all())


@pytest.mark.parametrize("axis", ["rows", "tokens"])
def test_no_body_call_sees_more_rows_than_a_chunk(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(axis=axis, num_tokens=40)
    inputs = inputs_of(case)
    seen: list[int] = []
    index_select = Tensor.index_select

    def recording(self: Tensor, dim: int, index: Tensor) -> Tensor:
        seen.append(index.numel())
        return index_select(self, dim, index)

    monkeypatch.setattr(Tensor, "index_select", recording)
    run(case, *inputs)
    assert seen and max(seen) <= case.size


def test_autocast_around_the_loop_does_not_reach_the_bodies() -> None:
    case = Case()
    inputs = inputs_of(case)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(case, *inputs)
    cast.assert_close(run(case, *inputs), tolerance=1e-9)


def swiglu(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (rows @ gate_up).chunk(2, dim=-1)
    return ((torch.nn.functional.silu(gate) * up) @ down) * weight.unsqueeze(1)


def test_a_kept_projection_is_made_nowhere_else() -> None:
    """One expert, two chunks of 7 rows: nothing of 7 x 2F elements is allocated beside what is kept."""
    params = [torch.randn(1, HIDDEN, 2 * WIDTH), torch.randn(1, WIDTH, HIDDEN)]
    compiled_expert = compiled_expert_of(swiglu, params, ("expert", "expert"))
    hidden, index = torch.randn(14, HIDDEN), torch.zeros(14, 1, dtype=torch.long)
    routed = Routed(hidden, torch.rand(14, 1), *sort_assignments(index, 1), [[param] for param in params], 1)
    saving = compiled_expert.saving("projections", (True, True, True, True))
    assert saving is not None
    saved = SavedRows.empty(saving, hidden, 14).of_rows(14)
    chunks = chunks_of(routed, compiled_expert, ChunkPlan("rows", 7, 0, 0, ""))
    with torch.no_grad():
        trace = trace_memory(lambda: run_forward(routed, compiled_expert, chunks, hidden.dtype, saved=saved), CPU)
    assert 7 * 2 * WIDTH * 4 not in trace.allocation_bytes
    (found,) = saved.tensors
    rows = hidden[routed.order.long()]  # NOTE: products of as many rows; several threads round others otherwise
    assert torch.equal(found, torch.cat([rows[:7] @ params[0][0], rows[7:] @ params[0][0]]))
