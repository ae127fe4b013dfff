"""Floating-point operations of the experts, recomputation included.

Each routed row goes through the first projection (H to 2F: ``2 * H * 2F``) and the second (F to H:
``2 * F * H``). Backward does twice the forward's work: one product for the input's gradient, one for the
weight's. Recomputation adds the first projection again, or the whole forward. Router, activation and
combination are not counted.
"""

from benchmarks.peers import Recompute
from benchmarks.records import Sizes


def expert_flops(sizes: Sizes, recompute: Recompute) -> int:
    """Of one forward and backward of all layers."""
    first_projection = 2 * sizes.hidden * 2 * sizes.width
    forward = first_projection + 2 * sizes.width * sizes.hidden
    again = {"nothing": 0, "first projection": first_projection, "forward": forward}[recompute]
    return sizes.layers * sizes.routed_rows * (3 * forward + again)
