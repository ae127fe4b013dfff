"""docs/troubleshooting.md: every entry with the messages that belong to it."""

from __future__ import annotations

import textwrap
from collections import defaultdict

from benchmarks.troubleshooting.messages import ROOT, Message, messages
from benchmarks.troubleshooting.symptoms import SECTIONS, Symptom, symptom_of

__all__ = ["PAGE", "page"]

PAGE = ROOT / "docs" / "troubleshooting.md"
_HEAD = (
    "Every message of memfine_fx by what is seen; an ellipsis stands for what is only known at run time. Search this "
    "page for the words of a message. Written by `python -m benchmarks.troubleshooting` from the source; do not edit. "
    "A test fails when a message has no entry."
)


def page() -> str:
    """The page.

    Raises:
        LookupError: a message has no entry.
    """
    told: dict[Symptom, list[Message]] = defaultdict(list)
    for message in messages():
        entry = symptom_of(message)
        if entry is None:
            raise LookupError(
                f"{message.source}: the {message.kind} {message.text!r} has no entry in "
                "benchmarks/troubleshooting/symptoms.py; give it one and run python -m benchmarks.troubleshooting"
            )
        told[entry].append(message)
    parts = ["# Troubleshooting", _filled(_HEAD)]
    for section in SECTIONS:
        parts += [f"## {section.title}", _filled(section.text)]
        for entry in section.symptoms:
            parts += [
                f"### {entry.title}",
                _filled(entry.advice),
            ]
            if told[entry]:
                parts.append("\n".join(_line(message) for message in told[entry]))
    return "\n\n".join(parts) + "\n"


def _line(message: Message) -> str:
    text = message.text.strip("; ")
    quoted = f"`` {text} ``" if "`" in text else f"`{text}`"
    return f"- {message.kind}: {quoted}"


def _filled(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)
