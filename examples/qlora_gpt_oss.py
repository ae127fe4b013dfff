"""QLoRA on the experts of a GPT-OSS: tables in 4 bits (NF4, by bitsandbytes), adapters of PEFT on them.

    python examples/qlora_gpt_oss.py

Behind `memfine_fx.optimize(model)` each expert's table is made of its 4 bits when it runs, and again in backward; no
table of all experts ever is (checked below on the allocations of a step). The run to compare with is PEFT's on the same
tables made whole, because PEFT 0.21 loses an adapter over tables in 4 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from common import VOCABULARY, config, options, prove, prove_layers, table_allocations, train_adapters
from peft import LoraConfig, get_peft_model

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm

TABLES = ("gate_up_proj", "down_proj")


def lora_model() -> Any:
    """A GPT-OSS with random weights: 2 layers, hidden 64, 64 experts of width 128, top-4; adapters of rank 4."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_experts_per_tok=4, vocab_size=VOCABULARY)
    torch.manual_seed(0)
    model = tiny_causal_lm("gpt_oss", num_experts=64, num_local_experts=64, **sizes)
    targets = [f"mlp.experts.{name}" for name in TABLES]
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=targets))


def experts_of(model: Any) -> list[Any]:
    """The modules that hold the tables, below PEFT's wrappers."""
    return [one for one in model.modules() if isinstance(one._parameters.get("down_proj"), torch.nn.Parameter)]


def main() -> None:
    chosen = options(__doc__)
    plain, packed = lora_model(), lora_model()
    table = experts_of(packed)[0].gate_up_proj
    for whole, experts in zip(experts_of(plain), experts_of(packed), strict=True):
        for name in TABLES:
            replace_parameter_4bit(experts, name, quant_type="nf4")
            getattr(whole, name).data.copy_(getattr(experts, name))
    optimized = memfine_fx.optimize(packed, config=config(chosen.inner))
    reference, run = train_adapters(plain, chosen.steps), train_adapters(optimized, chosen.steps)
    found = table_allocations(optimized, table)
    print(f"tables   {found} allocations of an eighth of the experts' in a step")
    if found:
        raise SystemExit("FAILED: a part of the experts' tables was made")
    prove_layers(optimized)
    prove(reference, run, optimized)


if __name__ == "__main__":
    main()
