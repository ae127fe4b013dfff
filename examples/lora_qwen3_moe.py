"""LoRA on the experts of a Qwen3-MoE by PEFT: no expert table is added up whole, and the files are PEFT's.

    python examples/lora_qwen3_moe.py

PEFT's `target_parameters` makes W + B A for all experts at once, and its gradient. Behind `memfine_fx.optimize(model)`
the adapters meet one expert's rows at a time, factor by factor, so that a step holds neither (checked below on its
allocations). Saving and merging are PEFT's own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from common import config, moe_model, options, prove, prove_layers, table_allocations, train_adapters
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

import memfine_fx

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora_model() -> Any:
    """Rank 4 on attention and on 64 experts."""
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=EXPERTS)
    model = moe_model(num_experts=64)
    torch.manual_seed(0)
    return get_peft_model(model, settings)


def saved(model: Any) -> dict[str, torch.Tensor]:
    """The adapters as `save_pretrained` writes them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "adapter_model.safetensors")


def main() -> None:
    chosen = options(__doc__)
    plain = lora_model()
    optimized = memfine_fx.optimize(lora_model(), config=config(chosen.inner))
    reference, run = train_adapters(plain, chosen.steps), train_adapters(optimized, chosen.steps)
    table = next(one for name, one in optimized.named_parameters() if name.endswith("gate_up_proj"))
    print(f"tables   {table_allocations(plain, table)} allocations of an eighth of the experts' in a step of PEFT's,")
    print(f"         {table_allocations(optimized, table)} in one of memfine_fx's")
    if table_allocations(optimized, table):
        raise SystemExit("FAILED: a part of the experts' tables was made")
    ours, theirs = saved(optimized), saved(plain)
    off = max(float((ours[name] - one).abs().max()) for name, one in theirs.items())
    print(f"files    {len(ours)} tensors of the same names: {ours.keys() == theirs.keys()}; off by at most {off:.1e}")
    if ours.keys() != theirs.keys() or off > 1e-3:
        raise SystemExit("FAILED: the files are not PEFT's")
    prove_layers(optimized)
    prove(reference, run, optimized)


if __name__ == "__main__":
    main()
