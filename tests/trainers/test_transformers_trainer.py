"""`TrainingArguments(torch_compile_backend="memfine")`: no other line of a script changes."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.tokens = torch.randint(1, 64, (16, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}


def losses(trained: Any, folder: Path, **settings: Any) -> list[float]:
    """Of three steps under gradient checkpointing and two evaluations."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
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
    sequences = Sequences()
    trainer = Trainer(model=trained, args=arguments, train_dataset=sequences, eval_dataset=sequences)
    trainer.train()
    return [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]


@pytest.mark.trainers
def test_the_backend_of_training_arguments_trains_to_the_same_losses(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = tiny_causal_lm("qwen3_moe", num_hidden_layers=1)
    compiled = copy.deepcopy(model)
    found = losses(compiled, tmp_path, torch_compile=True, torch_compile_backend="memfine")
    assert found == pytest.approx(losses(model, tmp_path), abs=1e-4)
    assert memfine_fx.report(compiled).num_chunked >= 1


@pytest.mark.trainers
def test_the_backend_names_optimize_where_recorded_outputs_keep_layers_out(tmp_path: Path) -> None:
    """Checkpoints and router logits together: `optimize` chunks such a model, the name cannot, and says so once."""
    pytest.importorskip("accelerate")
    model = tiny_causal_lm("qwen3_moe", num_hidden_layers=1, output_router_logits=True)
    compiled = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = losses(compiled, tmp_path, torch_compile=True, torch_compile_backend="memfine")
    told = [str(one.message) for one in caught if "memfine_fx" in str(one.message)]
    assert found == pytest.approx(losses(model, tmp_path), abs=1e-4)
    assert len(told) == 1
    assert "records outputs (output_router_logits" in told[0]
    assert "call memfine_fx.optimize(model)" in told[0]


@pytest.mark.trainers
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_chunked_head_trains_and_evaluates_to_the_same_losses(tmp_path: Path, precision: str) -> None:
    """Trainer divides a sum of losses by its own count of labels, casts what bf16 returns, evaluates with logits."""
    pytest.importorskip("accelerate")
    model = tiny_causal_lm("qwen3_moe", num_hidden_layers=1)
    plain, is_low = copy.deepcopy(model), precision == "bf16"
    config = memfine_fx.Config(returns_logits=False, chunks_head=True, tokens_per_head_chunk=10)
    memfine_fx.optimize(model, config=config)
    found = losses(model, tmp_path, bf16=is_low)
    assert found == pytest.approx(losses(plain, tmp_path, bf16=is_low), abs=2e-2 if is_low else 1e-4)
    training, evaluation = memfine_fx.report(model).heads
    assert (training.status, training.num_chunks) == ("chunked", 3)
    assert (evaluation.status, evaluation.num_chunks) == ("refused", 0)
    assert "no gradients are wanted" in str(evaluation.reason)
