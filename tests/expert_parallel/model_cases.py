"""Whole models trained on several ranks against one process with all their batches.

DistributedDataParallel averages what is not sharded, or FSDP2 shards it. The reference's loss is that of all ranks'
tokens, so losses agree after averaging over ranks, and every gradient as it is.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import memfine_fx
from benchmarks.formats import linear_of
from benchmarks.workloads.adapted import FORMATS, Adapted
from memfine_fx.compat.bitsandbytes import pack_table
from memfine_fx.expert_parallel import sharded
from memfine_fx.expert_parallel.groups import expert_group
from memfine_fx.expert_parallel.shard import sharded_parameters
from memfine_fx.expert_parallel.state import TrainingState, whole_state_dict
from memfine_fx.models import DeepseekConfig, DeepseekMoE

VOCAB, SEQUENCE, STEPS = 32, 12, 20


class DeepseekLike(nn.Module):
    """Two DeepSeek-V3 layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        config = DeepseekConfig(hidden=16, expert_width=8, num_experts=8, top_k=3, spelling="gathered")
        self.embedding = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(DeepseekMoE(config) for _ in range(2))
        for layer in self.layers:
            layer.gate.e_score_correction_bias.normal_(std=0.1)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            hidden = hidden + layer(norm(hidden))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class ListOfExperts(nn.Module):
    """A loop over a ModuleList: each expert's parameters are tensors of their own."""

    def __init__(self, hidden: int = 16, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.gate = nn.Linear(hidden, 5, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, width), nn.SiLU(), nn.Linear(width, hidden, bias=False)) for _ in range(5)
        )
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids).flatten(0, 1)
        weight, index = self.gate(hidden).softmax(-1).topk(2)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(index == number)
            out.index_add_(0, token, expert(hidden[token]) * weight[token, place].unsqueeze(-1))
        return F.cross_entropy(self.head(hidden + out), labels.flatten())


def qwen(hidden: int = 16, expert_width: int = 8) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=32,
        moe_intermediate_size=expert_width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    model: nn.Module = Qwen3MoeForCausalLM(config)
    return model


def adapted(model: nn.Module | None = None) -> nn.Module:
    """Adapters of PEFT on the experts' tables and on attention; the tables themselves are frozen."""
    import peft

    settings = peft.LoraConfig(
        r=3,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    adapters: nn.Module = peft.get_peft_model(model or qwen(), settings)
    return adapters


def packed(format_name: str) -> nn.Module:
    """Experts' tables in a format, frozen, with adapters added to what is made of them."""
    model: Any = qwen(128, 128)  # blocks have 64 or 128 numbers
    for layer in model.model.layers:  # the first rank's experts get most rows, so that help pays
        layer.mlp.gate.weight.data[:2] *= 8
    for module, table in _tables(model):
        FORMATS[format_name](module, table)
        parametrize.register_parametrization(module, table, Adapted(getattr(module, table)))
    return model  # type: ignore[no-any-return]


def packed_below_peft() -> tuple[nn.Module, nn.Module]:
    """PEFT's adapters on tables in NF4 with quantized scales, and on those made whole: PEFT errs over packed ones."""
    model = adapted(qwen(64, 64))
    whole = copy.deepcopy(model)
    for (module, table), (other, _) in zip(_tables(model), _tables(whole), strict=True):
        pack_table(module, table)
        getattr(other, table).data.copy_(getattr(module, table))
    return model, whole


def packed_list() -> nn.Module:
    """A list of experts whose linear layers are in NF4, and PEFT's adapters on them."""
    import peft

    model = ListOfExperts(64, 64)
    for expert in model.experts:
        expert[0], expert[2] = (linear_of("Linear4bit", one) for one in (expert[0], expert[2]))
        expert.requires_grad_(False)
    settings = peft.LoraConfig(r=3, target_modules=r"experts\.\d+\.[02]", init_lora_weights=False)
    adapters: nn.Module = peft.inject_adapter_in_model(settings, model)
    for trained in (model.embedding, model.gate, model.head):
        trained.requires_grad_(True)
    return adapters


def _tables(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Experts' tables, which are frozen."""
    names = ("gate_up_proj", "down_proj")
    found = [
        (module, name)
        for module in model.modules()
        for name in names
        if isinstance(getattr(module, name, None), nn.Parameter)
    ]
    for module, name in found:
        getattr(module, name).requires_grad_(False)
    return found


MODELS: dict[str, Callable[[], nn.Module | tuple[nn.Module, nn.Module]]] = {
    "Qwen3-MoE": qwen,
    "DeepSeek-like": DeepseekLike,
    "list of experts": ListOfExperts,
    "adapted Qwen3-MoE": adapted,
    **{name: functools.partial(packed, name) for name in ("nf4", "mxfp4", "fp8", "int8")},
    "nf4 below PEFT": packed_below_peft,
    "list in nf4 below PEFT": packed_list,
}
"""Models by name, or with what they are compared with: else a copy."""


Plan = list[tuple[str, tuple[int, ...], str | None, bool, int]]
"""Models to train: name, shape of the mesh, where to save and resume, whether FSDP2 shards the dense part, slots."""


@dataclass(frozen=True)
class Comparison:
    """Worst relative errors over all steps: of losses, and of gradients, with the name of the worst.

    Clones are those of the last step, on all ranks and in all layers.
    """

    loss: float
    gradient: float
    worst: str
    num_chunked: int
    num_refused: int
    num_clones: int


class Trained:
    """One model on this rank, or the reference."""

    def __init__(self, model: nn.Module, mesh: Any = None, *, shards_dense: bool = False, slots: int = 0) -> None:
        self.model = self.call = model
        # In wider models roundings grow from step to step until they decide between experts that nearly tie.
        rate = 1e-2 if next(model.parameters()).shape[-1] <= 16 else 1e-3
        if mesh is not None:
            config = memfine_fx.Config(rows_per_chunk=13)
            group = expert_group(mesh, slots=slots)
            memfine_fx.optimize(model, inner_backend="eager", expert_parallel=group, config=config)
        if shards_dense:
            experts = {one.parameter for one in sharded_parameters(model).values()}
            fully_shard(model, mesh=_mesh((dist.get_world_size(),)), ignored_params=experts)
        elif mesh is not None:
            self.call = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, eps=1e-3, foreach=False)

    def step(self, batch: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        result = self.call(input_ids=batch, labels=batch)
        loss: torch.Tensor = result if isinstance(result, torch.Tensor) else result.loss
        loss.backward()
        return float(loss.detach())


def run_model(
    rank: int,
    name: str,
    shape: tuple[int, ...],
    folder: str | None = None,
    shards_dense: bool = False,
    slots: int = 0,
) -> Comparison:
    """Train on a mesh of this shape; with a folder, go on from a checkpoint on another mesh after half of the steps."""
    warnings.simplefilter("error", RuntimeWarning)
    torch._dynamo.reset()
    torch.manual_seed(3)
    made = MODELS[name]()
    whole, other = made if isinstance(made, tuple) else (made, copy.deepcopy(made))
    reference = Trained(other.train())
    ours = Trained(whole.train(), _mesh(shape), shards_dense=shards_dense, slots=slots)
    worst_loss, worst, worst_name = 0.0, 0.0, ""
    for step in range(STEPS):
        if folder is not None and step == STEPS // 2:
            ours = _resumed(ours, cast("nn.Module", MODELS[name]()), Path(folder))
        loss, expected, errors = _compare(rank, step, ours, reference)
        worst_loss = max(worst_loss, abs(loss - expected) / abs(expected))
        name_of_worst = max(errors, key=errors.__getitem__)
        if errors[name_of_worst] > worst:
            worst, worst_name = errors[name_of_worst], f"{name_of_worst} in step {step}"
        ours.optimizer.step()
        reference.optimizer.step()
    report = memfine_fx.report(ours.model)
    refused = [region for region in report.regions if region.status == "refused"]
    assert all(region.rounds is not None for region in report.regions), "a layer ran on whole tables"
    clones = sum(region.rounds.num_clones for region in report.regions if region.rounds is not None)
    return Comparison(worst_loss, worst, worst_name, report.num_chunked, len(refused), clones)


def _mesh(shape: tuple[int, ...]) -> Any:
    return dist.device_mesh.init_device_mesh("cpu", shape)


def _resumed(trained: Trained, fresh: nn.Module, folder: Path) -> Trained:
    """Saved, and loaded into another model whose experts every rank holds whole."""
    dcp.save({"training": TrainingState(trained.model, trained.optimizer)}, checkpoint_id=folder)
    other = Trained(fresh.train(), _mesh((dist.get_world_size(), 1)))
    dcp.load({"training": TrainingState(other.model, other.optimizer)}, checkpoint_id=folder)
    exported, loaded = whole_state_dict(trained.model), whole_state_dict(other.model)
    for name, value in loaded.items() if exported else ():
        assert torch.equal(exported[name], value), name
    return other


def _compare(rank: int, step: int, ours: Trained, reference: Trained) -> tuple[float, float, dict[str, float]]:
    torch.manual_seed(100 + step)
    num_ranks = dist.get_world_size()
    batches = torch.randint(0, VOCAB, (2 * num_ranks, SEQUENCE))
    expected = reference.step(batches)
    loss = torch.tensor(ours.step(batches[2 * rank : 2 * rank + 2]))
    dist.all_reduce(loss)
    owned = sharded_parameters(ours.model)
    errors = {}
    for (name, parameter), other in zip(ours.model.named_parameters(), reference.model.parameters(), strict=True):
        if not other.requires_grad:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None and other.grad is not None, name
        exact = owned[name].own(other.grad) if name in owned else other.grad
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        errors[name] = float((gradient - exact).norm() / exact.norm().clamp_min(1e-4))
    return float(loss) / num_ranks, expected, errors


def run_models(rank: int, plan: Plan) -> list[Comparison]:
    sharded.flops_of = lambda ranks: 1.0  # type: ignore[attr-defined]  # so slow that help, where there is room, pays
    return [run_model(rank, *one) for one in plan]
