"""Allocation failures inside the chunk loop: the step's results are those of a step without them, to the bit.

Inputs are small integers, of which every product and sum here is exact in any order. A contribution that is lost or
counted twice therefore shows, whatever its size.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from memfine_fx.errors import MemfineError
from memfine_fx.records import ChunkPlan, ParamKind, SavePolicy
from memfine_fx.runtime.halving import ChunkOutOfMemory, Progress, is_allocation_failure, run_chunks
from memfine_fx.runtime.loop import SavedRows, chunks_of, run_backward, run_forward
from memfine_fx.runtime.routing import Routed, sort_assignments
from memfine_fx.runtime.schedule import Chunk, rows_schedule
from tests.helpers import HIDDEN, NUM_EXPERTS, WIDTH, compiled_expert_of, mlp
from tests.runtime.injection import MESSAGE, injecting

NUM_TOKENS = 9
TOP_K = 2


def with_bias(rows: Tensor, weight: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    """Its bias gradient is no product: the body returns it whole."""
    return (torch.relu(rows @ up + bias) @ down) * weight.unsqueeze(1)


def with_shared(rows: Tensor, weight: Tensor, up: Tensor, scale: Tensor, down: Tensor) -> Tensor:
    return (torch.relu(rows @ up * scale) @ down) * weight.unsqueeze(1)


def small_ints(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-1, 2, shape).to(dtype)


@dataclass(frozen=True)
class Case:
    """One layer whose step fails here and there."""

    function: Callable[..., Tensor] = mlp
    extra: ParamKind | None = None
    dtype: torch.dtype = torch.float32
    axis: str = "rows"
    rows: int = 4
    takes_group: bool = False
    folds_weight: bool = True
    policy: SavePolicy = "nothing"

    @property
    def kinds(self) -> list[ParamKind]:
        return ["expert", *([self.extra] if self.extra else []), "expert"]

    def params(self) -> list[Tensor]:
        extra = {
            None: [],
            "expert": [small_ints(NUM_EXPERTS, WIDTH, dtype=self.dtype)],
            "shared": [small_ints(WIDTH, dtype=self.dtype).abs() + 1],
        }[self.extra]
        up = small_ints(NUM_EXPERTS, HIDDEN, WIDTH, dtype=self.dtype)
        return [up, *extra, small_ints(NUM_EXPERTS, WIDTH, HIDDEN, dtype=self.dtype)]


CASES = {
    "fp32": Case(),
    "fp32, weight not folded": Case(folds_weight=False),
    "fp32, token slices": Case(axis="tokens"),
    "fp32, a gradient that is no product": Case(with_bias, "expert"),
    "fp32, a shared parameter": Case(with_shared, "shared"),
    "fp32, projections kept": Case(policy="projections"),
    "bf16": Case(dtype=torch.bfloat16),
    "bf16, operands kept, experts in groups": Case(dtype=torch.bfloat16, rows=8, takes_group=True, policy="operands"),
    "bf16, a gradient that is no product": Case(with_bias, "expert", dtype=torch.bfloat16),
    "bf16, experts in groups": Case(dtype=torch.bfloat16, rows=8, takes_group=True),
    "bf16, experts in one group": Case(dtype=torch.bfloat16, rows=100, takes_group=True),
}


class Layer:
    """A case's inputs, and its step."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.compiled_expert = compiled_expert_of(
            case.function,
            case.params(),
            case.kinds,
            folds_weight=case.folds_weight,
            takes_group=case.takes_group,
        )
        hidden = small_ints(NUM_TOKENS, HIDDEN, dtype=case.dtype)
        weight = torch.randint(1, 3, (NUM_TOKENS, TOP_K)).to(case.dtype)
        index = torch.rand(NUM_TOKENS, NUM_EXPERTS).mul(torch.tensor([4.0, 2.0, 0.0, 1.0])).topk(TOP_K).indices
        params = [[param] for param in case.params()]
        self.routed = Routed(hidden, weight, *sort_assignments(index, NUM_EXPERTS), params, TOP_K)
        self.plan = ChunkPlan("tokens" if case.axis == "tokens" else "rows", case.rows, case.rows, 0, "")
        self.chunks = chunks_of(self.routed, self.compiled_expert, self.plan)
        self.grad = small_ints(NUM_TOKENS, HIDDEN, dtype=case.dtype)
        self.wanted = ((True, True), [[True] for _ in case.kinds])
        flags = (True, True, *[True] * len(case.kinds))
        self.saving = None if case.policy == "nothing" else self.compiled_expert.saving(case.policy, flags)

    @torch.no_grad()
    def step(self, on_failure: Callable[[int], None] = lambda rows: None) -> list[Tensor]:
        rows = self.routed.order.shape[0]
        saved = None if self.saving is None else SavedRows.empty(self.saving, self.routed.hidden, rows).of_rows(rows)
        out = run_forward(self.routed, self.compiled_expert, self.chunks, self.routed.hidden.dtype, on_failure, saved)
        grads = run_backward(self.grad, self.routed, self.compiled_expert, self.chunks, *self.wanted, on_failure, saved)
        return [out, *grads]


def assert_same(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for got, wanted in zip(results, expected, strict=True):
        assert torch.equal(got, wanted), (got - wanted).abs().max()


@pytest.fixture(params=CASES)
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(CASES[request.param])


def test_inputs_leave_no_gradient_empty(layer: Layer) -> None:
    """Otherwise a lost contribution could be one of zeros."""
    assert all(result.count_nonzero() > result.numel() / 8 for result in layer.step())


def test_a_failure_at_any_operation_of_any_chunk_changes_no_result(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = layer.step()
    with injecting(monkeypatch, lambda number, chunk: False) as counter:
        assert_same(layer.step(), expected)
    assert counter.num_operations > 10 * len(layer.chunks)
    for failing in range(counter.num_operations):
        with injecting(monkeypatch, lambda number, chunk, failing=failing: number == failing) as injector:
            results = layer.step()
        assert injector.num_failures == 1
        assert_same(results, expected)


def test_repeated_failures_change_no_result(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = layer.step()
    dice = random.Random(1)
    with injecting(monkeypatch, lambda number, chunk: chunk.num_rows > 1 and dice.random() < 0.1) as injector:
        assert_same(layer.step(), expected)
    assert injector.num_failures > 2


@pytest.mark.parametrize("most", [1, 3])
def test_what_never_fits_above_some_rows_is_run_below(layer: Layer, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = layer.step()
    limits: list[int] = []
    with injecting(monkeypatch, lambda number, chunk: chunk.num_rows > most) as injector:
        assert_same(layer.step(limits.append), expected)
    largest = max(chunk.num_rows for chunk in layer.chunks)
    assert 0 < injector.num_failures <= 2 * largest.bit_length()
    assert len(limits) == 2 and all(most / 2 < limit <= most for limit in limits)


def test_a_single_row_that_fails_names_what_it_needs(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        injecting(monkeypatch, lambda number, chunk: True),
        pytest.raises(ChunkOutOfMemory, match="a single row, after halving its rows down to that: one row needs") as e,
    ):
        layer.step()
    assert e.value.needed_bytes == sum(num_bytes for _, num_bytes in e.value.terms) > 0
    assert e.value.cause == MESSAGE and MESSAGE in str(e.value)
    assert isinstance(e.value, (MemfineError, torch.OutOfMemoryError))


def test_backward_names_its_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(CASES["bf16"])
    with injecting(monkeypatch, lambda number, chunk: True), pytest.raises(ChunkOutOfMemory) as caught:
        run_backward(layer.grad, layer.routed, layer.compiled_expert, layer.chunks, *layer.wanted)
    assert dict(caught.value.terms)["gradient staging of an expert"] == HIDDEN * WIDTH * (4 + 2 + 4)


def test_other_errors_pass_through_at_once() -> None:
    tried: list[int] = []

    def run(chunk: Chunk, progress: Progress) -> None:
        tried.append(chunk.num_rows)
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        run_chunks(rows_schedule([0, 8], 8, groups=False), run, groups=False, needs=list)
    assert tried == [8]


def test_what_a_failed_chunk_had_made_is_gone_before_the_retry() -> None:
    made: list[weakref.ref[Tensor]] = []

    def run(chunk: Chunk, progress: Progress) -> None:
        gc.disable()
        assert all(reference() is None for reference in made)
        rows = torch.zeros(chunk.num_rows)
        made.append(weakref.ref(rows))
        if chunk.num_rows > 2:
            raise torch.OutOfMemoryError(MESSAGE)

    try:
        assert run_chunks(rows_schedule([0, 9], 9, groups=False), run, groups=False, needs=list) == 2
    finally:
        gc.enable()


def test_later_chunks_are_not_tried_above_the_rows_that_failed() -> None:
    tried: list[int] = []

    def run(chunk: Chunk, progress: Progress) -> None:
        tried.append(chunk.num_rows)
        if chunk.num_rows > 4:
            raise torch.OutOfMemoryError(MESSAGE)

    run_chunks(rows_schedule([0, 8, 16, 20], 8, groups=False), run, groups=False, needs=list)
    assert tried == [8, 4, 4, 4, 4, 4]


def test_effects_that_happened_are_not_repeated() -> None:
    happened: list[str] = []

    def run(chunk: Chunk, progress: Progress) -> None:
        def fail() -> None:
            if chunk.num_rows > 1:
                raise torch.OutOfMemoryError(MESSAGE)
            happened.append(f"second {chunk.start}")

        progress.complete([lambda: happened.append(f"first {chunk.start}:{chunk.stop}"), fail])

    run_chunks(rows_schedule([0, 2, 3], 2, groups=False), run, groups=False, needs=list)
    assert happened == ["first 0:2", "second 0", "second 1", "first 2:3", "second 2"]


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_allocation_failures_are_told_from_other_errors(error: Exception, is_one: bool) -> None:
    assert is_allocation_failure(error) == is_one


def test_the_allocator_of_this_cpu_fails_as_expected() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_allocation_failure(caught.value)
