"""A function run by several processes of one gloo group on this machine."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """`function(rank, *args)` on every rank; what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run, (function, num_ranks, folder, args), nprocs=num_ranks)
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(num_ranks)]


def _run(rank: int, function: Callable[..., Any], num_ranks: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    torch.save(function(rank, *args), Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()
