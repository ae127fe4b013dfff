"""PEFT: LoRA on attention over frozen experts, and LoRA on the experts themselves (`target_parameters`).

    python examples/peft_lora.py

The change to a training script is `memfine_fx.optimize(model)` after `get_peft_model`. Frozen experts get no weight
gradients: none is computed, and no buffer of their size is allocated in backward (checked below on the allocations).
"""

from __future__ import annotations

from typing import Any

import torch
from common import config, forward_backward, moe_model, options, prove, train_adapters
from peft import LoraConfig, get_peft_model

import memfine_fx
from memfine_fx.memory.measure import trace_memory

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIGS = {
    "LoRA on attention, frozen experts": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "LoRA on attention and experts": LoraConfig(r=4, target_modules=["q_proj"], target_parameters=EXPERTS),
}


def lora_model(settings: LoraConfig) -> Any:
    model = moe_model()
    torch.manual_seed(0)
    return get_peft_model(model, settings)


def expert_sized_allocations(model: Any) -> int:
    """Allocations in one step as large as all weights of a layer's first projection."""
    table = model.get_base_model().model.layers[0].mlp.experts.gate_up_proj
    trace = trace_memory(forward_backward(model), torch.device("cpu"))
    return sum(num_bytes >= table.numel() * table.element_size() for num_bytes in trace.allocation_bytes)


def main() -> None:
    chosen = options(__doc__)
    for name, settings in CONFIGS.items():
        print(name)
        optimized = memfine_fx.optimize(lora_model(settings), config=config(chosen.inner))
        reference, run = train_adapters(lora_model(settings), chosen.steps), train_adapters(optimized, chosen.steps)
        if not settings.target_parameters:
            found = expert_sized_allocations(optimized)
            print(f"frozen   experts: {found} allocations of a weight gradient's size in a step")
            if found:
                raise SystemExit("FAILED: a gradient of frozen experts was allocated")
        prove(reference, run, optimized)


if __name__ == "__main__":
    main()
