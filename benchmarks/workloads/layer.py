"""One MoE layer: the unmodified block of transformers, forward and backward, under one peer.

``workload`` "rank": what one expert-parallel rank computes in MemFine's run, the same eight experts under each printed
layer's load. The rank that holds a layer's eight hottest experts receives s' rows, 3 to 18 times the balanced number.
Here those rows come from s' / K tokens of K choices each, on eight experts with the printed skew, in one process:
nothing is sent, and the block is the unmodified one. One step runs forward and backward of layers 4 to 15 one after the
other, so its peak is the worst layer's, as with full recomputation in the paper (one set of activations alive). All
layers share one set of weights.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.loads import choose_experts, expert_counts, router_weight, tokens_that_choose
from benchmarks.peers import Forward, find_peer
from benchmarks.records import Job, Sizes
from benchmarks.workloads import WEIGHT_STD, Workload, normalised_product
from memfine_fx.memory.published import IMBALANCE, Imbalance, rank_rows


@dataclass(frozen=True)
class Layer:
    """A block under a peer, to be run on inputs of several sizes and loads."""

    job: Job
    block: Any
    forward: Forward

    def at(self, sizes: Sizes, load: str) -> Workload:
        """One step of inputs of these sizes."""
        return self.workload(*draw_inputs(self.job, sizes, load))

    def workload(self, hidden: torch.Tensor, upstream: torch.Tensor) -> Workload:
        """One step of these inputs."""
        trained = {name: parameter for name, parameter in self.block.named_parameters() if parameter.requires_grad}
        leaves = {**trained, "hidden": hidden}

        def step() -> torch.Tensor:
            out = self.forward(hidden)
            out.backward(upstream)
            return out.detach()

        def step_with_shape(batch: int, sequence: int) -> torch.Tensor:
            shape = (batch, sequence, hidden.shape[-1])
            out = self.forward(torch.randn(shape, dtype=hidden.dtype, device=hidden.device))
            out.backward(torch.ones_like(out))
            return out.detach()

        return Workload(step, step_with_shape, leaves, normalised_product)


def build_layer(job: Job) -> Layer:
    """The seeded block under the job's peer."""
    block = build_block(job)
    return Layer(job, block, find_peer(job.workload, job.peer).wrap(block, job.sizes))


def build_layer_workload(job: Job) -> Workload:
    return build_layer(job).at(job.sizes, job.load)


def build_gradients_workload(job: Job) -> Workload:
    """The layer, and how far its gradients are from an fp32 reference with the same routing."""
    block = build_block(job)
    hidden, upstream = draw_inputs(job, job.sizes, job.load)
    reference = _reference_gradients(block, hidden, upstream)
    layer = Layer(job, block, find_peer(job.workload, job.peer).wrap(block, job.sizes))
    workload = layer.workload(hidden, upstream)

    def gradient_error() -> float:
        return max(
            _relative_error(leaf.grad, reference[name])
            for name, leaf in workload.leaves.items()
            if leaf.grad is not None
        )

    return Workload(workload.step, workload.step_with_shape, workload.leaves, workload.value_of, gradient_error)


def build_block(job: Job) -> Any:
    """A Qwen3-MoE block; with a made load, its router is the one that the inputs are made for."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes, device, dtype = job.sizes, torch.device(job.device), getattr(torch, job.dtype)
    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.width,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=sizes.top_k > 1,  # one normalised choice is always 1, and its router has no gradient
    )
    config._experts_implementation = "grouped_mm"
    generator = torch.Generator(device=device).manual_seed(job.seed)
    with torch.device(device):
        block = Qwen3MoeSparseMoeBlock(config).to(dtype).train()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=WEIGHT_STD, generator=generator)
    if job.load:
        block.gate.weight.data.copy_(_made_router(job, sizes))
    return block


def draw_inputs(job: Job, sizes: Sizes, load: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The input and the gradient of the output, each [batch, sequence, H]."""
    device, dtype = torch.device(job.device), getattr(torch, job.dtype)
    generator = torch.Generator(device=device).manual_seed(job.seed + 1)
    shape = (sizes.batch, sizes.sequence, sizes.hidden)
    if load:
        chooser = torch.Generator().manual_seed(job.seed + 2)
        chosen = choose_experts(expert_counts(load, sizes.tokens, sizes.experts, sizes.top_k), sizes.tokens, chooser)
        tokens = tokens_that_choose(chosen, _made_router(job, sizes), chooser)
        hidden = tokens.view(shape).to(device, dtype).requires_grad_()
    else:
        hidden = torch.randn(shape, dtype=dtype, device=device, generator=generator, requires_grad=True)
    return hidden, torch.randn(shape, dtype=dtype, device=device, generator=generator)


def _made_router(job: Job, sizes: Sizes) -> torch.Tensor:
    return router_weight(sizes.experts, sizes.hidden, torch.Generator().manual_seed(job.seed + 3))


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


def sizes_of_layer(sizes: Sizes, imbalance: Imbalance) -> Sizes:
    """`sizes` are the most loaded layer's; the others have tokens in proportion to their rows."""
    share = rank_rows(imbalance) / max(rank_rows(other) for other in IMBALANCE)
    return replace(sizes, batch=1, sequence=max(1, round(sizes.sequence * share)))


def build_rank_workload(job: Job) -> Workload:
    layer = build_layer(job)
    sizes = [sizes_of_layer(job.sizes, one) for one in IMBALANCE]
    parts = [layer.at(size, f"paper:{one.layer}") for size, one in zip(sizes, IMBALANCE, strict=True)]
    leaves: dict[str, torch.Tensor] = {}
    for one, part in zip(IMBALANCE, parts, strict=True):
        leaves |= {f"hidden {one.layer}" if name == "hidden" else name: leaf for name, leaf in part.leaves.items()}

    def step() -> torch.Tensor:
        for part in parts[:-1]:
            part.step()
        return parts[-1].step()

    return Workload(
        step=step,
        step_with_shape=parts[0].step_with_shape,
        leaves=leaves,
        value_of=normalised_product,
        series={
            "layer": tuple(float(one.layer) for one in IMBALANCE),
            "rows": tuple(float(size.routed_rows) for size in sizes),
        },
        parts=tuple(part.step for part in parts),
    )
