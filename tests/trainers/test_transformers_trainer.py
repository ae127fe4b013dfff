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
@pytest.mark.parametrize("is_reentrant", [False, True], ids=["checkpoints", "reentrant checkpoints"])
def test_the_backend_chunks_layers_that_record_outputs_under_checkpoints(
    tmp_path: Path, is_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has to be prepared before Dynamo captures is prepared when accelerate takes the model."""
    pytest.importorskip("accelerate")
    monkeypatch.setenv("MEMFINE_OPTIONS", "inner_backend=eager")
    model = tiny_causal_lm("qwen3_moe", num_hidden_layers=2, output_router_logits=True)
    by_name, by_call = copy.deepcopy(model), memfine_fx.optimize(copy.deepcopy(model))
    settings: dict[str, Any] = {"gradient_checkpointing_kwargs": {"use_reentrant": is_reentrant}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = losses(by_name, tmp_path, torch_compile=True, torch_compile_backend="memfine", **settings)
    assert not [str(one.message) for one in caught if "memfine_fx" in str(one.message)]
    assert found == pytest.approx(losses(by_call, tmp_path, **settings), abs=1e-6)
    if not is_reentrant:  # eager, reentrant checkpoints lose the router's gradient of the auxiliary loss
        assert found == pytest.approx(losses(model, tmp_path, **settings), abs=1e-4)
    for one in (by_name, by_call):
        regions = memfine_fx.report(one).regions
        # Each layer in some graph: by either way the first layer is refused in one of them (ROWS_NOT_FOLLOWED).
        assert len({region.where.module for region in regions if region.status == "chunked"}) == 2


@pytest.mark.trainers
def test_the_backend_alone_names_optimize_where_recorded_outputs_keep_layers_out() -> None:
    """Without a trainer nobody prepares the model: `optimize` chunks it, the name cannot, and says so once."""
    model = tiny_causal_lm("qwen3_moe", num_hidden_layers=1, output_router_logits=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, backend="memfine", options={"inner_backend": "eager"})
    tokens = Sequences().tokens[:2]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            compiled(input_ids=tokens, labels=tokens).loss.backward()
    told = [str(one.message) for one in caught if "memfine_fx" in str(one.message)]
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
    training, evaluation = sorted(memfine_fx.report(model).heads, key=lambda head: head.status)
    assert (training.status, training.num_chunks) == ("chunked", 3)
    assert (evaluation.status, evaluation.num_chunks) == ("refused", 0)
    assert "no gradients are wanted" in str(evaluation.reason)
