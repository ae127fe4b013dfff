"""``python -m benchmarks.formats``: which formats of experts' tables are read expert by expert, in five families.

Each cell is a toy model of the family with real classes, its experts' tables in that format: one step beside the
unmodified model, and one whose allocations are walked. It writes results/formats.jsonl and docs/formats.md. Needs PEFT,
bitsandbytes and torchao beside transformers; a cell whose package is missing keeps its row.
"""

from __future__ import annotations

import argparse
import copy
import json
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

RESULTS = Path(__file__).parent / "results" / "formats.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "formats.md"
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe")
_E, _WIDTH = 16, 128
_SIZES: dict[str, Any] = dict(
    num_experts=_E, num_local_experts=_E, n_routed_experts=_E, hidden_size=_WIDTH, moe_intermediate_size=_WIDTH,
    intermediate_size=_WIDTH, num_hidden_layers=2,
)  # fmt: skip
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "torchao")

Tables = list[tuple[Any, str]]


@dataclass(frozen=True)
class Cell:
    """One format in one family.

    Args:
        state: "local", "whole" (chunked, but tables are made whole) or "refused".
        error: worst relative error of loss and gradients against the unmodified model.
        why: of what is not local.
    """

    format: str
    family: str
    state: str
    error: float
    why: str = ""


def _lora(model: nn.Module, tables: Tables) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    modules = {module: name for name, module in model.named_modules()}
    targets = sorted({f"{modules[module]}.{name}" for module, name in tables})
    adapters: Any = get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=targets))
    for name, parameter in adapters.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapters  # type: ignore[no-any-return]


def _packed(name: str, *, adapts: bool = False) -> Callable[[nn.Module, Tables], nn.Module]:
    def make(model: nn.Module, tables: Tables) -> nn.Module:
        for module, table in tables:
            adapted.FORMATS[name](module, table)
            if adapts:
                parametrize.register_parametrization(
                    module, table, adapted._Adapted(getattr(module, table)).to(getattr(module, table).dtype)
                )
        return model

    return make


def _torchao(name: str) -> Callable[[nn.Module, Tables], nn.Module]:
    def make(model: Any, tables: Tables) -> nn.Module:
        from torchao import quantization

        modules = {module: path for path, module in model.named_modules()}
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped and batched matmuls by these tensors raise in torchao
        config = getattr(quantization, name)()
        paths = {f"{modules[module]}.{table}": config for module, table in tables}
        quantization.quantize_(model, quantization.FqnToConfig(paths), filter_fn=None)
        return model

    return make


FORMATS: dict[str, Callable[[nn.Module, Tables], nn.Module]] = {
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
_PACKED_AFTERWARDS = frozenset({"NF4 + LoRA (PEFT)"})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="FORMAT", help="other formats keep their rows")
    parser.add_argument("--table", action="store_true", help="only write the page again from the stored rows")
    options = parser.parse_args(arguments)
    cells = {(cell.format, cell.family): cell for cell in stored()}
    for name in () if options.table else options.only or FORMATS:
        for family in FAMILIES:
            torch._dynamo.reset()
            cells[name, family] = cell = check(name, family)
            print(cell, flush=True)
            ordered = [cells[key] for key in _keys() if key in cells]
            RESULTS.write_text("".join(json.dumps(asdict(one)) + "\n" for one in ordered), encoding="utf-8")
    PAGE.write_text(page_of([cells[key] for key in _keys() if key in cells]), encoding="utf-8")
    return 0


def _keys() -> Iterator[tuple[str, str]]:
    return ((name, family) for name in FORMATS for family in FAMILIES)


def stored() -> list[Cell]:
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return [Cell(**json.loads(line)) for line in lines]


def check(name: str, family: str) -> Cell:
    """One cell, measured."""
    torch.manual_seed(0)
    model: Any = tiny_causal_lm(family, **_SIZES).requires_grad_(False)
    tables = [
        (module, table)
        for module in model.modules()
        for table, one in module.named_parameters(recurse=False)
        if one.ndim == 3 and one.shape[0] == _E
    ]
    table_bytes = max(getattr(module, table).numel() for module, table in tables) * 4
    made = FORMATS[name](model, tables)
    made.get_input_embeddings().weight.requires_grad_(True)  # type: ignore[operator]  # of transformers
    reference = copy.deepcopy(made)
    if name in _PACKED_AFTERWARDS:
        _pack(made, reference, tables)
    config = memfine_fx.Config(inner_backend="eager", rows_per_chunk=16)
    optimized = memfine_fx.optimize(made, inner_backend="eager", dynamic=True, config=config)
    tokens = torch.randint(1, 64, (2, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = max(_errors(optimized, reference, tokens))
    regions, notes = memfine_fx.report(optimized).regions, memfine_fx.report(optimized).notes
    if not regions or any(one.status != "chunked" for one in regions):
        kept = [note.partition(": ")[2] for note in notes if "experts stay" in note]
        return Cell(name, family, "refused", error, (kept or [str(one) for one in regions] or ["no region"])[0])
    whole = [one.why_expanded for one in regions if one.why_expanded]
    trace = trace_memory(lambda: _step(optimized, tokens), torch.device("cpu"))
    if whole or trace.has_allocation_of(table_bytes // 8):
        return Cell(name, family, "whole", error, (whole or ["an allocation of an eighth of a table"])[0])
    return Cell(name, family, "local", error)


def _pack(made: nn.Module, whole: nn.Module, tables: Tables) -> None:
    """Tables below PEFT's adapters in 4 bits; `whole`, a copy, gets what they are made whole."""
    paths = {module: path for path, module in made.named_modules()}
    for module, table in tables:
        adapted.FORMATS["nf4"](module, table)
        getattr(whole.get_submodule(paths[module]), table).data.copy_(getattr(module, table))


def _step(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def _errors(ours: nn.Module, theirs: nn.Module, tokens: torch.Tensor) -> Iterator[float]:
    left, right = _step(ours, tokens), _step(theirs, tokens)
    yield float((left - right).abs() / right.abs())
    gradients = {name: one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    found = {name: one.grad for name, one in ours.named_parameters() if one.grad is not None}
    assert gradients.keys() == found.keys(), gradients.keys() ^ found.keys()
    for name, expected in gradients.items():
        yield float((found[name] - expected).norm() / expected.norm().clamp_min(1e-6))


def page_of(cells: list[Cell]) -> str:
    """docs/formats.md"""
    by_key = {(cell.format, cell.family): cell for cell in cells}
    reasons = list(dict.fromkeys(cell.why for cell in cells if cell.why))
    lines = [
        "# Formats of experts' tables",
        "",
        f"Written by `python -m benchmarks.formats`; do not edit. {_versions()}; toy sizes (H=F=128, E=16, T=24), "
        "fp32, inner compiler eager, 16 rows a chunk.",
        "",
        "**local**: chunked, each expert's table is made when it runs, and no allocation of a step is as large as an "
        "eighth of a table. **whole**: chunked, but a table is made whole ahead of the experts. **refused**: the "
        "experts run as they were. The number is the worst relative error of the loss and every gradient against the "
        "unmodified model (over packed tables PEFT 0.21 itself is wrong; there it is PEFT on the same tables made "
        "whole).",
        "",
        f"| format | {' | '.join(FAMILIES)} |",
        f"|---|{'---|' * len(FAMILIES)}",
    ]
    for name in FORMATS:
        row = [by_key.get((name, family)) for family in FAMILIES]
        lines.append(f"| {name} | {' | '.join(_words(cell, reasons) for cell in row)} |")
    lines += ["", *(f"{number}. {why.splitlines()[0]}" for number, why in enumerate(reasons, 1)), ""]
    return "\n".join(lines)


def _words(cell: Cell | None, reasons: list[str]) -> str:
    if cell is None:
        return "not measured"
    note = f" ({reasons.index(cell.why) + 1})" if cell.why else ""
    return f"{cell.state}{note}, {cell.error:.0e}"


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
