"""What a process does under DeepSpeed's ZeRO: run by `test_deepspeed`, where DeepSpeed is installed."""

from __future__ import annotations

import os
from typing import Any

import memfine_fx
from tests.trainers.distributed_cases import batch, config, model_of

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported

__all__ = ["zero_run"]


def zero_run(rank: int, stage: int, optimizes: bool) -> tuple[list[float], list[float], int]:
    """Losses of three AdamW steps without and with memfine_fx, and the regions chunked.

    Args:
        rank: this process.
        stage: of ZeRO.
        optimizes: by `memfine_fx.optimize`; otherwise by the name of the experts function.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29731")
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }

    def losses(model: Any) -> list[float]:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        found = []
        for step in range(3):
            loss = engine(**batch(2 * step + rank)).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    model = model_of()
    plain = losses(model_of())
    if optimizes:
        memfine_fx.optimize(model, config=config("eager"))
    else:
        model.set_experts_implementation("memfine")
    ours = losses(model)
    return plain, ours, memfine_fx.report(model).num_chunked
