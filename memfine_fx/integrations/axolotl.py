"""A plugin for Axolotl: models are optimized as soon as they are loaded, by lines of its YAML file.

    plugins:
      - memfine_fx.integrations.axolotl.MemfinePlugin
    memfine:
      memory_budget: 20GiB
      returns_logits: false

Below `memfine` stand the fields of `memfine_fx.Config`; without it, those of MEMFINE_OPTIONS hold.
"""

from __future__ import annotations

from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from memfine_fx.api import optimize
from memfine_fx.config import Config
from memfine_fx.errors import ConfigError

__all__ = ["MemfineArgs", "MemfinePlugin"]


class MemfineArgs(BaseModel):
    """The fields of a YAML file that this plugin adds to Axolotl's schema."""

    memfine: dict[str, Any] | None = None


class MemfinePlugin(BasePlugin):  # type: ignore[misc]  # Axolotl is not there where types are checked
    """An Axolotl plugin that optimizes the model, adapters included, before Axolotl makes its trainer."""

    def get_input_args(self) -> str:
        """Return the dotted name of the schema class."""
        return f"{__name__}.{MemfineArgs.__name__}"

    def register(self, cfg: Any) -> None:
        """Read the options, so that a bad one raises an error before a model is loaded.

        Raises:
            ConfigError: an unknown or malformed option, or lines that are no options.
        """
        _config(cfg)

    def post_model_load(self, cfg: Any, model: torch.nn.Module) -> None:
        """Optimize the loaded model in place.

        Raises:
            ConfigError: an unknown or malformed option.
        """
        optimize(model, config=_config(cfg))


def _config(cfg: Any) -> Config:
    options = cfg.get("memfine")
    if options is not None and not isinstance(options, dict):
        raise ConfigError(f"memfine: {options!r} of the YAML file is not a list of NAME: VALUE")
    return Config.from_options({name: _plain(value) for name, value in (options or {}).items()})


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
