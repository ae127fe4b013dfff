"""A prefill process and a decode process that keep a cache differently: shards, pages, precision and axis order.

An instance holds a prompt's cache in `tp` shards by heads (heads that are fewer than shards are repeated), each in
pages of `block_tokens` tokens, tokens before heads or heads before tokens. `routes` lists which heads go from which
shard to which; a route's message is the plain tensor [layers, tokens, heads, width] in the narrower of both precisions,
so neither end needs to know the other's pages. Messages go through torch.distributed (gloo: host memory on both ends,
as between vendors).

    shards_of -> Shard, ...     a transformers cache in an instance's layout
    send, receive               all routes between two processes
    cache_of                    the transformers cache of an instance's shards
    prefill, decode             the two processes: a prompt's cache and first token, and all tokens after it

With both layouts in the model's precision every number is the one that a single process computes (`generate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from memfine_fx.errors import ConfigError

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicCache

__all__ = [
    "Layout",
    "Route",
    "Shape",
    "Shard",
    "cache_of",
    "decode",
    "generate",
    "prefill",
    "receive",
    "routes",
    "send",
    "shards_of",
]


@dataclass(frozen=True)
class Layout:
    """How an instance keeps a cache."""

    tp: int = 1
    block_tokens: int = 16
    dtype: torch.dtype = torch.float32
    heads_first: bool = False


@dataclass(frozen=True)
class Shape:
    """Sizes of one prompt's cache; keys and values may differ in width."""

    layers: int
    heads: int
    tokens: int
    key_width: int
    value_width: int


@dataclass(frozen=True)
class Route:
    """Heads [first, last) from one shard to another."""

    source: int
    target: int
    first: int
    last: int


@dataclass
class Shard:
    """Pages of one rank: keys and values [layers, pages, block_tokens, heads, width], or heads before tokens."""

    keys: Tensor
    values: Tensor


def routes(heads: int, source: int, target: int) -> tuple[Route, ...]:
    """Which heads go where between `source` and `target` shards; every shard of the target gets all of its heads.

    Raises:
        ConfigError: heads and shards do not divide each other.
    """
    found = []
    for there in range(target):
        wanted = _heads(heads, target, there)
        given: set[int] = set()
        for here in range(source):
            held = _heads(heads, source, here)
            first, last = max(wanted.start, held.start), min(wanted.stop, held.stop)
            # A repeated head comes from the first shard that has it.
            if first < last and first not in given:
                given.update(range(first, last))
                found.append(Route(here, there, first, last))
    return tuple(found)


def shards_of(cache: DynamicCache, layout: Layout) -> tuple[Shape, tuple[Shard, ...]]:
    """The cache of one prompt as the instance's shards, converted to its precision.

    Raises:
        ConfigError: it holds several prompts, or layers that keep different numbers of tokens (sliding windows).
    """
    keys, values = ([getattr(layer, name) for layer in cache.layers] for name in ("keys", "values"))
    if len({(one.shape[0], one.shape[2]) for one in keys}) != 1 or keys[0].shape[0] != 1:
        raise ConfigError("expected the cache of one prompt with as many tokens in every layer")
    shape = Shape(len(keys), keys[0].shape[1], keys[0].shape[2], keys[0].shape[3], values[0].shape[3])
    # [layers, tokens, heads, width]
    whole = [torch.cat(one).transpose(1, 2) for one in (keys, values)]
    shards = []
    for rank in range(layout.tp):
        held = _heads(shape.heads, layout.tp, rank)
        shards.append(Shard(*(_paged(one[:, :, held.start : held.stop], layout) for one in whole)))
    return shape, tuple(shards)


def cache_of(shape: Shape, shards: Sequence[Shard], layout: Layout, dtype: torch.dtype) -> DynamicCache:
    """The transformers cache that the shards hold together, in the model's precision."""
    from transformers.cache_utils import DynamicCache

    owners = routes(shape.heads, layout.tp, 1)
    cache = DynamicCache()
    pair = [
        torch.cat([_plain(getattr(shards[route.source], name), shape.tokens, layout) for route in owners], 2)
        for name in ("keys", "values")
    ]
    for index in range(shape.layers):
        keys, values = (one[index].transpose(0, 1).unsqueeze(0).to(dtype).contiguous() for one in pair)
        cache.update(keys, values, index)
    return cache


def send(shape: Shape, shards: Sequence[Shard], here: Layout, there: Layout, peer: int) -> int:
    """Send all routes to the process `peer`; returns the bytes sent."""
    header = torch.tensor([shape.layers, shape.heads, shape.tokens, shape.key_width, shape.value_width])
    dist.send(header, peer)
    num_bytes = 0
    for route in routes(shape.heads, here.tp, there.tp):
        start = _heads(shape.heads, here.tp, route.source).start
        for pages in (shards[route.source].keys, shards[route.source].values):
            held = _plain(pages, shape.tokens, here)[:, :, route.first - start : route.last - start]
            message = held.to(_narrower(here.dtype, there.dtype)).contiguous()
            dist.send(message, peer)
            num_bytes += message.numel() * message.element_size()
    return num_bytes


def receive(here: Layout, there: Layout, peer: int) -> tuple[Shape, tuple[Shard, ...]]:
    """Receive what `peer`, whose layout is `there`, sends; the shards are in the layout `here`."""
    header = torch.empty(5, dtype=torch.int64)
    dist.recv(header, peer)
    shape = Shape(*header.tolist())
    parts: list[list[list[Tensor]]] = [[[], []] for _ in range(here.tp)]
    for route in routes(shape.heads, there.tp, here.tp):
        for which, width in enumerate((shape.key_width, shape.value_width)):
            size = (shape.layers, shape.tokens, route.last - route.first, width)
            message = torch.empty(size, dtype=_narrower(here.dtype, there.dtype))
            dist.recv(message, peer)
            parts[route.target][which].append(message)
    return shape, tuple(Shard(*(_paged(torch.cat(one, 2), here) for one in pair)) for pair in parts)


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


def _heads(heads: int, tp: int, rank: int) -> range:
    """The heads of a shard."""
    if heads % tp and tp % heads:
        raise ConfigError(f"{heads} heads cannot be kept in {tp} shards; expected a divisor or a multiple")
    if tp > heads:
        return range(rank * heads // tp, rank * heads // tp + 1)
    return range(rank * heads // tp, (rank + 1) * heads // tp)


def _paged(plain: Tensor, layout: Layout) -> Tensor:
    """[layers, tokens, heads, width] in pages, the last one filled with zeros."""
    layers, tokens, heads, width = plain.shape
    pages = -(-tokens // layout.block_tokens)
    padded = plain.new_zeros(layers, pages * layout.block_tokens, heads, width, dtype=layout.dtype)
    padded[:, :tokens] = plain
    paged = padded.view(layers, pages, layout.block_tokens, heads, width)
    return paged.transpose(2, 3).contiguous() if layout.heads_first else paged


def _plain(pages: Tensor, tokens: int, layout: Layout) -> Tensor:
    ordered = pages.transpose(2, 3) if layout.heads_first else pages
    return ordered.flatten(1, 2)[:, :tokens]


def _narrower(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if one.itemsize <= other.itemsize else other


def _continue(model: Any, cache: Any, first: int, num_tokens: int) -> list[int]:
    tokens = [first]
    while len(tokens) < num_tokens:
        result = model(torch.tensor([[tokens[-1]]]), past_key_values=cache, use_cache=True)
        tokens.append(_greedy(result.logits))
    return tokens


def _greedy(logits: Tensor) -> int:
    return int(logits[0, -1].argmax())
