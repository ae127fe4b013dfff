"""transformers models that return what their layers computed (`output_router_logits`, `output_hidden_states`).

Such a model records by forward hooks, which transformers installs at the first call that asks for them, under a lock.
Inside a compiled call this breaks the graph in every layer, and a checkpointed layer is then left out of the graphs for
good. So the hooks are installed before that call. Under checkpointing a hook's append to a list is a side effect, which
Dynamo compiles only with a flag of its own; transformers records in forward and never while recomputing, so that
leaving the effect out of the recomputation is exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from memfine_fx.compat.settings import RECORDING
from memfine_fx.compat.transformers import (
    installer_of_recorders,
    is_recording_outside_graphs,
    recordable_outputs,
)

__all__ = ["RecordedOutputs", "hint_for_recording"]


class RecordedOutputs:
    """The parts of a model that can record, found once.

    Args:
        model: any module; without transformers, or without parts that record, nothing is ever done.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parts: list[tuple[Any, tuple[str, ...]]] = []
        self._is_recording = False
        self._install = installer_of_recorders()
        if self._install is None:
            return
        for part in model.modules():
            keys = recordable_outputs(part)
            if keys:
                self._parts.append((part, tuple(f"output_{key}" for key in keys)))

    @contextlib.contextmanager
    def prepared(self, kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Hooks installed if a call with these arguments records anything, and Dynamo's flag set for it."""
        if not self._is_recording and self._records(kwargs):
            self._is_recording = True
            for part, _ in self._parts:
                assert self._install is not None
                self._install(part)
        # A hook's append is a side effect: the recomputation of a checkpointed layer leaves it out.
        with RECORDING.applied() if self._is_recording else contextlib.nullcontext():
            yield

    def _records(self, kwargs: Mapping[str, Any]) -> bool:
        return any(kwargs.get(key, getattr(part.config, key, False)) for part, keys in self._parts for key in keys)


def hint_for_recording() -> str:
    """Return a hint about output recording that keeps layers out of the graphs; "" if none does.

    Call it while the model runs.
    """
    if not is_recording_outside_graphs():
        return ""
    return (
        "; the model records outputs (output_router_logits, output_hidden_states) under gradient checkpointing, which "
        "keeps its layers out of the graphs: call memfine_fx.optimize(model) instead of the backend's name"
    )
