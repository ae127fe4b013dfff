"""The roofline of the GPU kernels: what is recorded is what the page shows, and bounds bound."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.gpu_kernels import TABLES
from benchmarks.measures import gpu_layers
from benchmarks.measures.gpu_roofline import FILE, filled
from benchmarks.roofline import CHIPS, PEERS, SHAPES, Kernel, Shape, chip_figures, least_bytes, peer_kernels, total

RECORDED: dict[str, Any] = json.loads(FILE.read_text())
H100 = CHIPS[0]


def test_the_page_shows_what_is_recorded() -> None:
    text = TABLES.read_text()
    assert text.count("<!-- roofline: ") == 6
    assert filled(text, RECORDED) == text


def test_every_shape_and_device_is_recorded() -> None:
    found = {(row["shape"], row["device"]) for row in RECORDED["layers"]}
    assert found == {(shape.name, chip.name) for shape in SHAPES for chip in CHIPS}


def test_windows_hold_less_than_the_grouped_layer_the_more_the_smaller_they_are() -> None:
    assert [row["shape"] for row in RECORDED["peaks"]] == [shape.name for shape in SHAPES]
    for row in RECORDED["peaks"]:
        by_plan = row["megabytes"]
        plans = ("again, 32 windows", "again, 4 windows", "kept, 1 window", "grouped, checkpoint")
        peaks = [by_plan[plan]["peak"] for plan in plans]
        assert peaks == sorted(set(peaks)), row


def test_nothing_moves_less_than_the_least() -> None:
    for row in RECORDED["layers"]:
        assert row["over_strict"] >= row["over_handed"] >= 1, row


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_peers_move_no_less_than_the_least_and_multiply_as_much(shape: Shape, name: str) -> None:
    kernels = peer_kernels(name, shape, H100)
    assert total(kernels, H100)[2] >= least_bytes(shape, saves_products=True)[1]
    flops = 18 * shape.rows * shape.hidden * shape.width
    assert (
        flops
        <= sum(kernel.flops for kernel in kernels)
        <= flops + 18 * 128 * shape.experts * shape.hidden * shape.width
    )


def test_sonicmoe_moves_the_least_of_the_peers() -> None:
    for shape in SHAPES:
        sizes = {name: total(peer_kernels(name, shape, H100), H100)[1] for name in PEERS}
        assert min(sizes, key=sizes.__getitem__) == "sonicmoe"


def test_a_kernel_takes_its_longer_bound_and_unfilled_waves_cost() -> None:
    rate, bandwidth = chip_figures(H100)
    kernel = Kernel("", flops=rate, num_bytes=bandwidth / 2, distinct=0, programs=132, slots=132)
    assert kernel.seconds(H100) == pytest.approx(1.0)
    assert replace(kernel, programs=133).seconds(H100) == pytest.approx(264 / 133)
    assert replace(kernel, num_bytes=3 * bandwidth).seconds(H100) == pytest.approx(3.0)
    assert (kernel.bound(H100), replace(kernel, num_bytes=3 * bandwidth).bound(H100)) == ("products", "bytes")


@pytest.mark.slow
def test_what_is_recorded_is_what_is_computed() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed here: make gpu-kernels")
    from benchmarks.measures.gpu_roofline import measure

    assert measure().is_met


def test_the_page_shows_what_was_measured_of_layers() -> None:
    """Needs no Triton: the tables are those of the committed rows."""
    text = TABLES.read_text()
    assert text.count("<!-- gpu-layers -->") == 1
    assert gpu_layers.filled(text, json.loads(gpu_layers.FILE.read_text())) == text
