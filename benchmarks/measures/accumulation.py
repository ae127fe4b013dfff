"""How many bytes does adding to existing gradients in place save in a micro-batch that accumulates?

A Qwen3-MoE of 4 layers, T=1024, fp32, Inductor, without a budget. After two backwards, one more is traced with the
allocator's events: with the default options, and with the pass disabled that lets a region add in place, so that
backward returns new gradients and autograd adds them.
"""

import torch

import memfine_fx
from benchmarks.measures import Answer, device_here
from memfine_fx.config import PassName
from memfine_fx.demo.training import ModelSizes, build_causal_lm
from memfine_fx.memory.measure import trace_memory

SIZES = ModelSizes(
    layers=4, hidden=256, width=512, experts=16, top_k=2, heads=4, kv_heads=2, head_dim=64, vocab=2048, positions=1024
)
_WORTH = 1.01
"""Bytes of the ordinary way against those of the addition in place, above which the undeclared write is worth it."""


def measure() -> Answer:
    (in_place, num_bytes), (apart, _) = _peak_bytes(), _peak_bytes("fuse_gradients")
    row = {
        "parameter_bytes": num_bytes,
        "in_place_bytes": in_place,
        "apart_bytes": apart,
        "apart_to_in_place": round(apart / in_place, 3),
    }
    return Answer(row=row, is_met=apart / in_place > _WORTH)


def _peak_bytes(*disabled: PassName) -> tuple[int, int]:
    """Return the peak of a micro-batch that accumulates, beyond what exists before it, and the parameters' bytes."""
    device = device_here()
    torch.compiler.reset()
    model = build_causal_lm(SIZES, seed=0, dtype=torch.float32, device=device)
    memfine_fx.optimize(model, config=memfine_fx.Config(disable_passes=disabled))
    tokens = torch.randint(SIZES.vocab, (2, 512), device=device)

    def backward() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    backward()
    backward()
    return trace_memory(backward, device).peak_bytes, sum(parameter.nbytes for parameter in model.parameters())
