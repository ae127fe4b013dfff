"""Low-rank adapters of the experts' tables as the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Adapter", "AdapterForm", "AdapterForms", "adapters_of", "num_adapter_params", "trained_adapters"]


@dataclass(frozen=True)
class AdapterForm:
    """A low-rank term of a projection, s (x A^T) B^T of two parameters (LoRA, arXiv 2106.09685).

    Args:
        rank: r.
        scale: s.
        is_first_out_in, is_second_out_in: whether A stands as [r,in], and B as [out,r], or turned.
    """

    rank: int
    scale: float
    is_first_out_in: bool = True
    is_second_out_in: bool = True


AdapterForms = tuple[AdapterForm | None, ...]
"""Forms of the adapters of gate and up, or both in one, and of down; None where there is none, empty without any."""


@dataclass(frozen=True)
class Adapter:
    """Views of an adapter's parameters, or of their gradients.

    Args:
        first: A, [E,r,D].
        second: B, [E,C,r].
        scale: s.
    """

    first: torch.Tensor
    second: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return int(self.first.shape[1])


def adapters_of(params: Sequence[torch.Tensor], forms: AdapterForms) -> list[Adapter | None]:
    """Return the adapter of each form.

    Args:
        params: A and B of each form that is not None, one after the other.

    Raises:
        ValueError: there are more or fewer, or two do not meet.
    """
    left, adapters = list(params), list[Adapter | None]()
    for form in forms:
        if form is None:
            adapters.append(None)
            continue
        if len(left) < 2:
            raise ValueError(f"{len(params)} parameters are not those of adapters {forms}")
        first, second = left.pop(0), left.pop(0)
        adapter = Adapter(
            first if form.is_first_out_in else first.mT, second if form.is_second_out_in else second.mT, form.scale
        )
        if not adapter.first.shape[1] == adapter.second.shape[2] == form.rank:
            raise ValueError(f"factors {list(adapter.first.shape)} and {list(adapter.second.shape)} do not meet")
        adapters.append(adapter)
    if left:
        raise ValueError(f"{len(params)} parameters are not those of adapters {forms}")
    return adapters


def num_adapter_params(forms: AdapterForms) -> int:
    return 2 * sum(form is not None for form in forms)


def trained_adapters(forms: AdapterForms, wanted: Sequence[bool]) -> tuple[bool, bool]:
    """Return whether any factor of gate's and up's adapters is trained, and whether any of down's is.

    Args:
        wanted: for each factor of the forms that are not None, whether its gradient is.
    """
    pairs = iter(wanted)
    trained = [form is not None and any((next(pairs), next(pairs))) for form in forms or (None,)]
    return any(trained[:-1]), trained[-1]
