"""Runs files of users: what may be null, and errors that name row and field."""

import json
from pathlib import Path
from typing import Any

import pytest

from memfine_fx.errors import ConfigError
from memfine_planner.training.runs import Run, load_runs, published
from memfine_planner.training.validation import check_runs

DENSE = {
    "model": "llama3_8b",
    "system": "H100",
    "gpus": 8,
    "tp": 1,
    "pp": 1,
    "mbs": 1,
    "gbs": 128,
    "seq": 8192,
    "precision": "BF16",
    "tokens_per_s_per_gpu": 10_000,
}
SIZES = {"layers": 4, "hidden": 512, "ffn": 1024, "heads": 8, "vocab": 1000}


def load(tmp_path: Path, content: Any) -> tuple[Run, ...]:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(content))
    return load_runs(path)


def test_null_size_of_a_dense_model_is_one(tmp_path: Path) -> None:
    nulls = dict.fromkeys(("ep", "cp", "vp", "fsdp", "settings", "source", "remark", "informed", "calibrate"))
    (plain,) = load(tmp_path, {"throughput": [DENSE]})
    (run,) = load(tmp_path, {"throughput": [DENSE | nulls], "iteration_time": None, "architectures": None})
    assert run == plain
    assert check_runs([run])[0].predicted > 0


def test_numbers_of_another_kind_are_refused_by_row_and_field(tmp_path: Path) -> None:
    rows = [row for kind in ("throughput", "iteration_time") for row in published()[kind][:1]]
    for kind, row in zip(("throughput", "iteration_time"), rows, strict=True):
        sizes = [name for name in ("gpus", "tp", "pp", "vp", "cp", "ep", "mbs", "gbs", "seq") if name in row]
        for name in sizes:
            for value in ("8", 1.5, -1, 0, True, [8], {}):
                with pytest.raises(ConfigError, match=rf"runs\.json: {kind}\[1\]\.{name}: Input should be"):
                    load(tmp_path, {kind: [row, row | {name: value}]})


@pytest.mark.parametrize("name", ["model", "system", "gpus", "tp", "pp", "mbs", "gbs", "seq", "precision"])
def test_null_and_absent_are_refused_where_there_is_no_default(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"throughput\[0\]\.{name}: Input should be .* \(got null\)"):
        load(tmp_path, {"throughput": [DENSE | {name: None}]})
    absent = {key: value for key, value in DENSE.items() if key != name}
    with pytest.raises(ConfigError, match=rf"throughput\[0\]\.{name}: Field required"):
        load(tmp_path, {"throughput": [absent]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "expected an object with lists of runs, got list"),
        ({}, "expected at least one run in throughput or iteration_time"),
        ({"througput": [DENSE]}, r"runs\.througput: nothing reads this field; did you mean throughput\?"),
        ({"throughput": {}}, "throughput: expected a list, got dict"),
        ({"throughput": [7]}, r"throughput\[0\]: Input should be"),
        ({"throughput": [DENSE | {"model": "nope"}]}, r"throughput\[0\] \(nope on H100\): unknown model 'nope'"),
        ({"throughput": [DENSE | {"system": "Q1"}]}, r"throughput\[0\] \(llama3_8b on Q1\): unknown system 'Q1'"),
        ({"throughput": [DENSE | {"precision": "BF17"}]}, r"throughput\[0\] .*unknown precision 'BF17'"),
        ({"throughput": [DENSE | {"tokens_per_s_per_gpu": 0}]}, r"\.tokens_per_s_per_gpu: .*greater than 0 \(got 0\)"),
        ({"throughput": [DENSE | {"gbs": 4}]}, r"throughput\[0\] .*does not divide global_batch=4; nearest valid"),
        ({"throughput": [DENSE | {"ep": 2}]}, r"throughput\[0\] .*ep=2, but llama3_8b has no experts"),
        ({"throughput": [DENSE | {"recomputed": 1, "setings": {}}]}, r"\.setings: nothing reads .* mean settings\?"),
        ({"throughput": [DENSE | {"settings": {"colour": 1}}]}, r"throughput\[0\] .*unknown strategy field colour"),
        ({"throughput": [DENSE | {"settings": {"recompute_layers": "5"}}]}, r"recompute_layers='5': Input should be"),
        ({"throughput": [DENSE | {"settings": {"attention": "slow"}}]}, r"attention='slow' is none of flash, unfused"),
        ({"systems": {"Toy": None}}, "Toy: expected a system's fields"),
        ({"architectures": {"t": SIZES | {"heads": None}}}, r"architectures\.t\.heads: .* \(got null\)"),
        ({"architectures": {"t": SIZES | {"experts": "8"}}}, r"architectures\.t\.experts: .*integer \(got '8'\)"),
        ({"architectures": {"t": SIZES | {"experts": 8}}}, r"architectures\.t: .*MoE layers need experts >= top_k"),
        ({"architectures": {"t": SIZES | {"kv_lora_rank": 8}}}, r"architectures\.t: kv_lora_rank comes with qk_nope"),
        ({"architectures": {"t": SIZES | {"expert": 8}}}, r"architectures\.t\.expert: .*did you mean experts\?"),
    ],
)
def test_bad_file_is_refused_where_it_is_read(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, content)


def test_model_of_the_file_goes_before_a_built_in_one_of_its_name(tmp_path: Path) -> None:
    (run,) = load(tmp_path, {"architectures": {"llama3_8b": SIZES}, "throughput": [DENSE]})
    assert run.arch.layers == 4


def test_null_sizes_of_a_models_own_are_its_defaults(tmp_path: Path) -> None:
    nulls = dict.fromkeys(("kv_heads", "head_dim", "experts", "top_k", "moe_ffn", "sliding_window", "tied", "gated"))
    (run,) = load(tmp_path, {"architectures": {"t": SIZES | nulls}, "throughput": [DENSE | {"model": "t"}]})
    assert (run.arch.kv_heads, run.arch.head_dim, run.arch.is_moe, run.arch.gated) == (8, 64, False, True)
    assert check_runs([run])[0].predicted > 0
