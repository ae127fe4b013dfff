"""transformers.Trainer: checkpointing, accumulation, bf16, router loss, evaluation, saving, resuming, generating.

    python examples/transformers_trainer.py

The change to a training script is `memfine_fx.optimize(model)` before `Trainer(...)`. `TrainingArguments(
torch_compile=True, torch_compile_backend="memfine")` does the same (tests/trainers/test_matrix.py).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from common import Run, Tokens, batches, config, forward_backward, moe_model, options, prove, step_peak
from transformers import Trainer, TrainingArguments

import memfine_fx


def arguments(folder: str, steps: int, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=True,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )


def losses(trainer: Trainer) -> list[float]:
    """Losses of the steps and of the evaluations in between."""
    log = trainer.state.log_history
    return [entry[key] for entry in log for key in ("loss", "eval_loss") if key in entry]


def train(model: Any, folder: str, steps: int) -> tuple[Run, Trainer]:
    trainer = Trainer(model=model, args=arguments(folder, steps), train_dataset=Tokens(), eval_dataset=Tokens(4))
    trainer.train()
    model.train()
    return Run(losses(trainer), step_peak(forward_backward(model))), trainer


def resumed(cls: Any, inner: str, folder: str, steps: int) -> list[float]:
    """Losses of a run of `steps` steps that went on from its checkpoint after half of them.

    The model is loaded by `from_pretrained`, because transformers saves experts one by one and its Trainer does not put
    them together again when it resumes.
    """
    checkpoint = str(Path(folder) / f"checkpoint-{steps // 2}")
    model = memfine_fx.optimize(cls.from_pretrained(checkpoint), config=config(inner))
    trainer = Trainer(model=model, args=arguments(folder, steps), train_dataset=Tokens(), eval_dataset=Tokens(4))
    trainer.train(resume_from_checkpoint=checkpoint)
    return losses(trainer)


def main() -> None:
    chosen = options(__doc__)
    model = moe_model(output_router_logits=True)
    optimized = memfine_fx.optimize(moe_model(output_router_logits=True), config=config(chosen.inner))
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as chunked:
        reference, _ = train(model, plain, chosen.steps)
        run, trainer = train(optimized, chunked, chosen.steps)
        after = resumed(type(model), chosen.inner, chunked, chosen.steps)
        print(f"resumed  after {chosen.steps // 2} steps; largest difference {_difference(after, run.losses):.1e}")
        trainer.save_model(chunked)
        loaded = type(model).from_pretrained(chunked).eval()
        optimized.eval()
        prompt = batches(1)[0]["input_ids"][:, :8]
        written, expected = (one.generate(prompt, max_new_tokens=8, do_sample=False) for one in (optimized, loaded))
        print(f"saved    and loaded: generates the same text: {torch.equal(written, expected)}")
        if not torch.equal(written, expected) or _difference(after, run.losses) > 1e-4:
            raise SystemExit("FAILED: the model that was saved, loaded or resumed is not the trained one")
    prove(reference, run, optimized)


def _difference(after: list[float], whole: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(after, whole, strict=True))


if __name__ == "__main__":
    main()
