"""A callback for `transformers.Trainer` that logs what memfine_fx does."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memfine_fx.api import log_scalars
from memfine_fx.errors import MemfineError
from memfine_fx.report.training_log import ScalarWriter

__all__ = ["MemfineCallback"]


class MemfineCallback(TrainerCallback):
    """A Trainer callback that writes `memfine_fx.scalars` at each logging step.

    Args:
        writer: where to; None for TensorBoard event files in the folder "memfine" of the Trainer's output folder.

    Raises:
        MemfineError: at the first logging step, if the model was neither optimized nor compiled by memfine_fx.
    """

    def __init__(self, writer: ScalarWriter | None = None) -> None:
        self._writer = writer
        self._own: Any = None

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the scalars of the model as it stands."""
        if not state.is_world_process_zero:
            return
        log_scalars(self._writer or self._tensorboard(args), kwargs["model"], state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the event file."""
        if self._own is not None:
            self._own.close()
            self._own = None

    def _tensorboard(self, args: TrainingArguments) -> ScalarWriter:
        if self._own is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise MemfineError("tensorboard is not installed; install it or give the callback a writer") from error
            self._own = SummaryWriter(os.path.join(str(args.output_dir), "memfine"))
        writer: ScalarWriter = self._own
        return writer
