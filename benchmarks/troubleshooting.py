"""Write the lists of messages in docs/troubleshooting.md, or with --check only compare them.

python -m benchmarks.troubleshooting

An entry's title and advice are written in the page, by hand. A comment behind them says which messages belong to it:

    <!-- messages
    word: found nothing to chunk
    source: passes/head/find.py
    kind: warning
    -->

A message belongs to the first entry that has one of its words or its source, and its kind where the entry has kinds. A
refusal belongs to the entry that names its `errors.Reason` (`reason: TOKENS_INTERACT`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.messages import ROOT, Message, messages

__all__ = ["PAGE", "Entry", "entries_of", "filled"]

PAGE = ROOT / "docs" / "troubleshooting.md"
_BLOCK = re.compile(r"(<!-- messages\n(.*?)-->\n)(?:\n(?: *- [^\n]*\n)+)?", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """Which messages one entry of the page holds."""

    words: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, comment: str) -> Entry:
        found: dict[str, list[str]] = {"word": [], "source": [], "kind": [], "reason": []}
        for line in comment.splitlines():
            key, _, value = line.partition(": ")
            found[key].append(value)
        return cls(*map(tuple, found.values()))

    def holds(self, message: Message) -> bool:
        if self.kinds and message.kind not in self.kinds:
            return False
        if message.reason:
            return message.reason in self.reasons
        return message.source.startswith(self.sources or ("\0",)) or any(word in message.text for word in self.words)


def entries_of(text: str) -> list[Entry]:
    """The page's entries with messages, in order.

    Raises:
        KeyError: a line of a comment is no word, source, kind or reason.
    """
    return [Entry.of(comment) for _, comment in _BLOCK.findall(text)]


def filled(text: str, said: Sequence[Message]) -> str:
    """The page with every list of messages written anew.

    Raises:
        LookupError: a message has no entry, or an entry no message.
    """
    told: dict[Entry, list[Message]] = {entry: [] for entry in entries_of(text)}
    for message in said:
        entry = next((one for one in told if one.holds(message)), None)
        if entry is None:
            raise LookupError(
                f"{message.source}: the {message.kind} {message.text!r} has no entry in docs/troubleshooting.md; give "
                "it one and run python -m benchmarks.troubleshooting"
            )
        told[entry].append(message)
    if without := [entry for entry, held in told.items() if not held]:
        raise LookupError(f"docs/troubleshooting.md: no message of the source belongs to {without}")

    def lines(block: re.Match[str]) -> str:
        return f"{block[1]}\n" + "".join(f"{line}\n" for line in _lines(told[Entry.of(block[2])]))

    return _BLOCK.sub(lines, text)


def _lines(said: Sequence[Message]) -> list[str]:
    """An entry's list of messages: by kind, unless all of them are refusals."""
    by_kind: dict[str, list[str]] = {}
    for message in said:
        by_kind.setdefault(message.kind, []).append(_quoted(message))
    if set(by_kind) == {"refusal"}:
        return [f"- {text}" for text in by_kind["refusal"]]
    lines = []
    for kind, texts in by_kind.items():
        lines += [f"- {kind}: {texts[0]}"] if len(texts) == 1 else [f"- {kind}:", *(f"    - {text}" for text in texts)]
    return lines


def _quoted(message: Message) -> str:
    text = message.text.strip("; ")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is not what would be written")
    options = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    after = filled(before, messages())
    if not options.check:
        PAGE.write_text(after, encoding="utf-8")
    return int(options.check and before != after)


if __name__ == "__main__":
    sys.exit(main())
