"""A prefill process and a decode process that generate together what one process generates alone.

The prefill process computes a prompt's cache and first token and sends both; the decode process generates the rest,
token by token, from the cache as its own layout holds it. With both layouts in the model's precision every number is
the one that a single process computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memfine_fx.planning.serving.cache import Layout, cache_of, receive, send, shards_of

__all__ = ["decode", "generate", "prefill"]


@torch.no_grad()
def generate(model: Any, prompt: Tensor, num_tokens: int) -> list[int]:
    """Greedy tokens after a prompt [1, tokens], in one process."""
    result = model(prompt, use_cache=True)
    return _continue(model, result.past_key_values, _greedy(result.logits), num_tokens)


@torch.no_grad()
def prefill(model: Any, prompts: Sequence[Tensor], here: Layout, there: Layout, peer: int) -> int:
    """Prefill each prompt [1, tokens] and hand it over; returns the bytes of cache sent."""
    sent = 0
    for prompt in prompts:
        result = model(prompt, use_cache=True)
        dist.send(torch.tensor([_greedy(result.logits)]), peer)
        sent += send(*shards_of(result.past_key_values, here), here, there, peer)
    return sent


@torch.no_grad()
def decode(model: Any, num_prompts: int, num_tokens: int, here: Layout, there: Layout, peer: int) -> list[list[int]]:
    """Generate after prompts that `peer` prefills."""
    generated = []
    for _ in range(num_prompts):
        first = torch.empty(1, dtype=torch.int64)
        dist.recv(first, peer)
        cache = cache_of(*receive(here, there, peer), here, model.dtype)
        generated.append(_continue(model, cache, int(first), num_tokens))
    return generated


def _continue(model: Any, cache: Any, first: int, num_tokens: int) -> list[int]:
    tokens = [first]
    while len(tokens) < num_tokens:
        result = model(torch.tensor([[tokens[-1]]]), past_key_values=cache, use_cache=True)
        tokens.append(_greedy(result.logits))
    return tokens


def _greedy(logits: Tensor) -> int:
    return int(logits[0, -1].argmax())
