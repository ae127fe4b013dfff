"""List the memory of devices by name, and what CUDA takes of it beyond a step's tensors.

Neither was measured by us on a GPU: sizes name the maker's page to check them by, and constants their source.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfine_fx.errors import ConfigError

__all__ = ["CUDA_TERMS", "DEVICES", "CudaTerm", "device_bytes"]

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


@dataclass(frozen=True)
class CudaTerm:
    """One use of device memory in bytes, and where the number is from."""

    name: str
    num_bytes: int
    source: str


CUDA_TERMS = (
    CudaTerm(
        "context and loaded kernels",
        781_000_000,
        "nvidia-smi before the first tensor, https://github.com/pytorch/pytorch/issues/34323; it differs by GPU and "
        "version",
    ),
    CudaTerm(
        "workspace of cuBLAS",
        32 << 20,
        "recommended for Hopper and PyTorch's choice there, https://github.com/pytorch/pytorch/pull/120925",
    ),
)
"""Left out, since nothing here bounds them: the caching allocator's rounding and fragments, scratch of CUDA kernels."""
