"""What a layer's step holds on a device: counted of its run on fake tensors, not measured.

Ours are the GPU kernels, whose launches are skipped: what a step allocates does not depend on them. Beside them stands
the grouped layer of model libraries (`memfine_fx.models`: gather, grouped_mm, activation, grouped_mm, sum over K),
eager and under a checkpoint. What torch.compile would fuse of that is not known here, nor what kernels of its products
take as scratch. Bytes are those of tensors, without what an allocator rounds them up to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from benchmarks.gpu_kernels import Case, Step
from memfine_fx.models.gpt_oss import GptOssConfig, GptOssExperts
from memfine_fx.models.mixtral import MixtralConfig, MixtralMoE

__all__ = ["StepBytes", "bytes_of_grouped", "bytes_of_kernels", "bytes_of_step", "grouped_experts"]


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one layer's forward and backward beyond its input and parameters, the output and all gradients.

    Args:
        between: alive between forward and backward.
        peak: most that is alive at once.
    """

    between: int
    peak: int


def bytes_of_kernels(case: Case, target: str) -> StepBytes:
    """Of the kernels on a target; needs Triton."""
    from memfine_fx.kernels.launches import skipping

    with FakeTensorMode(), skipping():
        step = Step(case, target)
        return bytes_of_step(step.inputs, step.forward, step.backward)


def bytes_of_grouped(case: Case) -> StepBytes:
    """Of the grouped layer with experts of the same form, in bf16; its windows do not matter."""
    with FakeTensorMode():
        experts = grouped_experts(case)
        hidden = torch.empty(case.tokens, case.hidden, dtype=torch.bfloat16, requires_grad=True)
        index = torch.empty(case.tokens, case.top_k, dtype=torch.int64)
        weight = torch.empty(case.tokens, case.top_k, dtype=torch.bfloat16, requires_grad=True)
        inputs = [hidden, weight, *experts.parameters()]

        def forward() -> Tensor:
            return cast(Tensor, checkpoint(experts, hidden, index, weight, use_reentrant=False))

        def backward(out: Tensor) -> list[Tensor]:
            out.backward(out.detach())
            return [one.grad for one in inputs if one.grad is not None]

        return bytes_of_step([index, *inputs], forward, backward)


def bytes_of_step(
    inputs: Sequence[Tensor], forward: Callable[[], Tensor], backward: Callable[[Tensor], list[Tensor]]
) -> StepBytes:
    """Of any step.

    Args:
        inputs: all tensors that are there before.
        forward: makes the output.
        backward: takes what stands for the output's gradient, and makes all gradients.
    """
    with _Storages(inputs) as storages:
        out = forward()
        num_forward = len(storages.events)
        gradients = backward(out)
    results = {storages.number_of(one) for one in (out, *gradients)}
    live = list(accumulate(num_bytes for number, num_bytes in storages.events if number not in results))
    num_left_out = sum(number in results for number, _ in storages.events[:num_forward])
    between = num_forward - num_left_out
    return StepBytes(live[between - 1] if between else 0, max((0, *live)))


class _Storages(TorchDispatchMode):
    """Storages as they come and go, but for those that are there before: (number, bytes, or less than none)."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self._numbers = WeakIdKeyDictionary({one.untyped_storage(): -1 for one in there})

    def number_of(self, tensor: Tensor) -> int:
        return int(self._numbers[tensor.untyped_storage()])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and one.untyped_storage() not in self._numbers:
                self._add(one.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        number, num_bytes = len(self.events), storage.nbytes()
        self._numbers[storage] = number
        self.events.append((number, num_bytes))
        weakref.finalize(storage, self.events.append, (number, -num_bytes))


def grouped_experts(case: Case) -> torch.nn.Module:
    """Of the case's form, sizes and dtype of rows."""
    sizes = {"hidden": case.hidden, "expert_width": case.width, "num_experts": case.experts, "top_k": case.top_k}
    former = torch.get_default_dtype()
    # NOTE: parameters of a fake mode cannot be converted, so that they are made as they are wanted.
    torch.set_default_dtype(getattr(torch, case.dtype))
    try:
        return GptOssExperts(GptOssConfig(**sizes)) if case.has_bias else MixtralMoE(MixtralConfig(**sizes)).experts
    finally:
        torch.set_default_dtype(former)
