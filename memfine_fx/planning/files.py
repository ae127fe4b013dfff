"""Users' YAML and JSON files, checked where they are read: an error names file, field, what was expected and found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from memfine_fx.errors import ConfigError

__all__ = ["checked", "read_mapping"]

Record = TypeVar("Record", bound=BaseModel)


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file.

    Args:
        what: the file holds, for the message.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML or JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected {what}, got {type(loaded).__name__}")
    return loaded


def checked(kind: type[Record], fields: Mapping[str, Any], where: str) -> Record:
    """A record of these fields.

    Args:
        where: stands before each field's name in the message.

    Raises:
        ConfigError: every bad field is named.
    """
    try:
        return kind(**fields)
    except ValidationError as error:
        lines = []
        for one in error.errors():
            name = ".".join(str(part) for part in one["loc"] if part != "[key]")
            got = "" if one["type"] == "missing" else f" (got {one['input']!r})"
            lines.append(f"{where}{name}: {one['msg']}{got}")
        raise ConfigError("\n".join(lines)) from None
