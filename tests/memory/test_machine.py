"""Features of CPUs that are not here, by their instructions and oneDNN's limit; the name of this one; and the files
that hold what was measured: damaged, torn, or impossible to write."""

from __future__ import annotations

import errno
import math
import platform
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memfine_fx.memory import machine
from memfine_fx.memory.machine import (
    CpuFeatures,
    DamagedFile,
    cpu_features,
    cpu_model,
    features_of,
    load_measurement,
    measurement_key,
    number_between,
    save_measurement,
)

XEON = ("avx512bw", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16")


@pytest.mark.parametrize(
    ("instructions", "max_isa", "expected"),
    [
        (XEON, "", CpuFeatures("native", True, True, False)),
        (XEON, "ALL", CpuFeatures("native", True, True, False)),
        (XEON, "avx512_core_amx", CpuFeatures("native", True, True, False)),
        ((*XEON, "amx_fp16"), "", CpuFeatures("native", True, True, True)),
        ((*XEON, "amx_fp16"), "AVX512_CORE_AMX", CpuFeatures("native", True, True, False)),
        (XEON, "AVX512_CORE_FP16", CpuFeatures("native", True, False, False)),
        (XEON, "AVX512_CORE_BF16", CpuFeatures("native", False, False, False)),
        (XEON, "AVX512_CORE", CpuFeatures("converted", False, False, False)),
        (XEON, "AVX2", CpuFeatures("none", False, False, False)),
        (("avx512_bw", "avx512_bf16"), "", CpuFeatures("native", False, False, False)),
        (("avx512bw",), "", CpuFeatures("converted", False, False, False)),
        (("avx2",), "", CpuFeatures("none", False, False, False)),
    ],
)
def test_features_follow_instructions_up_to_the_limit(
    instructions: tuple[str, ...], max_isa: str, expected: CpuFeatures
) -> None:
    assert features_of(instructions, max_isa) == expected


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86")
def test_this_cpu_is_asked_and_the_limit_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert cpu_features() == CpuFeatures("none", False, False, False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    asked = cpu_features()
    monkeypatch.setattr(machine.torch.cpu, "get_capabilities", None)  # as in versions without it
    assert cpu_features() == asked


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no /proc/cpuinfo")
def test_measurements_are_kept_for_the_model_of_the_cpu_and_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_model()
    here = measurement_key("cpu", "rates")
    assert measurement_key("cpu", "rates") == here
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    limited = measurement_key("cpu", "rates")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    monkeypatch.setattr(machine, "cpu_model", lambda: "another CPU")
    assert len({here, limited, measurement_key("cpu", "rates")}) == 3


def test_cpus_of_one_name_are_told_apart_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"model name": "AMD EPYC", "cpu family": "26", "model": "2"}
    monkeypatch.setattr(machine, "_cpuinfo", lambda field: told.get(field, ""))
    assert cpu_model() == "AMD EPYC (family 26, model 2)"
    del told["cpu family"], told["model"]
    assert cpu_model() == "AMD EPYC"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's measurements are saved; nothing has warned yet."""
    monkeypatch.setenv("MEMFINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "_has_warned", False)
    return tmp_path / "cache"


def test_a_measurement_is_read_as_it_was_saved(folder: Path) -> None:
    assert load_measurement("name", _text) is None
    save_measurement("name", "first")
    save_measurement("name", "second")
    assert load_measurement("name", _text) == "second"
    assert [path.name for path in folder.iterdir()] == ["name.json"]


@pytest.mark.parametrize(
    "content",
    [b"", b'"tex', b"[1, 2", b"3", b"null", b"\xff\xfe", b"[" * 100_000, b"9" * 5_000, b"\0" * 100],
    ids=["empty", "torn text", "torn list", "number", "null", "no UTF-8", "deep", "long", "zeros"],
)
def test_a_damaged_file_is_measured_again_and_written_anew(
    content: bytes, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    (folder / "name.json").write_bytes(content)
    with caplog.at_level("INFO", "memfine_fx"):
        assert load_measurement("name", _text) is None
    assert "name.json is damaged and is measured again" in caplog.text
    save_measurement("name", "whole")
    assert load_measurement("name", _text) == "whole"


@pytest.mark.parametrize("value", [0.5, 2.5, math.nan, math.inf, -math.inf, True, "1", None, [1], 10**400, -1])
def test_numbers_out_of_range_are_refused(value: object) -> None:
    with pytest.raises(DamagedFile, match="expected a number from 1 to 2"):
        number_between(value, 1, 2)
    assert number_between(1, 1, 2) == 1.0


def _below_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFINE_CACHE", str(tmp_path / "file" / "below"))
    return str(tmp_path / "file" / "below")


def _a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFINE_CACHE", str(tmp_path / "file"))
    return str(tmp_path / "file")


def _without_permission(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """As for a user who is not root."""

    def refuses(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", refuses)
    return str(tmp_path / "cache")


def _full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The disk takes half of the text."""
    write = Path.write_bytes

    def fills_up(self: Path, text: str, **kwargs: object) -> None:
        write(self, text[: len(text) // 2].encode())
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", fills_up)
    return str(tmp_path / "cache")


def _without_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """HOME is unset, and the user is not in the list of users, as in containers."""

    def unknown(user: object) -> None:
        raise KeyError(user)

    monkeypatch.delenv("MEMFINE_CACHE")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    return "~/.cache/memfine_fx"


def _with_an_absent_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.delenv("MEMFINE_CACHE")
    monkeypatch.setenv("HOME", "/dev/null/home")
    return "/dev/null/home/.cache/memfine_fx"


@pytest.mark.parametrize(
    "hinder", [_below_a_file, _a_file, _without_permission, _full, _without_home, _with_an_absent_home]
)
def test_what_cannot_be_saved_is_said_once(
    hinder: Callable[[pytest.MonkeyPatch, Path], str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    where = hinder(monkeypatch, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for name in ("first", "second"):
        assert load_measurement(name, _text) is None
        save_measurement(name, "measured")
    (said,) = caplog.records
    assert (said.levelname, said.name) == ("WARNING", "memfine_fx.memory.machine")
    assert "cannot be saved" in said.getMessage() and "MEMFINE_CACHE" in said.getMessage()
    assert where in said.getMessage()
    left = [path for path in sorted(tmp_path.rglob("*")) if path not in before and path != folder]
    assert not left, "neither half a file nor a folder named ~"


def test_a_tilde_in_the_variable_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MEMFINE_CACHE", "~/measured")
    save_measurement("name", "text")
    assert (tmp_path / "measured" / "name.json").read_text() == '"text"'


_KILLED_WRITERS = """
import json, os, random, signal, time
from memfine_fx.memory import machine

rows = list(range(1_000_000))
texts = [json.dumps([life, rows]) for life in range(6)]
machine.json.dumps = texts.__getitem__  # so that a writer writes nearly all of its time
machine.save_measurement("rows", 0)
for life in range(1, 6):
    writer = os.fork()
    if not writer:
        while True:
            machine.save_measurement("rows", life)
    time.sleep(0.1 + 0.1 * random.random())
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    written, whole = machine.load_measurement("rows", lambda fields: fields)
    assert written <= life and whole == rows, (written, len(whole))
assert written > 0, "no writer came to write"
print("whole after every kill")
"""


def test_a_writer_that_is_killed_leaves_the_file_whole(folder: Path) -> None:
    command = [sys.executable, "-c", _KILLED_WRITERS]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.stdout == "whole after every kill\n", told.stderr
