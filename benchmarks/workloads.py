"""The layer and the model that every peer runs: weights, inputs and one step, all from the job's seed."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.peers import PEERS_OF
from benchmarks.records import Job, Sizes
from memfine_fx.demo.model import ModelSizes, build_causal_lm

WEIGHT_STD = 0.02
_PROBE_PIECE = 1 << 24


@dataclass(frozen=True)
class Workload:
    """A step to measure. ``step`` runs forward and backward, and returns its loss or output."""

    step: Callable[[], torch.Tensor]
    step_with_shape: Callable[[int, int], torch.Tensor]  # batch, sequence
    leaves: dict[str, torch.Tensor]  # whatever gets a gradient
    value_of: Callable[[torch.Tensor], float]
    gradient_error: Callable[[], float] | None = None

    def zero_gradients(self) -> None:
        """In place, so that the gradients' bytes exist before the step."""
        for leaf in self.leaves.values():
            if leaf.grad is not None:
                leaf.grad.zero_()

    def drop_gradients(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None

    def gradient_norm(self) -> float:
        return math.hypot(*(float(torch.linalg.vector_norm(grad)) for grad in self.gradients()))

    def gradient_checksum(self) -> float:
        """Products of unit-length gradients with a fixed probe, of order one whatever the sizes."""
        products = [normalised_product(grad) for grad in self.gradients()]
        return math.fsum(products) / math.sqrt(len(products))

    def gradients(self) -> list[torch.Tensor]:
        missing = [name for name, leaf in self.leaves.items() if leaf.grad is None]
        assert not missing, f"no gradient reached {missing}"
        return [leaf.grad for leaf in self.leaves.values() if leaf.grad is not None]


def normalised_product(tensor: torch.Tensor) -> float:
    """Of the flattened tensor at unit length with cos(0), cos(1), ...; in pieces, to need little memory."""
    total, norm = 0.0, float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
    for start, piece in enumerate(torch.split(tensor.detach().reshape(-1), _PROBE_PIECE)):
        places = torch.arange(len(piece), dtype=torch.float64, device=piece.device) + start * _PROBE_PIECE
        total += float(piece.double() @ places.cos())
    return total / max(norm, 1e-30)


def build_workload(job: Job) -> Workload:
    return {"layer": _build_layer, "gradients": _build_gradients, "model": _build_model}[job.workload](job)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _build_layer(job: Job) -> Workload:
    block, hidden, upstream = _seeded_layer(job)
    return _layer_workload(job, block, hidden, upstream)


def _layer_workload(job: Job, block: Any, hidden: torch.Tensor, upstream: torch.Tensor) -> Workload:
    leaves = {**dict(block.named_parameters()), "hidden": hidden}
    forward = PEERS_OF[job.workload][job.peer].wrap(block, job.sizes)

    def step() -> torch.Tensor:
        out = forward(hidden)
        out.backward(upstream)
        return _detached(out)

    def step_with_shape(batch: int, sequence: int) -> torch.Tensor:
        shape = (batch, sequence, job.sizes.hidden)
        out = forward(torch.randn(shape, dtype=hidden.dtype, device=hidden.device))
        out.backward(torch.ones_like(out))
        return _detached(out)

    return Workload(step, step_with_shape, leaves, normalised_product)


def _seeded_layer(job: Job) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The unmodified block of transformers, its input and the gradient of its output."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes, device, dtype = job.sizes, torch.device(job.device), getattr(torch, job.dtype)
    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.width,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    generator = torch.Generator(device=device).manual_seed(job.seed)
    with torch.device(device):
        block = Qwen3MoeSparseMoeBlock(config).to(dtype).train()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=WEIGHT_STD, generator=generator)
    shape = (sizes.batch, sizes.sequence, sizes.hidden)
    hidden = torch.randn(shape, dtype=dtype, device=device, generator=generator, requires_grad=True)
    upstream = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    return block, hidden, upstream


def _build_gradients(job: Job) -> Workload:
    """The layer, and how far its gradients are from an fp32 reference with the same routing."""
    block, hidden, upstream = _seeded_layer(job)
    reference = _reference_gradients(block, hidden, upstream)
    workload = _layer_workload(job, block, hidden, upstream)

    def gradient_error() -> float:
        return max(
            _relative_error(leaf.grad, reference[name])
            for name, leaf in workload.leaves.items()
            if leaf.grad is not None
        )

    return Workload(workload.step, workload.step_with_shape, workload.leaves, workload.value_of, gradient_error)


class _FixedRouter(nn.Module):
    """The router with its choice of experts given: a top-k that flips by rounding is no gradient error."""

    def __init__(self, weight: nn.Parameter, expert_index: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.expert_index = expert_index

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(hidden, self.weight)
        chosen = logits.softmax(-1, dtype=torch.float).gather(-1, self.expert_index)
        return logits, chosen / chosen.sum(-1, keepdim=True), self.expert_index


def _reference_gradients(block: Any, hidden: torch.Tensor, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        *_, expert_index = block.gate(hidden.flatten(0, 1))
    reference = copy.deepcopy(block).float()
    reference.gate = _FixedRouter(reference.gate.weight, expert_index)
    reference.experts.config._experts_implementation = "eager"
    exact_hidden = hidden.detach().float().requires_grad_()
    reference(exact_hidden).backward(upstream.float())
    leaves = {**dict(reference.named_parameters()), "hidden": exact_hidden}
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    distance = torch.linalg.vector_norm(found.float() - expected)
    return float(distance / torch.linalg.vector_norm(expected))


def _build_model(job: Job) -> Workload:
    """A Qwen3-MoE language model and one batch of random tokens."""
    device = torch.device(job.device)
    model = build_causal_lm(_model_sizes(job.sizes), seed=job.seed, dtype=getattr(torch, job.dtype), device=device)
    forward = PEERS_OF["model"][job.peer].wrap(model, job.sizes)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return _detached(loss)

    def draw_tokens(batch: int, sequence: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(job.seed + 1)
        return torch.randint(job.sizes.vocab, (batch, sequence), generator=generator).to(device)

    tokens = draw_tokens(job.sizes.batch, job.sizes.sequence)
    return Workload(
        step=lambda: run(tokens),
        step_with_shape=lambda batch, sequence: run(draw_tokens(batch, sequence)),
        leaves=dict(model.named_parameters()),
        value_of=float,
    )


def _model_sizes(sizes: Sizes) -> ModelSizes:
    return ModelSizes(
        layers=sizes.layers,
        hidden=sizes.hidden,
        width=sizes.width,
        experts=sizes.experts,
        top_k=sizes.top_k,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab=sizes.vocab,
        positions=4 * sizes.sequence,
    )
