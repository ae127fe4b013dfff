"""Features of CPUs that are not here, by their instructions and oneDNN's limit; and the name of this one."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from memfine_fx.memory import machine
from memfine_fx.memory.machine import CpuFeatures, cpu_features, cpu_model, features_of, measurement_key

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
