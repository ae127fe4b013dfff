"""Each rank records and replays the routing of its own tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import memfine_fx
from memfine_fx.passes.verify.forced_choices import ForcedChoices
from tests.expert_parallel.model_cases import VOCAB, qwen
from tests.expert_parallel.ranks import run_ranks

_CONFIG = memfine_fx.Config(inner_backend="eager", rows_per_chunk=16)


def replayed(rank: int, way: str) -> dict[str, float]:
    """Return errors of loss and gradients outside of experts against one process whose choices are forced."""
    torch.manual_seed(0)
    model: Any = qwen()
    unmodified = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(10 + rank)
    tokens = torch.randint(0, VOCAB, (2, 6), generator=generator)
    ids = torch.rand(12, 2, 6, generator=generator).topk(2).indices
    columns = iter(ids.unbind(1))
    with ForcedChoices(lambda scores, own: next(columns).view(own.shape), 6):
        loss = unmodified(input_ids=tokens, labels=tokens).loss
    loss.backward()
    call: nn.Module = model
    if way == "expert parallel":
        memfine_fx.optimize(model, expert_parallel=dist.group.WORLD, config=_CONFIG)
    else:
        if way == "FSDP2":
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        memfine_fx.optimize(model, config=_CONFIG)
        call = DistributedDataParallel(model) if way == "DDP" else model
    with memfine_fx.replay_routing(call, ids), memfine_fx.record_routing(call) as record:
        result = call(input_ids=tokens, labels=tokens).loss
        result.backward()
    assert torch.equal(record.ids.long(), ids)
    errors = {"loss": _error(result, loss)}
    for name, parameter in unmodified.named_parameters():
        if "experts" not in name:
            expected: Any = parameter.grad
            if way != "expert parallel":
                dist.all_reduce(expected)
                expected = expected / dist.get_world_size()
            gradient = model.get_parameter(name).grad
            errors[name] = _error(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient, expected)
    return errors


def _error(value: Tensor | None, expected: Tensor) -> float:
    assert value is not None
    return float((value - expected).norm() / expected.norm())


def test_ranks_that_share_experts_replay_their_own_tokens() -> None:
    for errors in run_ranks(replayed, 2, "expert parallel"):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_a_model_inside_ddp_or_sharded_is_recorded_and_replayed(way: str) -> None:
    for errors in run_ranks(replayed, 2, way):
        assert max(errors.values()) < 1e-5, errors
