"""Seconds of work on a device, the best of several times: what others do on the machine only slows things down.

A CPU is asked for each run. On CUDA many runs go into one stream between two events, so that launching one hides behind
those before it, as in a step: waiting for each would add what a wait takes, tens of microseconds, to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, thread_time
from typing import TypeVar

import torch

__all__ = ["copies_beyond_cache", "seconds_of", "with_cpu_share"]

ResultT = TypeVar("ResultT")

LIMIT_S, FEWEST = 0.08, 5
"""A measurement is repeated for so long, and at least so often."""
_CACHE_TIMES = 2
"""Inputs that runs take in turn have so many times the bytes of L2: each is out of it when its turn comes again."""
_QUEUED = 32  # runs between two events


def seconds_of(runs: Sequence[Callable[[], object]], device: torch.device, *, is_ahead: bool = True) -> float:
    """Return the seconds of one of `runs`, which are called in turn: the best of several measurements.

    Args:
        is_ahead: on CUDA, whether as many runs that do not count go before: then it is the device's time that counts,
            where runs are no shorter than their launches, else that of whichever is slower.
    """
    for run in runs:
        run()  # what is compiled or allocated once
    measure = _in_a_queue if device.type == "cuda" else _one_by_one
    best, spent, count = float("inf"), 0.0, 0
    while spent < LIMIT_S or count < FEWEST:
        seconds, of_one = measure(runs, device, is_ahead)
        best, spent, count = min(best, of_one), spent + seconds, count + 1
    return max(best, 1e-9)


def with_cpu_share(function: Callable[[], ResultT]) -> tuple[ResultT, float]:
    """Return a function's result, and the share of its time in which the calling thread had a CPU.

    A thread that measures never waits on purpose, so that the share is 1 on an idle machine. Where other processes take
    turns with it, or with the threads that it waits for, the share is less.
    """
    started, worked = perf_counter(), thread_time()
    result = function()
    return result, (thread_time() - worked) / max(perf_counter() - started, 1e-9)


def _one_by_one(runs: Sequence[Callable[[], object]], device: torch.device, is_ahead: bool) -> tuple[float, float]:
    """Return (seconds of all runs, seconds of the fastest)."""
    durations = []
    for run in runs:
        started = perf_counter()
        run()
        durations.append(perf_counter() - started)
    return sum(durations), min(durations)


def _in_a_queue(runs: Sequence[Callable[[], object]], device: torch.device, is_ahead: bool) -> tuple[float, float]:
    """Return (seconds of all runs, mean seconds of one)."""
    rounds = max(1, _QUEUED // len(runs))
    with torch.cuda.device(device):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        if is_ahead:
            _run_all(runs, rounds)
        first.record()
        _run_all(runs, rounds)
        last.record()
        last.synchronize()
    seconds = first.elapsed_time(last) / 1e3
    return seconds, seconds / (rounds * len(runs))


def _run_all(runs: Sequence[Callable[[], object]], rounds: int) -> None:
    for _ in range(rounds):
        for run in runs:
            run()


def copies_beyond_cache(num_bytes: int, device: torch.device) -> int:
    """How many inputs of so many bytes runs have to take in turn for each to come from memory.

    One on a CPU, where a thread has a part of its own of each input and caches differ too much.
    """
    if device.type != "cuda":
        return 1
    cache_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return max(1, -(-_CACHE_TIMES * cache_bytes // max(1, num_bytes)))
