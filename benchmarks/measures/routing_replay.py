"""What does recording a routing cost a step, and replaying it?

A Qwen3-MoE causal LM with experts_implementation="memfine", fp32, forward and backward. Three ways take turns, warm;
ratios are medians over rounds.
"""

import contextlib
import statistics
import time

import torch

import memfine_fx
from benchmarks.measures import Answer
from memfine_fx.demo.tiny import tiny_causal_lm

_MOST_RECORDING = 1.01
_SIZES = {
    "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 4,
    "num_experts": 32, "num_experts_per_tok": 4, "vocab_size": 4096, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


def measure(rounds: int = 15, tokens: int = 2048) -> Answer:
    """A step that records its routing takes at most 1.01 of the time of a plain step."""
    model = tiny_causal_lm("qwen3_moe", **_SIZES)
    model.set_experts_implementation("memfine")
    ids = torch.randint(0, _SIZES["vocab_size"], (2, tokens // 2), generator=torch.Generator().manual_seed(0))

    def seconds(context: contextlib.AbstractContextManager[object]) -> float:
        model.zero_grad()
        began = time.perf_counter()
        with context:
            model(input_ids=ids, labels=ids).loss.backward()
        return time.perf_counter() - began

    with memfine_fx.record_routing(model) as record:
        seconds(contextlib.nullcontext())
    routing = record.ids
    steps = []
    for _ in range(rounds):
        recording = memfine_fx.record_routing(model)
        replaying = memfine_fx.replay_routing(model, routing)
        ways = {"plain": contextlib.nullcontext(), "recording": recording, "replaying": replaying}
        steps.append({name: seconds(context) for name, context in ways.items()})
    row = {
        "tokens": tokens,
        "plain_seconds": round(statistics.median(step["plain"] for step in steps), 4),
        "recording_of_plain": round(statistics.median(step["recording"] / step["plain"] for step in steps), 4),
        "replaying_of_plain": round(statistics.median(step["replaying"] / step["plain"] for step in steps), 4),
    }
    return Answer(row=row, is_met=row["recording_of_plain"] <= _MOST_RECORDING)
