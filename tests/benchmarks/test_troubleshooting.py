"""The troubleshooting page holds every message of the source, and its entries hold messages that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

import memfine_fx.errors
from benchmarks.troubleshooting.messages import Message, messages
from benchmarks.troubleshooting.page import PAGE, page
from benchmarks.troubleshooting.symptoms import SECTIONS, symptom_of


def test_the_page_is_what_the_source_says() -> None:
    """Also that every message has an entry. To mend it: python -m benchmarks.troubleshooting."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_entry_with_a_pattern_has_a_message() -> None:
    held = {symptom_of(message) for message in messages()}
    for section in SECTIONS:
        for entry in section.symptoms:
            assert entry in held or not (entry.words or entry.sources), entry.title


def test_every_error_class_is_on_the_page() -> None:
    kinds = {message.kind for message in messages()} | {"CannotChunk", "CompatibilityWarning"}  # refusals; a warning
    assert set(memfine_fx.errors.__all__) <= kinds


def test_messages_are_found_however_they_are_made(tmp_path: Path) -> None:
    folder = tmp_path / "passes"
    folder.mkdir()
    (folder / "one.py").write_text(
        "def find(node, seen):\n"
        "    reason = f'{node}: first'\n"
        "    if seen:\n"
        "        reason = 'second'\n"
        "    warnings.warn('third ' + (f'a {seen}' if seen else 'b'), stacklevel=2)\n"
        "    return Refusal(node, reason)\n"
    )
    found = messages(tmp_path)
    assert Message("refusal", "…: first", "passes/one.py") in found
    assert {message.text for message in found} == {"…: first", "second", "third a …", "third b"}
    assert symptom_of(Message("refusal", "a reason that nobody wrote", "passes/one.py")) is None


def test_a_message_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "passes"
    folder.mkdir()
    (folder / "one.py").write_text("raise ConfigError(make_text())\n")
    with pytest.raises(LookupError, match=r"passes/one.py:1: cannot read the message 'make_text\(\)'"):
        messages(tmp_path)
