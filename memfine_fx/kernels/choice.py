"""Which GPU kernels run where: for a layer of experts, and for the loss of a head."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from memfine_fx.config import asked_gpu_kernels
from memfine_fx.kernels.launches import has_triton
from memfine_fx.kernels.tables import KernelForm, Param, standing
from memfine_fx.memory.measure import run_outside_compilation
from memfine_fx.records.heads import HeadLoss
from memfine_fx.runtime.head_loop import LossKernel

if TYPE_CHECKING:  # these need Triton
    from memfine_fx.kernels.tiling import LayerTiles
    from memfine_fx.kernels.tuning import LayerKind

__all__ = ["can_run", "loss_kernel_on", "precision_of_products", "tiles_of", "why_compiled_functions_run"]

_LOG = logging.getLogger(__name__)

_DEVICES = ("cuda",)
_TIMED = ("cuda",)  # devices on which tiles are chosen by time: not in the interpreter
_MEASURED = ("sm_90",)  # benchmarks/results/gpu_model.json
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_compiled_functions_run(form: KernelForm | None, tensors: Sequence[torch.Tensor], top_k: int, axis: str) -> str:
    """Return why the compiled expert functions, not the kernels, run a layer on one rank; "" where the kernels run it.

    A layer that the kernels will run on a CUDA device is timed there first, unless that was done; see `kernels.tuning`.
    Where MEMFINE_GPU_KERNELS says nothing, the kernels run only on devices that were measured, and only where they were
    faster than torch's grouped products.

    Args:
        form: of the expert function, None where no kernel computes it.
        tensors: tokens [T,H], then the parameters of the expert function in its order; they may be fake.
        top_k: K.
        axis: of the layer's chunks, "rows" or "tokens".
    """
    setting = asked_gpu_kernels()
    if setting is False:
        return "MEMFINE_GPU_KERNELS is 0"
    if axis != "rows":
        return f"chunks along {axis}"
    # The kernels add rows to tokens in another order in every run. Dynamo compiles anew where this setting changes.
    if torch.are_deterministic_algorithms_enabled():
        return "torch is to be deterministic"
    if form is None:
        return "experts of a form that the kernels do not know"
    if not can_run(form, tensors):
        return "a device, dtypes or layouts that the kernels do not take, or no Triton"
    if setting is None and not _was_measured(form, tensors):
        return "the kernels were not measured on such a device or dtype; MEMFINE_GPU_KERNELS=1 asks for them"
    return _why_not_after_timing(form, tensors, top_k, only_if_faster=setting is None)


def can_run(form: KernelForm, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the kernels compute experts of this form on tensors of these devices, layouts and dtypes.

    Packed expert weights, which are dequantized tile by tile, must be frozen; their adapters need not be.

    Args:
        tensors: tokens [T,H], then the parameters of the expert function in its order; they may be fake.
    """
    if not all(tensor.device.type in _DEVICES for tensor in tensors):
        return False
    hidden, *params = tensors
    if form.is_list:
        num_experts = len(params) // len(form.positions)
        groups = [params[first : first + num_experts] for first in range(0, len(params), num_experts)]
        are_alike = all(len({(param.shape, param.stride(), param.dtype) for param in group}) == 1 for group in groups)
        are_one_dtype = len({param.dtype for param in params}) == 1  # the kernels read all of them by address
        return are_alike and are_one_dtype and all(tensor.dtype in _DTYPES for tensor in tensors) and has_triton()
    positions = form.computed_positions
    packed = [params[position] for position in positions]
    others = [hidden, *(param for position, param in enumerate(params) if position not in positions)]
    own = [params[position] for position in form.positions[: form.num_own]]
    are_known = all(tensor.dtype in _DTYPES for tensor in others) and not any(
        param.requires_grad for param in own if packed
    )
    return are_known and all(param.is_contiguous() for param in packed) and has_triton()


def _was_measured(form: KernelForm, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether models with such layers were measured on these devices and in these dtypes.

    Adapters may be in fp32: PEFT creates them so for expert weights in 16 bits.

    Args:
        tensors: as for `can_run`.
    """
    from memfine_fx.kernels.tiling import target_of

    if form.is_list or any(target_of(tensor.device) not in _MEASURED for tensor in tensors):
        return False
    hidden, *params = tensors
    own = [params[position] for position in form.positions[: form.num_own]]
    return all(tensor.element_size() == 2 for tensor in (hidden, *own))


def _why_not_after_timing(
    form: KernelForm, tensors: Sequence[torch.Tensor], top_k: int, *, only_if_faster: bool
) -> str:
    """Time the tiles of the kernels for a layer, and return why the kernels shall not run it, or "".

    Where the kernels fail to compile or to start, a warning says so.

    Args:
        tensors: as for `can_run`.
        only_if_faster: whether the kernels shall not run where torch's grouped products took less time.
    """
    from memfine_fx.kernels.tuning import KernelsDoNotRun, times_of

    if form.is_list:
        return ""
    hidden, *params = tensors
    ordered = [params[position] for position in form.positions]
    try:
        tiles_of(form, hidden, ordered, top_k, measures=True)
    except KernelsDoNotRun as error:
        _LOG.warning("experts run in compiled functions, because GPU kernels do not run here: %s", error)
        return "the kernels do not run here"
    times = times_of(_kind(form, hidden, ordered, top_k), hidden.device) if only_if_faster else None
    if times is None or times.grouped is None or times.kernels <= times.grouped:
        return ""
    return f"grouped products took {1e3 * times.grouped:.2f} ms of a timed layer, the kernels {1e3 * times.kernels:.2f}"


def _kind(form: KernelForm, hidden: torch.Tensor, params: Sequence[Param], top_k: int) -> LayerKind:
    """Return the kind of layer whose timed tiles serve this one: the same layer without its adapters."""
    from memfine_fx.kernels.tuning import kind_of

    own = list(map(standing, params[: form.num_own]))
    return kind_of(form.layout, form.activation, form.has_bias, precision_of_products(), hidden, own, top_k)


def tiles_of(
    form: KernelForm, hidden: torch.Tensor, params: Sequence[Param], top_k: int, *, measures: bool
) -> LayerTiles | None:
    """Return the tile sizes that were fastest for such a layer on its device, or None where none were timed.

    Args:
        params: in the order of `form.positions`.
        measures: whether they are timed now where they were not before.

    Raises:
        KernelsDoNotRun: no tiles could be timed.
    """
    from memfine_fx.kernels.tuning import tune, tuned

    if hidden.device.type not in _TIMED or form.sources or form.is_list:
        return None
    kind = _kind(form, hidden, params, top_k)
    return tune(kind, hidden.device) if measures else tuned(kind, hidden.device)


def precision_of_products() -> str:
    """Return how the kernels multiply fp32: as torch does, "ieee" or "tf32"."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def loss_kernel_on(device: torch.device) -> LossKernel | None:
    """Return the kernel that turns a chunk's logits into losses and gradients, None where it does not run.

    It needs Triton, and an NVIDIA GPU of compute capability 8.0 or an AMD one. Where it fails to compile or to start on
    such a device, a warning says so.
    """
    if device.type != "cuda" or not has_triton():
        return None
    is_supported = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    if not is_supported or not _loss_kernel_runs(device):
        return None
    from memfine_fx.kernels.cross_entropy import cross_entropy_

    return cross_entropy_


@functools.cache
def _loss_kernel_runs(device: torch.device) -> bool:
    """Run the kernel once per device, on one row of logits: Triton may find no compiler, or not know the device."""
    from memfine_fx.kernels.cross_entropy import cross_entropy_

    def one_row() -> torch.Tensor:
        label = torch.zeros(1, dtype=torch.int64, device=device)
        return cross_entropy_(torch.zeros(1, 8, device=device), label, HeadLoss(), torch.ones((), device=device))

    try:
        run_outside_compilation(device.type, one_row)
    except Exception as error:  # of the compiler or of the driver: its types differ by version and target
        _LOG.warning("a head's loss goes over blocks of logits, because its GPU kernel does not run here: %s", error)
        return False
    return True
