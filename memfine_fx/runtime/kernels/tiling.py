"""Tile sizes of a layer's kernels by target and dtype: one choice each, taken from what compiles without spills.

benchmarks/results/gpu_kernels.json says what each takes of a target. No choice was timed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from memfine_fx.runtime.kernels.launches import Tiles

__all__ = ["LEAST_COLUMNS", "LayerTiles", "target_of", "tiles_for"]


@dataclass(frozen=True)
class LayerTiles:
    """Tiles of the kernel of each name; `down` also of the input gradient."""

    gate_up: Tiles
    down: Tiles
    down_backward: Tiles
    weight_gradient: Tiles


_LOW_PRECISION = {
    "sm_80": LayerTiles(
        gate_up=Tiles(128, 64, 64, num_warps=8, num_stages=3),
        down=Tiles(128, 64, 64, num_warps=8, num_stages=3),
        down_backward=Tiles(64, 64, 64, num_warps=8, num_stages=3),
        weight_gradient=Tiles(128, 64, 64, num_warps=8, num_stages=3),
    ),
    "sm_90": LayerTiles(
        gate_up=Tiles(128, 64, 64, num_warps=8, num_stages=3),
        down=Tiles(128, 128, 64, num_warps=8, num_stages=3),
        down_backward=Tiles(128, 32, 64, num_warps=8, num_stages=3),
        weight_gradient=Tiles(128, 64, 64, num_warps=8, num_stages=3),
    ),
    "sm_100": LayerTiles(
        gate_up=Tiles(128, 64, 64, num_warps=8, num_stages=3),
        down=Tiles(128, 128, 64, num_warps=8, num_stages=3),
        down_backward=Tiles(128, 64, 64, num_warps=8, num_stages=3),
        weight_gradient=Tiles(128, 64, 64, num_warps=8, num_stages=3),
    ),
    "gfx942": LayerTiles(
        gate_up=Tiles(128, 64, 32, num_warps=4, num_stages=2),
        down=Tiles(128, 128, 32, num_warps=8, num_stages=2),
        down_backward=Tiles(128, 64, 32, num_warps=4, num_stages=2),
        weight_gradient=Tiles(64, 64, 32, num_warps=4, num_stages=2),
    ),
}
_FULL_PRECISION = LayerTiles(
    gate_up=Tiles(64, 32, 32, num_warps=4, num_stages=2),
    down=Tiles(64, 64, 32, num_warps=8, num_stages=2),
    down_backward=Tiles(64, 32, 32, num_warps=4, num_stages=2),
    weight_gradient=Tiles(64, 32, 32, num_warps=4, num_stages=2),
)
LEAST_COLUMNS = min(tiles.down_backward.columns for tiles in (*_LOW_PRECISION.values(), _FULL_PRECISION))
"""Of all targets: each tile of so many columns has a part of the routing weight's gradient."""


@functools.cache
def target_of(device: torch.device) -> str:
    """Whose tiles a device takes; asked once for each, since it asks the driver. The interpreter takes sm_80's."""
    if device.type != "cuda":
        return "sm_80"
    if torch.version.hip is not None:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def tiles_for(target: str, dtype: torch.dtype) -> LayerTiles:
    """The tiles for rows of a dtype on a target of `target_of`."""
    if dtype is torch.float32:
        return _FULL_PRECISION
    return _LOW_PRECISION[target]
