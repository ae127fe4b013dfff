"""The loads, stores and FLOPs of every kernel launch of a layer."""

from __future__ import annotations

from collections.abc import Callable

from memfine_fx.kernels.combine import combine_accesses
from memfine_fx.kernels.down import down_accesses
from memfine_fx.kernels.down_backward import down_backward_accesses
from memfine_fx.kernels.gate_up import gate_up_accesses
from memfine_fx.kernels.launches import Launch
from memfine_fx.kernels.low_rank import narrow_accesses
from memfine_fx.kernels.sorting import sort_accesses
from memfine_fx.kernels.traffic import Access, Load
from memfine_fx.kernels.weight_gradient import weight_gradient_accesses

__all__ = ["accesses_of", "flops_of"]

_ACCESSES: dict[str, Callable[[Launch, Load], list[Access]]] = {
    "gate_up_kernel": gate_up_accesses,
    "down_kernel": down_accesses,
    "down_backward_kernel": down_backward_accesses,
    "combine_kernel": combine_accesses,
    "narrow_kernel": narrow_accesses,
    "weight_gradient_kernel": weight_gradient_accesses,
}


def accesses_of(launch: Launch, load: Load) -> list[Access]:
    """Return a launch's loads and stores for a load of its window, or of the whole layer where it is one of the sort.

    Raises:
        ValueError: tables are lists, whose entries are in none of the launch's arguments.
    """
    if launch.constants.get("LIST_TYPE") is not None:
        raise ValueError(f"what {launch.name} reads of a list of experts is not counted")
    return _ACCESSES.get(launch.name, sort_accesses)(launch, load)


def flops_of(launch: Launch, load: Load) -> tuple[int, int]:
    """Return (FLOPs of a launch's matrix products on the window's rows, the same with the spare rows of tiles)."""
    constants, name = launch.constants, launch.name
    if name == "weight_gradient_kernel":
        heights = constants["NUM_PROJECTIONS"] * constants["HEIGHT"] + constants["HAS_DOWN"] * constants["DOWN_HEIGHT"]
        entries, tile = heights * constants["WIDTH"], constants["TILE_DEPTH"]
    elif name == "down_kernel":
        length = constants["DEPTH"] * (1 + constants["HAS_SECOND"]) + constants["RANK"] * (
            1 + constants["HAS_SECOND_TERM"]
        )
        entries, tile = constants["COLUMNS"] * length, constants["TILE_ROWS"]
    elif name == "narrow_kernel":
        entries, tile = constants["LENGTH"] * constants["RANK"], constants["TILE_ROWS"]
    elif name in ("gate_up_kernel", "down_backward_kernel"):
        num_matrices = 1 + (name == "gate_up_kernel" and constants["HAS_UP"])
        entries, tile = (
            constants["WIDTH"] * num_matrices * (constants["HIDDEN"] + constants["RANK"]),
            constants["TILE_ROWS"],
        )
    else:
        return 0, 0
    return 2 * entries * load.num_rows, 2 * entries * load.num_tiles(tile) * tile
