"""Seconds and bytes of serving a decoder on one instance: prefill, a decode step, and the hand-over of a cache.

An instance is `tp * pp` equal devices holding the weights once; experts are spread over the tp devices of a stage.
Attention is sharded by heads, or replicated (every device attends for its own requests, as DeepSeek-V3 is served).

    prefill     the larger of arithmetic and weight traffic for the linear layers, pointwise traffic, attention by its
                FLOPs, exchanges
    decode      the larger of arithmetic and weight traffic, where of a MoE layer only the experts that the batch hits
                are read, then the cache of every request at its context, exchanges, and a fixed cost per layer
    hand-over   bytes of the cache over the slower side's network; through host memory between vendors; one pass over
                the receiver's memory where page, precision or parallel size differ

All is per instance; queueing is in `queueing`. Activations are granted a tenth of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from memfine_planner.serving.hardware import Accelerator, Architecture, mean_context

__all__ = ["Instance", "Model", "decode_s", "handover_s", "num_hit", "prefill_s"]

_USABLE_MEMORY = 0.9
_ELEMENT_BYTES = {"FP16": 2.0, "BF16": 2.0, "FP8": 1.0, "FP4": 0.5}
_NETWORK_OVERHEAD = 2.0


@dataclass(frozen=True)
class Model:
    """What is served, and how its numbers are kept.

    Args:
        number: format of weights and products.
        cache_bytes: of one element of the cache.
        alpha: popularity of experts, the k-th most popular drawn as k^-alpha; 0 for balanced.
    """

    arch: Architecture
    number: str = "BF16"
    cache_bytes: float = 2.0
    alpha: float = 0.0

    @property
    def element_bytes(self) -> float:
        return _ELEMENT_BYTES[self.number]

    @property
    def weight_bytes(self) -> float:
        return self.element_bytes * self.arch.params

    @property
    def cache_bytes_per_token(self) -> float:
        """Of all layers, held once."""
        return self.arch.layers * self.layer_cache_bytes

    @property
    def layer_cache_bytes(self) -> float:
        latent = self.arch.latent
        width = latent.kv_lora_rank + latent.qk_rope_head_dim if latent else 2 * self.arch.kv_heads * self.arch.head_dim
        return self.cache_bytes * width


@dataclass(frozen=True)
class Instance:
    """Devices that serve together."""

    accelerator: Accelerator
    tp: int = 1
    pp: int = 1
    replicated_attention: bool = False

    @property
    def devices(self) -> int:
        return self.tp * self.pp

    def cache_copies(self, model: Model) -> int:
        """How often a stage holds a token's cache: heads that are fewer than devices are repeated."""
        if self.replicated_attention:
            return 1
        heads = 1 if model.arch.latent else model.arch.kv_heads
        return max(1, self.tp // heads)

    def cache_tokens(self, model: Model) -> float:
        """Tokens whose cache fits beside the weights; 0 or less where these do not fit."""
        memory = _USABLE_MEMORY * self.accelerator.memory_gib * 2**30 * self.devices
        weights = model.weight_bytes
        if self.replicated_attention:
            weights += (self.tp - 1) * model.element_bytes * model.arch.attention_params * model.arch.layers
        return (memory - weights) / (model.cache_bytes_per_token * self.cache_copies(model))


def prefill_s(model: Model, on: Instance, length: float, requests: float = 1.0) -> float:
    """Seconds to prefill prompts of one length together, through all stages."""
    arch, device = model.arch, on.accelerator
    tokens = requests * length
    attention = sum(count * 2.0 * arch.heads * (arch.qk_dim + arch.v_dim) * mean_context(int(length), kind.window)
                    for kind, count in arch.kind_counts.items())  # fmt: skip
    scores = tokens * attention / on.tp / device.flops_per_s("BF16")
    # Logits are of the last token alone.
    head = 2.0 * arch.embedding_params * requests / on.tp / device.flops_per_s(model.number)
    return _linear_s(model, on, tokens) + scores + head + _exchange_s(model, on, tokens) + _overhead_s(model, on)


def decode_s(model: Model, on: Instance, batch: float, context: float) -> float:
    """Seconds between two tokens of every request of a batch, at a mean context.

    With stages the batch travels in pp groups: each layer sees one of them, and all pass before a request's next token.
    """
    arch, device = model.arch, on.accelerator
    group = batch / on.pp
    seen = sum(
        count * (min(context, kind.window) if kind.window else context) for kind, count in arch.kind_counts.items()
    )
    shards = on.tp / on.cache_copies(model)
    cache = group * seen * model.layer_cache_bytes / shards / device.memory_bytes_per_s
    scores = group * seen * 2.0 * arch.heads * (arch.qk_dim + arch.v_dim) / on.tp / device.flops_per_s("BF16")
    if arch.latent:
        # Decoding attends in the latent space: wider products for a smaller cache.
        ranks = 2.0 * arch.latent.kv_lora_rank + arch.latent.qk_rope_head_dim
        scores *= ranks / (arch.qk_dim + arch.v_dim)
    head = max(
        2.0 * arch.embedding_params * group / device.flops_per_s(model.number),
        model.element_bytes * arch.embedding_params / device.memory_bytes_per_s,
    )
    layers = _linear_s(model, on, group) + _exchange_s(model, on, group) + _overhead_s(model, on)
    return layers + max(cache, scores) + head / on.tp


def handover_s(
    model: Model, source: Instance, target: Instance, length: float, target_cache_bytes: float = 0.0
) -> float:
    """Seconds until a prompt's cache lies in the decoding instance; nothing of it hidden behind the prefill."""
    here, there = source.accelerator, target.accelerator
    size = length * model.cache_bytes_per_token
    received = size * (target_cache_bytes or model.cache_bytes) / model.cache_bytes
    # Every device sends and receives its own part; copies of repeated heads are made at the receiver.
    rates = [one.accelerator.network_gb_per_s * one.accelerator.link_fraction * one.devices for one in (source, target)]
    total = min(size, received) / (min(rates) * 1e9)
    if here.vendor != there.vendor:
        total += size / (here.host_link_gb_per_s * 1e9 * source.devices) + received / (
            there.host_link_gb_per_s * 1e9 * target.devices
        )
    is_same = (here.block_tokens, source.tp, source.pp) == (
        there.block_tokens,
        target.tp,
        target.pp,
    ) and size == received
    if not is_same:
        total += 2 * received * target.cache_copies(model) / (there.memory_bytes_per_s * target.devices)
    return total


@lru_cache(maxsize=64)
def _popularity(experts: int, top_k: int, alpha: float) -> NDArray[np.float64]:
    """Chance that a token picks each expert, most popular first."""
    weights = np.arange(1, experts + 1, dtype=np.float64) ** -alpha
    shares = weights / weights.sum()
    # K different experts drawn one after the other; scaled so that the chances sum to K.
    chances: NDArray[np.float64] = 1 - (1 - shares) ** top_k
    for _ in range(20):
        chances = np.asarray(np.minimum(1.0, chances * top_k / chances.sum()))
    return chances


def num_hit(experts: int, top_k: int, alpha: float, tokens: float) -> float:
    """Expected number of experts that a batch's tokens pick."""
    return float(np.sum(1 - (1 - _popularity(experts, top_k, alpha)) ** tokens))


@lru_cache(maxsize=256)
def _imbalance(experts: int, top_k: int, alpha: float, devices: int) -> float:
    """Rows of the fullest device over the mean; experts are dealt to the least loaded, most popular first."""
    loads = np.zeros(devices)
    room = np.full(devices, -(-experts // devices))
    for share in _popularity(experts, top_k, alpha):
        at = int(np.argmin(np.where(room > 0, loads, np.inf)))
        loads[at] += share
        room[at] -= 1
    return float(loads.max() / loads.mean())


def _linear_s(model: Model, on: Instance, tokens: float) -> float:
    """All layers' products on one token group, each layer the slower of arithmetic and reading its weights."""
    arch, device = model.arch, on.accelerator
    rate, bandwidth, total = device.flops_per_s(model.number), device.memory_bytes_per_s, 0.0
    for kind, count in arch.kind_counts.items():
        dense = arch.dense_params(kind)
        ours = dense / on.tp
        work = ours * tokens
        if on.replicated_attention:
            # Each device holds the layer outside its experts whole and serves its own part of the tokens.
            ours, work = float(dense), dense * tokens / on.tp
        layer = max(2.0 * work / rate, model.element_bytes * ours / bandwidth)
        if kind.is_moe:
            stretch = _imbalance(arch.experts, arch.top_k, model.alpha, on.tp)
            rows = tokens * arch.top_k / on.tp * stretch
            read = num_hit(arch.experts, arch.top_k, model.alpha, tokens) / on.tp * arch.expert_params
            layer += max(2.0 * rows * arch.expert_params / rate, model.element_bytes * read / bandwidth)
        # Norms, residuals, rotations and the activation, each reading and writing its operands in 16 bits.
        width = arch.top_k * arch.moe_ffn + arch.shared_ffn if kind.is_moe else arch.ffn
        total += count * (layer + 2.0 * tokens * (16 * arch.hidden + 3 * width) / on.tp / bandwidth)
    return total


def _exchange_s(model: Model, on: Instance, tokens: float) -> float:
    """Exchanges of all layers: two all-reduces each, or dispatch and combine; and the sends between stages."""
    arch, device = model.arch, on.accelerator
    fraction = device.link_fraction * 1e9
    inside = on.tp <= device.domain
    bandwidth = (device.domain_gb_per_s if inside else device.network_gb_per_s) * fraction
    latency = device.layer_overhead_us * 1e-6 * (1.0 if inside else _NETWORK_OVERHEAD)
    sent = 2.0 * tokens * arch.hidden
    total = (on.pp - 1) * (sent / on.tp / (device.network_gb_per_s * fraction) + latency)
    if on.tp == 1:
        return total
    if on.replicated_attention:
        remote = 1 - device.domain / on.tp if not inside else 1 - 1 / on.tp
        # Dispatch in the weights' format, combine in 16 bits.
        moved = tokens / on.tp * arch.top_k * arch.hidden * (model.element_bytes + 2.0) * remote
        return total + len(arch.moe_layers) * (moved / bandwidth + 2 * latency)
    reduced = 2 * sent * (on.tp - 1) / on.tp / bandwidth
    return total + arch.layers * 2 * (reduced + latency)


def _overhead_s(model: Model, on: Instance) -> float:
    return model.arch.layers * on.accelerator.layer_overhead_us * 1e-6
