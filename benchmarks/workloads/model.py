"""A whole language model from transformers, one batch of random tokens, forward and backward."""

from typing import Any

import torch

from benchmarks.peers import find_peer
from benchmarks.records import Job, Sizes
from benchmarks.workloads import Workload
from memfine_fx.demo.tiny import tiny_model
from memfine_fx.demo.training import ModelSizes, build_causal_lm


def build_model_workload(job: Job) -> Workload:
    """A language model, Qwen3-MoE unless the workload names another behind a colon, and one batch of random tokens."""
    device, dtype = torch.device(job.device), getattr(torch, job.dtype)
    if job.kind == job.workload:
        model = build_causal_lm(_model_sizes(job.sizes), seed=job.seed, dtype=dtype, device=device)
    else:
        model, _ = build_architecture(job, device)
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


def build_architecture(job: Job, device: torch.device) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model of the architecture that a job's workload names behind a colon, at the job's sizes, and its inputs."""
    torch.manual_seed(job.seed)
    sizes = job.sizes
    made = tiny_model(
        job.workload.partition(":")[2],
        batch=sizes.batch,
        length=sizes.sequence,
        layers=sizes.layers,
        experts_implementation="grouped_mm",
        **_fields(job),
    )
    model: Any = made.module.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, job.dtype))
    return model, {name: value.to(device) for name, value in made.inputs.items()}


def _fields(job: Job) -> dict[str, Any]:
    """The job's sizes under the names that transformers' configs use; each takes those it knows."""
    sizes, model = job.sizes, job.workload.partition(":")[2]
    fields = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.width,
        "moe_intermediate_size": sizes.width,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": 2 * sizes.sequence,
        "num_experts": sizes.experts,
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
    }
    if model == "deepseek_v3":  # heads have parts of their own sizes there and each its own key, experts another name
        del fields["head_dim"]
        fields |= {"num_key_value_heads": sizes.heads}
        fields |= {"n_routed_experts": sizes.experts, "kv_lora_rank": 64, "q_lora_rank": 64, "v_head_dim": 64}
    return fields
