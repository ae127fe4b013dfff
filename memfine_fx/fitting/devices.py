"""List the memory of devices by name, with the maker's page to check it by; the pages were not read."""

from __future__ import annotations

from memfine_fx.errors import ConfigError

__all__ = ["DEVICES", "device_bytes"]

_NVIDIA = "https://www.nvidia.com/en-us/"
_AMD = "https://www.amd.com/en/products/accelerators/instinct/"

DEVICES: dict[str, tuple[int, str]] = {
    "t4": (16, _NVIDIA + "data-center/tesla-t4/"),
    "v100-16gb": (16, _NVIDIA + "data-center/v100/"),
    "v100-32gb": (32, _NVIDIA + "data-center/v100/"),
    "l4": (24, _NVIDIA + "data-center/l4/"),
    "a10": (24, _NVIDIA + "data-center/products/a10-gpu/"),
    "a40": (48, _NVIDIA + "data-center/a40/"),
    "l40s": (48, _NVIDIA + "data-center/l40s/"),
    "a100-40gb": (40, _NVIDIA + "data-center/a100/"),
    "a100-80gb": (80, _NVIDIA + "data-center/a100/"),
    "h100": (80, _NVIDIA + "data-center/h100/"),
    "h100-nvl": (94, _NVIDIA + "data-center/h100/"),
    "h200": (141, _NVIDIA + "data-center/h200/"),
    "b200": (180, _NVIDIA + "data-center/dgx-b200/"),
    "rtx-3090": (24, _NVIDIA + "geforce/graphics-cards/30-series/rtx-3090-3090ti/"),
    "rtx-4090": (24, _NVIDIA + "geforce/graphics-cards/40-series/rtx-4090/"),
    "rtx-5090": (32, _NVIDIA + "geforce/graphics-cards/50-series/rtx-5090/"),
    "rtx-a6000": (48, _NVIDIA + "design-visualization/rtx-a6000/"),
    "rtx-6000-ada": (48, _NVIDIA + "design-visualization/rtx-6000/"),
    "mi250x": (128, _AMD + "mi200/mi250x.html"),
    "mi300x": (192, _AMD + "mi300/mi300x.html"),
    "mi325x": (256, _AMD + "mi300/mi325x.html"),
}
"""Name -> (GB, the page). A GB is counted as 10^9 bytes, the smaller of its meanings: drivers show more."""


def device_bytes(name: str) -> int:
    """Return the memory of a device in bytes.

    Raises:
        ConfigError: no device of this name is known.
    """
    key = name.lower().replace(" ", "-").replace("_", "-")
    if key not in DEVICES:
        raise ConfigError(f"gpu={name!r} is unknown; known: {', '.join(DEVICES)}; any other by memory, such as '80GiB'")
    return DEVICES[key][0] * 10**9
