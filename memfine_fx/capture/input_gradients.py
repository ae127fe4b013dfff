"""Embeddings whose output is made to want a gradient (`enable_input_require_grads`, as PEFT and trainers call it).

Reentrant checkpoints give no gradient to what is inside of them unless an input wants one, so a hook on the frozen
embedding says `output.requires_grad_(True)`. In a graph, no tensor that depends on such an output may be returned, the
loss neither: the graph breaks at the hook. The same is said there by adding a zero that wants a gradient. That holds
outside of graphs as well, so the hook stays exchanged.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from memfine_fx.compat.nn import forward_hooks

__all__ = ["WantedInputGradients"]


def _as_hosts_write_it(module: Any, input: Any, output: Any) -> None:
    output.requires_grad_(True)


class WantedInputGradients:
    """The embeddings of a model.

    Args:
        model: every part of it that gives its input embeddings is asked for them, in each `prepare`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parts: list[Any] = [
            module for module in model.modules() if callable(getattr(module, "get_input_embeddings", None))
        ]

    def prepare(self) -> None:
        """Exchange hooks that say nothing but `output.requires_grad_(True)`."""
        for embedding in self._embeddings():
            hooks = forward_hooks(embedding)
            for key in [key for key, hook in hooks.items() if _only_wants_gradient(hook)]:
                hooks[key] = _adds_wanting_zero(embedding)

    def _embeddings(self) -> list[torch.nn.Module]:
        embeddings: dict[int, torch.nn.Module] = {}
        for part in self._parts:
            try:
                embedding = part.get_input_embeddings()
            except (NotImplementedError, AttributeError):  # what transformers says of parts that have none
                continue
            if isinstance(embedding, torch.nn.Module):
                embeddings[id(embedding)] = embedding
        return list(embeddings.values())


def _only_wants_gradient(hook: object) -> bool:
    if not isinstance(hook, types.FunctionType) or hook.__code__.co_argcount != 3:
        return False
    codes = hook.__code__, _as_hosts_write_it.__code__
    own, expected = ((code.co_names, code.co_code, code.co_consts) for code in codes)
    return own == expected


def _adds_wanting_zero(embedding: torch.nn.Module) -> Callable[..., torch.Tensor | None]:
    weight = next(embedding.parameters(), None)
    device = None if weight is None or weight.is_meta else weight.device
    zero = torch.zeros((), device=device, requires_grad=True)

    def want_gradient(module: Any, input: Any, output: torch.Tensor) -> torch.Tensor | None:
        if output.requires_grad or not torch.is_grad_enabled():
            return None
        return output + zero.to(output.device)

    return want_gradient
