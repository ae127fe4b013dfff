"""What memfine_fx does during training, in TensorBoard: chunks, rows, imbalance and bytes of every layer.

    python examples/tensorboard_logging.py

With `transformers.Trainer`: `callbacks=[MemfineCallback()]`. In any other loop: `memfine_fx.log_scalars(writer, model,
step)`. The event files are read back here, and must hold what `memfine_fx.report` says.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import Run, Tokens, batches, config, forward_backward, moe_model, options, prove, step_peak
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from transformers import Trainer, TrainingArguments

import memfine_fx
from memfine_fx.integrations.transformers import MemfineCallback


def train(model: Any, folder: str, steps: int, callbacks: list[Any]) -> Run:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=callbacks)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run(losses, step_peak(forward_backward(model)))


def logged(folder: Path) -> dict[str, list[float]]:
    """Scalars of the event files in a folder."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def main() -> None:
    chosen = options(__doc__)
    optimized = memfine_fx.optimize(moe_model(), config=config(chosen.inner))
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as chunked:
        reference = train(moe_model(), plain, chosen.steps, [])
        run = train(optimized, chunked, chosen.steps, [MemfineCallback()])
        found = logged(Path(chunked) / "memfine")
    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            optimized(**batches(1)[0])
            memfine_fx.log_scalars(writer, optimized, step=0)
        by_hand = logged(Path(folder))
    for tag, values in sorted(found.items()):
        print(f"  {tag:62} {' '.join(f'{value:g}' for value in values)}")
    region = next(one for one in memfine_fx.report(optimized).regions if one.status == "chunked")
    is_whole = all(len(values) > chosen.steps - 1 for values in found.values())
    if not is_whole or by_hand[f"memfine/{region.where.module}/chunks"] != [region.num_chunks]:
        raise SystemExit("FAILED: the event files do not hold what the report says")
    prove(reference, run, optimized)


if __name__ == "__main__":
    main()
