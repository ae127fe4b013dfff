"""The colours of every page and chart that memfine_fx and its planners write, in the reader's light or dark scheme."""

from __future__ import annotations

import re

__all__ = ["SERIES", "palette", "with_light_colours"]

SERIES = tuple(f"series{number}" for number in range(16))
"""Names of colours that tell series of one chart apart."""
_SERIES_COLOURS = (
    "#4e79a7 #86a8cc #a0cbe8 #59a14f #f28e2b #ffbe7d #b07aa1 #e15759 "
    "#ff9d9a #9c755f #bab0ac #8cd17d #d7d2cf #499894 #d37295 #b6992d"
).split()
_LIGHT = {
    "ink": "#1d2733",
    "soft": "#5a6673",
    "back": "#f5f6f8",
    "paper": "#ffffff",
    "line": "#dfe3e8",
    "accent": "#2a7f9e",
    "good": "#17692f",
    "bad": "#a32020",
    "forward": "#7aa6d8",
    "backward": "#d8a57a",
    **dict(zip(SERIES, _SERIES_COLOURS, strict=True)),
}
_DARK = {
    "ink": "#e4e7eb",
    "soft": "#a3adb8",
    "back": "#101317",
    "paper": "#1a1e23",
    "line": "#363c44",
    "accent": "#63b7d6",
    "good": "#74cf8f",
    "bad": "#ff9d96",
    "forward": "#4a82bd",
    "backward": "#b87a46",
}


def palette(scope: str) -> str:
    """Return CSS that sets the colours as variables: --ink and --soft of text, --back and --paper behind it, ...

    Args:
        scope: the selector of what has them, such as ":root".
    """
    light, dark = ("".join(f"--{name}:{colour};" for name, colour in colours.items()) for colours in (_LIGHT, _DARK))
    in_dark = f"@media(prefers-color-scheme:dark){{{scope}{{{dark}}}}}"
    return f"{scope}{{color-scheme:light dark;{light}}}\n{in_dark}"


def with_light_colours(svg: str) -> str:
    """Return an SVG with each variable replaced by its light colour, for programs that know no CSS variables."""
    return re.sub(r"var\(--(\w+)\)", lambda match: _LIGHT[match[1]], svg)
