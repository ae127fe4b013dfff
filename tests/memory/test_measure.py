"""The allocator's events add up to the bytes that we know were taken."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfine_fx.memory.measure import mark, run_outside_compilation, trace_memory

CPU = torch.device("cpu")
FLOAT_BYTES = 4


def test_a_known_sequence_has_exactly_its_peak_and_sizes() -> None:
    def step() -> None:
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        third = torch.empty(100)
        del second, third

    trace = trace_memory(step, CPU)

    assert trace.allocation_bytes == (1000 * FLOAT_BYTES, 500 * FLOAT_BYTES, 100 * FLOAT_BYTES)
    assert trace.peak_bytes == 1500 * FLOAT_BYTES
    assert trace.live_bytes[:4] == (4000, 6000, 2000, 2400)
    assert trace.resting_bytes == 0


def test_a_view_allocates_nothing() -> None:
    base = torch.zeros(64, 64)

    trace = trace_memory(lambda: base.view(-1)[10:].t(), CPU)

    assert trace.allocation_bytes == ()
    assert trace.peak_bytes == 0


def test_what_the_step_keeps_is_resting() -> None:
    saved = []

    trace = trace_memory(lambda: saved.append(torch.empty(256)), CPU)

    assert trace.resting_bytes == 256 * FLOAT_BYTES
    assert trace.peak_bytes == 256 * FLOAT_BYTES


def test_a_result_is_dropped_before_the_trace_ends() -> None:
    assert trace_memory(lambda: torch.empty(256), CPU).resting_bytes == 0


def test_preallocated_gradients_are_not_counted() -> None:
    weight = torch.ones(1 << 16, requires_grad=True)
    weight.grad = torch.zeros_like(weight)

    trace = trace_memory(lambda: (weight * 2).sum().backward(), CPU)

    assert trace.resting_bytes == 0
    assert weight.grad is not None and bool((weight.grad == 2).all())


def test_marks_lie_between_the_events_around_them() -> None:
    def step() -> None:
        held = torch.empty(8)
        mark("forward ends")
        torch.empty(8)
        del held

    trace = trace_memory(step, CPU)

    ((name, time_us),) = trace.marks
    assert name == "forward ends"
    assert trace.times_us[0] == 0.0 <= time_us <= trace.times_us[1]


def test_has_allocation_of_finds_single_allocations_only() -> None:
    trace = trace_memory(lambda: (torch.empty(100), torch.empty(100)), CPU)

    assert trace.has_allocation_of(400)
    assert not trace.has_allocation_of(401)


def test_two_runs_of_an_eager_step_agree_exactly() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    rows = torch.randn(128, 32)

    def step() -> None:
        layer(rows).sum().backward()

    step()
    first, second = trace_memory(step, CPU), trace_memory(step, CPU)

    assert first.live_bytes == second.live_bytes
    assert first.peak_bytes > 128 * 64 * FLOAT_BYTES


def test_buffers_of_compiled_code_are_seen_and_agree_exactly() -> None:
    rows = torch.randn(64, 64)
    compiled = torch.compile(lambda rows: torch.mm(rows.sin(), rows) + 1)
    compiled(rows)

    first, second = trace_memory(lambda: compiled(rows), CPU), trace_memory(lambda: compiled(rows), CPU)

    assert first.allocation_bytes == second.allocation_bytes == (rows.nbytes, rows.nbytes)
    assert first.peak_bytes == 2 * rows.nbytes


def test_another_device_type_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cpu and cuda, but got device 'meta'"):
        trace_memory(lambda: None, torch.device("meta"))


@pytest.mark.cuda
def test_cuda_peak_matches_the_sum_of_events() -> None:
    device = torch.device("cuda")

    def step() -> None:
        first = torch.empty(1 << 20, device=device)
        del first
        torch.empty(1 << 10, device=device)

    trace = trace_memory(step, device)

    assert trace.peak_bytes == max(trace.live_bytes) == (1 << 20) * FLOAT_BYTES


def test_what_is_measured_inside_a_compilation_is_what_runs_outside() -> None:
    def run() -> torch.Tensor:
        square = torch.ones(2, 2, requires_grad=True)
        return torch.mm(square, square)

    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        product = run_outside_compilation("cpu", run)
    assert type(product) is torch.Tensor
    assert product.dtype is torch.float32 and not product.requires_grad
    assert product.tolist() == [[2.0, 2.0], [2.0, 2.0]]
