"""The ways to ask torch.compile: modes, fullgraph, dynamic, a compiled step; threads and generation."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.errors import ConfigError
from tests.integration.comparison import FP32_TOLERANCE, assert_same_step, optimized_copy, relative_error, run_step

OPTIONS = {"inner_backend": "eager", "rows_per_chunk": 5}
SHAPES = ((2, 12), (2, 9), (1, 7), (3, 12), (1, 1))


def tiny(num_layers: int = 1) -> Any:
    return tiny_causal_lm("qwen3_moe", num_hidden_layers=num_layers)


def batch(size: int = 2, length: int = 12) -> dict[str, Any]:
    tokens = torch.randint(1, 64, (size, length))
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.trainers
@pytest.mark.parametrize("dynamic", [True, False, None])
def test_every_setting_of_dynamic_is_exact_in_other_shapes(dynamic: bool | None) -> None:
    model = tiny()
    optimized = copy.deepcopy(model)
    optimized.compile(backend="memfine", dynamic=dynamic, options=OPTIONS)
    for shape in SHAPES:
        assert_same_step(optimized, model, batch(*shape))
    assert memfine_fx.report(optimized).num_chunked >= 1


@pytest.mark.trainers
def test_fullgraph_holds_with_recorded_router_logits() -> None:
    model = tiny_causal_lm("qwen3_moe", num_hidden_layers=1, output_router_logits=True)
    optimized = memfine_fx.optimize(
        copy.deepcopy(model), fullgraph=True, config=memfine_fx.Config(inner_backend="eager", rows_per_chunk=5)
    )
    assert_same_step(optimized, model, batch())
    assert memfine_fx.report(optimized).num_chunked == 1


@pytest.mark.trainers
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_modes_reach_the_graph_around_the_experts(mode: str) -> None:
    model = tiny()
    optimized = copy.deepcopy(model)
    optimized.compile(backend="memfine", mode=mode)
    seen = []
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    original = GraphLowering.run

    def run(self: Any, *args: Any) -> Any:
        seen.append(config.max_autotune)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphLowering, "run", run)
        # A graph that is cached is lowered no more.
        with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
            assert_same_step(optimized, model, batch())
    assert seen
    assert any(seen) == (mode != "default")


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_with_cuda_graphs_are_refused(mode: str) -> None:
    model = tiny()
    model.compile(backend="memfine", mode=mode)
    with pytest.raises(ConfigError, match="CUDA graphs"):
        model(**batch())


@pytest.mark.trainers
def test_a_compiled_training_step_is_chunked() -> None:
    model = tiny()
    ours = copy.deepcopy(model)

    def step(module: Any, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = module(**inputs).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = torch.compile(step, backend="memfine", options=OPTIONS)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (ours, model)]
    for _ in range(3):
        inputs = batch()
        found = compiled(ours, optimizers[0], inputs)
        assert relative_error(found, step(model, optimizers[1], inputs)) < FP32_TOLERANCE
    assert memfine_fx.report(ours).num_chunked == 1


@pytest.mark.trainers
def test_threads_share_an_optimized_model() -> None:
    model = tiny()
    optimized = optimized_copy(model, rows_per_chunk=5)
    inputs = [batch(2, 5 + number) for number in range(3)]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        for _ in range(3):
            found[number] = torch.autograd.grad(optimized(**inputs[number]).loss, list(optimized.parameters()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, gradients in found.items():
        expected = torch.autograd.grad(model(**inputs[number]).loss, list(model.parameters()))
        worst = max(relative_error(*pair) for pair in zip(gradients, expected, strict=True))
        assert worst < FP32_TOLERANCE
    assert len(found) == 3


@pytest.mark.trainers
def test_generation_and_training_take_turns() -> None:
    model = tiny()
    optimized = optimized_copy(model, rows_per_chunk=5)
    prompt = batch()["input_ids"]
    for settings in ({}, {"num_beams": 2}):
        assert_same_step(optimized, model, batch())
        written = [
            one.eval().generate(prompt, max_new_tokens=4, do_sample=False, **settings) for one in (optimized, model)
        ]
        assert torch.equal(*written)
        optimized.train()
        model.train()
    assert run_step(optimized, batch()).tensors
