"""Files that users write: read once, every field checked where it is read, errors that name file, place and field."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from memfine_fx.errors import ConfigError

__all__ = ["problem_texts", "read_json", "read_mapping", "read_text", "refuse_misspelt", "validated", "write_text"]

_Record = TypeVar("_Record", bound=BaseModel)


def read_text(path: Path, what: str) -> str:
    """The text of a file; ConfigError says that `what` cannot be read, and why."""
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets begin their files with a mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"cannot read {what} {path}: {reason}") from error


def write_text(path: Path, text: str, what: str) -> None:
    """Write a file, with the folders above it; ConfigError says that `what` cannot be written, and why."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {what} {path}: {error.strerror}") from error


def read_json(path: Path, what: str) -> Any:
    """A parsed JSON file; ConfigError names the line that is not JSON."""
    try:
        return json.loads(read_text(path, what))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error


def read_mapping(path: Path, what: str, expected: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file.

    Args:
        what: the file is, for the message: "the task".
        expected: what it should hold: "the fields model and rate".

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        loaded = yaml.safe_load(read_text(path, what))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML or JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected {expected}, got {type(loaded).__name__}")
    return loaded


def validated(record: type[_Record], fields: object, where: str) -> _Record:
    """`fields` as a record.

    Raises:
        ConfigError: a line for each field that is missing or of another kind, with `where`, what was expected and what
            is there.
    """
    try:
        return record.model_validate(fields)
    except ValidationError as error:
        problems = [f"{where}{text}" for _, text in problem_texts(error)]
        raise ConfigError("\n".join(problems)) from None


def problem_texts(error: ValidationError) -> list[tuple[tuple[str, ...], str]]:
    """(path of the field, ".field: expected (got)") of everything that a record refused."""
    found = []
    for problem in error.errors():
        location = tuple(str(part) for part in problem["loc"] if part != "[key]")
        value = "null" if problem["input"] is None else repr(problem["input"])
        got = "" if problem["type"] == "missing" else f" (got {value})"
        dotted = "".join(f".{part}" for part in location)
        found.append((location, f"{dotted}: {problem['msg']}{got}"))
    return found


def refuse_misspelt(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """ConfigError for a field that nothing reads and that is spelt nearly like one that is not given.

    Other fields that nothing reads are the user's notes.
    """
    known = set(known)
    for name in given:
        close = get_close_matches(name, sorted(known - set(given)), 1, 0.75) if name not in known else []
        if close:
            raise ConfigError(f"{where}.{name}: nothing reads this field; did you mean {close[0]}?")
