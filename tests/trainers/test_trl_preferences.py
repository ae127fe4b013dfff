"""TRL's trainers of preferences and rewards, full and with adapters made by it: DPO, reward models and GRPO.

The model is optimized before the trainer is made; the same trainer without memfine_fx gives the losses to compare with.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memfine_fx
from tests.trainers.test_trl import WORDS, adapters, chunked_layers, tiny_model, toy_tokenizer

NUM_STEPS = 2


def settings(folder: Path) -> dict[str, Any]:
    return dict(
        output_dir=str(folder),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        bf16=False,
    )


def lines(*names: str) -> Any:
    """A data set with these columns of made-up text."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)

    def text() -> str:
        length = int(torch.randint(3, 7, (), generator=generator))
        return " ".join(f"w{one}" for one in torch.randint(0, WORDS, (length,), generator=generator).tolist())

    return Dataset.from_list([{name: text() for name in names} for _ in range(8)])


def dpo(model: Any, kind: str, folder: Path) -> Any:
    from trl import DPOConfig, DPOTrainer

    reference = None if kind != "full" else tiny_model()
    return DPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(max_length=16, **settings(folder)),
        train_dataset=lines("prompt", "chosen", "rejected"),
        processing_class=toy_tokenizer(),
        peft_config=adapters(kind),
    )


def reward(model: Any, kind: str, folder: Path) -> Any:
    from trl import RewardConfig, RewardTrainer

    config = adapters(kind)
    if config is not None:
        config.task_type = "SEQ_CLS"
    return RewardTrainer(
        model=model,
        args=RewardConfig(max_length=16, **settings(folder)),
        train_dataset=lines("chosen", "rejected"),
        processing_class=toy_tokenizer(),
        peft_config=config,
    )


def grpo(model: Any, kind: str, folder: Path) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
        args=GRPOConfig(num_generations=2, max_completion_length=4, **settings(folder)),
        train_dataset=lines("prompt"),
        processing_class=toy_tokenizer(),
        peft_config=adapters(kind),
    )


RECIPES: dict[str, Callable[[Any, str, Path], Any]] = {"dpo": dpo, "reward": reward, "grpo": grpo}


def classifier() -> Any:
    from transformers import Qwen3MoeForSequenceClassification

    config = tiny_model().config
    config.num_labels = 1
    torch.manual_seed(0)
    return Qwen3MoeForSequenceClassification(config)


def logged(recipe: str, model: Any, kind: str, folder: Path) -> dict[str, list[float]]:
    """Losses and norms of gradients, a step each; GRPO's first loss is zero by construction, its gradients are not."""
    torch.manual_seed(1)
    trainer = RECIPES[recipe](model, kind, folder)
    trainer.train()
    return {key: [entry[key] for entry in trainer.state.log_history if key in entry] for key in ("loss", "grad_norm")}


@pytest.mark.trainers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["full", "attention", "experts"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_layer_is_chunked_and_losses_are_those_of_plain_training(recipe: str, kind: str, tmp_path: Path) -> None:
    for package in ("trl", "peft", "datasets"):
        pytest.importorskip(package)
    model = classifier() if recipe == "reward" else tiny_model()
    plain = copy.deepcopy(model)
    memfine_fx.optimize(model, config=memfine_fx.Config(inner_backend="eager", rows_per_chunk=5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = logged(recipe, model, kind, tmp_path)
    assert not [one for one in caught if "memfine_fx" in str(one.message)]
    expected = logged(recipe, plain, kind, tmp_path)
    for key in ("loss", "grad_norm"):
        assert len(found[key]) == NUM_STEPS
        assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key
    assert all(norm > 0 for norm in found["grad_norm"])
    assert chunked_layers(model) == {0, 1}
