"""Force a router's choices: top-k, arg-max and sort name given experts, whatever the scores are.

A dispatch mode stands below autograd, so gradients of the scores flow as if the scores had led to these choices. It
reaches eager code and captured graphs alike, and no kernel of memfine_fx: what runs inside of an operator does not pass
a dispatch mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memfine_fx.compat.functional import Listening

__all__ = ["ROUTINGS", "ForcedChoices"]

aten = torch.ops.aten
_SORTS = (aten.sort.default, aten.sort.stable)

ROUTINGS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "first experts only": lambda token, choice, num_experts: choice % num_experts + 0 * token,
    "last experts only": lambda token, choice, num_experts: (num_experts - 1 - choice) % num_experts + 0 * token,
    "in turn": lambda token, choice, num_experts: (token + choice) % num_experts,
    "token 0 apart": lambda token, choice, num_experts: ((token > 0) * 1 + choice) % num_experts,
    "last token apart": lambda token, choice, num_experts: (choice - (token == token.max()) * 1) % num_experts,
}
"""Name -> (token [T,1], choice [1,E], E) -> expert [T,E], a permutation of all experts for each token."""


class ForcedChoices(Listening):  # type: ignore[no-untyped-call]
    """Lets every choice among experts follow one routing.

    Args:
        routing: from `ROUTINGS`.
        num_experts: E. Choices along a last dimension of another size are free; None to force them all.
    """

    def __init__(self, routing: str, num_experts: int | None) -> None:
        super().__init__(self._forced)
        self._routing, self._num_experts = ROUTINGS[routing], num_experts
        self.num_forced = 0

    def _forced(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
        """Return the result of a choice among experts under the forced routing; None for any other call."""
        scores = args[0] if args else None
        if (
            not isinstance(scores, Tensor)
            or not scores.is_floating_point()
            or not scores.ndim
            or scores.shape[-1] != (self._num_experts or scores.shape[-1])
        ):
            return None
        if func is aten.argmax.default and _is_last(scores, _argument(args, kwargs, 1, "dim")):
            return self._experts(scores)[..., 0].reshape(result.shape)
        is_max = func is aten.max.dim and _is_last(scores, _argument(args, kwargs, 1, "dim"))
        is_top_k = func is aten.topk.default and _is_last(scores, _argument(args, kwargs, 2, "dim", -1))
        if is_max or is_top_k or (func in _SORTS and _is_last(scores, _dim_of_sort(func, args, kwargs))):
            values, ids = result
            experts = self._experts(scores)[..., : 1 if is_max else ids.shape[-1]]
            chosen = scores.gather(-1, experts).reshape(values.shape)
            return type(result)((chosen, experts.reshape(ids.shape)))
        return None

    def _experts(self, scores: Tensor) -> Tensor:
        """[...,E]: all experts in the order of the routing."""
        self.num_forced += 1
        num_experts = scores.shape[-1]
        token = torch.arange(scores.numel() // num_experts, device=scores.device)[:, None]
        choice = torch.arange(num_experts, device=scores.device)[None]
        return self._routing(token, choice, num_experts).view(scores.shape)


def _argument(args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _dim_of_sort(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _argument(args, kwargs, 1, "dim", -1) if func is aten.sort.default else kwargs.get("dim", -1)


def _is_last(scores: Tensor, dim: Any) -> bool:
    return dim in (-1, scores.ndim - 1)
