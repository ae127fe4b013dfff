"""Exact byte counts of one step, from the allocator's own events.

Terms
    live bytes    allocated and not yet freed, relative to the start of the step
    peak          the largest live bytes at any moment, never below zero
    resting       live bytes after the step returned and its result was dropped

On CPU and CUDA alike the events are those that PyTorch's allocators hand to the profiler, so buffers of
Inductor's compiled code are seen as well as eager tensors. Resident set size is not used: it drifts with the
C allocator by hundreds of megabytes.

1. Collect garbage, so that no dead reference cycle of an earlier step is freed inside this one.
2. Run the step under autograd's profiler, which parses nothing until it is asked; drop its result.
3. Keep the device's allocation events in time order and add them up, leaving out the storages that the
   caller names afterwards (the gradients that the step made): what is left is bytes *beyond* those.
4. On CUDA, with nothing left out, the peak is ``max_memory_allocated``, which the allocator itself keeps.

What is not seen: scratch memory that a kernel library takes outside PyTorch's allocators. On CPU, freeing a
tensor older than the step is not seen either, since the allocator no longer knows its size; on CUDA it
counts negative. CUDA sizes are the allocator's blocks, rounded up to 512 bytes.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch.autograd.profiler import profile, record_function

from memfine_fx.compat.autograd import run_without_modes

ResultT = TypeVar("ResultT")

_MARK = "memfine_fx.mark/"
_BEGIN = "begin/"
_END = "end/"


@dataclass(frozen=True)
class MemoryTrace:
    """The allocations and frees of one step on one device, in time order."""

    device: str
    times_us: tuple[float, ...]  # of each allocator event, from the first event on
    live_bytes: tuple[int, ...]  # after each event, relative to the start
    allocation_bytes: tuple[int, ...]  # the size of each allocation, in time order
    peak_bytes: int
    marks: tuple[tuple[str, float], ...] = ()  # what `mark` named, on the clock of `times_us`

    @property
    def resting_bytes(self) -> int:
        """Live bytes that the step left behind."""
        return self.live_bytes[-1] if self.live_bytes else 0

    def has_allocation_of(self, num_bytes: int) -> bool:
        """Whether any single allocation had at least this many bytes."""
        return any(size >= num_bytes for size in self.allocation_bytes)


def mark(name: str) -> None:
    """Name this moment of a traced step, such as the end of the forward; costs next to nothing elsewhere."""
    with record_function(_MARK + name):
        pass


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name a stretch of a traced step; see `memory.timeline`. Costs next to nothing elsewhere."""
    mark(_BEGIN + name)
    try:
        yield
    finally:
        mark(_END + name)


def begin_of(mark: str) -> str | None:
    """The name of the stretch that a mark begins, or None."""
    return mark.removeprefix(_BEGIN) if mark.startswith(_BEGIN) else None


def end_of(mark: str) -> str | None:
    """The name of the stretch that a mark ends, or None."""
    return mark.removeprefix(_END) if mark.startswith(_END) else None


@dataclass(frozen=True)
class _Event:
    """One allocation (or, negative, one free) at an address."""

    time_ns: int
    address: int
    num_bytes: int


def run_outside_compilation(device_type: str, function: Callable[[], ResultT]) -> ResultT:
    """Run a function on real operators, also inside a compilation, and return its result: no gradients, no autocast.

    A compilation's fake tensors take neither time nor memory, and autocast would choose another dtype's kernels.
    """

    def plainly() -> ResultT:
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            return function()

    return run_without_modes(plainly)


def trace_memory(
    step: Callable[[], object],
    device: torch.device,
    beyond: Callable[[], Iterable[torch.Tensor]] | None = None,
    *,
    collects_garbage: bool = True,
) -> MemoryTrace:
    """Run ``step`` once and return its allocations on ``device``, "cpu" or "cuda".

    Compile first: the compiler's own tensors would be counted. Two runs of one deterministic step agree
    exactly in every size.

    Args:
        step: what to run.
        device: where to count.
        beyond: asked after the step; storages of these tensors that the step allocated are not counted,
            from the moment they were allocated. Usually the gradients, with ``set_to_none`` before the step.
        collects_garbage: whether step 1 is done, which takes tenths of a second in a large process.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"trace_memory counts bytes on cpu and cuda, but got device {device.type!r}")
    if collects_garbage:
        gc.collect()
    at_start = _reset_cuda_peak(device)
    with profile(use_kineto=True, profile_memory=True) as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = _events_in_time_order(profiler)
    allocations = _allocations(profiler, device)
    if beyond is not None:
        allocations = _without(allocations, {tensor.untyped_storage().data_ptr() for tensor in beyond()})
    live = tuple(accumulate(event.num_bytes for event in allocations))
    start_ns = allocations[0].time_ns if allocations else (events[0].start_ns() if events else 0)
    is_counted_by_cuda = device.type == "cuda" and beyond is None
    return MemoryTrace(
        device=str(device),
        times_us=tuple((event.time_ns - start_ns) / 1e3 for event in allocations),
        live_bytes=live,
        allocation_bytes=tuple(event.num_bytes for event in allocations if event.num_bytes > 0),
        peak_bytes=max(0, _cuda_peak(device) - at_start) if is_counted_by_cuda else max((0, *live)),
        marks=tuple(
            (event.name().removeprefix(_MARK), (event.start_ns() - start_ns) / 1e3)
            for event in events
            if event.name().startswith(_MARK)
        ),
    )


def _events_in_time_order(profiler: profile) -> list[Any]:
    # NOTE: the public events() drops allocations made outside an operator; Kineto's list has them all.
    # Its event type has no public stub, hence Any.
    assert profiler.kineto_results is not None
    return sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())


def _allocations(profiler: profile, device: torch.device) -> list[_Event]:
    """The device's allocator events in time order, with their addresses."""
    assert profiler.kineto_results is not None
    roots = profiler.kineto_results.experimental_event_tree()
    events = [
        _Event(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
        for event in _walk(roots)
        if event.tag.name == "Allocation" and _is_on(event.extra_fields.device, device)
    ]
    return sorted(events, key=lambda event: event.time_ns)


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    pending = list(events)
    while pending:
        event = pending.pop()
        yield event
        pending.extend(event.children)


def _is_on(where: torch.device, device: torch.device) -> bool:
    if device.type != where.type:
        return False
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return device.type == "cpu" or where.index == index


def _without(events: list[_Event], addresses: set[int]) -> list[_Event]:
    """The events less the last allocation at each address, which is the one still alive."""
    left_out: set[int] = set()
    for position in range(len(events) - 1, -1, -1):
        event = events[position]
        if event.num_bytes > 0 and event.address in addresses:
            addresses = addresses - {event.address}
            left_out.add(position)
    return [event for position, event in enumerate(events) if position not in left_out]


def _reset_cuda_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _cuda_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device)
