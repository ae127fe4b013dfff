"""TRL's SFT trainer, full and with adapters made by it, optimized before and compiled by the backend's name."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import memfine_fx

WORDS = 60
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OPTIONS = "inner_backend=eager,rows_per_chunk=5"


def toy_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    known = special | {f"w{number}": number + len(special) for number in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sentences() -> Any:
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(6, 14, (16,), generator=generator).tolist()
    numbers = [torch.randint(0, WORDS, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list([{"text": " ".join(f"w{one}" for one in line)} for line in numbers])


def tiny_model() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def adapters(kind: str) -> Any:
    """LoRA for the trainer to make: None for a full fine-tuning."""
    if kind == "full":
        return None
    from peft import LoraConfig

    targets = EXPERTS if kind == "experts" else None
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], target_parameters=targets, task_type="CAUSAL_LM")


def losses(model: Any, kind: str, folder: Path, **settings: Any) -> list[float]:
    """Of three steps with the trainer's own defaults: gradient checkpointing on, a fused head."""
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        bf16=False,
        max_length=16,
        **settings,
    )
    torch.manual_seed(1)
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=sentences(),
        processing_class=toy_tokenizer(),
        peft_config=adapters(kind),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def chunked_layers(model: Any) -> set[int]:
    """Numbers of the layers whose experts were chunked."""
    regions = memfine_fx.report(model).regions
    chunked = [region.where.module.split(".") for region in regions if region.status == "chunked"]
    return {int(parts[parts.index("layers") + 1]) for parts in chunked}


@pytest.mark.trainers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("way", ["optimize", "backend"])
@pytest.mark.parametrize("kind", ["full", "attention", "experts"])
def test_every_layer_is_chunked_and_losses_are_those_of_plain_training(
    kind: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("trl", "peft", "datasets"):
        pytest.importorskip(package)
    model = tiny_model()
    plain, settings = copy.deepcopy(model), {}
    monkeypatch.setenv("MEMFINE_OPTIONS", OPTIONS)
    if way == "optimize":
        memfine_fx.optimize(model)
    else:
        settings = {"torch_compile": True, "torch_compile_backend": "memfine"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = losses(model, kind, tmp_path, **settings)
    assert not [one for one in caught if "memfine_fx" in str(one.message)]
    assert found == pytest.approx(losses(plain, kind, tmp_path), rel=1e-5)
    assert chunked_layers(model) == {0, 1}
    assert {region.plan.rows_per_chunk for region in memfine_fx.report(model).regions if region.plan} == {5}
