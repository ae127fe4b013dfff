"""DDP and FSDP2 (`fully_shard`): two gloo processes on this machine, each with a part of the batch.

    python examples/distributed.py

The change to a training script is `memfine_fx.optimize(model)` before `DistributedDataParallel(model)`, and after
`fully_shard`. Gradients of both processes together must equal those of one process on the whole batch, and each
parameter's hook must run once a step.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import Run, batches, config, forward_backward, moe_model, options, prove, step_peak
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import memfine_fx

WORLD = 2


def ddp(model: Any, inner: str) -> Any:
    """Buckets of 1 MiB, less than the model, so that torch's own splitting of graphs by buckets takes place."""
    return DistributedDataParallel(memfine_fx.optimize(model, config=config(inner)), bucket_cap_mb=1)


def fsdp2(model: Any, inner: str, policy: MixedPrecisionPolicy | None = None) -> Any:
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return memfine_fx.optimize(model, config=config(inner))


def fsdp2_bf16(model: Any, inner: str) -> Any:
    return fsdp2(model, inner, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


WAYS: dict[str, tuple[Callable[[Any, str], Any], float]] = {
    "DDP": (ddp, 1e-5),
    "FSDP2": (fsdp2, 1e-5),
    "FSDP2, bf16 parameters": (fsdp2_bf16, 5e-2),
}


def worker(rank: int, port: int, chosen: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    try:
        for name, (wrap, tolerance) in WAYS.items():
            _check(rank, name, wrap, tolerance, chosen)
    finally:
        dist.destroy_process_group()


def _check(rank: int, name: str, wrap: Callable[[Any, str], Any], tolerance: float, chosen: argparse.Namespace) -> None:
    reference, model = moe_model(), moe_model()
    wrapped = wrap(model, chosen.inner)
    num_hooks = 0

    def count(_: torch.Tensor) -> None:
        nonlocal num_hooks
        num_hooks += 1

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    losses, expected = [], []
    for step in range(chosen.steps):
        parts = batches(WORLD * chosen.steps)[WORLD * step :][:WORLD]
        wrapped.zero_grad()
        loss = wrapped(**parts[rank]).loss
        loss.backward()
        reference.zero_grad()
        whole = [reference(**part).loss / WORLD for part in parts]
        torch.stack(whole).sum().backward()
        losses.append(loss.item())
        expected.append(WORLD * whole[rank].item())
        _compare(name, model, reference, tolerance)
    if num_hooks != chosen.steps * len(list(model.parameters())):
        raise SystemExit(f"FAILED: {name}: {num_hooks} hooks ran")
    if rank == 0:
        print(f"{name}: gradients equal one process's, {num_hooks // chosen.steps} hooks a step", flush=True)
    peak = step_peak(forward_backward(wrapped))
    before = step_peak(forward_backward(reference))
    if rank == 0:
        prove(Run(expected, before), Run(losses, peak), model, tolerance=max(1e-4, tolerance))


def _compare(name: str, model: Any, reference: Any, tolerance: float) -> None:
    for (key, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
        error = float((gradient - theirs.grad).norm() / theirs.grad.norm().clamp_min(1e-6))
        if not error <= tolerance:
            raise SystemExit(f"FAILED: {name}: gradient of {key} is off by {error:.1e}")


def main() -> None:
    chosen = options(__doc__)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(worker, args=(port, chosen), nprocs=WORLD)
    print("OK")


if __name__ == "__main__":
    main()
