"""One MoE layer as it is fine-tuned: its weights frozen, in full or in packed numbers, with adapters on the experts.

``workload``: the format of the experts' tables, then "+lora" where adapters of rank 8 are trained on both of them.

    frozen      full precision, nothing trained but what lies before the layer: what the layer itself needs
    lora        full precision; the adapters are PEFT's (`target_parameters`)
    nf4         4 bits, by bitsandbytes' `replace_parameter_4bit`
    mxfp4       4 bits in blocks of 32, made whole by transformers' `convert_moe_packed_tensors`
    fp8         float8 in blocks of 128 x 128, made whole by transformers' `_dequantize_fp8_weight`
    int8        bytes with a scale a row

Adapters over packed tables are W + s A B written out in a parametrization: PEFT 0.21 itself fails over parametrized
tables.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.peers import find_peer
from benchmarks.records import Job
from benchmarks.workloads import WEIGHT_STD, Workload
from benchmarks.workloads.layer import Layer, build_block

RANK = 8
TABLES = ("gate_up_proj", "down_proj")


class _Made(nn.Module):
    """A table made whole of packed numbers by `make(numbers, scales)` whenever it is read."""

    def __init__(self, make: Callable[[Tensor, Tensor], Tensor], scales: Tensor) -> None:
        super().__init__()
        self.make = make
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.make(numbers, self.scales)


class Adapted(nn.Module):
    """W + s B A of each expert."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        num_experts, out, width = table.shape
        self.a = nn.Parameter(torch.randn(num_experts, RANK, width) * WEIGHT_STD)
        self.b = nn.Parameter(torch.randn(num_experts, out, RANK) * WEIGHT_STD)

    def forward(self, table: Tensor) -> Tensor:
        return table + (self.b @ self.a) * (1 / RANK)


def _frozen(experts: Any, name: str) -> None:
    """Full precision."""


def _nf4(experts: Any, name: str) -> None:
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    replace_parameter_4bit(experts, name, quant_type="nf4")


def _mxfp4(experts: Any, name: str) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    num_experts, out, width = getattr(experts, name).shape
    dtype = getattr(experts, name).dtype
    shape = (num_experts, width, out // 32)  # it gives [E,out,width], turned
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    scales = torch.randint(119, 122, shape, dtype=torch.uint8)
    make = lambda numbers, exponents: convert_moe_packed_tensors(numbers, exponents, dtype=dtype)  # noqa: E731
    _replace(experts, name, blocks, _Made(make, scales))


def _fp8(experts: Any, name: str) -> None:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    table = getattr(experts, name).data
    blocks = table.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    scales = blocks.abs().amax(dim=(2, 4)) / 448
    numbers = (blocks / scales[:, :, None, :, None]).reshape(table.shape).to(torch.float8_e4m3fn)
    make = lambda packed, scale: _dequantize_fp8_weight(packed, scale, [128, 128], table.dtype)  # noqa: E731
    _replace(experts, name, numbers, _Made(make, scales))


def _int8(experts: Any, name: str) -> None:
    table = getattr(experts, name).data
    scales = table.abs().amax(2, keepdim=True) / 127
    make = lambda packed, scale: packed.to(scale.dtype) * scale  # noqa: E731
    _replace(experts, name, (table / scales).round().to(torch.int8), _Made(make, scales))


def _replace(experts: Any, name: str, numbers: Tensor, made: nn.Module) -> None:
    setattr(experts, name, nn.Parameter(numbers, requires_grad=False))
    parametrize.register_parametrization(experts, name, made, unsafe=True)


FORMATS: dict[str, Callable[[Any, str], None]] = {
    "frozen": _frozen, "nf4": _nf4, "mxfp4": _mxfp4, "fp8": _fp8, "int8": _int8,
}  # fmt: skip
WORKLOADS = (*FORMATS, "lora", *(f"{name}+lora" for name in FORMATS if name != "frozen"))


def build_adapted_workload(job: Job) -> Workload:
    """The frozen block in the workload's format, under the job's peer."""
    block = build_block(job).requires_grad_(False)
    torch.manual_seed(job.seed)
    name, _, adapters = job.workload.partition("+")
    if name == "lora":
        _add_adapters_of_peft(block)
    else:
        for table in TABLES:
            FORMATS[name](block.experts, table)
            if adapters:
                parametrize.register_parametrization(block.experts, table, Adapted(getattr(block.experts, table)))
    layer = Layer(job, block, find_peer(job.workload, job.peer).wrap(block, job.sizes))
    return layer.at(job.sizes, job.load)


def _add_adapters_of_peft(block: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    targets = [f"experts.{name}" for name in TABLES]
    config = LoraConfig(r=RANK, lora_alpha=1, target_modules=[], target_parameters=targets)
    inject_adapter_in_model(config, block)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_B" in name:
            nn.init.normal_(parameter, std=WEIGHT_STD)
