"""bitsandbytes: parameters in 4 bits, which a parametrization makes whole when they are read, and linear layers."""

from __future__ import annotations

import copy
import importlib
import math
import sys
from collections.abc import Collection, MutableMapping, Sequence
from typing import Any

import torch

from memfine_fx.compat.checks import Feature, expect
from memfine_fx.compat.nn import own_parameters

__all__ = [
    "CODE_BOOK_BYTES",
    "DEQUANTIZE_4BIT",
    "LAYERS",
    "LINEAR_4BIT",
    "SCALES_A_BLOCK",
    "TABLE_CACHE",
    "caching_hooks",
    "compute_dtype",
    "eight_bit_bytes",
    "layers_in_4_bits",
    "linear_4bit",
    "num_packed",
    "optimizer_state_bytes",
    "pack_layers",
    "pack_table",
    "packed_experts",
    "packed_product",
    "readable",
    "scale_tensors",
    "with_scales",
]

_MODULE = "bitsandbytes.nn.parametrize"
_LAYERS = "bitsandbytes.nn.modules"
_CLASSES = ("Linear4bit", "LinearNF4", "LinearFP4")
_HOOKS = ("_enable_parametrization_cache", "_disable_parametrization_cache")

DEQUANTIZE_4BIT = "bitsandbytes::dequantize_4bit"
"""(packed, absmax, blocksize, quant_type, shape, dtype) -> [*shape]; two numbers a byte, one absmax for each
`blocksize` numbers in their order in memory."""

LINEAR_4BIT = "memfine::linear_4bit"
"""Rows times a weight in 4 bits, transposed: see `linear_4bit`."""

SCALES_A_BLOCK = 256
"""Of double quantisation: scales in bytes that have one scale."""

CODE_BOOK_BYTES = 1024
"""Of the numbers that eight bits stand for in an optimizer's state; one book for each kind of state."""

_LEAST_8BIT, _STATE_BLOCK = 4096, 256
"""Elements below which a parameter's state is in fp32; elements of a state that share a scale."""

_STATES = {"AdEMAMix": 3, "Optimizer2State": 2, "Optimizer1State": 1}
"""Tensors like a parameter that each base class keeps, the more special first; two kinds have a code book each."""


def eight_bit_bytes(elements: int, num_states: int, least: int = _LEAST_8BIT) -> int:
    """Return the bytes of state that an 8-bit optimizer keeps for one parameter, without code books."""
    if elements < least:
        return 4 * num_states * elements
    return num_states * (elements + 4 * -(-elements // _STATE_BLOCK))


def optimizer_state_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> int | None:
    """Return the bytes of state that a bitsandbytes optimizer will hold for parameters that it has not stepped.

    None for an optimizer of another library. Options that bitsandbytes' global manager sets for single parameters are
    ignored.
    """
    names = {base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("bitsandbytes.optim")}
    num_states = next((number for name, number in _STATES.items() if name in names), 0)
    options: Any = getattr(optimizer, "args", None)
    if not num_states or options is None:
        return None
    least = int(options.min_8bit_size) if options.optim_bits == 8 else sys.maxsize
    has_books = any(parameter.numel() >= least for parameter in parameters)
    num_bytes = sum(eight_bit_bytes(parameter.numel(), num_states, least) for parameter in parameters)
    return num_bytes + has_books * min(num_states, 2) * CODE_BOOK_BYTES


def caching_hooks(model: torch.nn.Module) -> list[tuple[MutableMapping[int, Any], int]]:
    """Return the places of the hooks that cache dequantized weights until a module's forward ends.

    Returns:
        (dictionary of the module's hooks, key of the caching hook) for each.
    """
    functions = {getattr(sys.modules.get(_MODULE), name, None) for name in _HOOKS} - {None}
    if not functions:
        return []
    installed_hooks: list[tuple[MutableMapping[int, Any], int]] = [
        (hooks, key)
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for key, hook in hooks.items()
        if hook in functions
    ]
    return installed_hooks if installed_hooks and TABLE_CACHE.holds() else []


def layers_in_4_bits(model: torch.nn.Module) -> list[Any]:
    """The linear layers of a model whose weights are in 4 bits; where bitsandbytes was never imported, none."""
    modules = sys.modules.get(_LAYERS)
    classes = tuple(cls for name in _CLASSES if (cls := getattr(modules, name, None)) is not None)
    # A subclass with a forward of its own may do something else; where experts are shared out, it has none.
    forwards = {cls.forward for cls in classes}
    layers = [module for module in model.modules() if isinstance(module, classes) and type(module).forward in forwards]
    return layers if layers and LAYERS.holds() else []


def pack_layers(model: torch.nn.Module, excluded: Collection[str]) -> None:
    """Put a `Linear4bit` in the place of each plain linear layer, as transformers does for `load_in_4bit`: NF4, scales
    quantized too, products in the weight's dtype. Weights may be meta tensors.

    Args:
        excluded: names of layers that stay as they are.
    """
    _make_codebook()
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and name not in excluded
    ]
    for name, linear in layers:
        model.set_submodule(name, _packed_layer(linear))


def _packed_layer(linear: torch.nn.Linear) -> torch.nn.Module:
    modules: Any = importlib.import_module(_LAYERS)
    functional: Any = importlib.import_module("bitsandbytes.functional")
    sizes, dtype, settings = (linear.in_features, linear.out_features), linear.weight.dtype, {"quant_type": "nf4"}
    packed: Any = modules.Linear4bit(*sizes, bias=False, compute_dtype=dtype, device="meta", **settings)
    numbers, state = functional.quantize_4bit(linear.weight.data, compress_statistics=True, **settings)
    packed.weight = modules.Params4bit(numbers, quant_state=state, module=packed, bnb_quantized=True, **settings)
    packed.quant_state, packed.bias = state, linear.bias
    return packed  # type: ignore[no-any-return]


def pack_table(module: torch.nn.Module, name: str) -> None:
    """Keep a parameter in NF4 with quantized scales, made whole when it is read; it may be a meta tensor."""
    _make_codebook()
    parametrize: Any = importlib.import_module(_MODULE)
    parametrize.replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")


def _make_codebook() -> None:
    """The codebook of scales is cached for the process where it is first asked for: never on the meta device."""
    functional: Any = importlib.import_module("bitsandbytes.functional")
    functional.quantize_blockwise(torch.zeros(1))


def packed_experts(module: torch.nn.Module) -> int | None:
    """E of a table [E,...] whose numbers in 4 bits a module keeps as `original`, one expert behind the other.

    None for other modules, and where a block of numbers with one scale lies across a border of experts.
    """
    cls = getattr(sys.modules.get(_MODULE), "Bnb4bitParametrization", None)
    packed: Any = module._parameters.get("original")
    if cls is None or packed is None or not isinstance(module, torch.nn.ModuleList) or type(module[0]) is not cls:
        return None
    state: Any = module[0].quant_state
    num_experts, num_each = state.shape[0], math.prod(state.shape[1:])
    is_split = len(state.shape) >= 3 and num_each % math.lcm(state.blocksize, 2 * packed.element_size()) == 0
    return num_experts if is_split and packed.numel() * packed.element_size() * 2 == num_experts * num_each else None


def scale_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the scales and codebooks of a module's own 4-bit weights, which are neither parameters nor buffers."""
    return [value for state in _states(module) for value in vars(state).values() if isinstance(value, torch.Tensor)]


def num_packed(module: torch.nn.Module) -> int:
    """How many numbers a module's own weights in 4 bits are."""
    return sum(math.prod(state.shape) for state in _states(module) if state.shape is not None)


def _states(module: torch.nn.Module) -> list[Any]:
    """Return the quantization states of a module's own weights, and those of their quantized scales, each once."""
    owners = (module, *module._parameters.values())
    states = [vars(owner).get("quant_state") for owner in owners if owner is not None]
    states += [getattr(state, "state2", None) for state in states]
    return list({id(state): state for state in states if state is not None}.values())


def readable(whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A tensor that stands for a parameter `own`, with what makes its numbers in 4 bits readable if they are."""
    state = getattr(own, "quant_state", None)
    if state is not None:
        whole.quant_state = state  # type: ignore[attr-defined]
    return whole


def with_scales(packed: torch.nn.Parameter, source: torch.nn.Parameter, memo: dict[int, Any]) -> None:
    """Give a parameter what makes another one in 4 bits readable: a fake tensor cannot be of the library's class."""
    for name, value in vars(source).items():
        setattr(packed, name, copy.deepcopy(value, memo) if name == "quant_state" else value)


def compute_dtype(layer: Any, x: torch.Tensor) -> torch.dtype:
    """The dtype in which a layer in 4 bits multiplies `x`: its own, or that of the first rows it saw."""
    if layer.compute_type_is_set or x.dtype not in (torch.float32, torch.bfloat16):
        return x.dtype if layer.compute_dtype is None else layer.compute_dtype
    return x.dtype


def packed_product(layer: Any, rows: torch.Tensor) -> torch.Tensor | None:
    """Rows [R,in] times the transposed weight of a layer in 4 bits; None where it is packed for a kernel of its own."""
    packed, state = layer.weight, getattr(own_parameters(layer)["weight"], "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return None
    if tuple(state.shape) != (layer.out_features, layer.in_features):
        return None
    twice = state.state2
    scales = [state.absmax, twice.absmax, twice.code, state.offset] if state.nested else [state.absmax]
    if state.nested and twice.blocksize != SCALES_A_BLOCK:
        return None
    product: torch.Tensor = linear_4bit(rows, packed, scales, state.blocksize, state.quant_type, layer.out_features)
    return product


@torch.library.custom_op(LINEAR_4BIT, mutates_args=())
def linear_4bit(
    rows: torch.Tensor, packed: torch.Tensor, scales: list[torch.Tensor], block_size: int, quant_type: str, out: int
) -> torch.Tensor:
    """Rows times a matrix [out,in] in 4 bits, transposed; backward makes the matrix again, as bitsandbytes does.

    Args:
        rows: [R,in] floats.
        packed: [out in / 2, 1] bytes.
        scales: of each block, as floats; or their bytes, what these are scaled by, their codebook and an offset.
        block_size: numbers with one scale.
        quant_type: "nf4" or "fp4".
        out: rows of the matrix.

    Returns:
        [R,out] in the rows' dtype.
    """
    shape = [out, rows.shape[-1]]
    multiply = getattr(torch.ops.bitsandbytes, "gemm_4bit", None)  # its kernels read packed numbers where rows are few
    if multiply is None or rows.dtype is torch.float64 or not rows.numel():
        return torch.nn.functional.linear(rows, _weight_of(packed, scales, block_size, quant_type, shape, rows.dtype))
    absmax, *twice = scales
    product: torch.Tensor
    if not twice:
        product = multiply(rows, packed, shape, absmax, block_size, quant_type)
    else:
        nested = dict(absmax_8bit=absmax, absmax_code=twice[1], absmax_offset=twice[2])
        product = multiply(rows, packed, shape, twice[0], block_size, quant_type, **nested)
    return product


@linear_4bit.register_fake
def _(
    rows: torch.Tensor, packed: torch.Tensor, scales: list[torch.Tensor], block_size: int, quant_type: str, out: int
) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], out)


def _keep_packed(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, packed, scales, ctx.block_size, ctx.quant_type, out = inputs
    ctx.shape, ctx.num_scales = [out, rows.shape[-1]], len(scales)
    ctx.save_for_backward(packed, *scales)


def _gradient_of_rows(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    packed, *scales = ctx.saved_tensors
    weight = _weight_of(packed, scales, ctx.block_size, ctx.quant_type, ctx.shape, grad.dtype)
    return grad @ weight, None, [None] * ctx.num_scales, None, None, None


linear_4bit.register_autograd(_gradient_of_rows, setup_context=_keep_packed)


def _weight_of(
    packed: torch.Tensor,
    scales: list[torch.Tensor],
    block_size: int,
    quant_type: str,
    shape: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The matrix [out,in] of packed numbers, by the library's operators, which know no fp64; see `linear_4bit`."""
    ops: Any = torch.ops.bitsandbytes
    is_double = dtype is torch.float64
    absmax, *twice = (scale.float() if scale.dtype is torch.float64 else scale for scale in scales)
    if twice:
        absmax = ops.dequantize_blockwise(absmax, *twice[:2], SCALES_A_BLOCK, torch.float32) + twice[2]
    weight = ops.dequantize_4bit(packed, absmax, block_size, quant_type, shape, torch.float32 if is_double else dtype)
    return weight.to(dtype)  # type: ignore[no-any-return]


def _check_layers() -> None:
    """A layer in 4 bits gives, and hands back, what its whole weight gives."""
    modules: Any = importlib.import_module(_LAYERS)
    with torch.random.fork_rng(devices=[]):
        layer = modules.Linear4bit(64, 2, bias=False, compress_statistics=True, quant_type="nf4").to("cpu")
        rows = torch.randn(3, 64, requires_grad=True)
    expected, product = layer(rows), packed_product(layer, rows)
    expect(product is not None, "its weight is packed in another way")
    assert product is not None
    expect(torch.allclose(product, expected, rtol=1e-4, atol=1e-5), "it multiplies by another weight")
    expected_grad, product_grad = (torch.autograd.grad(output.sum(), rows)[0] for output in (expected, product))
    expect(torch.allclose(product_grad, expected_grad, rtol=1e-4, atol=1e-5), "its gradient is another")


LAYERS = Feature(
    name="bitsandbytes.nn.modules.Linear4bit",
    package="bitsandbytes",
    purpose="lists of experts whose linear layers are in 4 bits, in one graph",
    seen=("0.50", "0.50"),
    fallback="Experts in a list whose linear layers bitsandbytes keeps in 4 bits run as they were, and are not "
    "chunked.",
    check=_check_layers,
)


def _check_cache() -> None:
    """A parameter in 4 bits is the same tensor with its module's hooks and without them."""
    parametrize: Any = importlib.import_module(_MODULE)
    module = torch.nn.Module()
    with torch.random.fork_rng(devices=[]):
        module.weight = torch.nn.Parameter(torch.randn(2, 64))
    parametrize.replace_parameter_4bit(module, "weight")
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    expect(len(hooks) == 2 and all(getattr(parametrize, name) in hooks for name in _HOOKS), f"its hooks are {hooks}")
    expect(torch.equal(module.weight, module.weight), "two reads differ")
    name = torch.ops.bitsandbytes.dequantize_4bit.default._schema.name
    expect(name == DEQUANTIZE_4BIT, f"its operator is called {name}")


TABLE_CACHE = Feature(
    name="bitsandbytes.nn.parametrize._enable_parametrization_cache",
    package="bitsandbytes",
    purpose="tables in 4 bits that are made one expert at a time",
    seen=("0.50", "0.50"),
    fallback="Experts whose tables bitsandbytes keeps in 4 bits are chunked, but each table is made whole.",
    check=_check_cache,
)
