"""Tiles by time: the fastest of a list, kept on disk; each of the lists gives the layer's results."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.kernels import choice
from memfine_fx.models.mixtral import MixtralConfig, MixtralMoE
from tests.damage import damaged_json
from tests.kernels.cases import DEVICE, Sizes, in_kernels, parameters, relative_error
from tests.kernels.test_layer import check

pytestmark = in_kernels
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
NAMES = ("gate_up", "down", "down_backward", "weight_gradient")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is known yet."""
    from memfine_fx.kernels import tuning

    monkeypatch.setenv("MEMFINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "measurement_key", lambda kind, *parts: str(abs(hash(repr(parts)))))  # of no device
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "_seconds_of_call", lambda call, device: 0.5)
    return tmp_path / "cache"


def kind(dtype: torch.dtype = torch.float16, *, has_bias: bool = False) -> Any:
    from memfine_fx.kernels.tuning import kind_of

    sizes = Sizes(experts=40, hidden=32, width=24)
    params = parameters("halves", sizes, dtype, has_bias=has_bias)
    return kind_of("halves", "swiglu", has_bias, "ieee", torch.empty(3, 32, dtype=dtype), params, 2)


def own_target() -> str:
    """Whose lists the device has that the tests run on."""
    from memfine_fx.kernels.tiling import target_of

    return target_of(DEVICE)


def tile_of(launch: Any) -> Any:
    from memfine_fx.kernels.launches import Tiles

    told = launch.constants
    sizes = (told[name] for name in ("TILE_ROWS", "TILE_COLUMNS", "TILE_DEPTH"))
    group_rows = told.get("GROUP_ROWS", Tiles.group_rows)
    return Tiles(*sizes, launch.num_warps, launch.num_stages, group_rows, told["BY_DESCRIPTOR"])


def test_the_fastest_of_each_list_is_chosen_and_the_first_of_equals() -> None:
    from memfine_fx.kernels.tiling import candidates, tiles_for
    from memfine_fx.kernels.tuning import tune, tuned

    seen: dict[str, list[Any]] = {}

    def seconds(launch: Any, device: torch.device) -> float:
        name = launch.name.removesuffix("_kernel")
        seen.setdefault(name, []).append(tile_of(launch))
        return 1.0 if name == "down" and tile_of(launch) == candidates(own_target(), torch.float16, "down")[-1] else 2.0

    found = tune(kind(), DEVICE, seconds)
    default = tiles_for(own_target(), torch.float16)
    assert (found.gate_up, found.down_backward, found.weight_gradient) == (
        default.gate_up, default.down_backward, default.weight_gradient,
    )  # fmt: skip
    assert found.down == candidates(own_target(), torch.float16, "down")[-1] != default.down
    for name in NAMES:  # forward's and backward's launches of each, in the order of the list
        assert tuple(dict.fromkeys(seen[name])) == candidates(own_target(), torch.float16, name)
    assert len(seen["down"]) == 2 * len(candidates(own_target(), torch.float16, "down"))
    assert tuned(kind(), DEVICE) == found
    assert tuned(kind(has_bias=True), DEVICE) is None


def test_what_does_not_run_is_passed_over() -> None:
    from memfine_fx.kernels.tiling import candidates, tiles_for
    from memfine_fx.kernels.tuning import tune

    first, second, *_ = candidates(own_target(), torch.float16, "gate_up")

    def seconds(launch: Any, device: torch.device) -> float:
        if tile_of(launch) == first and launch.name == "gate_up_kernel":
            raise RuntimeError("out of resource: shared memory")
        return 1.0

    found = tune(kind(), DEVICE, seconds)
    assert found.gate_up == second
    assert found.down == tiles_for(own_target(), torch.float16).down


def test_where_nothing_of_a_list_runs_that_is_an_error_once_and_for_all(folder: Path) -> None:
    from memfine_fx.kernels import tuning
    from memfine_fx.kernels.tuning import KernelsDoNotRun, tune, tuned

    asked: list[str] = []

    def seconds(launch: Any, device: torch.device) -> float:
        asked.append(launch.name)
        raise ValueError("no such instruction")

    for _ in range(2):
        with pytest.raises(
            KernelsDoNotRun, match="gate_up runs with none of its tiles: ValueError: no such instruction"
        ):
            tune(kind(), DEVICE, seconds)
    assert asked == ["gate_up_kernel"] * 4
    (saved,) = tuning._known.values()
    assert isinstance(saved, KernelsDoNotRun) and saved.__traceback__ is None  # which would hold what was timed
    assert tuned(kind(), DEVICE) is None
    assert not folder.exists()


def test_times_are_taken_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfine_fx.kernels import tuning

    calls: list[str] = []

    def seconds(launch: Any, device: torch.device) -> float:
        calls.append(launch.name)
        return float(len(calls) % 7)

    found = tuning.tune(kind(), DEVICE, seconds)
    (file,) = folder.iterdir()
    taken = len(calls)
    for _ in range(2):  # from this process, and from the file
        assert tuning.tune(kind(), DEVICE, seconds) == found
        assert len(calls) == taken
        tuning._known.clear()
    file.write_text('{"gate_up": {}}')
    tuning.tune(kind(), DEVICE, seconds)
    assert len(calls) == 2 * taken
    tuning._known.clear()
    tuning.tune(kind(torch.float32), DEVICE, seconds)  # a list of one, of which nothing is timed
    assert len(calls) == 2 * taken


def test_a_damaged_file_is_measured_again_and_written_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfine_fx.kernels import tuning

    first = tuning.tune(kind(), DEVICE, lambda launch, device: 1.0)
    (file,) = folder.iterdir()
    whole, lists = file.read_text(), tuning._lists(kind(), DEVICE)
    measured = tuning._Found(first, tuning.times_of(kind(), DEVICE))
    monkeypatch.setattr(tuning, "_measured", lambda kind, device, seconds: measured)
    for damage in damaged_json(whole):
        file.write_text(damage)
        tuning._known.clear()
        found, times = tuning.tune(kind(), DEVICE), tuning.times_of(kind(), DEVICE)
        assert all(any(getattr(found, name) is tiles for tiles in listed) for name, listed in lists.items()), damage
        assert times is not None and 1e-9 <= times.kernels <= 1e4, damage
        assert times.grouped is None or 1e-9 <= times.grouped <= 1e4, damage
        if (found, times) == (measured.tiles, measured.times):
            assert json.loads(file.read_text()) == json.loads(whole), damage


# Each kernel runs alone here, on what no other has written.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast", "ignore:invalid value encountered")
def test_launches_are_of_the_layer_and_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once; numbers are drawn without the user's generator, and few experts stand for many."""
    from memfine_fx.kernels import tuning

    monkeypatch.setattr(tuning, "_ROWS_PER_EXPERT", 4)
    monkeypatch.setattr(tuning, "_ROWS", 4)
    monkeypatch.setattr(tuning, "_MOST_EXPERTS", 3)
    asked = kind()
    before = torch.get_rng_state()
    tables: set[tuple[int, ...]] = set()

    def seconds(launch: Any, device: torch.device) -> float:
        launch.run()
        tables.add(tuple(launch.arguments["gate"].shape) if "gate" in launch.arguments else (3,))
        return 1.0

    tuning.tune(asked, DEVICE, seconds)
    assert {shape[0] for shape in tables} == {3}
    assert torch.equal(torch.get_rng_state(), before)


def test_without_memory_the_tiles_are_those_of_the_code(folder: Path, caplog: Any) -> None:
    from memfine_fx.kernels import tuning
    from memfine_fx.kernels.tiling import tiles_for

    def seconds(launch: Any, device: torch.device) -> float:
        if launch.name == "weight_gradient_kernel":
            raise torch.OutOfMemoryError("no room")
        return 1.0 if tile_of(launch).num_stages == 4 else 2.0

    assert tuning.tune(kind(), DEVICE, seconds) == tiles_for(own_target(), torch.float16)
    assert "there is no memory to time others in" in caplog.text
    assert not folder.exists()  # the next process asks again


def test_a_layer_is_timed_in_grouped_products_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a step's calls runs as it stands; what they do not take is not compared."""
    from memfine_fx.kernels import tuning

    asked = kind(torch.bfloat16)
    assert tuning.times_of(asked, DEVICE) is None

    def seconds_of_call(call: Any, device: torch.device) -> float:
        call()
        return 0.5

    monkeypatch.setattr(tuning, "_seconds_of_call", seconds_of_call)
    tuning.tune(asked, DEVICE, lambda launch, device: 1.0)
    # 5 launches with products kept; rows gathered 3 times and added twice, the activation twice, 2 x (3 and a copy).
    assert tuning.times_of(asked, DEVICE) == tuning.Times(5.0, 15 * 0.5)
    tuning._known.clear()
    tuning.tune(asked, DEVICE, lambda launch, device: 2.0)
    assert tuning.times_of(asked, DEVICE) == tuning.Times(5.0, 15 * 0.5)  # from the file

    def refused(call: Any, device: torch.device) -> float:
        raise RuntimeError("strides must be multiples of 16 bytes")

    monkeypatch.setattr(tuning, "_seconds_of_call", refused)
    tuning.tune(kind(has_bias=True), DEVICE, lambda launch, device: 1.0)
    assert tuning.times_of(kind(has_bias=True), DEVICE) == tuning.Times(5.0, None)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_each_of_the_lists_computes_the_layer(target: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfine_fx.kernels.tiling import candidates, tiles_for
    from tests.kernels import test_layer

    listed = candidates(target, torch.bfloat16, name)
    assert listed[0] == getattr(tiles_for(target, torch.bfloat16), name)
    assert len(set(listed)) == len(listed) > 1
    for tiles in listed[1:]:
        chosen = replace(tiles_for(target, torch.bfloat16), **{name: tiles})
        monkeypatch.setattr(test_layer, "small_tiles", lambda chosen=chosen: chosen)
        check(Sizes(tokens=70, hidden=72, width=40, experts=2), "random", 90, dtype=torch.float16)


def run_a_region(seconds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a compiled model, whose tiles are chosen by these times."""
    from memfine_fx.kernels import tuning

    monkeypatch.setattr(choice, "_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(choice, "_TIMED", ("cuda", "cpu"))
    monkeypatch.setenv("MEMFINE_GPU_KERNELS", "1")
    monkeypatch.setattr(tuning, "_seconds_of_launch", seconds)
    config = MixtralConfig(hidden=32, expert_width=24, num_experts=4, top_k=2, spelling="gathered")
    eager = MixtralMoE(config).to(DEVICE).half()
    model = memfine_fx.optimize(copy.deepcopy(eager), inner_backend="eager")
    hidden = torch.randn(11, 32, device=DEVICE).half()
    assert relative_error(model(hidden), eager(hidden)) < 3e-3


def test_regions_whose_kernels_do_not_run_keep_their_bodies(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def fails(launch: Any, device: torch.device) -> float:
        raise ValueError("no such instruction")

    run_a_region(fails, monkeypatch)
    assert "experts keep their bodies, because GPU kernels do not run here: gate_up runs with none" in caplog.text


def test_regions_run_with_the_tiles_that_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfine_fx.kernels.launches import Launch
    from memfine_fx.kernels.tiling import candidates

    fastest = candidates(own_target(), torch.float16, "gate_up")[-1]
    used: list[Any] = []
    run = Launch.run

    def noted(self: Any) -> None:
        if self.name == "gate_up_kernel":
            used.append(tile_of(self))
        run(self)

    monkeypatch.setattr(Launch, "run", noted)
    run_a_region(lambda launch, device: 1.0 if tile_of(launch) == fastest else 2.0, monkeypatch)
    assert used and set(used) == {fastest}
