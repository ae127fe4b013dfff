"""Accelerators as serving sees them: those of every vendor, and NVIDIA's from the training planner's systems.

The only place here that knows those systems and the fractions of their rates that were fitted to training runs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from memfine_planner.costs.architectures import Architecture, mean_context
from memfine_planner.costs.calibration import Calibration, fitted
from memfine_planner.costs.model_configs import architecture
from memfine_planner.hardware.systems import System, builtin_systems
from memfine_planner.hardware.vendors import Accelerator, builtin_accelerators, load_accelerators

__all__ = ["Accelerator", "Architecture", "accelerators", "architecture", "mean_context"]


@cache
def _builtin() -> dict[str, Accelerator]:
    calibration = fitted()
    nvidia = {name: _of_system(one, calibration) for name, one in builtin_systems().items()}
    return nvidia | builtin_accelerators()


def accelerators(path: Path | None = None) -> dict[str, Accelerator]:
    """All known accelerators by name, with those of a file.

    Raises:
        ConfigError: the file cannot be read, or a field is bad.
    """
    return _builtin() | (load_accelerators(path) if path else {})


def _of_system(sys: System, calibration: Calibration) -> Accelerator:
    shared = ("name", "tflops", "memory_gib", "memory_gb_per_s", "network_gb_per_s", "host_link_gb_per_s", "sources")
    return Accelerator(
        vendor="NVIDIA",
        domain=sys.nvlink_domain,
        domain_gb_per_s=sys.nvlink_gb_per_s,
        gemm_fraction={number: calibration.gemm(sys.generation, number) for number in sys.tflops},
        memory_fraction=calibration.memory,
        link_fraction=calibration.network,
        checked={
            name.replace("nvlink_domain", "domain").replace("nvlink", "domain"): page
            for name, page in sys.checked.items()
        },
        **{name: getattr(sys, name) for name in shared},
    )
