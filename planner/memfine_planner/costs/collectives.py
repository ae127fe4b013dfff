"""Time of a collective: latency plus bytes over bandwidth (alpha-beta), on a two-level topology.

Ring bounds (Thakur, Rabenseifner and Gropp, 2005) inside an NVLink domain; across domains the links of all members
in a domain work together, and the slower level decides.
"""

from __future__ import annotations

from math import ceil, log2

from memfine_planner.costs.calibration import Calibration
from memfine_planner.hardware.links import Group
from memfine_planner.hardware.systems import System

__all__ = ["all_gather", "all_reduce", "all_to_all", "point_to_point"]


_COPIED_NVLINK_GB_PER_S = 450.0
_COPIED_NETWORK_GB_PER_S = 50.0
"""Links up to which point-to-point copies keep pace: those of Hopper systems, on which an all-to-all of copies is
calibrated. GPT-OSS, whose experts' biases exclude the fused dispatcher, trains no faster on B300's 800 Gb/s than on
B200's 400, and on NVL72 as if over Hopper's NVLink."""


def all_gather(num_bytes: float, group: Group, sys: System, cal: Calibration) -> float:
    """Seconds to gather `num_bytes` in all (the result), or to reduce-scatter as many."""
    if group.size <= 1 or num_bytes <= 0:
        return 0.0
    local, domains = group.per_domain(sys), group.domains(sys)
    inside = num_bytes * (local - 1) / local / (sys.nvlink_gb_per_s * 1e9 * cal.nvlink)
    latency = ceil(log2(local)) * cal.nvlink_latency_us if local > 1 else 0.0
    if domains == 1:
        return inside + latency * 1e-6
    across = num_bytes * (domains - 1) / domains / (sys.network_gb_per_s * 1e9 * cal.network * local)
    latency += (domains - 1 if domains <= 8 else 2 * ceil(log2(domains))) * cal.network_latency_us
    return max(inside, across) + latency * 1e-6


def all_reduce(num_bytes: float, group: Group, sys: System, cal: Calibration) -> float:
    """Seconds to reduce `num_bytes` held by every rank: a reduce-scatter and an all-gather."""
    return 2 * all_gather(num_bytes, group, sys, cal)


def all_to_all(
    num_bytes: float,
    remote: float,
    group: Group,
    sys: System,
    cal: Calibration,
    exchanges: int = 1,
    *,
    is_fused: bool = True,
) -> float:
    """Seconds for every rank to send `num_bytes` in all, a fraction `remote` of it out of its domain.

    Args:
        is_fused: by a kernel that writes to its peers and so follows the link; else by point-to-point copies, whose few
            blocks of threads move no more over links faster than the Hopper generation's.
    """
    if group.size <= 1 or num_bytes <= 0:
        return 0.0
    nvlink, network = sys.nvlink_gb_per_s, sys.network_gb_per_s
    if not is_fused:
        nvlink, network = min(nvlink, _COPIED_NVLINK_GB_PER_S), min(network, _COPIED_NETWORK_GB_PER_S)
    inside = num_bytes * (1 - remote) / (nvlink * 1e9 * cal.alltoall)
    across = num_bytes * remote / (network * 1e9 * cal.network)
    latency = cal.network_latency_us if group.domains(sys) > 1 else cal.nvlink_latency_us
    return max(inside, across) + 2 * latency * exchanges * 1e-6


def point_to_point(num_bytes: float, stride: int, sys: System, cal: Calibration) -> float:
    """Seconds to send to the rank `stride` away."""
    if stride < sys.nvlink_domain:
        return num_bytes / (sys.nvlink_gb_per_s * 1e9 * cal.nvlink) + cal.nvlink_latency_us * 1e-6
    return num_bytes / (sys.network_gb_per_s * 1e9 * cal.network) + cal.network_latency_us * 1e-6
