"""Kernel order: fused kernels run where their last member stood, and never before what they need."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import memfine_fx.runtime.op  # noqa: F401  # registers the ops
from memfine_fx.passes.step.scheduler_passes import KernelOrder, RegionDistance


@dataclass(frozen=True)
class Dep:
    name: str


@dataclass(eq=False)
class Kernel:
    """The part of an Inductor scheduler node that ordering reads."""

    buffers: list[str]
    needs: list[str]
    max_order: int
    unmet_dependencies: list[Dep] = field(init=False)

    def __post_init__(self) -> None:
        self.unmet_dependencies = [Dep(name) for name in self.needs]

    def get_buffer_names(self) -> list[str]:
        return self.buffers

    def get_nodes(self) -> list[Kernel]:
        return [self]


def test_a_fused_kernel_waits_for_its_last_member() -> None:
    first = Kernel(["grad0"], [], 0)
    fused = Kernel(["norm0", "norm1"], ["grad0", "grad1"], 4)
    early_weight_grad = Kernel(["weight0"], ["grad0"], 1)
    second = Kernel(["grad1"], ["grad0"], 2)
    as_inductor_leaves_it = [first, second, fused, early_weight_grad]
    assert KernelOrder()(as_inductor_leaves_it) == [first, early_weight_grad, second, fused]


def test_dependencies_come_before_ranks() -> None:
    late = Kernel(["a"], [], 9)
    reader = Kernel(["b"], ["a"], 1)
    assert KernelOrder()([late, reader]) == [late, reader]


def test_a_cycle_leaves_the_order_alone() -> None:
    one, two = Kernel(["a"], ["b"], 0), Kernel(["b"], ["a"], 1)
    assert KernelOrder()([one, two]) == [one, two]


def test_inductor_takes_the_pass_and_its_uuid() -> None:
    with torch._inductor.config.patch(_post_fusion_custom_pass=KernelOrder()):
        compiled = torch.compile(lambda x: (x.sin().sum(0), (x @ x).cos().sum(0)))
        x = torch.randn(8, 8)
        torch.testing.assert_close(compiled(x)[1], (x @ x).cos().sum(0))
    assert KernelOrder().uuid() == KernelOrder().uuid()


@dataclass(frozen=True)
class Fallback:
    op_overload: torch._ops.OpOverload


@dataclass(eq=False)
class Placed:
    """The part of an Inductor scheduler node that holds its place."""

    min_order: int
    max_order: int
    node: Fallback | None = None


def test_what_stands_behind_a_region_is_too_far_away_to_be_fused_with_what_stands_before_it() -> None:
    region = Fallback(torch.ops.memfine.experts_backward.default)
    makers = (None, Fallback(torch.ops.aten.sort.stable), region, None, region, None)
    before, near, first, between, second, behind = RegionDistance()(
        [Placed(place, place, maker) for place, maker in enumerate(makers)]
    )
    assert near.min_order - before.max_order == 1 and first.min_order - near.max_order == 1
    assert between.min_order - first.max_order > 64 and behind.min_order - second.max_order > 64
