"""A whole language model: Qwen3-MoE from transformers, one batch of random tokens, forward and backward."""

import torch

from benchmarks.peers import find_peer
from benchmarks.records import Job, Sizes
from benchmarks.workloads import Workload
from memfine_fx.demo.model import ModelSizes, build_causal_lm


def build_model_workload(job: Job) -> Workload:
    """A Qwen3-MoE language model and one batch of random tokens."""
    device = torch.device(job.device)
    model = build_causal_lm(_model_sizes(job.sizes), seed=job.seed, dtype=getattr(torch, job.dtype), device=device)
    forward = find_peer("model", job.peer).wrap(model, job.sizes)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

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
    names = ModelSizes.__dataclass_fields__.keys() & Sizes.__dataclass_fields__.keys()
    return ModelSizes(**{name: getattr(sizes, name) for name in names}, positions=4 * sizes.sequence)
