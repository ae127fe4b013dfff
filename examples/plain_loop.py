"""A plain PyTorch loop: autocast, GradScaler, clipping, a fused optimizer, accumulation and a second loss.

    python examples/plain_loop.py

The change to a training script is `memfine_fx.optimize(model)`.
"""

from __future__ import annotations

from typing import Any

import torch
from common import Run, batches, config, forward_backward, moe_model, options, prove, step_peak

import memfine_fx


def train(model: Any, num_steps: int) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad(set_to_none=bool(step % 2))
        total = 0.0
        for batch in batches(2 * num_steps)[2 * step : 2 * step + 2]:
            with torch.autocast("cpu", torch.float16):
                output = model(**batch, output_router_logits=True)
            scaler.scale(output.aux_loss * 0.01).backward(retain_graph=True)
            scaler.scale(output.loss / 2).backward()
            total += output.loss.item() / 2
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(total)
    return Run(losses, step_peak(forward_backward(model)))


def main() -> None:
    chosen = options(__doc__)
    optimized = memfine_fx.optimize(moe_model(), config=config(chosen.inner))
    prove(train(moe_model(), chosen.steps), train(optimized, chosen.steps), optimized, tolerance=1e-3)


if __name__ == "__main__":
    main()
