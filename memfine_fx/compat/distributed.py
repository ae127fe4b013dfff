"""torch.distributed: parameters that DistributedDataParallel leaves alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch

from memfine_fx.compat.checks import Feature, expect

__all__ = ["IGNORED_BY_DDP", "ignore_in_ddp"]

_IGNORED = "_ddp_params_and_buffers_to_ignore"


def ignore_in_ddp(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Let a DistributedDataParallel of this model leave parameters alone, beside those that it leaves alone already."""
    object.__setattr__(model, _IGNORED, [*getattr(model, _IGNORED, ()), *names])


def _check_ignored() -> None:
    wrapper = torch.nn.parallel.DistributedDataParallel
    probe = torch.nn.Identity()
    wrapper._set_params_and_buffers_to_ignore_for_model(probe, ["probe"])  # type: ignore[no-untyped-call]
    expect(getattr(probe, _IGNORED, None) == ["probe"], "ignored names are stored elsewhere")
    expect(f"module.{_IGNORED}" in inspect.getsource(wrapper.__init__), "what is ignored is not read")


IGNORED_BY_DDP = Feature(
    name="DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    package="torch",
    purpose="experts of which each rank has its own, under DistributedDataParallel",
    seen=("2.11", "2.15"),
    fallback="DistributedDataParallel would average different experts, so expert_parallel is refused.",
    check=_check_ignored,
)
