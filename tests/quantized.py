"""Tables in 4 bits by bitsandbytes' operator, which is written here where the library is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from memfine_fx.kernels.packed import NF4

__all__ = ["dequantized"]

if importlib.util.find_spec("bitsandbytes") is None:

    @torch.library.custom_op("bitsandbytes::dequantize_4bit", mutates_args=())
    def dequantize_4bit(
        packed: Tensor, absmax: Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        assert quant_type == "nf4"
        numbers = torch.stack((packed.reshape(-1) >> 4, packed.reshape(-1) & 15), dim=1).int()
        codes = torch.tensor(NF4, device=packed.device)
        scaled = codes.index_select(0, numbers.flatten()).reshape(-1, blocksize) * absmax.float().view(-1, 1)
        return scaled.reshape(list(shape)).to(dtype)

    @dequantize_4bit.register_fake
    def _(
        packed: Tensor, absmax: Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        return absmax.new_empty(list(shape), dtype=dtype)

else:
    import bitsandbytes  # noqa: F401  # registers the operator


def dequantized(packed: Tensor, absmax: Tensor, block: int, shape: Sequence[int]) -> Tensor:
    """[*shape] in fp32, of NF4."""
    made: Tensor = torch.ops.bitsandbytes.dequantize_4bit(packed, absmax, block, "nf4", list(shape), torch.float32)
    return made
