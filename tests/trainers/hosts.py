"""What trains a model in the matrix of `test_matrix`: each host by what is trained and by the way memfine_fx comes in.

A host is called with (kind, way, folder) and gives what its run logged and the numbers of the layers that were chunked.

    kind: "full"; "attention": LoRA of PEFT on attention over frozen experts; "experts": on attention and expert tables
    way: "plain"; "optimize": `memfine_fx.optimize(model)`; "backend": the name "memfine" where the host takes a backend
"""

from __future__ import annotations

import functools
import os
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.runtime import op
from tests.expert_parallel.ranks import run_ranks

OPTIONS = {"inner_backend": "eager", "rows_per_chunk": 5}
NUM_LAYERS, NUM_STEPS, WORDS = 2, 3, 64
_SHARED = -1
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True)
class Trained:
    """One run.

    Args:
        logged: a step each.
        layers: numbers of those that were chunked in some graph; all where equal layers share one that has no number,
            if as many backwards ran in chunks as layers and steps ask for.
        rows_per_chunk: of their plans.
        told: memfine_fx's warnings.
    """

    logged: list[float]
    layers: set[int]
    rows_per_chunk: set[int]
    told: tuple[str, ...] = ()


class _CountedBackwards:
    """How many backwards of a layer's experts ran in chunks."""

    def __enter__(self) -> None:
        self.number, self._runs = 0, op.run_backward

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return self._runs(*args, **kwargs)

        op.run_backward = counting

    def __exit__(self, *_: object) -> None:
        op.run_backward = self._runs


def listened(run: Callable[..., Trained]) -> Callable[..., Trained]:
    """With what it told."""

    @functools.wraps(run)
    def listening(*args: Any) -> Trained:
        counted = _CountedBackwards()
        with warnings.catch_warnings(record=True) as caught, counted:
            warnings.simplefilter("always")
            trained = run(*args)
        if trained.layers == {_SHARED} and counted.number >= NUM_LAYERS * NUM_STEPS:
            trained = replace(trained, layers=set(range(NUM_LAYERS)))
        return replace(trained, told=tuple(str(one.message) for one in caught if "memfine_fx" in str(one.message)))

    return listening


def model_of(kind: str, **overrides: Any) -> Any:
    """A Qwen3-MoE of two layers, with adapters where `kind` has them."""
    torch.manual_seed(0)
    model = tiny_causal_lm("qwen3_moe", num_hidden_layers=NUM_LAYERS, **overrides)
    if kind == "full":
        return model
    from peft import LoraConfig, get_peft_model

    targets = EXPERTS if kind == "experts" else None
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], target_parameters=targets))


def batches(rank: int = 0) -> Iterable[dict[str, torch.Tensor]]:
    for step in range(NUM_STEPS):
        tokens = torch.randint(1, WORDS, (2, 12), generator=torch.Generator().manual_seed(100 * rank + step))
        yield {"input_ids": tokens, "labels": tokens}


def base_of(model: Any) -> Any:
    """The language model under PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@listened
def loop(kind: str, way: str, folder: Path) -> Trained:
    """A loop of one's own."""
    model = model_of(kind)
    called = _changed(model, way)
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=1e-2)
    losses = []
    for batch in batches():
        loss = called(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _trained(losses, called, way)


@listened
def transformers_trainer(kind: str, way: str, folder: Path) -> Trained:
    """With recorded router logits and gradient checkpointing."""
    from transformers import Trainer, TrainingArguments

    model = model_of(kind, output_router_logits=True)
    if kind != "full":
        model.enable_input_require_grads()
    settings = _of_trainers(model, way)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=NUM_STEPS, per_device_train_batch_size=2, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False}, learning_rate=1e-2, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, **settings,
    )  # fmt: skip
    rows = [{key: value[0] for key, value in batch.items()} for batch in batches()] * 4
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return _trained([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model, way)


def of_trl(name: str) -> Callable[[str, str, Path], Trained]:
    """One of TRL's, as its example runs it."""

    @listened
    def run(kind: str, way: str, folder: Path) -> Trained:
        from trl_trainers import train

        logged, model = train(name, kind, way, folder, memfine_fx.Config(**OPTIONS))
        return _trained(logged, model, way)

    return run


@listened
def accelerated(kind: str, way: str, folder: Path) -> Trained:
    from accelerate import Accelerator

    model = model_of(kind)
    settings = {"dynamo_backend": "memfine"} if _of_trainers(model, way) else {}
    accelerator = Accelerator(cpu=True, **settings)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained_parameters(model), lr=1e-2))
    losses = []
    for batch in batches():
        loss = prepared(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _trained(losses, model, way)


@listened
def lightning_trainer(kind: str, way: str, folder: Path) -> Trained:
    import lightning

    model = model_of(kind)
    called, losses = _changed(model, way), []

    class Module(lightning.LightningModule):  # type: ignore[misc]  # not there where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.model = called

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(trained_parameters(self), lr=1e-2)

    trainer = lightning.Trainer(
        max_steps=NUM_STEPS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(folder),
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(list(batches()), batch_size=None))
    return _trained(losses, called, way)


def on_ranks(rank_run: Callable[[int, str, str], Trained]) -> Callable[[str, str, Path], Trained]:
    """On two gloo processes, which run all ways one after the other: starting them is most of the time; rank 0's."""

    @functools.cache
    def of_kind(kind: str) -> dict[str, Trained | str]:
        first, second = run_ranks(_all_ways, 2, rank_run.__name__, kind, timeout_s=400)
        for one, other in zip(first.values(), second.values(), strict=True):
            assert isinstance(one, str) or one.layers == other.layers
        return dict(first)

    def run(kind: str, way: str, folder: Path) -> Trained:
        trained = of_kind(kind)[way]
        assert isinstance(trained, Trained), trained
        return trained

    return run


def _all_ways(rank: int, name: str, kind: str) -> dict[str, Trained | str]:
    """What each way gave, or the error that it ended with."""
    found: dict[str, Trained | str] = {}
    for way in ("plain", "optimize", "backend"):
        torch._dynamo.reset()
        try:
            found[way] = globals()[name](rank, kind, way)
        except Exception:
            found[way] = traceback.format_exc()
    return found


@listened
def ddp_rank(rank: int, kind: str, way: str) -> Trained:
    model = model_of(kind)
    if way == "optimize":
        _changed(model, way)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    if way == "backend":
        torch._dynamo.config.optimize_ddp = False  # as docs/trainers.md says
        replica = _changed(replica, way)
    return _stepped(replica, model, rank, way)


@listened
def fsdp2_rank(rank: int, kind: str, way: str) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of(kind)
    mesh = init_device_mesh("cpu", (2,))
    for part in (*base_of(model).model.layers, model):
        fully_shard(part, mesh=mesh)
    return _stepped(_changed(model, way), model, rank, way)


@listened
def _zero_1(rank: int, kind: str, way: str) -> Trained:
    return _zero(rank, kind, way, 1)


@listened
def _zero_2(rank: int, kind: str, way: str) -> Trained:
    return _zero(rank, kind, way, 2)


@listened
def _zero_3(rank: int, kind: str, way: str) -> Trained:
    return _zero(rank, kind, way, 3)


def _zero(rank: int, kind: str, way: str, stage: int) -> Trained:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29731", DS_ACCELERATOR="cpu")
    import deepspeed

    model = model_of(kind)
    if way == "optimize":
        _changed(model, way)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    parameters = trained_parameters(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=settings)
    if way == "backend":
        engine.compile(backend="memfine", compile_kwargs={"options": OPTIONS})
    losses = []
    for batch in batches(rank):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return _trained(losses, model, way)


def _stepped(called: Any, model: torch.nn.Module, rank: int, way: str) -> Trained:
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=1e-2)
    losses = []
    for batch in batches(rank):
        loss = called(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _trained(losses, called, way)


def _changed(model: Any, way: str) -> Any:
    """What is to be called."""
    if way == "optimize":
        return memfine_fx.optimize(model, config=memfine_fx.Config(**OPTIONS))
    return torch.compile(model, backend="memfine", options=OPTIONS) if way == "backend" else model


def _of_trainers(model: Any, way: str) -> dict[str, Any]:
    """Arguments of a trainer that compiles by itself, from the same options."""
    if way == "optimize":
        _changed(model, way)
    if way != "backend":
        return {}
    os.environ["MEMFINE_OPTIONS"] = ",".join(f"{name}={value}" for name, value in OPTIONS.items())
    return {"torch_compile": True, "torch_compile_backend": "memfine"}


def _trained(logged: list[float], model: Any, way: str) -> Trained:
    if way == "plain":
        return Trained(logged, set(), set())
    chunked = [region for region in memfine_fx.report(model).regions if region.status == "chunked"]
    paths = [region.where.module.split(".") for region in chunked]
    layers = {int(path[path.index("layers") + 1]) if "layers" in path else _SHARED for path in paths}
    return Trained(logged, layers, {region.plan.rows_per_chunk for region in chunked if region.plan is not None})


HOSTS: dict[str, Callable[[str, str, Path], Trained]] = {
    "own loop": loop,
    "transformers.Trainer": transformers_trainer,
    "TRL SFTTrainer": of_trl("sft"),
    "TRL SFTTrainer, packing": of_trl("sft_packed"),
    "TRL SFTTrainer, padding-free": of_trl("sft_padding_free"),
    "TRL SFTTrainer, chunked_nll": of_trl("sft_chunked_nll"),
    "TRL DPOTrainer": of_trl("dpo"),
    "TRL RewardTrainer": of_trl("reward"),
    "TRL GRPOTrainer": of_trl("grpo"),
    "accelerate": accelerated,
    "Lightning": lightning_trainer,
    "DDP": on_ranks(ddp_rank),
    "FSDP2": on_ranks(fsdp2_rank),
    "DeepSpeed ZeRO-1": on_ranks(_zero_1),
    "DeepSpeed ZeRO-2": on_ranks(_zero_2),
    "DeepSpeed ZeRO-3": on_ranks(_zero_3),
}
NEEDS = {
    "TRL": ("trl", "datasets"),
    "Lightning": ("lightning",),
    "DeepSpeed": ("deepspeed",),
    "accelerate": ("accelerate",),
}
COMPILED_BY_NAME_ALONE = (
    "own loop",
    "Lightning",
    "DDP",
    "FSDP2",
    "DeepSpeed ZeRO-1",
    "DeepSpeed ZeRO-2",
    "DeepSpeed ZeRO-3",
)
"""Hosts where a user's own line names the backend, so that nobody can prepare the model before it is captured."""
