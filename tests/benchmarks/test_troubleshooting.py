"""The troubleshooting page holds every message of the source, and its entries hold messages that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

import memfine_fx.errors
from benchmarks.messages import Message, messages
from benchmarks.troubleshooting import PAGE, entries_of, filled

_ENTRY = "<!-- messages\nword: first\nreason: NO_RULE\nkind: refusal\n-->"
_TEXT = f"### Seen\n\nDo this.\n\n{_ENTRY}\n\n- refusal: `old`\n\n## Next\n"


def test_the_page_is_what_the_source_says() -> None:
    """Also that every message has an entry and every entry one. To mend it: python -m benchmarks.troubleshooting."""
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text, messages()) == text
    assert len(entries_of(text)) == text.count("<!-- messages\n") > 50


def test_every_error_class_is_on_the_page() -> None:
    kinds = {message.kind for message in messages()} | {"CannotChunk", "GuardRefused", "Reason", "CompatibilityWarning"}
    assert set(memfine_fx.errors.__all__) <= kinds


def test_every_reason_is_on_the_page() -> None:
    assert {message.reason for message in messages()} - {""} == set(memfine_fx.errors.Reason.__members__)


def test_lists_are_written_anew_and_nothing_else() -> None:
    said = [Message("refusal", "the first `a`", "passes/one.py"), Message("refusal", "first", "passes/two.py")]
    assert filled(_TEXT, said) == _TEXT.replace("- refusal: `old`", "- `` the first `a` ``\n- `first`")


@pytest.mark.parametrize("kind", ["refusal", "warning"])
def test_a_message_without_an_entry_and_an_entry_without_a_message_are_named(kind: str) -> None:
    text = "a reason that nobody wrote" if kind == "refusal" else "first"
    with pytest.raises(LookupError, match=rf"passes/one.py: the {kind} '{text}' has no entry"):
        filled(_TEXT, [Message(kind, text, "passes/one.py")])
    with pytest.raises(LookupError, match=r"no message of the source belongs to .*words=\('first',\)"):
        filled(_TEXT, [])


def test_messages_are_found_however_they_are_made(tmp_path: Path) -> None:
    folder = tmp_path / "passes"
    folder.mkdir()
    (folder / "one.py").write_text(
        "def find(node, seen):\n"
        "    reason = f'{node}: first'\n"
        "    if seen:\n"
        "        reason = 'second'\n"
        "    warnings.warn('third ' + (f'a {seen}' if seen else 'b'), stacklevel=2)\n"
        "    return Refusal(node, Reason.NO_RULE, reason)\n"
    )
    found = messages(tmp_path)
    assert Message("refusal", "…: first", "passes/one.py", "NO_RULE") in found
    assert {message.text for message in found} == {"…: first", "second", "third a …", "third b"}


def test_a_refusal_belongs_to_the_entry_of_its_reason_whatever_its_words() -> None:
    assert "- `other`" in filled(_TEXT, [Message("refusal", "other", "passes/one.py", "NO_RULE")])
    with pytest.raises(LookupError, match="has no entry"):
        filled(_TEXT, [Message("refusal", "first", "passes/one.py", "OPAQUE")])


def test_a_message_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "passes"
    folder.mkdir()
    (folder / "one.py").write_text("raise ConfigError(make_text())\n")
    with pytest.raises(LookupError, match=r"passes/one.py:1: cannot read the message 'make_text\(\)'"):
        messages(tmp_path)
