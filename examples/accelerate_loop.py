"""Hugging Face accelerate: `prepare`, accumulation, clipping, and a checkpoint that is saved and loaded.

    python examples/accelerate_loop.py

The change to a training script is `memfine_fx.optimize(model)` before `accelerator.prepare`.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from common import Run, Tokens, config, forward_backward, moe_model, options, prove, step_peak

import memfine_fx


def train(model: Any, num_steps: int) -> Run:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Tokens(2 * num_steps), batch_size=2)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        accelerator.load_state(folder)
    return Run(losses, step_peak(forward_backward(accelerator.unwrap_model(prepared))))


def main() -> None:
    chosen = options(__doc__)
    optimized = memfine_fx.optimize(moe_model(), config=config(chosen.inner))
    prove(train(moe_model(), chosen.steps), train(optimized, chosen.steps), optimized)


if __name__ == "__main__":
    main()
