"""The few numbers that no data sheet gives: what fraction of a rate is reached, and what a launch costs.

Each has a prior, from published micro-benchmarks or reasoning, and a value fitted to published runs by
`memfine_planner.training.fitting` (data/calibration.json). None belongs to one run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

__all__ = ["CALIBRATION_FILE", "Calibration", "Prior", "fitted", "priors"]

CALIBRATION_FILE = Path(__file__).parent / "data" / "calibration.json"


@dataclass(frozen=True)
class Calibration:
    """Fractions of data-sheet rates and fixed costs.

    Args:
        gemm_ampere_16, ...: fraction of the dense rate that a large matrix product reaches, by GPU generation and
            bits of the format, in a step (clocks under power limits included).
        gemm_half_size: a product's dimension at which half of that is reached, per PFLOP/s of the format's rate.
        attention: fraction of the 16-bit rate that flash attention's forward reaches at head width 128;
            backward reaches 0.85 of it.
        memory: fraction of the memory bandwidth that fused pointwise kernels reach.
        nvlink, network: fraction of the link's bandwidth that collectives reach.
        alltoall: fraction of NVLink's bandwidth that an all-to-all of expert rows reaches.
        overlap: fraction of a compute interval that can hide communication, and of communication that hides.
        launch_us: host time of an x86 server per kernel launch of the training framework.
        expert_us: the same per unit of a grouped linear's loop over its experts.
        chunk_us: the same per micro-batch and chunk of the pipeline where the exchange is overlapped: the schedule
            builds a plan for every pair of chunks and waits for its streams at their ends.
        grace_launch: how much longer a Grace core takes.
        nvlink_latency_us, network_latency_us: fixed cost of a step of a collective.
    """

    gemm_ampere_16: float = 0.75
    gemm_hopper_16: float = 0.72
    gemm_hopper_8: float = 0.62
    gemm_blackwell_16: float = 0.72
    gemm_blackwell_8: float = 0.62
    gemm_blackwell_4: float = 0.50
    gemm_half_size: float = 100.0
    attention: float = 0.55
    memory: float = 0.75
    nvlink: float = 0.75
    network: float = 0.8
    alltoall: float = 0.6
    overlap: float = 0.8
    launch_us: float = 15.0
    expert_us: float = 30.0
    chunk_us: float = 10_000.0
    grace_launch: float = 1.2
    nvlink_latency_us: float = 6.0
    network_latency_us: float = 15.0

    def gemm(self, generation: str, number: str) -> float:
        """Fraction of the rate that a large product reaches."""
        bits = {"FP16": 16, "BF16": 16, "FP8": 8, "FP4": 4}[number]
        value: float = getattr(self, f"gemm_{generation}_{bits}")
        return value


@dataclass(frozen=True)
class Prior:
    """What is believed before fitting: median and spread (standard deviation of the logarithm)."""

    name: str
    median: float
    spread: float
    why: str


def priors() -> tuple[Prior, ...]:
    """Priors of the fitted numbers; the others stay at their defaults."""
    base = Calibration()
    table = (
        ("gemm_ampere_16", 0.08, "cuBLAS reaches 0.75 to 0.85 of 312 TFLOPS on large products"),
        ("gemm_hopper_16", 0.08, "cuBLAS reaches 0.7 to 0.75 of 989 TFLOPS under the 700 W limit"),
        ("gemm_hopper_8", 0.12, "cuBLASLt reaches 0.6 to 0.7 of 1,979 TFLOPS under the 700 W limit"),
        ("gemm_blackwell_16", 0.12, "as Hopper; fewer public measurements"),
        ("gemm_blackwell_8", 0.15, "as Hopper; fewer public measurements"),
        ("gemm_half_size", 0.5, "tile and wave quantisation; K of a few hundred loses half of a tile's prologue"),
        ("attention", 0.15, "FlashAttention-2/3 and cuDNN reach 0.5 to 0.7 of the 16-bit rate forward"),
        ("memory", 0.15, "stream kernels reach 0.8 to 0.9; fused norms and permutes less"),
        ("network", 0.15, "NCCL and DeepEP reach 0.8 to 0.9 of 400 Gb/s on large messages"),
        ("alltoall", 0.25, "uneven peers and many small messages"),
        ("overlap", 0.15, "communication kernels take SMs and bandwidth from compute"),
        ("launch_us", 0.5, "5 us a bare launch; modules and autograd multiply it"),
        ("expert_us", 0.5, "allocation, views and scales of each expert's tensors, forward and backward"),
        ("chunk_us", 1.0, "a thousand Python calls and waits for streams and neighbours; a guess, raised from 5 ms"),
    )
    return tuple(Prior(name, getattr(base, name), spread, why) for name, spread, why in table)


@cache
def fitted() -> Calibration:
    """The calibration fitted to all published runs that ship with the package."""
    known = {field.name for field in fields(Calibration)}
    values = json.loads(CALIBRATION_FILE.read_text())["values"]
    return replace(Calibration(), **{name: value for name, value in values.items() if name in known})
