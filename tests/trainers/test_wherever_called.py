"""An optimized model stays optimized in what hosts put around it and into it: one test for each thing they do.

Every step is compared with the same host around the same model without memfine_fx, and each layer must have run its
backward in chunks in that very step, so that no report of an earlier graph can stand for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.runtime import op
from tests.integration.comparison import FP32_TOLERANCE, relative_error

pytest.importorskip("transformers")
pytestmark = pytest.mark.trainers

NUM_LAYERS = 2
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OPTIONS: dict[str, Any] = {"inner_backend": "eager", "rows_per_chunk": 5}
WAYS = ["optimize", "backend"]
both_ways = pytest.mark.parametrize("way", WAYS)


def batch(seed: int = 0) -> dict[str, Tensor]:
    tokens = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def optimize(model: Any, way: str = "optimize") -> Any:
    """A model changed in place, by "optimize" or by the backend's name alone."""
    if way == "optimize":
        return memfine_fx.optimize(model, config=memfine_fx.Config(**OPTIONS))
    torch._dynamo.reset()  # Dynamo counts recompilations of a model's code over all models of the process
    model.compile(backend="memfine", options=OPTIONS)
    return model


def pair() -> tuple[Any, Any]:
    """A model that is not optimized yet and its twin that never is."""
    torch.manual_seed(0)
    model = tiny_causal_lm("qwen3_moe", num_hidden_layers=NUM_LAYERS)
    return model, copy.deepcopy(model)


class Steps:
    """Training steps of two models, and how many layers ran in chunks in each of ours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._num_chunked = 0
        run_backward = op.run_backward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._num_chunked += 1
            return run_backward(*args, **kwargs)

        monkeypatch.setattr(op, "run_backward", counted)

    def take(self, ours: Any, theirs: Any, tolerance: float = FP32_TOLERANCE) -> None:
        """Two steps of each: losses and gradients agree, and every layer was chunked.

        What is compiled in the first is compared with autograd, which runs a backward in chunks more.
        """
        for seed in range(2):
            self._num_chunked = 0
            losses = [_loss_of_step(model, batch(seed)) for model in (ours, theirs)]
            assert self._num_chunked == NUM_LAYERS or (seed == 0 and self._num_chunked > NUM_LAYERS)
            assert losses[0] == pytest.approx(losses[1], rel=tolerance)
            for (name, found), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                assert (found.grad is None) == (wanted.grad is None), name
                if found.grad is not None and wanted.grad is not None:
                    assert relative_error(found.grad, wanted.grad) < tolerance, name


def _loss_of_step(model: Any, inputs: dict[str, Tensor]) -> float:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def lora(targets: list[str]) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets, init_lora_weights=False)


adapted = pytest.mark.parametrize(
    ("targets", "way"),
    [
        pytest.param([], "optimize", id="attention-optimize"),
        pytest.param([], "backend", id="attention-backend"),
        pytest.param(EXPERTS, "optimize", id="attention and experts-optimize"),
    ],
)
"""What is adapted and the way in: PEFT's adapters on experts need `optimize`, as the backend's warning says."""


def with_adapters(model: Any, targets: list[str]) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(model, lora(targets))


@adapted
def test_adapters_made_after_it(steps: Steps, targets: list[str], way: str) -> None:
    ours, theirs = pair()
    optimize(ours, way)
    steps.take(ours, theirs)
    steps.take(with_adapters(ours, targets), with_adapters(theirs, targets))


@adapted
def test_adapters_made_before_it(steps: Steps, targets: list[str], way: str) -> None:
    ours, theirs = (with_adapters(model, targets) for model in pair())
    steps.take(optimize(ours, way), theirs)


@adapted
def test_adapters_that_are_added_switched_and_deleted(steps: Steps, targets: list[str], way: str) -> None:
    ours, theirs = pair()
    ours, theirs = with_adapters(optimize(ours, way), targets), with_adapters(theirs, targets)
    steps.take(ours, theirs)
    for model in (ours, theirs):
        torch.manual_seed(2)
        model.add_adapter("second", lora(targets))
        model.set_adapter("second")
    steps.take(ours, theirs)
    for model in (ours, theirs):
        model.set_adapter("default")
        model.delete_adapter("second")
    steps.take(ours, theirs)


@adapted
def test_adapters_that_are_disabled_for_a_while(steps: Steps, targets: list[str], way: str) -> None:
    """As DPO and GRPO do for the reference model."""
    ours, theirs = pair()
    ours, theirs = with_adapters(optimize(ours, way), targets), with_adapters(theirs, targets)
    for _ in range(2):
        steps.take(ours, theirs)
        with ours.disable_adapter(), theirs.disable_adapter(), torch.no_grad():
            assert relative_error(ours(**batch()).logits, theirs(**batch()).logits) < FP32_TOLERANCE


@adapted
def test_adapters_that_are_merged_and_unmerged(steps: Steps, targets: list[str], way: str) -> None:
    ours, theirs = pair()
    ours, theirs = with_adapters(optimize(ours, way), targets), with_adapters(theirs, targets)
    before = ours(**batch()).logits.detach()
    for model in (ours, theirs):
        model.merge_adapter()
    assert relative_error(ours(**batch()).logits, theirs(**batch()).logits) < FP32_TOLERANCE
    assert relative_error(ours(**batch()).logits, before) < FP32_TOLERANCE
    for model in (ours, theirs):
        model.unmerge_adapter()
    steps.take(ours, theirs)


@pytest.mark.parametrize("is_merged", [False, True], ids=["unload", "merge_and_unload"])
@adapted
def test_adapters_that_are_unloaded(steps: Steps, targets: list[str], way: str, is_merged: bool) -> None:
    ours, theirs = pair()
    ours, theirs = with_adapters(optimize(ours, way), targets), with_adapters(theirs, targets)
    ours(**batch())
    plain = [model.merge_and_unload() if is_merged else model.unload() for model in (ours, theirs)]
    for model in plain:
        model.requires_grad_(True)
    steps.take(*plain)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after a step"])
@both_ways
def test_checkpoints_that_are_switched_on(steps: Steps, way: str, is_before: bool, use_reentrant: bool) -> None:
    """With the embedding frozen, as adapters leave it: reentrant checkpoints need an input that wants gradients."""
    ours, theirs = pair()

    def switch_on() -> None:
        for model in (ours, theirs):
            model.get_input_embeddings().requires_grad_(False)
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()

    if is_before:
        switch_on()
    optimize(ours, way)
    if not is_before:
        steps.take(ours, theirs)
        switch_on()
    steps.take(ours, theirs)
    for model in (ours, theirs):
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
    steps.take(ours, theirs)


@pytest.fixture
def accelerator_of() -> Iterator[Callable[[str], Any]]:
    """An accelerator of a precision; a process has one, so that another test's is taken away, and this one back."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield lambda precision: accelerate.Accelerator(cpu=True, mixed_precision=precision)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_accelerate_prepares_it(
    steps: Steps, accelerator_of: Callable[[str], Any], is_before: bool, precision: str
) -> None:
    """Mixed precision puts a forward with autocast on the model."""
    prepare = accelerator_of(precision).prepare
    ours, theirs = pair()
    prepared = prepare(optimize(ours)) if is_before else optimize(prepare(ours))
    steps.take(prepared, prepare(theirs), FP32_TOLERANCE if precision == "no" else 3e-2)


def test_accelerate_gives_it_back(steps: Steps, accelerator_of: Callable[[str], Any]) -> None:
    accelerator = accelerator_of("bf16")
    ours, theirs = pair()
    prepared = accelerator.prepare(optimize(ours))
    prepared(**batch())
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert unwrapped is ours
    steps.take(unwrapped, theirs)


@pytest.mark.parametrize("optimized", ["the model, before", "the model, after", "the wrapper"])
def test_ddp_around_it(steps: Steps, group: None, optimized: str) -> None:
    ours, theirs = pair()
    if optimized == "the model, before":
        optimize(ours)
    wrapped, reference = (torch.nn.parallel.DistributedDataParallel(one) for one in (ours, theirs))
    if optimized != "the model, before":
        optimize(wrapped if optimized == "the wrapper" else ours)
    steps.take(wrapped, reference)


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_fsdp2_shards_it(steps: Steps, group: None, is_before: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    ours, theirs = pair()
    if is_before:
        optimize(ours)
    for model in (ours, theirs):
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
    if not is_before:
        optimize(ours)
    steps.take(ours, theirs)
