"""Reading compiled wrappers: what is made, renamed, reused, returned by ops and dropped, with symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import memfine_fx.runtime.op  # noqa: F401  # registers the ops
from memfine_fx.compat.functorch import random_state_ops
from memfine_fx.compat.shapes import unbacked_size
from memfine_fx.compat.tensors import FakeTensorMode
from memfine_fx.errors import CompatibilityWarning
from memfine_fx.memory import wrapper_code
from memfine_fx.memory.kernel_scratch import scratch_bytes
from memfine_fx.memory.liveness import CountedInputs, GraphMemory
from memfine_fx.memory.products import Product
from memfine_fx.memory.wrapper_code import read_wrapper

HEAD = "def call(self, args):\n    s0, saved, primals_1 = args\n    args.clear()\n"
S0 = sympy.Symbol("s0", integer=True, positive=True)


def read(lines: str, graph: fx.Graph | None = None, inputs: CountedInputs | None = None) -> GraphMemory:
    source = HEAD + "".join(f"    {line}\n" for line in lines.strip().splitlines())
    memory = read_wrapper(source, graph or fx.Graph(), inputs)
    assert memory is not None
    return memory


def live(memory: GraphMemory, **sizes: int) -> list[int]:
    """Live bytes after each statement of the body."""
    return memory.live_bytes(sizes, lambda call: 100)[2:]


def test_buffers_live_from_their_making_until_their_last_name_is_dropped() -> None:
    memory = read(
        """
buf0 = empty_strided_cpu((s0, 4), (4, 1), torch.float32)
kernel(buf0)
buf1 = reinterpret_tensor(buf0, (4, s0), (s0, 1), 0); del buf0  # reuse
buf2 = buf1; del buf1
buf3 = empty_strided_cpu((8, ), (1, ), torch.bfloat16)
del buf2
return (buf3, )
"""
    )
    assert live(memory, s0=3) == [48, 48, 48, 48, 48, 48, 64, 16, 16]
    assert memory.symbols == (S0,)
    assert memory.left_bytes == 16


def test_results_of_other_ops_take_their_sizes_from_the_graph_and_live_with_their_tuple() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.topk.default, (graph.placeholder("x"), 2))
    node.meta["val"] = (torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int64))
    graph.output(node)
    memory = read(
        """
buf0 = torch.ops.aten.topk.default(primals_1, 2)
buf1 = buf0[0]
buf2 = buf0[1]
del buf0
del buf1
return (buf2, )
""",
        graph,
    )
    assert live(memory) == [96, 96, 96, 96, 64, 64]


@pytest.mark.parametrize("name", ["torch.ops.aten.convolution.default", "extern_kernels.convolution"])
def test_a_convolution_makes_its_result_and_takes_scratch(name: str) -> None:
    graph = fx.Graph()
    rows, weight = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    rows.meta["val"], weight.meta["val"] = torch.empty(2, 8, 4), torch.empty(8, 1, 3)
    node = graph.call_function(torch.ops.aten.convolution.default, (rows, weight, None, [1], [2], [1], False, [0], 8))
    node.meta["val"] = torch.empty(2, 8, 6)
    graph.output(node)
    memory = read(f"buf0 = {name}(primals_1, primals_2, stride=(1,), groups=8, bias=None)\nreturn (buf0, )", graph)
    assert live(memory) == [2 * 384 + 96, 384]


def test_a_region_call_adds_its_working_set_where_it_runs() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.memfine.experts.default, tuple(graph.placeholder(name) for name in "abcdef"))
    node.meta["val"] = torch.empty(2, 4)
    graph.output(node)
    memory = read("buf0 = torch.ops.memfine.experts.default(a, b, c, d, [e], 'key/7')\nbuf1 = buf0\ndel buf0", graph)
    assert [(call.region_id, call.phase) for call in memory.calls] == [("key/7", "forward")]
    assert live(memory) == [132, 32, 32]


def test_saved_inputs_are_alive_from_the_start_and_inputs_of_the_user_count_nothing() -> None:
    graph = fx.Graph()
    for name, shape in (("saved", (4, 4)), ("primals_1", (100,))):
        graph.placeholder(name).meta["val"] = torch.empty(shape)
    memory = read("del primals_1\ndel saved\nreturn ()", graph, CountedInputs(("saved",)))
    assert live(memory) == [64, 0, 0]


def test_inputs_that_somebody_else_holds_are_alive_to_the_end_whatever_the_wrapper_drops_or_renames() -> None:
    graph = fx.Graph()
    for name in ("saved", "tangents_1", "tangents_2"):
        graph.placeholder(name).meta["val"] = torch.empty(4, 4)
    lines = "buf0 = tangents_1; del tangents_1\ndel saved\ndel buf0\nreturn ()"
    memory = read(lines, graph, CountedInputs(freed=("saved",), held=("tangents_1", "tangents_2")))
    assert live(memory) == [192, 192, 128, 128, 128]


def test_cuda_sizes_are_rounded_to_the_allocators_blocks() -> None:
    memory = read("buf0 = empty_strided_cuda((s0, ), (1, ), torch.float32)\nreturn (buf0, )")
    assert live(memory, s0=1) == [512, 512]
    assert live(memory, s0=129) == [1024, 1024]


@pytest.mark.parametrize(
    "source",
    [
        "def f(args):\n    pass",
        "def partition_0(args):\n    pass\ndef call(args):\n    pass",
        HEAD + "    buf0 = some.unknown_op(saved)\n",
        HEAD + "    buf0 = empty_strided_cpu((round(s0), ), (1, ), torch.float32)\n",
        "not python at all (",
        HEAD + "    buf0 = torch.ops.aten.mm.default(saved, saved)\n" * 2,
    ],
)
def test_an_unknown_form_is_no_timeline_and_says_so(source: str) -> None:
    graph = fx.Graph()
    saved = graph.placeholder("saved")
    graph.call_function(torch.ops.aten.mm.default, (saved, saved)).meta["val"] = torch.zeros(2, 2)
    with pytest.warns(CompatibilityWarning, match="estimated from its operations, not read from its code") as caught:
        assert read_wrapper(source, graph) is None
        assert read_wrapper(source, graph) is None
    assert len(caught) == 1


def test_a_graph_that_calls_nothing_has_no_wrapper_and_loses_nothing() -> None:
    assert read_wrapper("", fx.Graph()) is None


def test_the_peak_as_an_expression_drops_what_is_never_the_largest() -> None:
    memory = read(
        """
buf0 = empty_strided_cpu((s0, 4), (4, 1), torch.float32)
buf1 = empty_strided_cpu((s0, ), (1, ), torch.float32)
del buf0
buf2 = empty_strided_cpu((1000, ), (1, ), torch.float32)
return (buf1, buf2)
"""
    )
    assert memory.peak_expression(lambda call: 0) == sympy.Max(20 * S0, 4 * S0 + 4000)
    peak = memory.peak({"s0": 10}, lambda region_id, phase: 0)
    assert (peak.num_bytes, peak.terms) == (4040, (("buf2", 4000), ("buf1", 40)))
    with pytest.raises(KeyError, match="no value for s0"):
        memory.peak({}, lambda region_id, phase: 0)


def test_inductor_writes_what_is_read_here() -> None:
    """The real thing: an element-wise result feeding a matmul, compiled with symbolic sizes."""
    seen: list[GraphMemory | None] = []

    def compile_and_read(graph_module: fx.GraphModule, inputs: list[torch.Tensor], **options: object) -> object:
        from torch._inductor.compile_fx import compile_fx_inner

        compiled = compile_fx_inner(graph_module, inputs, **options)
        seen.append(read_wrapper(compiled.source_code, graph_module.graph))
        return compiled

    def backend(graph_module: fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph_module, inputs, inner_compile=compile_and_read)

    compiled = torch.compile(lambda x, w: (x.sin() @ w).cos() @ w, backend=backend, dynamic=True)
    with torch.no_grad(), functorch_config.patch(enable_autograd_cache=False):
        compiled(torch.randn(24, 16), torch.randn(16, 16))
    memory = seen[-1]
    assert memory is not None
    values = {symbol: value for symbol, value in zip(map(str, memory.symbols), (24, 16), strict=False)}
    assert memory.peak(values, lambda region_id, phase: 0).num_bytes >= 2 * 24 * 16 * 4  # first product and its cosine


def saving_graph(name: str, num_rows: int = 6) -> fx.Graph:
    """A call of a region that saves an unknown number of rows, of 8 bytes each."""
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        saved_rows, output = torch.empty((unbacked_size(shape_env), 2)), torch.empty(4, 2)
        order = torch.empty(num_rows, dtype=torch.int32)
    graph = fx.Graph()
    saved, order_node = graph.placeholder("saved"), graph.placeholder("order")
    saved.meta["val"], order_node.meta["val"] = saved_rows, order
    rows = (saved, None, order_node, order_node, [saved], "a/1", [True])
    if name == "experts_saving":
        node = graph.call_function(torch.ops.memfine.experts_saving.default, (*rows, "projections", 6))
        node.meta["val"] = [output, saved_rows]
    else:
        target = torch.ops.memfine.experts_backward_saved.default
        node = graph.call_function(target, (saved, *rows, [saved], "projections"))
        node.meta["val"] = [output]
    graph.output(node)
    return graph


def test_rows_that_a_region_saves_count_by_its_id_with_room_for_all_and_as_many_as_a_run_saves() -> None:
    forward = read(
        """
u0 = buf9.item()
buf0 = torch.ops.memfine.experts_saving.default(saved, None, order, order, [saved], 'a/1', [True], 'projections', u0)
buf1 = buf0[0]
buf2 = buf0[1]
del buf0
return (buf1, buf2, )
""",
        saving_graph("experts_saving"),
    )
    assert [allocation.saved_by for allocation in forward.allocations] == ["", "a/1"]
    assert live(forward)[-1] == 32 + 48
    for rows, num_bytes in ((0, 0), (1, 8), (5, 40), (6, 48)):
        saved = forward.of_run(frozenset({("a/1", rows, 6)}))
        assert live(saved)[-1] == 32 + num_bytes
        assert [(call.policy, call.num_saved_rows) for call in saved.calls] == [("projections", rows)]
    assert forward.of_run(frozenset({("b/2", 0, 6)})).allocations == forward.allocations


def test_saved_rows_that_a_backward_reads_count_by_the_id_of_their_region() -> None:
    backward = read(
        """
buf0 = torch.ops.memfine.experts_backward_saved.default(buf9, buf9, None, order, order, [], 'a/1', [True], [saved], 'projections')
del saved
buf1 = buf0[0]
return (buf1, )
""",  # noqa: E501  # as Inductor writes it
        saving_graph("experts_backward_saved"),
        CountedInputs(freed=("saved",)),
    )
    saved = backward.allocations[0]
    assert (saved.name, saved.saved_by, saved.num_bytes) == ("saved", "a/1", 48)
    assert live(backward.of_run(frozenset({("a/1", 0, 6)})))[0] == live(backward)[0] - 48


def test_complex_numbers_of_real_ones_are_a_view_and_keep_them_alive() -> None:
    graph = fx.Graph()
    rows = graph.placeholder("x")
    viewed = graph.call_function(torch.ops.aten.view_as_complex.default, (rows,))
    product = graph.call_function(torch.ops.aten.mul.Tensor, (viewed, viewed))
    real = graph.call_function(torch.ops.aten.view_as_real.default, (product,))
    viewed.meta["val"] = product.meta["val"] = torch.empty(2, 4, dtype=torch.complex64)
    real.meta["val"] = torch.empty(2, 4, 2)
    graph.output(real)
    memory = read(
        """
buf0 = empty_strided_cpu((2, 4, 2), (8, 2, 1), torch.float32)
buf1 = torch.ops.aten.view_as_complex.default(reinterpret_tensor(buf0, (2, 4, 2), (8, 2, 1), 0))
del buf0
buf2 = buf1; del buf1
buf3 = torch.ops.aten.mul.Tensor(buf2, buf2)
del buf2
buf4 = torch.ops.aten.view_as_real.default(buf3)
del buf3
return (buf4, )
""",
        graph,
    )
    assert live(memory) == [64, 64, 64, 64, 64, 128, 64, 64, 64, 64]


def test_of_an_op_that_also_takes_complex_numbers_the_wrapper_calls_only_those() -> None:
    graph = fx.Graph()
    rows = graph.placeholder("x")
    rows.meta["val"] = torch.empty(2, 4, dtype=torch.complex64)
    large = graph.call_function(torch.ops.aten.mul.Tensor, (1.0, 2.0))
    large.meta["val"] = torch.empty(1000)  # in a kernel
    product = graph.call_function(torch.ops.aten.mul.Tensor, (rows, rows))
    product.meta["val"] = torch.empty(2, 4, dtype=torch.complex64)
    graph.output((large, product))
    memory = read("buf0 = torch.ops.aten.mul.Tensor(x, x)\nreturn (buf0, )", graph)
    assert live(memory) == [64, 64]


def attention_graph(target: Callable[..., object], *, is_saving: bool) -> fx.Graph:
    """One attention of [1,2,8,4] that saves its random state, or that runs from a saved one."""
    graph = fx.Graph()
    query = graph.placeholder("query")
    query.meta["val"] = torch.empty(1, 2, 8, 4)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    results = torch.empty(1, 2, 8, 4), torch.empty(1, 2, 8)
    saved = graph.placeholder("state")
    saved.meta["val"] = torch.empty(5056, dtype=torch.uint8)
    arguments = (operator, query, query, query) if is_saving else (saved, operator, query, query, query)
    called = graph.call_function(target, arguments)
    called.meta["val"] = (torch.empty(5056, dtype=torch.uint8), results) if is_saving else results
    graph.output(called)
    return graph


def test_attention_under_a_random_state_holds_its_results_and_the_state() -> None:
    saving, running, _ = random_state_ops()
    plain = fx.Graph()
    query = plain.placeholder("query")
    query.meta["val"] = torch.empty(1, 2, 8, 4)
    scratch = scratch_bytes(
        plain.call_function(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, (query, query, query))
    )
    assert scratch > 0
    saved = read(
        """
buf0 = torch.ops.higher_order.run_and_save_rng_state(torch.ops.aten.x, query, query, query)
buf1 = buf0[0]
buf2 = buf0[1][0]
del buf0
return (buf1, buf2)
""",
        attention_graph(saving, is_saving=True),
    )
    assert live(saved) == [5056 + 256 + 64 + scratch, 5056 + 256 + 64, 5056 + 256 + 64, 5056 + 256, 5056 + 256]
    run = read(
        """
buf0 = torch.ops.higher_order.run_with_rng_state(state, torch.ops.aten.x, query, query, query)
buf1 = buf0[0]
del buf0
return (buf1, )
""",
        attention_graph(running, is_saving=False),
    )
    assert live(run) == [256 + 64 + scratch, 256 + 64, 256, 256]


def test_reductions_that_cuda_kernels_leave_in_parts_make_their_results() -> None:
    """As torch 2.13 ends the gradient of a norm's weight; blocks of the allocator have 512 bytes."""
    memory = read(
        """
workspace_0 = empty_strided_cuda((2048, ), (1, ), torch.float32)
kernel.run(workspace_0, 8192)
buf0 = workspace_0[0 * (4) * (256) : (0 + 1) * (4) * (256)].view(4, 256).sum(dim=0).view([1, 256]).to(torch.bfloat16)
buf1 = workspace_0[1 * (4) * (256) : (1 + 1) * (4) * (256)].view(4, 256).amax(dim=0).view([256])
del workspace_0
return (buf0, buf1)
"""
    )
    assert live(memory) == [8192, 8192, 8192 + 512 + 1024, 8192 + 512 + 1024, 512 + 1024, 512 + 1024]


def test_parts_of_a_reduction_are_counted_where_sizes_are_dynamic() -> None:
    """As torch writes them for a GPU whose rows are split at run time."""
    memory = read(
        """
buf0 = empty_strided_cuda((math.floor(15 / 16 + 1 / 16 * s0), ), (1, ), torch.float32)
buf1 = empty_strided_cuda((math.ceil(s0 / 16), 128), (128, 1), torch.float32)
del buf0
return (buf1, )
"""
    )
    assert live(memory, s0=1) == [512, 1024, 512, 512]
    assert live(memory, s0=4096) == [1024, 1024 + 512 * 256, 512 * 256, 512 * 256]
    assert live(memory, s0=4097) == [1536, 1536 + 512 * 257, 512 * 257, 512 * 257]


def test_products_take_scratch_by_their_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 on a CPU; factors are parts of buffers, buffers under another name, inputs and results of ops."""
    seen: list[Product] = []

    def scratch(product: Product) -> sympy.Expr:
        seen.append(product)
        return sympy.Integer(1000 * len(seen))

    monkeypatch.setattr(wrapper_code, "product_scratch", scratch)
    graph = fx.Graph()
    weight = graph.placeholder("primals_1")
    weight.meta["val"] = torch.empty(3, 4, 5, dtype=torch.bfloat16)
    sorted_rows = graph.call_function(torch.ops.aten.sort.default, (weight,))
    sorted_rows.meta["val"] = (torch.empty(4, 8, dtype=torch.bfloat16).t(), torch.empty(8, 4, dtype=torch.int64))
    graph.output(sorted_rows)
    memory = read(
        """
buf0 = empty_strided_cpu((s0, 8), (8, 1), torch.bfloat16)
buf1 = buf0; del buf0
buf2 = empty_strided_cpu((8, 8), (8, 1), torch.bfloat16)
extern_kernels.mm(reinterpret_tensor(buf1, (8, s0), (1, 8), 0), buf1, out=buf2)
buf3 = empty_strided_cpu((3, 2, 5), (10, 5, 1), torch.bfloat16)
extern_kernels.bmm(reinterpret_tensor(buf2, (3, 2, 4), (8, 4, 1), 0), primals_1, out=buf3)
buf4 = torch.ops.aten.sort.default(primals_1)
buf5 = buf4[0]
del buf4
extern_kernels.addmm(buf3, buf5, reinterpret_tensor(buf1, (4, 2), (2, 1), 0), alpha=1, beta=1, out=buf2)
buf6 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
extern_kernels.mm(buf6, buf6, out=buf6)
return (buf2, buf3, buf5)
""",
        graph,
    )
    one, two, three = seen
    assert (one.left, one.inner, one.right, one.batch, one.is_by_column) == (8, S0, 8, 1, True)
    assert (two.left, two.inner, two.right, two.batch, two.is_by_column) == (2, 4, 5, 3, False)
    assert (three.left, three.inner, three.right, three.batch, three.is_by_column) == (8, 4, 2, 1, True)
    assert {product.dtype for product in seen} == {torch.bfloat16}
    found = live(memory, s0=2)
    assert [found[place] - found[place + 1] for place in (4, 6, 10)] == [1000 - 60, 2000 - 64 - 256, 3000 - 256]


@pytest.mark.parametrize(
    "lines",
    [
        "extern_kernels.mm(constant_1, constant_1, out=saved)\n    return (saved, )",  # a product of something unknown
        "buf0 = workspace_0[0:4].view(2, 2).median(dim=0)\n    return (buf0, )",  # no known call upon part of a buffer
    ],
)
def test_what_cannot_be_read_is_no_timeline(lines: str) -> None:
    with pytest.warns(CompatibilityWarning, match="cannot be read"):
        assert read_wrapper(f"{HEAD}    {lines}\n", fx.Graph()) is None
