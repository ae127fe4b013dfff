"""DDP and FSDP2 (`fully_shard`): two gloo processes on this machine, each with a part of the batch.

    python examples/distributed.py

The change to a training script is `memfine_fx.optimize(model)` before `DistributedDataParallel(model)`, and after
`fully_shard`. Gradients of both processes together must equal those of one process on the whole batch, and each
parameter's hook must run once a step. With parameters in bf16 they may be 1.25 times as far from those as the same
wrapper's without memfine_fx, which differs between CPUs.
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


def sharded(model: Any, policy: MixedPrecisionPolicy | None = None) -> Any:
    mesh = init_device_mesh("cpu", (WORLD,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return model


def fsdp2(model: Any, inner: str) -> Any:
    return memfine_fx.optimize(sharded(model), config=config(inner))


def sharded_bf16(model: Any) -> Any:
    return sharded(model, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def fsdp2_bf16(model: Any, inner: str) -> Any:
    return memfine_fx.optimize(sharded_bf16(model), config=config(inner))


WAYS: dict[str, tuple[Callable[[Any, str], Any], Callable[[Any], Any] | None]] = {
    "DDP": (ddp, None),
    "FSDP2": (fsdp2, None),
    "FSDP2, bf16 parameters": (fsdp2_bf16, sharded_bf16),
}
"""Each with the same wrapper without memfine_fx where that rounds too."""


def worker(rank: int, port: int, chosen: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    try:
        for name, (wrap, wrap_rounding) in WAYS.items():
            _check(rank, name, wrap, wrap_rounding, chosen)
    finally:
        dist.destroy_process_group()


def _check(
    rank: int,
    name: str,
    wrap: Callable[[Any, str], Any],
    wrap_rounding: Callable[[Any], Any] | None,
    chosen: argparse.Namespace,
) -> None:
    reference, model = moe_model(), moe_model()
    wrapped = wrap(model, chosen.inner)
    rounding = wrap_rounding(moe_model()) if wrap_rounding is not None else None
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
        if rounding is not None:
            rounding.zero_grad()
            rounding(**parts[rank]).loss.backward()
        _compare(name, model, reference, rounding)
    if num_hooks != chosen.steps * len(list(model.parameters())):
        raise SystemExit(f"FAILED: {name}: {num_hooks} hooks ran")
    if rank == 0:
        print(f"{name}: gradients equal one process's, {num_hooks // chosen.steps} hooks a step", flush=True)
    peak = step_peak(forward_backward(wrapped))
    before = step_peak(forward_backward(reference))
    if rank == 0:
        prove(Run(expected, before), Run(losses, peak), model, tolerance=1e-4 if rounding is None else 5e-2)


def _compare(name: str, model: Any, reference: Any, rounding: Any) -> None:
    allowed = None if rounding is None else _errors(rounding, reference)
    for key, error in _errors(model, reference).items():
        if not error <= (1e-5 if allowed is None else 1.25 * allowed[key]):
            raise SystemExit(f"FAILED: {name}: gradient of {key} is off by {error:.1e}")


def _errors(model: Any, reference: Any) -> dict[str, float]:
    """Relative errors of gradients, by parameter; every process must ask."""
    errors = {}
    for (key, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
        errors[key] = float((gradient - theirs.grad).norm() / theirs.grad.norm().clamp_min(1e-6))
    return errors


def main() -> None:
    chosen = options(__doc__)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(worker, args=(port, chosen), nprocs=WORLD)
    print("OK")


if __name__ == "__main__":
    main()
