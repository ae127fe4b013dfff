"""TRL: SFT, DPO, GRPO and reward training; in full, with LoRA on attention, and with LoRA on attention and experts.

    python examples/trl_trainers.py
    python examples/trl_trainers.py --trainer sft --kind experts

The change to a training script is `memfine_fx.optimize(model)` before the trainer is made, which makes the adapters
itself, or no change at all: `torch_compile=True, torch_compile_backend="memfine"` in its config (`--way backend`), with
options in the variable MEMFINE_OPTIONS. The models record router logits and the trainers checkpoint activations, as TRL
does for MoE models by default.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import config, prove_layers, prove_losses

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm

WORDS = 60
KINDS = ("full", "attention", "experts")
WAYS = ("optimize", "backend")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapters(kind: str) -> Any:
    """LoRA for the trainer to make: None for a full fine-tuning."""
    if kind == "full":
        return None
    from peft import LoraConfig

    targets = EXPERTS if kind == "experts" else None
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], target_parameters=targets, task_type="CAUSAL_LM")


def sft(model: Any, kind: str, folder: Path, **settings: Any) -> Any:
    """Its default loss calls the backbone alone and computes the head's loss in pieces."""
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model,
        args=SFTConfig(max_length=16, **_common(folder), **settings),
        train_dataset=_sentences(),
        processing_class=tokenizer(),
        peft_config=adapters(kind),
    )


def sft_packed(model: Any, kind: str, folder: Path, **settings: Any) -> Any:
    """Sequences put one behind the other, up to the length."""
    return sft(model, kind, folder, packing=True, packing_strategy="wrapped", **settings)


def sft_padding_free(model: Any, kind: str, folder: Path, **settings: Any) -> Any:
    """The sequences of a batch put one behind the other; attention would want a flash kernel, which a CPU has not."""
    return sft(model, kind, folder, packing=True, packing_strategy="bfd", padding_free=True, **settings)


def sft_chunked_nll(model: Any, kind: str, folder: Path, **settings: Any) -> Any:
    """The loss in chunks of tokens."""
    return sft(model, kind, folder, loss_type="chunked_nll", **settings)


def dpo(model: Any, kind: str, folder: Path, **settings: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model=model,
        ref_model=moe_model() if kind == "full" else None,
        args=DPOConfig(max_length=16, **_common(folder), **settings),
        train_dataset=_lines("prompt", "chosen", "rejected"),
        processing_class=tokenizer(),
        peft_config=adapters(kind),
    )


def reward(model: Any, kind: str, folder: Path, **settings: Any) -> Any:
    from trl import RewardConfig, RewardTrainer

    made = adapters(kind)
    if made is not None:
        made.task_type = "SEQ_CLS"
    return RewardTrainer(
        model=model,
        args=RewardConfig(max_length=16, **_common(folder), **settings),
        train_dataset=_lines("chosen", "rejected"),
        processing_class=tokenizer(),
        peft_config=made,
    )


def grpo(model: Any, kind: str, folder: Path, **settings: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
        args=GRPOConfig(num_generations=2, max_completion_length=4, **_common(folder), **settings),
        train_dataset=_lines("prompt"),
        processing_class=tokenizer(),
        peft_config=adapters(kind),
    )


TRAINERS: dict[str, Callable[..., Any]] = {
    "sft": sft,
    "sft_packed": sft_packed,
    "sft_padding_free": sft_padding_free,
    "sft_chunked_nll": sft_chunked_nll,
    "dpo": dpo,
    "reward": reward,
    "grpo": grpo,
}


def train(name: str, kind: str, way: str, folder: Path, chunks: memfine_fx.Config) -> tuple[list[float], Any]:
    """Losses and norms of gradients of two steps, and the model.

    Args:
        name: of `TRAINERS`.
        kind: of `KINDS`.
        way: of `WAYS`, or "plain".
        folder: for what the trainer writes.
        chunks: taken by "optimize"; for "backend" the variable has what differs from the defaults.
    """
    model = moe_model(is_classifier=name == "reward")
    settings: dict[str, Any] = {}
    if way == "optimize":
        memfine_fx.optimize(model, config=chunks)
    elif way == "backend":
        os.environ["MEMFINE_OPTIONS"] = f"inner_backend={chunks.inner_backend},rows_per_chunk={chunks.rows_per_chunk}"
        settings = {"torch_compile": True, "torch_compile_backend": "memfine"}
    torch.manual_seed(1)
    trainer = TRAINERS[name](model, kind, folder, **settings)
    trainer.train()
    log = trainer.state.log_history  # GRPO's first loss is zero by construction, its gradients are not
    return [float(entry[key]) for entry in log for key in ("loss", "grad_norm") if key in entry], model


def moe_model(*, is_classifier: bool = False) -> Any:
    """A Qwen3-MoE with random weights: 2 layers, hidden 32, 4 experts of width 24, top-2."""
    torch.manual_seed(0)
    model = tiny_causal_lm("qwen3_moe", output_router_logits=True, eos_token_id=1, bos_token_id=1)
    if not is_classifier:
        return model
    from transformers import Qwen3MoeForSequenceClassification

    model.config.num_labels = 1
    torch.manual_seed(0)
    return Qwen3MoeForSequenceClassification(model.config).train()


def _common(folder: Path) -> dict[str, Any]:
    return dict(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, bf16=False,
    )  # fmt: skip


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    known = special | {f"w{number}": number + len(special) for number in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _sentences() -> Any:
    return _lines("text", count=16, shortest=6, longest=13)


def _lines(*names: str, count: int = 8, shortest: int = 3, longest: int = 6) -> Any:
    """A data set with these columns of made-up text."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)

    def text() -> str:
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        return " ".join(f"w{one}" for one in torch.randint(0, WORDS, (length,), generator=generator).tolist())

    return Dataset.from_list([{name: text() for name in names} for _ in range(count)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inner", choices=("inductor", "aot_eager", "eager"), default="inductor")
    parser.add_argument("--trainer", choices=tuple(TRAINERS), nargs="*", default=("sft", "dpo"))
    parser.add_argument("--kind", choices=KINDS, nargs="*", default=("full", "experts"))
    parser.add_argument("--way", choices=WAYS, default="optimize")
    chosen = parser.parse_args()
    for name in chosen.trainer:
        for kind in chosen.kind:
            print(f"{name}, {kind}")
            with tempfile.TemporaryDirectory() as folder:
                plain, _ = train(name, kind, "plain", Path(folder), config(chosen.inner))
                ours, model = train(name, kind, chosen.way, Path(folder), config(chosen.inner))
            prove_losses(plain, ours, tolerance=1e-3)
            prove_layers(model)
    print("OK")


if __name__ == "__main__":
    main()
