"""Scratch of attention and product kernels: formulas against records of other CPUs, and against this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from memfine_fx.compat.bitsandbytes import linear_4bit
from memfine_fx.memory import kernel_probe, kernel_scratch
from memfine_fx.memory.graph_peak import live_peaks, read_graph
from memfine_fx.memory.kernel_probe import ATTENTION_SHAPES, PRODUCT_SHAPES, Excess, excess_of, shapes_of
from memfine_fx.memory.kernel_scratch import (
    Attention,
    backward_scratch,
    counted_at,
    forward_scratch,
    gradient_scratch,
    scratch_bytes,
)
from memfine_fx.memory.machine import CpuFeatures, features_of, host_bytes
from memfine_fx.memory.measure import trace_memory
from memfine_fx.memory.products import gradient_blocks
from memfine_fx.memory.sizes import ROWS
from tests.damage import damaged_json
from tests.memory.scratch_cases import PRODUCTS as PRODUCT_KERNELS
from tests.memory.scratch_cases import most_of_products, product_bytes, rows, takes_more_in_tiles

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

RECORD = json.loads((Path(__file__).parent / "data" / "attention_scratch.json").read_text())
"""Rows of a CPU with AMX under three instruction sets."""
PRODUCTS = json.loads((Path(__file__).parent / "data" / "product_scratch.json").read_text())
"""Gradients' products in bf16 on the same kind of CPU."""
NOT_COUNTED_EXACTLY = 1 << 17
"""Bytes a thread by which oneDNN's part of backward may be counted too large; threads seldom peak at once besides."""


@pytest.fixture(autouse=True)
def _own_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own, and nothing known of this machine."""
    monkeypatch.setenv("MEMFINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_scratch, "_warned", False)
    _forget()
    yield
    monkeypatch.undo()  # a test may have put another function where the cache is
    _forget()


def _forget() -> None:
    kernel_probe._measured.cache_clear()
    kernel_scratch._excess.cache_clear()


@pytest.mark.parametrize("max_isa", ["", "AVX512_CORE_BF16", "AVX2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_formulas_cover_what_a_cpu_with_amx_took(dtype: torch.dtype, max_isa: str) -> None:
    features = features_of(RECORD["instructions"], max_isa)
    found = [row for row in RECORD["rows"] if row[0] == max_isa and f"torch.{row[1]}" == str(dtype)]
    assert len(found) == 28
    for _, _, *sizes, threads, forward, backward in found:
        batch, heads, queries, keys, width = map(sympy.Integer, sizes)
        call = Attention(batch, heads, heads, queries, keys, width, dtype, is_causal=True)
        where = f"{sizes}, {threads} threads"
        assert forward_scratch(call, features, threads) == forward, where
        most = 1.2 * backward + threads * NOT_COUNTED_EXACTLY
        assert backward <= backward_scratch(call, features, threads) <= most, where


def test_packing_is_counted_in_symbols_as_in_numbers() -> None:
    """A sequence that is too short for its keys to be packed, and one that is not."""
    features = features_of(RECORD["instructions"])
    batch, queries, keys = sympy.symbols("b q k", positive=True, integer=True)
    numbers = [sympy.Integer(number) for number in (4, 2, 64)]

    def scratch(batch: sympy.Expr, queries: sympy.Expr, keys: sympy.Expr, threads: int) -> sympy.Expr:
        heads, key_heads, width = numbers
        return forward_scratch(
            Attention(batch, heads, key_heads, queries, keys, width, torch.bfloat16, is_causal=True), features, threads
        )

    for threads in (1, 2, 16):
        in_symbols = scratch(batch, queries, keys, threads)
        for one in ((1, 100, 2000), (2, 100, 2000), (1, 63, 800), (1, 800, 63), (3, 800, 801)):
            known = scratch(*map(sympy.Integer, one), threads)
            assert in_symbols.subs(dict(zip((batch, queries, keys), one, strict=True))) == known, (one, threads)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out, sums = FORWARD(query, key, value, 0.0, True)
    return (out, sums, *BACKWARD(out, query, key, value, out, sums, 0.0, True))


def with_dense_gradient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out, sums = FORWARD(query, key, value, 0.0, True)
    return BACKWARD(out.contiguous(), query, key, value, out, sums, 0.0, True)


def drawn(queries: int, keys: int, head: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(1, length, 2, head, dtype=dtype).transpose(1, 2) for length in (queries, keys, keys)]


def counted(graph: fx.Graph, target: object, sizes: dict[str, int]) -> int:
    (node,) = graph.find_nodes(op="call_function", target=target)
    expr = scratch_bytes(node)
    return int(expr.subs({symbol: sizes[str(symbol)] for symbol in expr.free_symbols}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "keys", "head", "mode"),
    [(800, 800, 64, "real"), (1024, 300, 48, "symbolic"), (300, 600, 128, "symbolic"), (24, 40, 192, "symbolic")],
)
def test_scratch_is_what_the_allocator_sees(queries: int, keys: int, head: int, dtype: torch.dtype, mode: str) -> None:
    inputs = drawn(queries, keys, head, dtype)
    graph = make_fx(attention, tracing_mode=mode)(*inputs).graph
    sizes: dict[str, int] = {}
    for node, tensor in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        sizes |= {str(symbol): size for symbol, size in zip(node.meta["val"].shape, tensor.shape, strict=True)}
    out, sums = FORWARD(*inputs, 0.0, True)
    for target, call in (
        (FORWARD, lambda: FORWARD(*inputs, 0.0, True)),
        (BACKWARD, lambda: BACKWARD(out, *inputs, out, sums, 0.0, True)),
    ):
        measured = scratch_of(call)
        slack = 0 if dtype is torch.float32 or target is FORWARD else NOT_COUNTED_EXACTLY * torch.get_num_threads()
        assert 0 < measured <= counted(graph, target, sizes) <= 1.02 * measured + slack


def test_a_graph_with_symbols_holds_what_a_cpu_with_amx_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_scratch, "cpu_features", lambda: features_of(RECORD["instructions"]))
    monkeypatch.setattr(kernel_scratch, "_excess", lambda kernel, dtype, threads: Excess())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    inputs = drawn(1024, 300, 48, torch.bfloat16)
    graph = make_fx(attention, tracing_mode="symbolic")(*inputs).graph
    memory = read_graph(graph, is_fused=False)
    sizes: dict[str, int] = {}
    for node, tensor in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        sizes |= {str(symbol): size for symbol, size in zip(node.meta["val"].shape, tensor.shape, strict=True)}
    found = dict(zip((one.name for one in memory.allocations), memory.bytes_at(sizes), strict=True))
    (recorded,) = [row for row in RECORD["rows"] if row[:8] == ["", "bfloat16", 1, 2, 1024, 300, 48, 1]]
    assert found["scratch of _scaled_dot_product_flash_attention_for_cpu"] == recorded[8]
    assert found["scratch of _scaled_dot_product_flash_attention_for_cpu_backward"] >= recorded[9]


def scratch_of(call: object) -> int:
    assert callable(call)
    results = sum(one.untyped_storage().nbytes() for one in call())
    return trace_memory(call, torch.device("cpu"), collects_garbage=False).peak_bytes - results


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_gradient_in_another_layout_is_copied(mode: str) -> None:
    inputs = drawn(200, 100, 32, torch.float32)
    out, sums = FORWARD(*inputs, 0.0, True)
    graph = make_fx(with_dense_gradient, tracing_mode=mode)(*inputs).graph
    names = [str(size) for size in graph.find_nodes(op="placeholder")[0].meta["val"].shape]
    sizes = dict(zip(names, inputs[0].shape, strict=True))
    sizes |= {str(size): 100 for size in graph.find_nodes(op="placeholder")[1].meta["val"].shape[2:3]}
    measured = scratch_of(lambda: BACKWARD(out.contiguous(), *inputs, out, sums, 0.0, True)) - out.nbytes
    assert measured > out.nbytes
    # NOTE: buffers of two threads of so short a call are seldom there at once to the last byte.
    slack = 0 if torch.get_num_threads() == 1 else 1 << 10
    assert measured <= counted(graph, BACKWARD, sizes) <= measured + slack


ALL = ("float32", "bfloat16", "float16")


def most_of(kernel: str) -> float:
    return most_of_products() if kernel in PRODUCT_KERNELS else 1.0


def more_of(kernel: str) -> int:
    return 600_000 if kernel in PRODUCT_KERNELS and takes_more_in_tiles() else 0


@pytest.mark.parametrize(
    ("isa", "dtypes"),
    [
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, ALL[1:2]),
        *(
            pytest.param(isa, ALL, marks=pytest.mark.slow)
            for isa in (
                {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
                {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
                {"ONEDNN_MAX_CPU_ISA": "AVX2"},
                {"ATEN_CPU_CAPABILITY": "avx2"},
                {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"},
            )
        ),
    ],
    ids=str,
)
def test_formulas_hold_under_other_instruction_sets(isa: dict[str, str], dtypes: tuple[str, ...]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | isa
    command = [sys.executable, "-m", "tests.memory.scratch_cases", *dtypes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for dtype, kernel, shape, measured, known in json.loads(done.stdout):
        assert measured <= most_of(kernel) * known + more_of(kernel), f"{kernel} in {dtype} at {shape}"
        if kernel == "forward":
            assert measured == known, f"{kernel} in {dtype} at {shape}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_formulas_hold_at_the_shapes_that_are_measured(dtype: torch.dtype) -> None:
    for _, kernel, shape, measured, known in rows(dtype):
        assert measured <= most_of(kernel) * known + more_of(kernel), f"{kernel} at {shape}"


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("num_rows", [16, 539, 2048])
@pytest.mark.parametrize(("width", "hidden"), [(512, 256), (64, 64), (48, 80)])
def test_scratch_of_a_gradients_product_is_no_more_than_is_counted(width: int, hidden: int, num_rows: int) -> None:
    measured = product_bytes(width, hidden, num_rows, torch.bfloat16)
    known = gradient_scratch([(width, hidden), (7,)], torch.bfloat16, "cpu").subs(ROWS, num_rows)
    assert measured <= most_of_products() * known


def test_products_cover_what_a_cpu_with_amx_took() -> None:
    features = features_of(PRODUCTS["instructions"])
    assert features.packs_bf16 and len(PRODUCTS["rows"]) == 200
    for threads, left, right, num_rows, measured in PRODUCTS["rows"]:
        counted = gradient_blocks(frozenset([(left, right)]), torch.bfloat16, features, threads).subs(ROWS, num_rows)
        assert measured <= counted <= 6 * measured + threads * (200 << 10), (threads, left, right, num_rows)


def test_products_elsewhere_need_none() -> None:
    assert (
        gradient_scratch([(8, 8)], torch.float32, "cpu")
        == gradient_scratch([(8, 8)], torch.bfloat16, "cuda")
        == gradient_scratch([], torch.bfloat16, "cpu")
        == gradient_blocks(frozenset([(8, 8)]), torch.bfloat16, CpuFeatures("none", False, False, False), 2)
        == 0
    )


def test_other_operations_need_none() -> None:
    graph = make_fx(torch.add)(torch.ones(2), torch.ones(2)).graph
    assert all(scratch_bytes(node) == 0 for node in graph.nodes)


@pytest.mark.parametrize(
    "call",
    [
        torch.mul,
        torch.maximum,
        lambda wide, low: torch.addcmul(wide, wide, low),
        lambda wide, low: torch.where(wide > 0, wide, low),
        lambda wide, low: low[:, :1] * wide,
        lambda wide, low: wide * wide,
    ],
    ids=["product", "maximum", "addcmul", "where", "broadcast", "of one dtype"],
)
def test_pointwise_kernels_cast_whole_operands_of_another_dtype(call: Callable[..., torch.Tensor]) -> None:
    wide, low = torch.randn(139, 64), torch.randn(139, 64).bfloat16()
    graph = make_fx(call, tracing_mode="fake")(wide, low).graph
    measured = trace_memory(lambda: call(wide, low), torch.device("cpu")).peak_bytes
    estimate = read_graph(graph, is_fused=False).peak_bytes({}, lambda _: 0)
    assert estimate == measured == max(map(int, live_peaks(graph, is_fused=False)))


def test_an_excess_covers_every_measurement_by_growth_and_factor() -> None:
    shapes = ((1, 8, 8, 4), (4, 8, 8, 4), (1, 16, 8, 4))
    inputs, known = [100, 400, 150], [1000, 1000, 2000]
    assert excess_of([1000, 900, 2000], known, inputs, shapes) == Excess()
    grows = excess_of([1100, 1400, 2150], known, inputs, shapes)  # a byte for each byte of the inputs
    assert grows == Excess(1.0, 1.0, (4, 8, 8, 4))
    larger = excess_of([1500, 1500, 2500], known, inputs, shapes)
    assert larger == Excess(1.5, 0.0, (1, 8, 8, 4))
    unknown = excess_of([50, 80], [0, 0], [100, 100], ((8, 8, 4), (8, 9, 4)))
    assert unknown == Excess(1.0, 0.8, (8, 9, 4))


def test_a_measurement_beyond_the_formula_wins_and_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"forward": _twice("forward"), "backward": _twice("backward"), "gradient": _twice("gradient")}
    monkeypatch.setattr(kernel_probe, "measure", lambda dtype: taken)
    inputs = drawn(64, 64, 32, torch.bfloat16)
    graph = make_fx(attention)(*inputs).graph
    call = Attention(*map(sympy.Integer, (1, 2, 2, 64, 64, 32)), torch.bfloat16, is_causal=True)
    threads = torch.get_num_threads()
    with pytest.warns(UserWarning, match=r"attention's forward in torch.bfloat16 takes .* of scratch") as seen:
        first = counted(graph, FORWARD, {})
        second = counted(graph, BACKWARD, {})
    assert len(seen) == 1
    features = kernel_scratch.cpu_features()
    assert first >= 2 * forward_scratch(call, features, threads)
    assert second >= 2 * backward_scratch(call, features, threads)
    formula = gradient_blocks(frozenset([(64, 64)]), torch.bfloat16, features, threads).subs(ROWS, 100)
    assert gradient_scratch([(64, 64)], torch.bfloat16, "cpu").subs(ROWS, 100) >= 2 * formula


def _twice(kernel: kernel_probe.Kernel) -> tuple[int, ...]:
    threads = torch.get_num_threads()
    return tuple(2 * counted_at(kernel, shape, torch.bfloat16, threads) for shape in shapes_of(kernel))


def test_kernels_are_measured_once_and_as_they_run_outside_a_compilation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with FakeTensorMode(), torch.autocast("cpu"), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = kernel_probe.measured_scratch("forward", torch.float32)
    assert found == tuple(
        counted_at("forward", shape, torch.float32, torch.get_num_threads()) for shape in ATTENTION_SHAPES
    )
    _forget()
    monkeypatch.setattr(kernel_probe, "measure", lambda dtype: pytest.fail("measured again"))
    assert kernel_probe.measured_scratch("forward", torch.float32) == found
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text('{"forward": [1]}')
    _forget()
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        kernel_probe.measured_scratch("forward", torch.float32)


def test_a_damaged_file_is_measured_again_and_written_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels: dict[kernel_probe.Kernel, tuple[int, ...]] = {
        kernel: (1000,) * len(shapes_of(kernel)) for kernel in get_args(kernel_probe.Kernel)
    }
    monkeypatch.setattr(kernel_probe, "measure", lambda dtype: kernels)
    assert kernel_probe.measured_scratch("rows", torch.float32) == kernels["rows"]
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_text()
    for damage in damaged_json(whole):
        file.write_text(damage)
        _forget()
        found = kernel_probe._measured(torch.float32, torch.get_num_threads())
        assert found.keys() == kernels.keys()
        for kernel, sizes in found.items():
            assert len(sizes) == len(shapes_of(kernel)) or (kernel in ("forward", "backward") and not sizes), damage
            assert all(type(size) is int and 0 <= size <= host_bytes() for size in sizes), damage
        if found == kernels:
            assert json.loads(file.read_text()) == json.loads(whole), damage


def test_a_kernel_that_does_not_run_here_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object) -> None:
        raise RuntimeError("pack_vnni2 is only supported when avx512 is supported")

    monkeypatch.setattr(kernel_probe, "_FORWARD", refuses)
    for _ in range(2):  # from the kernels, and from the file
        assert kernel_probe.measured_scratch("backward", torch.bfloat16) is None
        assert len(kernel_probe.measured_scratch("gradient", torch.bfloat16) or ()) == len(PRODUCT_SHAPES)
        _forget()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch before 2.13, about its own cycles
def test_inside_a_profile_the_formula_stands_alone() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert kernel_probe.measured_scratch("forward", torch.float32) is None
        torch.ones(3) + 1
    assert any(event.key == "aten::add" for event in profiler.key_averages())


@pytest.mark.trainers
@pytest.mark.parametrize("nested", [False, True])
def test_a_product_with_a_weight_in_4_bits_takes_the_whole_weight_and_its_scales(nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight, rows = torch.randn(512, 1024), torch.randn(4, 1024)
    packed, state = functional.quantize_4bit(weight, compress_statistics=nested, quant_type="nf4")
    scales = [state.absmax, state.state2.absmax, state.state2.code, state.offset] if nested else [state.absmax]

    def product(rows: torch.Tensor, packed: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        return linear_4bit(rows, packed, list(scales), state.blocksize, "nf4", 512)

    graph = make_fx(product, tracing_mode="fake")(rows, packed, *scales).graph
    counted = sum(int(scratch_bytes(node)) for node in graph.nodes)
    measured = trace_memory(lambda: product(rows, packed, *scales), torch.device("cpu")).peak_bytes
    result_bytes = 4 * 4 * 512
    assert counted + result_bytes == pytest.approx(measured, rel=0.01)
    assert counted + result_bytes >= measured - 64  # an offset's sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains_weight", [True, False])
def test_scratch_of_a_short_convolution_is_what_the_allocator_sees(dtype: torch.dtype, trains_weight: bool) -> None:
    """Each channel by itself, as layers have it that stand in for attention."""
    tokens, weight = torch.randn(2, 256, 513, dtype=dtype), torch.randn(256, 1, 3, dtype=dtype)
    others: tuple[object, ...] = ([1], [2], [1], False, [0], 256)
    mask = [True, trains_weight, False]
    forward, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default

    def both(tokens: torch.Tensor, weight: torch.Tensor) -> object:
        result = forward(tokens, weight, None, *others)
        return result, backward(result, tokens, weight, [0], *others, mask)

    graph, result = make_fx(both)(tokens, weight).graph, forward(tokens, weight, None, *others)
    for target, call in (
        (forward, lambda: [forward(tokens, weight, None, *others)]),
        (backward, lambda: backward(result, tokens, weight, [0], *others, mask)[: 1 + trains_weight]),
    ):
        measured = scratch_of(call)
        assert 0 < measured <= counted(graph, target, {}) <= 1.01 * measured
