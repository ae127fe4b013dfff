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

__all__ = ["ROUTINGS", "ForcedChoices", "by_routing"]

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


Choose = Callable[[Tensor, Tensor], Tensor | None]
"""(scores [...,E], what they chose [...,k]) -> experts [...,k]; None to leave the choice free."""


def by_routing(name: str) -> Choose:
    """Return what follows a routing of `ROUTINGS`."""
    routing = ROUTINGS[name]

    def choose(scores: Tensor, own: Tensor) -> Tensor:
        num_experts = scores.shape[-1]
        token = torch.arange(scores.numel() // num_experts, device=scores.device)[:, None]
        choice = torch.arange(num_experts, device=scores.device)[None]
        return routing(token, choice, num_experts).view(scores.shape)[..., : own.shape[-1]]

    return choose


class ForcedChoices(Listening):  # type: ignore[no-untyped-call]
    """Lets choices among experts name given ones.

    Args:
        choose: gives the experts.
        num_experts: E. Choices along a last dimension of another size are free; None to force them all.
    """

    def __init__(self, choose: Choose, num_experts: int | None) -> None:
        super().__init__(self._forced)
        self._choose, self._num_experts = choose, num_experts
        self.num_forced = 0

    def _forced(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
        """Return the result of a choice among experts that is forced; None for any other call."""
        scores = args[0] if args else None
        if (
            not isinstance(scores, Tensor)
            or not scores.is_floating_point()
            or not scores.ndim
            or scores.shape[-1] != (self._num_experts or scores.shape[-1])
        ):
            return None
        is_argmax = func is aten.argmax.default and _is_last(scores, _argument(args, kwargs, 1, "dim"))
        is_max = func is aten.max.dim and _is_last(scores, _argument(args, kwargs, 1, "dim"))
        is_top_k = func is aten.topk.default and _is_last(scores, _argument(args, kwargs, 2, "dim", -1))
        is_sort = func in _SORTS and _is_last(scores, _dim_of_sort(func, args, kwargs))
        if not (is_argmax or is_max or is_top_k or is_sort):
            return None
        ids = result if is_argmax else result[1]
        experts = self._choose(scores, ids if ids.ndim == scores.ndim else ids.unsqueeze(-1))
        if experts is None:
            return None
        self.num_forced += 1
        chosen = experts.reshape(ids.shape)
        return chosen if is_argmax else type(result)((scores.gather(-1, experts).reshape(ids.shape), chosen))


def _argument(args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _dim_of_sort(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _argument(args, kwargs, 1, "dim", -1) if func is aten.sort.default else kwargs.get("dim", -1)


def _is_last(scores: Tensor, dim: Any) -> bool:
    return dim in (-1, scores.ndim - 1)
