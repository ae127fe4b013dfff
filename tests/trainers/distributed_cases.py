"""What two processes do under DDP and FSDP2, and what they saw: run by `test_distributed`."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm
from tests.integration.comparison import relative_error

NUM_LAYERS = 2
SIZES = dict(hidden_size=64, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=4, vocab_size=128)
WIDE = dict(moe_intermediate_size=512)
"""An expert table of 2 MiB: larger than a bucket of 1 MiB, so that a cut at buckets goes through the experts."""


@dataclass(frozen=True)
class Step:
    """One training step of one rank.

    Args:
        loss: of this rank.
        error: largest relative error of a gradient against the same wrapper around the unoptimized model.
        gradient_dtypes: of the parameters' gradients.
        hook_counts: how often each parameter's gradient hook ran.
    """

    loss: float
    error: float
    gradient_dtypes: frozenset[torch.dtype]
    hook_counts: frozenset[int]


@dataclass(frozen=True)
class Fsdp2Run:
    """A step under FSDP2, and the next one as the profiler saw it.

    Args:
        step: the first.
        reference_loss: of the unoptimized model.
        num_chunked: regions.
        num_chunks: chunk ranges of the profiled step.
        num_gathers: all-gathers of the profiled step, a parameter group each.
        inside_chunk_loops: names of FSDP's own ranges and of collectives that began within a chunk.
    """

    step: Step
    reference_loss: float
    num_chunked: int
    num_chunks: int
    num_gathers: int
    inside_chunk_loops: tuple[str, ...]


@dataclass(frozen=True)
class DdpRun:
    """A step under DDP; the parameters of each bucket in the order of their reduction, with and without memfine_fx."""

    step: Step
    reference_loss: float
    num_chunked: int
    buckets: tuple[tuple[torch.Size, ...], ...]
    reference_buckets: tuple[tuple[torch.Size, ...], ...]


@dataclass(frozen=True)
class HeadRun:
    """A step whose head is chunked too.

    Args:
        step: of this rank.
        reference_loss: of the unoptimized model in the same wrapper.
        num_chunks: of the head.
    """

    step: Step
    reference_loss: float
    num_chunks: int


def model_of(**overrides: Any) -> Any:
    torch.manual_seed(0)
    return tiny_causal_lm("qwen3_moe", num_hidden_layers=NUM_LAYERS, **{**SIZES, **overrides})


def batch(rank: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 128, (2, 32), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": tokens, "labels": tokens}


def config(inner: Any) -> memfine_fx.Config:
    return memfine_fx.Config(inner_backend=inner, rows_per_chunk=32)


def fsdp2_run(rank: int, inner: str, takes_bf16: bool) -> Fsdp2Run:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded(model: Any) -> Any:
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy if takes_bf16 else MixedPrecisionPolicy())
        return model

    reference, model = sharded(model_of()), sharded(model_of())
    memfine_fx.optimize(model, config=config(inner))
    reference_loss = reference(**batch(rank)).loss
    reference_loss.backward()
    step = _step(model, model, reference, rank)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(**batch(rank)).loss.backward()
    events = [event for event in profiler.events() or []]
    chunks = [event.time_range for event in events if " chunk " in event.name]
    moves = [event for event in events if event.name.startswith(("FSDP::", "c10d::"))]
    inside = [move.name for move in moves if any(chunk.start <= move.time_range.start < chunk.end for chunk in chunks)]
    return Fsdp2Run(
        step,
        reference_loss.item(),
        memfine_fx.report(model).num_chunked,
        len(chunks),
        sum("_allgather_base_" in move.name for move in moves),
        tuple(inside),
    )


def fsdp2_adapters_run(rank: int) -> tuple[float, list[str]]:
    """Adapters of PEFT on experts' tables, sharded like these: the worst gradient against a whole model on all batches,
    and of each region why a table was made whole.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    reference, model = adapted_model(), adapted_model()
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    memfine_fx.optimize(model, config=config("eager"))
    model(**batch(rank)).loss.backward()
    for other in range(dist.get_world_size()):
        (reference(**batch(other)).loss / dist.get_world_size()).backward()
    errors = [
        relative_error(_whole(ours.grad), theirs.grad)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True)
        if theirs.grad is not None
    ]
    assert len(errors) == 4 * NUM_LAYERS + 1  # A and B of two tables, and the embedding
    return max(errors), [region.why_expanded for region in memfine_fx.report(model).regions]


def adapted_model() -> Any:
    import peft

    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = peft.LoraConfig(r=3, target_modules=[], target_parameters=targets, init_lora_weights=False)
    model: Any = peft.inject_adapter_in_model(settings, model_of())
    model.get_input_embeddings().weight.requires_grad_(True)
    return model


def ddp_run(rank: int) -> DdpRun:
    """Buckets of 1 MiB, smaller than the model's expert tables, so that torch would cut the graph."""
    seen: dict[str, list[tuple[torch.Size, ...]]] = {}

    def wrapped(model: Any, name: str) -> Any:
        replica = DistributedDataParallel(model, bucket_cap_mb=1)
        buckets = seen.setdefault(name, [])

        def reduce(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations as objects
            buckets.append(tuple(parameter.shape for parameter in bucket.parameters()))
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None is the whole group

        replica.register_comm_hook(None, reduce)
        return replica

    reference, model = model_of(**WIDE), model_of(**WIDE)
    plain, ours = wrapped(reference, "plain"), wrapped(memfine_fx.optimize(model, config=config("eager")), "ours")
    for replica in (plain, ours):  # the first step has one bucket; those of later ones follow from its order
        replica(**batch(rank)).loss.backward()
        replica.zero_grad()
    for buckets in seen.values():
        buckets.clear()
    reference_loss = plain(**batch(rank)).loss
    reference_loss.backward()
    step = _step(ours, model, reference, rank)
    chunked = memfine_fx.report(model).num_chunked
    return DdpRun(step, reference_loss.item(), chunked, tuple(seen["ours"]), tuple(seen["plain"]))


def head_run(rank: int, takes_fsdp2: bool) -> HeadRun:
    """A chunked head under DDP or FSDP2, where its weight is a parameter of the outermost group."""
    giving_up_logits = replace(config("eager"), returns_logits=False, chunks_head=True, tokens_per_head_chunk=20)

    def wrapped(model: Any, changed: Callable[[Any], Any]) -> Any:
        if not takes_fsdp2:
            return DistributedDataParallel(changed(model), bucket_cap_mb=1)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return changed(model)

    reference, model = model_of(), model_of()
    plain = wrapped(reference, lambda one: one)
    ours = wrapped(model, lambda one: memfine_fx.optimize(one, config=giving_up_logits))
    reference_loss = plain(**batch(rank)).loss
    reference_loss.backward()
    step = _step(ours, model, reference, rank)
    (head,) = memfine_fx.report(model).heads
    return HeadRun(step, reference_loss.item(), head.num_chunks or 0)


def cut_graph_warnings(rank: int) -> list[str]:
    """`torch.compile(DDP(model), backend="memfine")` as it is: what is said about it."""
    replica = DistributedDataParallel(model_of(**WIDE), bucket_cap_mb=1)
    compiled = torch.compile(replica, backend="memfine", options={"config": config("eager")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            compiled(**batch(rank)).loss.backward()
    return [str(one.message) for one in caught if "memfine_fx" in str(one.message)]


def _step(wrapped: Any, model: Any, reference: Any, rank: int) -> Step:
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: counts.update([name]))
    loss = wrapped(**batch(rank)).loss
    loss.backward()
    gradients = {name: _whole(parameter.grad) for name, parameter in model.named_parameters()}
    errors = [
        relative_error(gradients[name], _whole(parameter.grad)) for name, parameter in reference.named_parameters()
    ]
    return Step(
        loss.item(),
        max(errors),
        frozenset(gradient.dtype for gradient in gradients.values()),
        frozenset(counts[name] for name in gradients),
    )


def _whole(gradient: Any) -> torch.Tensor:
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    assert isinstance(whole, torch.Tensor)
    return whole


def experts_function_run(rank: int, takes_fsdp2: bool) -> float:
    """Return the largest relative error of a gradient with `experts_implementation="memfine"` against "eager"."""
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for implementation in ("eager", "memfine"):
        torch.manual_seed(0)
        model: Any = tiny_causal_lm("qwen3_moe", num_hidden_layers=NUM_LAYERS, **SIZES)
        model.set_experts_implementation(implementation)
        if takes_fsdp2:
            for layer in model.model.layers:
                fully_shard(layer)
            call: Any = fully_shard(model)
        else:
            call = DistributedDataParallel(model)
        tokens = torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(rank))
        for _ in range(2):  # the second gradients find buckets and gathered parameters of the first step
            model.zero_grad()
            call(input_ids=tokens, labels=tokens).loss.backward()
        gradients[implementation] = {
            name: parameter.grad.full_tensor() if takes_fsdp2 else parameter.grad
            for name, parameter in model.named_parameters()
        }
    assert memfine_fx.report(model).num_chunked >= 1
    chunked = gradients["memfine"]
    return max(relative_error(chunked[name], expected) for name, expected in gradients["eager"].items())
