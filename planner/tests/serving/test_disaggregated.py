"""Caches between layouts: nothing is lost, and two processes generate what one does."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from memfine_fx.demo.tiny import tiny_causal_lm, tiny_model
from memfine_fx.errors import ConfigError
from memfine_planner.serving import disaggregated
from memfine_planner.serving.disaggregated import (
    Layout,
    cache_of,
    decode,
    generate,
    prefill,
    receive,
    routes,
    send,
    shards_of,
)

transformers = pytest.importorskip("transformers")

SOURCES = [Layout(), Layout(2, 3), Layout(4, 16, heads_first=True), Layout(8, 5)]
TARGETS = [Layout(1, 7, heads_first=True), Layout(4, 4), Layout(8, 2, heads_first=True)]


def filled(heads: int = 4, tokens: int = 11, value_width: int = 6) -> "transformers.DynamicCache":
    torch.manual_seed(0)
    cache = transformers.DynamicCache()
    for layer in range(3):
        cache.update(torch.randn(1, heads, tokens, 6), torch.randn(1, heads, tokens, value_width), layer)
    return cache


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends in one process: what is sent waits to be received."""
    waiting: list[torch.Tensor] = []
    monkeypatch.setattr(disaggregated.dist, "send", lambda tensor, peer: waiting.append(tensor.clone()))
    monkeypatch.setattr(disaggregated.dist, "recv", lambda tensor, peer: tensor.copy_(waiting.pop(0)))


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_cache_arrives_as_it_was(source: Layout, target: Layout, mailbox: None) -> None:
    before = filled(value_width=10)
    num_bytes = send(*shards_of(before, source), source, target, 1)
    shape, shards = receive(target, source, 0)
    assert len(shards) == target.tp
    after = cache_of(shape, shards, target, torch.float32)
    for one, other in zip(before.layers, after.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
    # Each head goes once, but for those that the target repeats.
    assert num_bytes == 3 * 11 * 4 * max(1, target.tp // 4) * (6 + 10) * 4


def test_narrow_end_decides_what_is_sent(mailbox: None) -> None:
    source, target = Layout(), Layout(dtype=torch.bfloat16)
    before = filled()
    assert send(*shards_of(before, source), source, target, 1) == 3 * 11 * 4 * 12 * 2
    after = cache_of(*receive(target, source, 0), target, torch.float32)
    assert torch.equal(after.layers[0].keys, before.layers[0].keys.bfloat16().float())


@pytest.mark.parametrize(("heads", "source", "target"), [(8, 1, 4), (8, 4, 2), (2, 8, 4), (6, 2, 3), (1, 1, 8)])
def test_routes_bring_every_shard_its_heads_once(heads: int, source: int, target: int) -> None:
    for there in range(target):
        arrived = [
            h
            for route in routes(heads, source, target)
            if route.target == there
            for h in range(route.first, route.last)
        ]
        assert len(arrived) == len(set(arrived)) == max(1, heads // target)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 heads cannot be kept in 4 shards; expected a divisor or a multiple"):
        routes(6, 4, 2)


def test_several_prompts_are_refused() -> None:
    cache = transformers.DynamicCache()
    cache.update(torch.randn(2, 4, 3, 6), torch.randn(2, 4, 3, 6), 0)
    with pytest.raises(ConfigError, match="the cache of one prompt"):
        shards_of(cache, Layout())


def _run(rank: int, model_type: str, store: str, source: Layout, target: Layout) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    is_dense = model_type == "llama"
    model = (tiny_model("llama", wants_experts=False).module if is_dense else tiny_causal_lm(model_type)).eval()
    prompts = [torch.randint(0, 64, (1, length)) for length in (5, 19)]
    dist.init_process_group("gloo", f"file://{store}", world_size=2, rank=rank)
    if rank == 0:
        prefill(model, prompts, source, target, 1)
    else:
        generated = decode(model, 2, 12, target, source, 0)
        assert generated == [generate(model, prompt, 12) for prompt in prompts]
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama", "deepseek_v3"])
def test_two_processes_generate_what_one_does(model_type: str, tmp_path: Path) -> None:
    spawn(_run, (model_type, str(tmp_path / "store"), Layout(2, 4), Layout(1, 16, heads_first=True)), nprocs=2)
