"""`TrainingArguments(torch_compile_backend="memfine")`: no other line of a script changes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.tiny import tiny_causal_lm


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.tokens = torch.randint(1, 64, (16, 12))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}


@pytest.mark.trainers
def test_the_backend_of_training_arguments_trains_to_the_same_losses(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    sequences, model = Sequences(), tiny_causal_lm("qwen3_moe", num_hidden_layers=1)

    def losses(trained: Any, **settings: Any) -> list[float]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            learning_rate=1e-2,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **settings,
        )
        trainer = Trainer(model=trained, args=arguments, train_dataset=sequences, eval_dataset=sequences)
        trainer.train()
        return [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]

    compiled = copy.deepcopy(model)
    found = losses(compiled, torch_compile=True, torch_compile_backend="memfine")
    assert found == pytest.approx(losses(model), abs=1e-4)
    assert memfine_fx.report(compiled).num_chunked >= 1
