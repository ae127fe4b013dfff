"""What every launch of a layer loads, stores and multiplies."""

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
    """What a launch loads and stores under a load of its window, or of the layer where it is of the sort.

    Raises:
        ValueError: tables are lists, whose entries are in none of the launch's arguments.
    """
    if launch.constants.get("LIST_TYPE") is not None:
        raise ValueError(f"what {launch.name} reads of a list of experts is not counted")
    return _ACCESSES.get(launch.name, sort_accesses)(launch, load)


def flops_of(launch: Launch, load: Load) -> tuple[int, int]:
    """(FLOPs of a launch's matrix products on rows that are there, the same with tiles' rows to spare)."""
    told, name = launch.constants, launch.name
    if name == "weight_gradient_kernel":
        heights = told["NUM_PROJECTIONS"] * told["HEIGHT"] + told["HAS_DOWN"] * told["DOWN_HEIGHT"]
        entries, tile = heights * told["WIDTH"], told["TILE_DEPTH"]
    elif name == "down_kernel":
        length = told["DEPTH"] * (1 + told["HAS_SECOND"]) + told["RANK"] * (1 + told["HAS_SECOND_TERM"])
        entries, tile = told["COLUMNS"] * length, told["TILE_ROWS"]
    elif name == "narrow_kernel":
        entries, tile = told["LENGTH"] * told["RANK"], told["TILE_ROWS"]
    elif name in ("gate_up_kernel", "down_backward_kernel"):
        num_matrices = 1 + (name == "gate_up_kernel" and told["HAS_UP"])
        entries, tile = told["WIDTH"] * num_matrices * (told["HIDDEN"] + told["RANK"]), told["TILE_ROWS"]
    else:
        return 0, 0
    return 2 * entries * load.num_rows, 2 * entries * load.num_tiles(tile) * tile
