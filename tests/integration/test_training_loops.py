"""Whatever a training loop does with forward and backward: the optimized model must not show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm
from tests.integration.comparison import FP32_TOLERANCE, optimized_copy, relative_error

pytest.importorskip("transformers")

Loop = Callable[[Any], torch.Tensor]


def batch(seed: int = 0, length: int = 12) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def assert_same_training(loop: Loop, inner: str = "eager", **overrides: Any) -> Any:
    """What the loop returns, every parameter and every gradient after it equal those of the unmodified model."""
    model = tiny_causal_lm("qwen3_moe", **({"num_hidden_layers": 1} | overrides))
    optimized = optimized_copy(model, inner=inner, rows_per_chunk=5)
    assert relative_error(loop(optimized), loop(model)) < FP32_TOLERANCE
    for (name, ours), (_, theirs) in zip(optimized.named_parameters(), model.named_parameters(), strict=True):
        assert relative_error(ours, theirs) < FP32_TOLERANCE, name
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None and theirs.grad is not None:
            assert relative_error(ours.grad, theirs.grad) < FP32_TOLERANCE, name
    assert memfine_fx.report(optimized).num_chunked == len(optimized.model.layers)
    return optimized


def steps(
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], *, sets_to_none: bool = True
) -> Loop:
    def loop(model: Any) -> torch.Tensor:
        optimizer, losses = make_optimizer(model.parameters()), []
        for seed in range(3):
            optimizer.zero_grad(set_to_none=sets_to_none)
            loss = model(**batch(seed)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    return loop


def scaled_steps(model: Any) -> torch.Tensor:
    """fp16 under autocast with a GradScaler whose first scale overflows and is skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for seed in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(**batch(seed)).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(2.0**40 if seed == 0 else 2.0**10)
        losses.append(loss.detach())
    optimizer.zero_grad()
    return torch.stack(losses)


def autocast_on_and_off(model: Any) -> torch.Tensor:
    losses = []
    for enabled in (False, True, False):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(**batch()).loss
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def two_backwards(model: Any) -> torch.Tensor:
    model(**batch(1)).loss.backward()
    loss = model(**batch()).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def two_losses(model: Any) -> torch.Tensor:
    output = model(**batch(), output_router_logits=True)
    output.aux_loss.backward(retain_graph=True)
    output.loss.backward()
    return output.loss.detach()


def two_forwards_then_backward(model: Any) -> torch.Tensor:
    loss = model(**batch(1)).loss + model(**batch(2, length=7)).loss
    loss.backward()
    return loss.detach()


def evaluation_before_backward(model: Any) -> torch.Tensor:
    loss = model(**batch(1)).loss
    model.eval()
    with torch.no_grad():
        model(**batch(2, length=5))
    model.train()
    loss.backward()
    return loss.detach()


def checkpoint_around_the_model(model: Any) -> torch.Tensor:
    loss = checkpoint(lambda: model(**batch()).loss, use_reentrant=False)
    loss.backward()
    return loss.detach()


def activations_on_the_host(model: Any) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        loss = model(**batch()).loss
    loss.backward()
    return loss.detach()


def experts_frozen_for_a_while(model: Any) -> torch.Tensor:
    losses = []
    for is_trained in (True, False, True):
        model.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained or "experts" not in name)
        loss = model(**batch()).loss
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def optimizer_in_backward(model: Any) -> torch.Tensor:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for seed in range(2):
        loss = model(**batch(seed)).loss
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def gradient_of_embeddings_alone(model: Any) -> torch.Tensor:
    inputs = batch()
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embedded, labels=inputs["labels"]).loss, embedded)
    return gradient


LOOPS = {
    "AdamW foreach, zero_grad to None": steps(lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True)),
    "AdamW fused, zero_grad to zeros": steps(lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), sets_to_none=False),
    "GradScaler": scaled_steps,
    "autocast on and off": autocast_on_and_off,
    "two forwards then backward": two_forwards_then_backward,
    "evaluation before backward": evaluation_before_backward,
    "checkpoint around the model": checkpoint_around_the_model,
    "activations on the host": activations_on_the_host,
    "experts frozen for a while": experts_frozen_for_a_while,
    "optimizer in backward": optimizer_in_backward,
    "gradient of embeddings alone": gradient_of_embeddings_alone,
}


@pytest.mark.trainers
@pytest.mark.parametrize("name", LOOPS)
def test_training_loops_see_no_difference(name: str) -> None:
    assert_same_training(LOOPS[name])


def test_two_losses_of_one_forward() -> None:
    assert_same_training(two_losses, inner="aot_eager")


@pytest.mark.trainers
def test_compiled_code_runs_backward_twice_through_one_forward() -> None:
    """Inductor's code writes over what it saved; a kept graph must not see that."""
    assert_same_training(two_backwards, inner="inductor")


def test_recorded_router_logits_reach_the_graph_of_checkpointed_layers() -> None:
    def loop(model: Any) -> torch.Tensor:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        output = model(**batch())
        output.loss.backward()
        assert len(output.router_logits) == len(model.model.layers)
        return output.loss.detach()

    optimized = assert_same_training(loop, inner="aot_eager", output_router_logits=True)
    assert memfine_fx.report(optimized).num_graphs == 1


@pytest.mark.trainers
def test_recording_that_begins_later_is_captured_too() -> None:
    model = tiny_causal_lm("qwen3_moe", num_hidden_layers=2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimized = optimized_copy(model, rows_per_chunk=5)
    optimized(**batch())
    for recording in (model, optimized):
        recording.config.output_router_logits = True
        recording.zero_grad()
        recording(**batch()).loss.backward()
    for ours, theirs in zip(optimized.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert relative_error(ours.grad, theirs.grad) < FP32_TOLERANCE
    assert memfine_fx.report(optimized).num_chunked == 2


@pytest.mark.trainers
def test_a_copy_for_averaged_weights_is_optimized_too() -> None:
    model = tiny_causal_lm("qwen3_moe")
    optimized = optimized_copy(model, rows_per_chunk=5)
    optimized(**batch())
    averaged = torch.optim.swa_utils.AveragedModel(optimized)
    averaged.update_parameters(optimized)
    assert relative_error(averaged(**batch()).logits, model(**batch()).logits) < FP32_TOLERANCE
    assert memfine_fx.report(averaged.module).num_chunked == 2
