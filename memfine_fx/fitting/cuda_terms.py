"""List the memory of a CUDA device beyond a step's tensors: stated constants, not measured by us on any GPU yet."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CUDA_TERMS", "CudaTerm"]


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
