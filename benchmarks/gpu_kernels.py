"""What the kernels of memfine_fx.kernels take of a target, compiled ahead of time: no device is needed.

    python -m benchmarks.gpu_kernels            # compiles all and writes benchmarks/results/gpu_kernels.json
    python -m benchmarks.gpu_kernels --check    # compiles all and compares
    python -m benchmarks.gpu_kernels --page     # writes the table of results/gpu_tables.md; compiles nothing

A layer's step is run on fake tensors of a real model's sizes, which notes its launches; each is compiled for each
target as it would be launched, with the tiles that stand first in `tiling` and with those that are timed beside them on
a device. Registers and spills are as ptxas and the AMDGPU backend say, tensor-core instructions are counted in PTX and
ISA. Nothing of it is a time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from benchmarks.summaries import with_blocks
from memfine_fx.kernels.epilogue import written
from memfine_fx.kernels.launches import Launch, recording

__all__ = [
    "CASES",
    "HEAD",
    "PAGE",
    "RESULTS",
    "TABLES",
    "TARGETS",
    "Case",
    "Row",
    "Step",
    "filled",
    "head_launches",
    "launches_of",
    "rows_of",
    "step_of",
    "table",
]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_kernels.json"
PAGE = ROOT / "docs" / "gpu.md"
"""Measurements of models, and dry runs."""
TABLES = ROOT / "benchmarks" / "results" / "gpu_tables.md"
"""Kernels as compiled, layers as measured, and rooflines."""


@dataclass(frozen=True)
class Target:
    """One architecture.

    Args:
        name: as `memfine_fx.kernels.tiling` calls it.
        backend, architecture, warp_size: of Triton's GPUTarget.
        shared_limit: bytes of shared memory that one program may have.
        tensor_core: pattern of its matrix instructions in PTX or ISA.
    """

    name: str
    backend: str
    architecture: int | str
    warp_size: int
    shared_limit: int
    tensor_core: str


TARGETS = (
    Target("sm_80", "cuda", 80, 32, 163 << 10, r"\bmma\.sync"),
    Target("sm_90", "cuda", 90, 32, 227 << 10, r"\bwgmma\.mma_async"),
    Target("sm_100", "cuda", 100, 32, 227 << 10, r"\btcgen05\.mma"),
    Target("gfx942", "hip", "gfx942", 64, 64 << 10, r"\bv_mfma"),
)


@dataclass(frozen=True)
class Case:
    """A layer at a model's sizes; dtypes of rows and tables as torch calls them.

    Args:
        adds_gradients: whether the tables' gradients are there and are added to.
        is_packed: whether tables are in NF4, frozen, and made tile by tile.
        rank: of adapters in fp32, which alone are trained; 0 for none.
        is_list: whether each expert's matrices are tensors of their own.
    """

    name: str
    tokens: int
    top_k: int
    experts: int
    hidden: int
    width: int
    rows_per_window: int
    layout: Any = "halves"
    activation: Any = "swiglu"
    has_bias: bool = False
    dtype: str = "bfloat16"
    table_dtype: str = "bfloat16"
    saves_products: bool = False
    is_deterministic: bool = False
    precision: str = "ieee"
    adds_gradients: bool = False
    is_packed: bool = False
    rank: int = 0
    is_list: bool = False


_QWEN3 = {"tokens": 8192, "top_k": 8, "experts": 128, "hidden": 2048, "width": 768, "rows_per_window": 16384}


def _clamped_at_10(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)


CASES = (
    Case("Qwen3-30B-A3B", **_QWEN3),
    Case("Qwen3-30B-A3B, kept, deterministic", **_QWEN3, saves_products=True, is_deterministic=True),
    Case("Qwen3-30B-A3B, tables in fp32", **_QWEN3, table_dtype="float32"),
    Case("Qwen3-30B-A3B, gradients added to", **_QWEN3, adds_gradients=True),
    Case("Qwen3-30B-A3B, tables in NF4", **_QWEN3, is_packed=True),
    Case("Qwen3-30B-A3B, tf32", **_QWEN3, dtype="float32", table_dtype="float32", precision="tf32"),
    Case("Qwen3-30B-A3B, adapters of rank 16", **_QWEN3, rank=16),
    Case("Qwen3-30B-A3B, tables in NF4, adapters of rank 16", **_QWEN3, is_packed=True, rank=16),
    Case("Qwen3-30B-A3B, a list of experts", **_QWEN3, layout="apart", is_list=True),
    Case("GPT-OSS-120B", 8192, 4, 128, 2880, 2880, 16384, "interleaved_in_out", "clamped", has_bias=True),
    Case(
        "GPT-OSS-120B, adapters of rank 16",
        8192,
        4,
        128,
        2880,
        2880,
        16384,
        "interleaved_in_out",
        "clamped",
        has_bias=True,
        rank=16,
    ),
    Case("Qwen3-30B-A3B, SwiGLU clamped at 10, written", **_QWEN3, activation=written(_clamped_at_10, 2)),
)


_NF4_BLOCK = 64
HEAD, _VOCAB = "Qwen3-30B-A3B, head", 151936


@dataclass(frozen=True)
class Row:
    """One launch of a case on a target.

    Args:
        step: the kernel, and what tells it from others of the same kernel.
        tile: rows x columns x depth, or "" where there is none.
        by_descriptor: whether blocks come by descriptors.
        registers: of a thread (AMD: vector registers, accumulation registers included).
        spilled_bytes: written to memory for want of registers, by a thread.
        shared_bytes: by a program.
        tensor_core: matrix instructions in the text of the kernel.
        products: whether the kernel has matrix products.
    """

    case: str
    target: str
    step: str
    tile: str
    by_descriptor: bool
    num_warps: int
    num_stages: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_core: int
    products: bool


def launches_of(case: Case, target: str, tiles: Any = None) -> tuple[list[Launch], list[Launch]]:
    """The launches of a layer's forward, the sort first, and of its backward, on a fake device.

    Args:
        tiles: of the kernels, or None for those that stand in `tiling`.
    """
    with FakeTensorMode(), torch.device("cuda"):
        step = Step(case, target, tiles)
        with recording() as forward:
            out = step.forward()
        with recording() as backward:
            step.backward(out)
    return forward, backward


def head_launches() -> list[Launch]:
    """Of a chunk of a head, with gradients, on a fake device."""
    from memfine_fx.kernels.cross_entropy import cross_entropy_
    from memfine_fx.records.heads import HeadLoss

    with FakeTensorMode(), torch.device("cuda"), recording() as launches:
        logits = torch.empty(1024, _VOCAB, dtype=torch.bfloat16)
        cross_entropy_(logits, torch.empty(1024, dtype=torch.int64), HeadLoss(), torch.empty(()))
    return launches


class Step:
    """Forward and backward of a layer on its inputs, made empty where they are wanted."""

    def __init__(self, case: Case, target: str, tiles: Any = None) -> None:
        from memfine_fx.kernels.adapter_tables import AdapterForm
        from memfine_fx.kernels.layer import LayerOptions
        from memfine_fx.kernels.packed import four_bits
        from memfine_fx.kernels.tables import ListTable
        from memfine_fx.kernels.tiling import tiles_for

        dtype, table_dtype = getattr(torch, case.dtype), getattr(torch, case.table_dtype)
        shapes = _shapes(case)
        sources = tuple(four_bits((rows, columns), _NF4_BLOCK) for _, rows, columns in shapes) if case.is_packed else ()
        self._options = LayerOptions(
            case.rows_per_window, case.layout, case.activation, case.has_bias, case.saves_products,
            case.is_deterministic, case.precision,
            tiles or tiles_for(target, dtype, torch.uint8 if sources else table_dtype), sources,
            tuple(AdapterForm(case.rank, 2.0) for _ in range(2)) if case.rank else (),
        )  # fmt: skip
        self._num_experts, self._adds = case.experts, case.adds_gradients
        self._hidden = torch.empty(case.tokens, case.hidden, dtype=dtype)
        self._index = torch.empty(case.tokens, case.top_k, dtype=torch.int64)
        self._weight = torch.empty(case.tokens * case.top_k, dtype=dtype)
        self._params: list[Any] = [torch.empty(shape, dtype=table_dtype) for shape in shapes]
        if case.is_list:
            lists = ([torch.empty(shape, dtype=table_dtype) for _ in range(num)] for num, *shape in shapes)
            self._params = list(map(ListTable.of, lists))
        if sources:
            self._params = []
            for experts, rows, columns in shapes:
                size = rows * columns
                self._params.append(torch.empty(experts, size // 2, dtype=torch.uint8))
                self._params.append(torch.empty(experts, size // _NF4_BLOCK))
        self._factors = _factors(case) if case.rank else []
        self._params += self._factors
        self._kept: Any = None

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [self._hidden, self._index, self._weight, *self._params]

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        from memfine_fx.kernels.layer import run_forward
        from memfine_fx.kernels.sorting import sort_assignments

        routing = sort_assignments(self._index, self._num_experts)
        out, products = run_forward(self._hidden, self._weight, routing, self._params, self._options)
        self._kept = routing, products
        return out

    @torch.no_grad()
    def backward(self, grad: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of everything but ids."""
        from memfine_fx.kernels.layer import run_backward

        routing, products = self._kept
        num_own = self._options.num_own(self._params)
        wanted = [True] * 2 + [not self._options.sources and not self._factors] * num_own + [True] * len(self._factors)
        onto = [torch.empty_like(one) for one in self._params] if self._adds else []
        found = run_backward(
            grad, self._hidden, self._weight, routing, self._params, products, self._options, wanted, onto
        )  # fmt: skip
        of_params = [found.hidden, found.weight]
        for one in found.params:
            of_params += [one] if one is None or isinstance(one, torch.Tensor) else one
        return [one for one in of_params if one is not None]


def _shapes(case: Case) -> list[tuple[int, ...]]:
    experts, hidden, width = case.experts, case.hidden, case.width
    shapes: list[tuple[int, ...]] = [(experts, hidden, 2 * width), (experts, width, hidden)]
    if case.layout == "apart":
        return [(experts, width, hidden), (experts, width, hidden), (experts, hidden, width)]
    if case.layout == "halves":
        shapes = [(experts, 2 * width, hidden), (experts, hidden, width)]
    return [*shapes, (experts, 2 * width), (experts, hidden)] if case.has_bias else shapes


def _factors(case: Case) -> list[torch.Tensor]:
    """A and B of each adapter, with experts behind in B as PEFT has them."""
    found = []
    for out, depth in ((2 * case.width, case.hidden), (case.hidden, case.width)):
        found.append(torch.empty(case.experts, case.rank, depth))
        found.append(torch.empty(out, case.rank, case.experts).permute(2, 0, 1))
    return found


def rows_of(case: Case, target: Target) -> list[Row]:
    """Every different kernel of a case, compiled for a target."""
    forward, backward = launches_of(case, target.name)
    found: dict[str, Row] = {}
    for launch in (*forward, *backward):
        step = step_of(launch)
        if step not in found:
            found[step] = _row(case.name, target, step, launch)
    return list(found.values())


def timed_rows(case: Case, target: Target) -> list[Row]:
    """Every different kernel of a case with each of the tiles that are timed beside the first."""
    from memfine_fx.kernels.tiling import candidates, tiles_for

    found = []
    dtypes = getattr(torch, case.dtype), getattr(torch, case.table_dtype)
    first = tiles_for(target.name, *dtypes)
    for one in fields(first):
        for tiles in candidates(target.name, dtypes[0], one.name, dtypes[1])[1:]:
            chosen = replace(first, **{one.name: tiles})
            launches = [launch for part in launches_of(case, target.name, chosen) for launch in part]
            steps = {step_of(launch): launch for launch in launches if launch.name == f"{one.name}_kernel"}
            found += [_row(case.name, target, step, launch) for step, launch in steps.items()]
    return found


_TELLING = ("WRITES_PRODUCTS", "WRITES_ACTIVATED", "HAS_SECOND", "HAS_TERM", "HAS_BIAS", "IS_ATOMIC", "IS_FIRST_WINDOW")


def step_of(launch: Launch) -> str:
    told = launch.constants
    telling = [name.lower() for name in _TELLING if told.get(name)]
    if told.get("TOP_K") == 0:
        telling.append("of the window")
    if told.get("STRIDE_LENGTH", 1) != 1:
        telling.append("strided")
    if launch.name == "weight_gradient_kernel" and not told["HAS_DOWN"]:
        telling += ["flat"] * (8 * told["HEIGHT"] <= told["WIDTH"]) + ["tall"] * (8 * told["WIDTH"] <= told["HEIGHT"])
    return ", ".join([launch.name.removesuffix("_kernel"), *telling])


def _row(case: str, target: Target, step: str, launch: Launch) -> Row:
    compiled = _compile(launch, target)
    text = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    registers, spilled = _ptx_resources(text, target) if target.backend == "cuda" else _amd_resources(text)
    tile = [str(launch.constants[name]) for name in ("TILE_ROWS", "TILE_COLUMNS", "TILE_DEPTH") if _has(launch, name)]
    return Row(
        case=case,
        target=target.name,
        step=step,
        tile="x".join(tile),
        by_descriptor=launch.constants.get("BY_DESCRIPTOR", False),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=compiled.metadata.shared,
        tensor_core=len(re.findall(target.tensor_core, text)),
        products=_has(launch, "PRECISION"),
    )


def _has(launch: Launch, name: str) -> bool:
    return name in launch.constants


_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "u8", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip


def _compile(launch: Launch, target: Target) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    signature, constants, attributes = {}, {}, {}
    for position, name in enumerate(launch.kernel.arg_names):
        if name in launch.constants:
            signature[name], constants[name] = "constexpr", launch.constants[name]
            continue
        value = launch.arguments[name]
        if value is None:
            signature[name], constants[name] = "constexpr", None
            continue
        if isinstance(value, tuple):
            signature[name] = tuple("*" + _TYPES[one.dtype] for one in value)
            attributes |= {(position, inner): [["tt.divisibility", 16]] for inner in range(len(value))}
            continue
        if isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[name] = "*" + _TYPES[value.dtype] if is_tensor else "i32"
        if is_tensor:  # torch's allocations and whole rows of them are aligned
            attributes[(position,)] = [["tt.divisibility", 16]]
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    source = ASTSource(launch.kernel, signature, constants, attributes)
    place = GPUTarget(target.backend, target.architecture, target.warp_size)
    return triton.compile(source, target=place, options=options)


def _ptx_resources(ptx: str, target: Target) -> tuple[int, int]:
    """(registers, spilled bytes) of a kernel as ptxas says."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assembler = folder / ("ptxas" if target.name == "sm_80" else "ptxas-blackwell")  # as Triton chooses
    name = target.name if target.name == "sm_80" else f"{target.name}a"
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            str(assembler),
            "-v",
            "--regAllocOptLevel=2",
            f"--gpu-name={name}",
            str(source),
            "-o",
            str(Path(place) / "kernel.cubin"),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    assert registers is not None, said
    return int(registers[1]), sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", said))


def _amd_resources(assembly: str) -> tuple[int, int]:
    """(vector registers, spilled bytes) of a kernel as the backend says; a spilled register is 4 bytes."""
    registers, spilled = (re.search(rf"\.{name}:\s+(\d+)", assembly) for name in ("vgpr_count", "vgpr_spill_count"))
    assert registers is not None and spilled is not None, "no resources in the assembly"
    return int(registers[1]), 4 * int(spilled[1])


def table() -> dict[str, Any]:
    """Everything, as it is written to the results."""
    import triton

    rows = [asdict(row) for case in CASES for target in TARGETS for row in rows_of(case, target)]
    rows += [asdict(_row(HEAD, target, step_of(launch), launch)) for target in TARGETS for launch in head_launches()]
    timed = [
        asdict(row)
        for case in CASES
        if not (case.is_deterministic or case.is_packed or case.rank or case.is_list)
        and isinstance(case.activation, str)
        for target in TARGETS
        for row in timed_rows(case, target)
    ]
    launches = {case.name: [len(part) for part in launches_of(case, "sm_90")] for case in CASES}
    cases = [asdict(case) for case in CASES]
    return {
        "triton": triton.__version__,
        "cases": cases,
        "launches_forward_backward": launches,
        "rows": rows,
        "timed": timed,
    }


def filled(text: str, recorded: dict[str, Any]) -> str:
    """A page with the table of each case named in it written anew."""
    return with_blocks(text, "table", lambda case: _markdown(case, recorded))


def _markdown(case: str, recorded: dict[str, Any]) -> str:
    """A row for each kernel with products, a column for each target."""
    rows = [row for row in recorded["rows"] if row["case"] == case and row["products"]]
    head = ["kernel", *(target.name for target in TARGETS)]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for step in dict.fromkeys(row["step"] for row in rows):
        cells = {row["target"]: _cell(row) for row in rows if row["step"] == step}
        lines.append(f"| {step.replace('_', ' ')} | {' | '.join(cells[target.name] for target in TARGETS)} |")
    return "".join(f"{line}\n" for line in lines)


def _cell(row: dict[str, Any]) -> str:
    kilobytes = row["shared_bytes"] / 1024
    return f"{row['tile']}, {row['num_warps']} warps; {row['registers']}; {kilobytes:.1f} KB; {row['tensor_core']}"


def _written(found: dict[str, Any]) -> str:
    """JSON with a line for each row, so that a change is seen where it is."""
    head = json.dumps({name: value for name, value in found.items() if name not in _ROWS}, indent=1).removesuffix("\n}")
    rows = {name: ",\n  ".join(json.dumps(row) for row in found[name]) for name in _ROWS}
    return head + "".join(f',\n "{name}": [\n  {lines}\n ]' for name, lines in rows.items()) + "\n}\n"


_ROWS = ("rows", "timed")


def differences(recorded: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """What a table says otherwise than another, in words."""
    before, now = ({_key(row): row for name in _ROWS for row in one[name]} for one in (recorded, found))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            yield f"{', '.join(key)}: recorded {before.get(key)}, found {now.get(key)}"
    for name in ("triton", "cases", "launches_forward_backward"):
        if recorded[name] != found[name]:
            yield f"{name}: recorded {recorded[name]}, found {found[name]}"


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    """What tells a row from all others: the step with these tiles."""
    return tuple(
        str(row[name]) for name in ("case", "target", "step", "tile", "by_descriptor", "num_warps", "num_stages")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is recorded")
    parser.add_argument("--page", action="store_true", help="write the page's table from what is recorded")
    options = parser.parse_args(arguments)
    if options.page:
        TABLES.write_text(filled(TABLES.read_text(), json.loads(RESULTS.read_text())))
        return 0
    assert os.environ.get("TRITON_INTERPRET", "0") != "1", "the interpreter compiles nothing: unset TRITON_INTERPRET"
    found = json.loads(json.dumps(table()))
    if not options.check:
        RESULTS.write_text(_written(found))
        return 0
    said = list(differences(json.loads(RESULTS.read_text()), found))
    print("\n".join(said) or "as recorded")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
