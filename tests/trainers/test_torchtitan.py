"""torchtitan's own model, parallelization, optimizer and loss in a plain loop, block by block under memfine_fx.

Its Trainer takes no CPU, and FlexAttention has no backward there, so a block attends by torch's fused attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memfine_fx

pytest.importorskip("torchtitan.models.qwen3")
WORDS, LENGTH = 128, 64


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torchtitan.distributed.parallel_dims as parallel_dims

    monkeypatch.setattr(parallel_dims, "device_type", "cpu")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def tiny_spec(monkeypatch: pytest.MonkeyPatch) -> Any:
    from torchtitan.models import qwen3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    monkeypatch.setattr(qwen3, "get_attention_config", lambda backend: ScaledDotProductAttention.Config())
    spec = qwen3.model_registry("debugmodel_moe")
    sizes = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "num_experts": 16, "top_k": 4}
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=2, moe_hidden_dim=96, attn_backend="flex", moe_comm_backend="standard",
        rope=qwen3.CosSinRoPE.Config(dim=16, max_seq_len=256, theta=1e6), **sizes,
    )  # fmt: skip
    model = dataclasses.replace(
        spec.model,
        vocab_size=WORDS,
        dim=64,
        norm=qwen3._qwen3_norm(64),
        tok_embeddings=dataclasses.replace(spec.model.tok_embeddings, num_embeddings=WORDS, embedding_dim=64),
        lm_head=dataclasses.replace(spec.model.lm_head, in_features=64, out_features=WORDS),
        layers=layers,
    )
    return dataclasses.replace(spec, model=model)


def losses_of(spec: Any, checkpointing: Any, folder: Path, *, is_sharded: bool) -> tuple[list[float], torch.nn.Module]:
    """Four steps of torchtitan's AdamW."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.parallel_dims import ParallelDims

    torch.manual_seed(0)
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, 1)
    training = TrainingConfig(local_batch_size=2, seq_len=LENGTH, mixed_precision_param="float32")
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=training, parallelism=parallelism, compile_config=CompileConfig(),
        ac_config=checkpointing, dump_folder=str(folder), skip_dp=not is_sharded,
    )  # fmt: skip
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    loss_of = CrossEntropyLoss.Config(global_vocab_size=WORDS).build(compile_config=CompileConfig())
    optimizer = default_adamw(lr=1e-2).build(model_parts=[model])
    spec.post_optimizer_build_fn(optimizer, [model], dims)
    losses = []
    for seed in range(4):
        tokens = torch.randint(0, WORDS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        places = torch.arange(LENGTH).expand(2, LENGTH)
        loss, _ = loss_of(model(tokens[:, :-1], places), tokens[:, 1:].contiguous(), torch.tensor(2.0 * LENGTH))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def compiled_plainly(spec: Any) -> Any:
    """As torchtitan compiles it, without Inductor; under checkpoints its losses differ from eager's."""

    def parallelize(model: torch.nn.Module, **given: Any) -> Any:
        parallelized = spec.parallelize_fn(model, **given)
        for block in parallelized.layers.values():
            block.compile(backend="aot_eager")
        return parallelized

    return dataclasses.replace(spec, parallelize_fn=parallelize)


@pytest.mark.trainers
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # torchtitan's own: autocast to fp32 on a CPU
@pytest.mark.parametrize("checkpointing", ["", "FullAC", "SelectiveAC"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_blocks_of_torchtitan_are_chunked_and_train_alike(
    checkpointing: str, is_sharded: bool, one_rank: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torchtitan.distributed import activation_checkpoint

    from memfine_fx.integrations.torchtitan import compiled_by_memfine

    config = getattr(activation_checkpoint, checkpointing).Config() if checkpointing else None
    spec = tiny_spec(monkeypatch)
    plain, _ = losses_of(compiled_plainly(spec), config, tmp_path, is_sharded=is_sharded)
    ours = compiled_by_memfine(spec, inner_backend="aot_eager", rows_per_chunk=64)
    chunked, model = losses_of(ours, config, tmp_path, is_sharded=is_sharded)
    assert chunked == pytest.approx(plain, rel=1e-4), "products in bf16, chunk by chunk"
    report = memfine_fx.report(model)
    assert report.regions and all(region.status == "chunked" for region in report.regions), str(report)


def test_an_option_that_does_not_exist_is_named() -> None:
    from memfine_fx.integrations.torchtitan import compiled_by_memfine

    with pytest.raises(memfine_fx.ConfigError, match="memory_bugdet"):
        compiled_by_memfine(None, memory_bugdet="1GiB")
