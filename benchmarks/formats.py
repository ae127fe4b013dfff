"""``python -m benchmarks.formats``: which formats of experts' weights are read expert by expert, in five families.

Each cell is a toy model of the family with real classes, its experts' tables in that format, or a loop over a list of
experts whose linear layers are: one step beside the unmodified model, in fp32 and in bf16, and one whose allocations
are walked. It writes results/formats.jsonl and docs/formats.md. Needs PEFT, bitsandbytes,
torchao and compressed-tensors.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

import memfine_fx
from benchmarks.workloads import adapted
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.memory.measure import trace_memory
from memfine_fx.models.loops import LoopConfig, LoopMoE

RESULTS = Path(__file__).parent / "results" / "formats.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "formats.md"
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe")
LIST = "list"
_E, _WIDTH = 16, 128
_SIZES: dict[str, Any] = dict(
    num_experts=_E, num_local_experts=_E, n_routed_experts=_E, hidden_size=_WIDTH, moe_intermediate_size=_WIDTH,
    intermediate_size=_WIDTH,
)  # fmt: skip
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "torchao", "compressed-tensors")
_SAME_ROUTING = 0.1
"""A larger error of eager bf16 says that it chose other experts than fp32."""
_MOST_SEEDS = 8

Weights = list[tuple[Any, str]]
"""Modules, and what is packed or adapted in them: tables [E,F,H] by their name, or linear layers."""
Make = Callable[[nn.Module, Weights], nn.Module]


@dataclass(frozen=True)
class Cell:
    """One format in one family, or in a list of experts.

    Args:
        state: "local", "whole" (chunked, but tables are made whole), "refused", or "raises" (the unmodified model).
        error: worst relative error of output and gradients against the unmodified model, in fp32.
        why: of what is not local.
        bf16: error of output and gradients from fp32, relative to that of the unmodified model in bf16; None where
            nothing was chunked.
    """

    format: str
    family: str
    state: str
    error: float
    why: str = ""
    bf16: float | None = None


def _lora(model: nn.Module, weights: Weights) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    modules = {module: name for name, module in model.named_modules()}
    targets = sorted({f"{modules[module]}.{name}" for module, name in weights})
    return _with_b(get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=targets)))


def _with_b(adapters: Any) -> nn.Module:
    for name, parameter in adapters.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapters  # type: ignore[no-any-return]


def _packed(name: str, *, adapts: bool = False) -> Make:
    def make(model: nn.Module, weights: Weights) -> nn.Module:
        for module, table in weights:
            adapted.FORMATS[name](module, table)
            if adapts:
                whole = getattr(module, table)
                parametrize.register_parametrization(module, table, adapted.Adapted(whole).to(whole.dtype))
        return model

    return make


def _torchao(name: str) -> Make:
    def make(model: Any, weights: Weights) -> nn.Module:
        from torchao import quantization

        modules = {module: path for path, module in model.named_modules()}
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped and batched matmuls by these tensors raise in torchao
        config = getattr(quantization, name)()
        paths = {f"{modules[module]}.{table}": config for module, table in weights}
        quantization.quantize_(model, quantization.FqnToConfig(paths), filter_fn=None)
        return model

    return make


def _listed(kind: str = "", **lora: Any) -> Make:
    """Linear layers of bitsandbytes' class `kind`, and PEFT's adapters with these settings on them."""

    def make(model: nn.Module, weights: Weights) -> nn.Module:
        for expert, name in weights if kind else ():
            setattr(expert, name, linear_of(kind, getattr(expert, name)))
        if not lora:
            return model
        from peft import LoraConfig, inject_adapter_in_model

        return _with_b(inject_adapter_in_model(LoraConfig(target_modules=r"experts\.\d+\.\w+", **lora), model))

    return make


def linear_of(kind: str, linear: nn.Linear) -> nn.Module:
    import bitsandbytes

    settings: dict[str, Any] = {"quant_type": "nf4"} if kind == "Linear4bit" else {"has_fp16_weights": False}
    sizes, has_bias = (linear.in_features, linear.out_features), linear.bias is not None
    packed = getattr(bitsandbytes.nn, kind)(*sizes, bias=has_bias, **settings)
    packed.load_state_dict(linear.state_dict())
    return packed.to(linear.weight.dtype).to("cpu")  # type: ignore[no-any-return]  # packs it


def _compressed(model: nn.Module, weights: Weights) -> nn.Module:
    """int4 in groups of 128 as compressed-tensors keeps linear layers, until the model's first call."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    scheme = preset_name_to_scheme("W4A16", ["re:.*experts.*w[123]$"])
    config = QuantizationConfig(config_groups={"experts": scheme}, format="pack-quantized", ignore=["re:.*gate"])
    apply_quantization_config(model, copy.deepcopy(config))
    for expert, name in weights:
        layer = getattr(expert, name)
        layer.weight_scale.data.copy_(layer.weight.abs().amax(1, keepdim=True) / 7)
    ModelCompressor(quantization_config=config).compress_model(model)
    return model


FORMATS: dict[str, Make] = {
    "LoRA (PEFT)": _lora,
    "NF4 (bitsandbytes)": _packed("nf4"),
    "NF4 + LoRA": _packed("nf4", adapts=True),
    "NF4 + LoRA (PEFT)": _lora,
    "MXFP4": _packed("mxfp4"),
    "MXFP4 + LoRA": _packed("mxfp4", adapts=True),
    "FP8 in blocks": _packed("fp8"),
    "FP8 in blocks + LoRA": _packed("fp8", adapts=True),
    "int8, a scale a row": _packed("int8"),
    "int8 + LoRA": _packed("int8", adapts=True),
    "torchao Int8Tensor": _torchao("Int8WeightOnlyConfig"),
    "torchao Float8Tensor": _torchao("Float8WeightOnlyConfig"),
}
LISTED: dict[str, Make] = {
    "list: LoRA (PEFT)": _listed(r=2),
    "list: DoRA (PEFT)": _listed(r=2, use_dora=True),
    "list: LoRA with dropout (PEFT)": _listed(r=2, lora_dropout=0.1),
    "list: NF4 (Linear4bit)": _listed("Linear4bit"),
    "list: NF4 + LoRA (Linear4bit, PEFT)": _listed("Linear4bit", r=2),
    "list: int8 (Linear8bitLt)": _listed("Linear8bitLt"),
    "list: int8 + LoRA (Linear8bitLt, PEFT)": _listed("Linear8bitLt", r=2),
    "list: int4 (compressed-tensors)": _compressed,
}
_PACKED_AFTERWARDS = frozenset({"NF4 + LoRA (PEFT)"})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="FORMAT", help="other formats keep their rows")
    parser.add_argument("--table", action="store_true", help="only write the page again from the stored rows")
    options = parser.parse_args(arguments)
    cells = {(cell.format, cell.family): cell for cell in stored()}
    for name in () if options.table else options.only or (FORMATS | LISTED):
        for family in _families(name):
            torch._dynamo.reset()
            cells[name, family] = cell = check(name, family)
            print(cell, flush=True)
            ordered = [cells[key] for key in _keys() if key in cells]
            RESULTS.write_text("".join(json.dumps(asdict(one)) + "\n" for one in ordered), encoding="utf-8")
    PAGE.write_text(page_of([cells[key] for key in _keys() if key in cells]), encoding="utf-8")
    return 0


def _families(name: str) -> tuple[str, ...]:
    return (LIST,) if name in LISTED else FAMILIES


def _keys() -> Iterator[tuple[str, str]]:
    return ((name, family) for name in FORMATS | LISTED for family in _families(name))


def stored() -> list[Cell]:
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return [Cell(**json.loads(line)) for line in lines]


@dataclass(frozen=True)
class _Case:
    """A model to be optimized, what it is compared with, one call's inputs, and bytes of its largest weights."""

    ours: nn.Module
    theirs: nn.Module
    inputs: dict[str, torch.Tensor]
    table_bytes: int


def _case(name: str, family: str, dtype: torch.dtype, seed: int = 0) -> _Case:
    torch.manual_seed(seed)
    # One layer of experts in bf16: with two, the second may be given other rows, and choose other experts for them.
    num_layers = 1 + (dtype is torch.float32 or family == "deepseek_v3")  # whose first is dense
    model: Any = _loop() if family == LIST else tiny_causal_lm(family, **_SIZES, num_hidden_layers=num_layers)
    model.requires_grad_(False).to(dtype)
    weights = _weights_of(model, family)
    sizes = [getattr(module, name) for module, name in weights]
    table_bytes = max(one.weight.numel() * _E if family == LIST else one.numel() for one in sizes) * dtype.itemsize
    made = (FORMATS | LISTED)[name](model, weights)
    if family == LIST:
        inputs = {"hidden": torch.randn(24, _WIDTH, dtype=dtype, requires_grad=True)}
    else:
        made.get_input_embeddings().weight.requires_grad_(True)  # type: ignore[operator]  # of transformers
        tokens = torch.randint(1, 64, (2, 12))
        inputs = {"input_ids": tokens, "labels": tokens}
    reference = copy.deepcopy(made)
    if name in _PACKED_AFTERWARDS:
        _pack(made, reference, weights)
    return _Case(made, reference, inputs, table_bytes)


def _loop() -> nn.Module:
    return LoopMoE(LoopConfig(hidden=_WIDTH, expert_width=_WIDTH, num_experts=_E, top_k=2))


def _weights_of(model: nn.Module, family: str) -> Weights:
    if family == LIST:
        return [(expert, name) for expert in model.experts for name in dict(expert.named_children())]  # type: ignore[union-attr]
    return [
        (module, table)
        for module in model.modules()
        for table, one in module.named_parameters(recurse=False)
        if one.ndim == 3 and one.shape[0] == _E
    ]


def check(name: str, family: str, *, in_bf16: bool = True) -> Cell:
    """One cell, measured."""
    case = _case(name, family, torch.float32)
    try:
        expected = _step(case.theirs, case.inputs)
    except NotImplementedError as error:
        return Cell(name, family, "raises", 0.0, f"the unmodified model raises: {str(error).partition(', types=')[0]}")
    optimized = _optimized(case.ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _step(optimized, case.inputs)
    error = max(_errors(found, expected).values())
    regions, notes = memfine_fx.report(optimized).regions, memfine_fx.report(optimized).notes
    if not regions or any(one.status != "chunked" for one in regions):
        kept = [note.partition(": ")[2] for note in notes if "experts stay" in note]
        packed = [note for note in notes if "outside of graphs" in note or "breaks the graph" in note]
        reasons = [one.reason for one in regions if one.status != "chunked"]
        return Cell(name, family, "refused", error, (kept or packed or reasons or ["no region"])[0])
    bf16 = _bf16_share(name, family) if in_bf16 else None
    whole = [one.why_expanded for one in regions if one.why_expanded]
    trace = trace_memory(lambda: _step(optimized, case.inputs), torch.device("cpu"))
    if whole or trace.has_allocation_of(case.table_bytes // 8):
        return Cell(name, family, "whole", error, (whole or ["an allocation of an eighth of a table"])[0], bf16)
    return Cell(name, family, "local", error, bf16=bf16)


def _optimized(model: nn.Module) -> nn.Module:
    config = memfine_fx.Config(inner_backend="eager", rows_per_chunk=16)
    return memfine_fx.optimize(model, inner_backend="eager", dynamic=True, config=config)


def _bf16_share(name: str, family: str) -> float:
    """Root mean square over output and gradients of our errors from fp32, relative to that of eager bf16.

    The first seed is taken with which eager bf16 chooses the experts that fp32 chooses; ours choose as eager does,
    because what lies before the only layer of experts is the same.
    """
    for seed in range(_MOST_SEEDS):
        torch._dynamo.reset()
        case = _case(name, family, torch.bfloat16, seed)
        wide = {key: _in_fp32(value) for key, value in case.inputs.items()}
        truth = _step(_whole_in_fp32(case.theirs), wide)
        theirs = _errors(_step(case.theirs, case.inputs), truth)
        if max(theirs.values()) < _SAME_ROUTING:
            optimized = _optimized(case.ours)
            ours = _errors(_step(optimized, case.inputs), truth)
            refused = [one for one in memfine_fx.report(optimized).regions if one.status != "chunked"]
            if refused:  # else the unmodified model would be compared with itself
                raise RuntimeError(f"{name} in {family} is chunked in fp32 and not in bf16: {refused[0]}")
            return math.sqrt(sum(one**2 for one in ours.values()) / sum(one**2 for one in theirs.values()))
    raise RuntimeError(f"{name} in {family}: bf16 chooses other experts than fp32 with seeds below {_MOST_SEEDS}")


def _in_fp32(value: torch.Tensor) -> torch.Tensor:
    return value.detach().float().requires_grad_() if value.is_floating_point() else value


def _whole_in_fp32(model: nn.Module) -> nn.Module:
    """A copy in fp32 whose packed weights are what they are made of them."""
    whole = copy.deepcopy(model)
    for module in list(whole.modules()):
        for chain in getattr(module, "parametrizations", {}).values():
            made = chain[0](chain.original).detach()
            if made.shape == chain.original.shape and made.dtype is chain.original.dtype:
                continue  # adapters alone
            chain.original, chain[0] = nn.Parameter(made.float(), requires_grad=False), nn.Identity()
        for name, child in list(module.named_children()):
            own = dict(child.named_parameters(recurse=False))
            if hasattr(own.get("weight"), "quant_state"):
                setattr(module, name, _plain(child))
    return whole.float()


def _plain(layer: Any) -> nn.Linear:
    from bitsandbytes.functional import dequantize_4bit

    plain = nn.Linear(layer.in_features, layer.out_features, bias=False).requires_grad_(False)
    plain.weight.data = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    return plain


def _pack(made: nn.Module, whole: nn.Module, weights: Weights) -> None:
    """Tables below PEFT's adapters in 4 bits; `whole`, a copy, gets what they are made whole."""
    paths = {module: path for path, module in made.named_modules()}
    for module, table in weights:
        adapted.FORMATS["nf4"](module, table)
        getattr(whole.get_submodule(paths[module]), table).data.copy_(getattr(module, table))


def _step(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Output and every gradient of one step."""
    model.zero_grad()
    torch.manual_seed(0)
    leaves = [value for value in inputs.values() if value.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    result = model(**inputs)
    output = result if isinstance(result, torch.Tensor) else result.logits
    (result.float().square().mean() if isinstance(result, torch.Tensor) else result.loss).backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    gradients |= {f"input {place}": leaf.grad for place, leaf in enumerate(leaves) if leaf.grad is not None}
    return {name: one.detach().clone() for name, one in {"output": output, **gradients}.items()}


def _errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    apart = {name: (found[name].double() - one.double()).norm() for name, one in expected.items()}
    return {name: float(apart[name] / one.double().norm().clamp_min(1e-6)) for name, one in expected.items()}


def page_of(cells: list[Cell]) -> str:
    """docs/formats.md"""
    by_key = {(cell.format, cell.family): cell for cell in cells}
    reasons = list(dict.fromkeys(cell.why for cell in cells if cell.why))
    lines = [
        "# Formats of expert weights",
        "",
        f"Written by `python -m benchmarks.formats`; do not edit. {_versions()}; toy sizes (H=F=128, E=16, T=24), "
        "fp32, inner compiler eager, 16 rows a chunk.",
        "",
        "**local**: chunked; each expert's weights are computed when it runs, and no allocation is as large as an "
        "eighth of all of them. **whole**: chunked, but all are computed ahead. **refused**: the experts run as "
        "written. **raises**: the unmodified model does. First number: the worst relative error of output and "
        "gradients against the unmodified model in fp32. (Over packed weights PEFT 0.21 itself is wrong; there the "
        "reference is PEFT on dequantized weights.) Second number: the distance of bf16 from fp32 (root mean square of "
        "relative errors), over the unmodified model's.",
        "",
        f"| format | {' | '.join(FAMILIES)} |",
        f"|---|{'---|' * len(FAMILIES)}",
    ]
    for name in FORMATS:
        row = [by_key.get((name, family)) for family in FAMILIES]
        lines.append(f"| {name} | {' | '.join(_words(cell, reasons) for cell in row)} |")
    lines += ["", "A loop over a list of experts, each of three linear layers:", "", "| format | list |", "|---|---|"]
    lines += [f"| {name.removeprefix('list: ')} | {_words(by_key.get((name, LIST)), reasons)} |" for name in LISTED]
    lines += ["", *(f"{number}. {why.splitlines()[0]}" for number, why in enumerate(reasons, 1)), ""]
    return "\n".join(lines)


def _words(cell: Cell | None, reasons: list[str]) -> str:
    if cell is None:
        return "not measured"
    note = f" ({reasons.index(cell.why) + 1})" if cell.why else ""
    if cell.state == "raises":
        return f"raises{note}"
    bf16 = "" if cell.bf16 is None else f", {cell.bf16:.2f}"
    return f"{cell.state}{note}, {cell.error:.0e}{bf16}"


def _versions() -> str:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package).partition('+')[0]}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    raise SystemExit(main())
