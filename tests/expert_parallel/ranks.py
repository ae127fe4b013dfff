"""Several processes of one gloo group, each running one function; what they return comes back by rank."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch.distributed as dist
import torch.multiprocessing

from tests.rates import give_rates

__all__ = ["run_ranks"]


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 300.0, limit_s: float | None = None
) -> list[Any]:
    """`function(rank, *args)` on every rank.

    Args:
        function: of a module, so that another process can import it.
        num_ranks: processes.
        timeout_s: of the group.
        limit_s: until all but the last rank have returned, which may hang or be dead; then all are ended. Without it
            every rank must return.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        arguments = (function, num_ranks, folder, timeout_s, args)
        processes = [context.Process(target=_run, args=(rank, *arguments)) for rank in range(num_ranks)]
        for process in processes:
            process.start()
        for process in processes if limit_s is None else processes[:-1]:
            process.join(limit_s)
        for process in () if limit_s is None else processes:
            process.kill()
            process.join()
        results = [_result(Path(folder) / str(rank)) for rank in range(num_ranks)]
    if limit_s is None:
        assert [process.exitcode for process in processes] == [0] * num_ranks
    return results


def _run(
    rank: int, function: Callable[..., Any], num_ranks: int, folder: str, timeout_s: float, args: tuple[Any, ...]
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch._dynamo.config.fake_tensor_cache_enabled = False  # as in fast tests
    give_rates()  # the ranks are processes of their own, which no fixture reaches
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    torch.save(function(rank, *args), Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()


def _result(path: Path) -> Any:
    return torch.load(path, weights_only=False) if path.exists() else None
