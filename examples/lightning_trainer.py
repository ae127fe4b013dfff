"""Lightning: the Trainer with accumulation and clipping, and a Fabric loop.

    python examples/lightning_trainer.py

The change to a training script is `memfine_fx.optimize(model)` where the module keeps its model.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
from common import Run, Tokens, batches, config, forward_backward, moe_model, options, prove, step_peak

import memfine_fx


class Module(lightning.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def with_trainer(model: Any, num_steps: int) -> Run:
    module = Module(model)
    trainer = lightning.Trainer(
        max_steps=num_steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(Tokens(4 * num_steps), batch_size=2)
    trainer.fit(module, loader)
    return Run(module.losses, step_peak(forward_backward(model)))


def with_fabric(model: Any, num_steps: int) -> Run:
    fabric = lightning.Fabric(accelerator="cpu", precision="bf16-mixed")
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for batch in batches(num_steps):
        optimizer.zero_grad()
        loss = wrapped(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    return Run(losses, step_peak(forward_backward(model)))


def main() -> None:
    chosen = options(__doc__)
    warnings.filterwarnings("ignore", module="lightning")
    for train, tolerance in ((with_trainer, 1e-4), (with_fabric, 1e-3)):
        print(train.__name__.replace("_", " "))
        optimized = memfine_fx.optimize(moe_model(), config=config(chosen.inner))
        prove(train(moe_model(), chosen.steps), train(optimized, chosen.steps), optimized, tolerance)


if __name__ == "__main__":
    main()
