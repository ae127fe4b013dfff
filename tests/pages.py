"""Reads a page as a browser would, and fails where it is not well-formed or loads anything."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = {"meta", "br", "wbr", "path", "circle", "input"}


class ReadPage(HTMLParser):
    """A page: `text` that is seen, `tags`, `titles` (hover texts), and `scripts`."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.titles: list[str | None] = []
        self.text = ""
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"link", "img", "iframe", "base"}
        assert not {name for name, _ in attrs} & {"src", "href", "onload"}
        self.titles += [value for name, value in attrs if name == "title"]
        self.tags.append(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif "style" not in self.open:
            self.text += data


def read_page(html: str) -> ReadPage:
    """Return what a page shows; it must be well-formed, in both colour schemes, and name no buffer of Inductor."""
    page = ReadPage()
    page.feed(html)
    page.close()
    assert page.open == []
    assert "@import" not in html and "url(" not in html and "@media(prefers-color-scheme:dark)" in html
    assert re.search(r"\b(?:fill|stroke|color|background)[:=]\"?#", html) is None, "a colour of one scheme"
    assert re.search(r"\bbuf\d+", page.text) is None
    return page
